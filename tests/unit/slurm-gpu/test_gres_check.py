"""slurmd's own reading of a node's gres.conf, before anything of Slurm is touched."""

import pathlib
import re

import pytest
from slurm_double import SlurmDouble

from gpu import gres, gres_check
from slurm_ddp.run import CommandTimeout

SETTINGS = {"cpus": "2", "boards": "1", "corespersocket": "2", "realmemory": "4000", "gres": "gpu:old:1"}
LINES = ("Name=gpu Type=h100 File=/dev/nvidia0 Cores=0-1 Links=-1 Flags=nvidia_gpu_env",)
RECORD = "slurmd-n0: Gres Name=gpu Type={} Count=1 Index=0 ID=7696487 File={} Cores={} CoreCnt=2 Links={}{}\n"
MIG = ("Name=gpu Type=a100_3g.20gb MultipleFiles=/dev/nvidia0,/dev/c12,/dev/c13 Flags=nvidia_gpu_env",)


DETECTED = RECORD.format("h100", "/dev/nvidia0", "0-1", "(null)", "")


def ask(lines: tuple[str, ...] = LINES, *, detects: bool = False) -> str | None:
    plan = gres.Plan("gpu:h100:1", lines, ())
    return gres_check.difference("n0", plan, () if detects else lines, SETTINGS, "nvidia" if detects else "off")


@pytest.mark.parametrize(
    "printed",
    [
        RECORD.format("h100", "/dev/nvidia0", "0-1", "-1", " Flags=HAS_FILE,HAS_TYPE,ENV_NVML"),  # 25.11
        RECORD.format("h100", "/dev/nvidia0", "0-1", "-1", ""),
        RECORD.format("h100", "/dev/nvidia0", "0-1", "-1", "").replace(
            "slurmd-n0:", "[2026-11-22T19:56:59.297]"
        ),  # 26.05
        "slurmd-n0: error: /dev/nvidia0 is not a valid character or block device, fix your gres.conf\n"
        + RECORD.format("h100", "/dev/nvidia0", "0-1", "-1", ""),
    ],
)
def test_slurmd_agrees(slurm: SlurmDouble, printed: str):
    slurm.printed = printed
    assert ask() is None


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        (RECORD.format("x", "/dev/nvidia0", "0-1", "-1", ""), "/dev/nvidia0 has Type=x, not h100"),
        (RECORD.format("h100", "/dev/nvidia0", "0-3", "-1", ""), "/dev/nvidia0 has Cores=0-3, not 0-1"),
        (RECORD.format("h100", "/dev/nvidia0", "0-1", "(null)", ""), "/dev/nvidia0 has Links=(none), not -1"),
        (RECORD.format("h100", "/dev/nvidia1", "0-1", "-1", ""), "it finds no /dev/nvidia0"),
        (
            "slurmd-n0: error: xcpuinfo_abs_to_mac: failed\nslurmd-n0: error: Invalid GRES data for gpu, Cores=0-9\n",
            "it finds no /dev/nvidia0 (Invalid GRES data for gpu, Cores=0-9)",
        ),
        (
            "slurmd-n0: fatal: can't stat gres.conf file /dev/nvidia0: No such file or directory\n",
            "it finds no /dev/nvidia0 (can't stat gres.conf file /dev/nvidia0: No such file or directory)",
        ),
    ],
)
def test_slurmd_differs(slurm: SlurmDouble, printed: str, problem: str):
    slurm.printed = printed
    assert ask() == f"slurmd -G: {problem}"


@pytest.mark.parametrize("start", ["slurmd-n0:", "[2026-11-22T19:56:59.311]"])  # 26.05 prints a time
def test_slurmd_prints_a_device_whose_cores_it_calls_invalid(slurm: SlurmDouble, start: str):
    record = RECORD.format("h100", "/dev/nvidia0", "0-1", "-1", "").replace("slurmd-n0:", start)
    slurm.printed = f"{start} error: Invalid GRES data for gpu, Cores=0-1\n{record}"
    assert ask() == "slurmd -G: Invalid GRES data for gpu, Cores=0-1"


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        (DETECTED, None),  # AutoDetect=nvidia counts no links
        (DETECTED.replace("Cores=0-1 ", ""), None),  # nor cores where the kernel shows none
        (DETECTED.replace("Cores=0-1", "Cores=0"), "slurmd -G: /dev/nvidia0 has Cores=0, not 0-1"),
        (DETECTED.replace("h100", "h200"), "slurmd -G: /dev/nvidia0 has Type=h200, not h100"),
        (
            "slurmd-n0: error: System GPU detection failed\n",
            "slurmd -G: it finds no /dev/nvidia0 (System GPU detection failed)",
        ),
    ],
)
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
        assert pathlib.Path(spool).is_dir(), "slurmd complains of a socket's folder that is not there"
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
