"""The advice for slurm.conf in charm and docs, run in a shell and parsed by upstream's model."""

import pathlib
import subprocess

import pytest
from slurmutils import SlurmConfig

from slurm_ddp.slurm import advice as slurm_advice

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
    subprocess.run(
        ["sh", "-u", "-c", command], cwd=folder, env={"PATH": f"{folder}:/usr/bin:/bin"}, check=True
    )
    return (folder / "option").read_text()


@pytest.mark.parametrize(
    "option", ["", "\tgrestypes = gpu,mps\nAccountingStorageTRES=gres/gpu\n PrologFlags=alloc"]
)
def test_upstreams_model_takes_what_is_advised_and_loses_nothing(
    tmp_path: pathlib.Path, option: str
):
    before = SlurmConfig.from_str(option).dict() if option else {}
    advised = SlurmConfig.from_str("GresTypes=gpu,shard\n").dict()
    command = slurm_advice.slurm_conf({"GresTypes": "gpu,shard"})
    assert SlurmConfig.from_str(typed(command, option, tmp_path)).dict() == before | advised
