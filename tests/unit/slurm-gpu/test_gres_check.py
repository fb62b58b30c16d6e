"""slurmd's own reading of a node's gres.conf, before anything of Slurm is touched."""

import pathlib
import re

import pytest
import yaml
from slurm_double import SlurmDouble

from gpu import gres, gres_check
from slurm_ddp.commands import CommandTimeout

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

SETTINGS = {
    "cpus": "2",
    "boards": "1",
    "corespersocket": "2",
    "realmemory": "4000",
    "gres": "gpu:old:1",
}
LINES = ("Name=gpu Type=h100 File=/dev/nvidia0 Cores=0-1 Flags=nvidia_gpu_env",)
RECORD = "slurmd-n0: Gres Name=gpu Type={} Count=1 Index=0 ID=7696487 File={} Cores={} CoreCnt=2 Links={}{}\n"
MIG = (
    "Name=gpu Type=a100_3g.20gb MultipleFiles=/dev/nvidia0,/dev/c12,/dev/c13 Flags=nvidia_gpu_env",
)


def ask(lines: tuple[str, ...] = LINES, *, detects: bool = False) -> str | None:
    plan = gres.Plan("gpu:h100:1", lines, ())
    return gres_check.difference(
        "n0", plan, () if detects else lines, SETTINGS, "nvidia" if detects else "off"
    )


@pytest.mark.parametrize("printed", CASES["slurmd_agrees"])
def test_slurmd_agrees(slurm: SlurmDouble, printed: str):
    slurm.printed = printed
    assert ask() is None


@pytest.mark.parametrize(("printed", "problem"), CASES["slurmd_differs"])
def test_slurmd_differs(slurm: SlurmDouble, printed: str, problem: str):
    slurm.printed = printed
    assert ask() == f"slurmd -G: {problem}"


@pytest.mark.parametrize(
    "start", ["slurmd-n0:", "[2026-11-22T19:56:59.311]"]
)  # 26.05 prints a time
def test_slurmd_prints_a_device_whose_cores_it_calls_invalid(slurm: SlurmDouble, start: str):
    record = RECORD.format("h100", "/dev/nvidia0", "0-1", "-1", "").replace("slurmd-n0:", start)
    slurm.printed = f"{start} error: Invalid GRES data for gpu, Cores=0-1\n{record}"
    assert ask() == "slurmd -G: Invalid GRES data for gpu, Cores=0-1"


@pytest.mark.parametrize(("printed", "problem"), CASES["slurmds_own_detection"])
def test_slurmds_own_detection(slurm: SlurmDouble, printed: str, problem: str | None):
    slurm.printed = printed
    assert ask(detects=True) == problem


@pytest.mark.parametrize("printed", ["", "slurmd-n0: fatal: Unable to find the user\n"])
def test_a_slurmd_that_says_nothing_of_gpus_stops_nobody(slurm: SlurmDouble, printed: str):
    slurm.printed = printed
    assert ask() is None


def test_a_slurmd_that_hangs_stops_nobody(monkeypatch: pytest.MonkeyPatch):
    def hang(*_: object, timeout: float, **__: object) -> None:
        assert timeout <= 20
        raise CommandTimeout("slurmd: no answer within 20 s")

    monkeypatch.setattr(gres_check, "run", hang)
    assert ask() is None


def test_what_slurmd_is_given(monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, str] = {}

    def look(*argv: str, **_: object) -> None:
        directory = pathlib.Path(argv[-1]).parent
        seen.update({file.name: file.read_text() for file in directory.iterdir() if file.is_file()})
        (spool,) = re.findall(r"^SlurmdSpoolDir=(.*)$", seen["slurm.conf"], re.MULTILINE)
        assert pathlib.Path(spool).is_dir(), (
            "slurmd complains of a socket's folder that is not there"
        )
        assert "gpu" not in spool
        raise CommandTimeout("enough")

    monkeypatch.setattr(gres_check, "run", look)
    ask()
    node = seen["slurm.conf"].splitlines()[-1]
    assert node.startswith("NodeName=n0 NodeHostname=")
    assert node.endswith(" cpus=2 boards=1 corespersocket=2 Gres=gpu:h100:1")
    assert seen["gres.conf"] == f"AutoDetect=off\nNodeName=n0 AutoDetect=off {LINES[0]}\n"
    assert seen["cgroup.conf"] == "CgroupPlugin=disabled\n"
    ask(detects=True)
    assert seen["gres.conf"] == "AutoDetect=nvidia\n"
