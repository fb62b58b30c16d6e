"""What the charm and its documents tell to type for slurm.conf, typed into a shell and read by upstream's own model."""

import pathlib
import re
import subprocess

import pytest
import yaml
from slurmutils import CGroupConfig, ModelError, Partition, SlurmConfig

from slurm_ddp.slurm import advice as slurm_advice

ROOT = pathlib.Path(__file__).parents[3]
CHARM = ROOT / "charms/slurm-gpu"
PAGES = (CHARM / "README.md", ROOT / "docs/howto/gpus.md")
JUJU = """#!/bin/sh
test "$1 $2" = "config slurmctld" || { echo "no such application $*" >&2; exit 1; }
case $3 in
slurm-conf-parameters) cat option;;
slurm-conf-parameters=*) printf %s "${3#*=}" > option;;
*) echo "no such option $3" >&2; exit 1;;
esac
"""


def typed(command: str, option: str, folder: pathlib.Path) -> str:
    """Run the command on an option of slurmctld: its value afterwards."""
    (folder / "option").write_text(option)
    juju = folder / "juju"
    juju.write_text(JUJU)
    juju.chmod(0o755)
    subprocess.run(["sh", "-u", "-c", command], cwd=folder, env={"PATH": f"{folder}:/usr/bin:/bin"}, check=True)
    return (folder / "option").read_text()


def documented() -> list[str]:
    commands: list[str] = []
    for page in PAGES:
        commands += re.findall(r"^juju config slurmctld slurm-conf-parameters=.*$", page.read_text(), re.MULTILINE)
    return commands


HELD: dict[str, set[str]] = {
    "": set(),
    "PrologFlags=alloc\nGresTypes=gpu\n": {"prologflags"},
    "  grestypes = gpu,mps\nhealthcheckinterval=10\nAccountingStorageTRES=gres/gpu\nHealthCheckProgram=/x": {
        "accountingstoragetres"
    },
    "\tGresTypes=gpu\n \tHealthCheckProgram = /x\nPrologFlags=alloc\n\thealthcheckinterval=10": {"prologflags"},
}


@pytest.mark.parametrize("option", HELD)
@pytest.mark.parametrize(
    "settings", [{"HealthCheckProgram": "/x", "HealthCheckInterval": "300"}, {"GresTypes": "gpu,shard"}]
)
def test_upstreams_model_takes_what_is_advised_and_loses_nothing(
    tmp_path: pathlib.Path, settings: dict[str, str], option: str
):
    before = SlurmConfig.from_str(option).dict() if option else {}
    after = SlurmConfig.from_str(typed(slurm_advice.slurm_conf(settings), option, tmp_path)).dict()
    advised = SlurmConfig.from_str("".join(f"{key}={value}\n" for key, value in settings.items())).dict()
    assert {key: after[key] for key in advised} == advised
    assert after == before | advised
    assert set(after) >= HELD[option]


def test_two_settings_in_one_line_are_one_to_the_model():
    """Why the advice has a line for each: with this text slurmctld does not start."""
    one_line = "HealthCheckProgram=/x HealthCheckInterval=300"
    assert set(SlurmConfig.from_str(one_line).dict()) == {"healthcheckprogram"}
    with pytest.raises(ModelError):
        SlurmConfig.from_str("GresTypes=gpu\nGresTypes=gpu,shard")


@pytest.mark.parametrize("command", sorted(set(documented())))
def test_upstreams_model_takes_what_the_documents_say(tmp_path: pathlib.Path, command: str):
    before = SlurmConfig.from_str("PrologFlags=alloc\nSlurmdDebug=info\n").dict()
    after = SlurmConfig.from_str(typed(command, "PrologFlags=alloc\nSlurmdDebug=info\n", tmp_path)).dict()
    assert after == after | before
    assert len(after) > len(before)


def test_settings_that_the_options_name_are_ones_of_the_model():
    """Settings in the descriptions of the options, in the pages and in the overlay, each alone as in a line of its own."""
    texts = [(CHARM / "charmcraft.yaml").read_text(), *(page.read_text() for page in PAGES)]
    named = {word for text in texts for word in re.findall(r"`((?:GresTypes|HealthCheck\w+)=[^`]*)`", text)}
    assert {word.partition("=")[0] for word in named} >= {"GresTypes"}
    for word in named:
        SlurmConfig.from_str(word)
        assert " " not in word
    overlay = yaml.safe_load(re.sub(r"\*\S+", "x", (ROOT / "overlays/gpu.yaml").read_text()))["applications"]
    Partition.from_str(overlay["slurmd"]["options"]["partition-config"])
    options = overlay.get("slurmctld", {}).get("options", {})
    SlurmConfig.from_str(options.get("slurm-conf-parameters", ""))
    CGroupConfig.from_str(options.get("cgroup-parameters", ""))
