"""Every action of the four charms, once, on the deployed cluster: those that end well, and those that cannot be had here.

The table below has a row for each action that is declared; what the actions do at length is in the other files here.
"""

import re
import types
import typing

import pytest
import yaml

from functional.conftest import REPOSITORY, Cluster, Json

pytestmark = [
    pytest.mark.trains,
    pytest.mark.timeout(1500),
]  # the first test of a run deploys; each command has a limit of its own

TRAINER, PROXY, CLIENT, GPU = "ddp-trainer", "juicefs-server-proxy", "shared-filesystem-client", "slurm-gpu"
UNITS = {TRAINER: "trainer/0", PROXY: "juicefs-server-proxy/0"}  # of the others, the one beside slurmd/0
ELSEWHERE = "shown in another file here"
RUNS = ("tour-a", "tour-b")
SMALL = ("gpus-per-node=0", "cpus-per-task=1")  # so that torch for CPUs is what the job asks for


class Good(typing.NamedTuple):
    """An action that ends well, with these patterns in its results."""

    arguments: tuple[str, ...] = ()
    results: typing.Mapping[str, str] = types.MappingProxyType({})


class Refused(typing.NamedTuple):
    """An action that ends with this error and changes nothing: what it needs is not in the sandbox."""

    arguments: tuple[str, ...]
    error: str


NO_SMI = r"there is no /usr/bin/nvidia-smi on this machine.*"
TABLE: dict[tuple[str, str], Good | Refused | str] = {
    (TRAINER, "list-runs"): Good(results={"runs": r"(?s).*tour-b .*COMPLETED.*tour-a .*COMPLETED.*"}),
    (TRAINER, "show-run"): Good(("run=tour-a",), {"state": "COMPLETED", "curve-text": r"(?s).*│.*"}),
    (TRAINER, "compare-runs"): Good(
        (f"runs={','.join(RUNS)}",), {"results": r"(?s)RUN +STATE .*\ntour-a .*\ntour-b .*"}
    ),
    (TRAINER, "doctor"): Good(
        results={
            "verdict": "a run can start.*",
            "errors": "0",
            "nodes": r"(?s)NODE .*\nslurmd-0 .* \w+\nslurmd-1 .* \w+",
            "tracking": "none: .*",
        },
    ),
    (TRAINER, "benchmark-collectives"): Good(
        (*SMALL[:1], "max-bytes=16K", "iters=3"),
        {"state": "COMPLETED", "table": r"(?s).*Out of bounds values : 0 OK.*", "baseline": ".*/collectives.json"},
    ),
    (TRAINER, "plan"): Good((*SMALL, "tokens-per-second=1000"), {"efficiency": r"\d+%", "step": r"[\d.]+ m?s"}),
    (TRAINER, "run-log"): Good(("run=tour-b", "rank=1", "lines=5"), {"text": r"(?s).*\[RANK\] rank=1 .*"}),
    **dict.fromkeys(
        [
            (TRAINER, name)
            for name in (
                "install-environment",
                "prepare-dataset",
                "submit-ddp",
                "submit-sweep",
                "resume-run",
                "cancel-run",
            )
        ],
        ELSEWHERE,
    ),
    (PROXY, "status"): Good(
        results={"volume": "shared", "clients": "3", "capacity-gib": r"\d+", "survives-power-loss": "yes"}
    ),
    (PROXY, "fsck"): Good(results={"state": "clean", "summary": r"Used by \d+ slices .*"}),
    (PROXY, "gc"): Good(results={"mode": "dry run.*", "summary": r"scanned \d+ objects.*"}),
    (PROXY, "backup-metadata"): Good(results={"file": r"/\S+\.json\.gz", "sha256": "[0-9a-f]{64}"}),
    (PROXY, "restore-metadata"): Refused(("uuid=x", "file=/tmp/none"), "uuid: this application's volume is .*"),
    (PROXY, "set-quota"): Good(("path=/datasets", "capacity=900"), {"size": "900 GiB"}),
    (PROXY, "list-quotas"): Good(results={"count": "1", "quotas": r".*/datasets.*"}),
    (PROXY, "export-kubernetes"): Good(
        results={"file": r"/\S+\.yaml", "without-secrets": r"(?s).*csi\.juicefs\.com.*"}
    ),
    (PROXY, "benchmark"): Good(("big-file-size=8", "small-files=5"), {"write-big-file": r".* MiB/s.*"}),
    (CLIENT, "status"): Good(results={"state": "right", "source": "JuiceFS:shared", "mountpoint": "/mnt/shared"}),
    (CLIENT, "warmup"): Good(("path=runs",), {"path": "/mnt/shared/runs"}),
    (CLIENT, "remount"): Good(("wait=60",), {"state": "right"}),
    (CLIENT, "benchmark"): Good(("size=16",), {"mount-write-mib-s": r"[\d.]+", "local-read-mib-s": r"[\d.]+"}),
    (GPU, "detect"): Good(
        results={"source": "/proc/driver/nvidia", "count": "1", "gpus": r"\S+: .*, /dev/nvidia0\b.*"}
    ),
    (GPU, "show-gres"): Good(results={"registered": "gpu:mock_gpu:1", "lines-live": "true"}),
    (GPU, "accept-gpus"): Good(results={"registered": "gpu:mock_gpu:1"}),
    (GPU, "health-check"): Refused((), NO_SMI),
    (GPU, "upgrade-driver"): Refused(("wait=0",), r"branch: driver=keep names none; .*"),
    (GPU, "reset-gpu"): Refused(("gpu=0000:99:00.0",), r"gpu: no card at 0000:99:00\.0; there is 0000:81:00\.0"),
    (GPU, "set-mig"): Refused(("gpu=all", "profiles=3g.20gb", "wait=5"), NO_SMI),
}


@pytest.fixture(scope="module")
def runs(cluster: Cluster) -> None:
    """Two runs to look at."""
    for name in RUNS:
        options = ("nodes=2", *SMALL, f"run={name}", "wait=true")
        found = cluster.action("submit-ddp", "workload=smoke", *options, timeout=1500)
        assert found["state"] == "COMPLETED", found


def test_the_table_has_every_action():
    declared = {
        (path.parent.name, name)
        for path in (REPOSITORY / "charms").glob("*/charmcraft.yaml")
        for name in yaml.safe_load(path.read_text())["actions"]
    }
    assert declared == set(TABLE)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("charm", "name"),
    [key for key, row in TABLE.items() if row != ELSEWHERE],
    ids=lambda value: value,
)
def test_action(cluster: Cluster, charm: str, name: str):
    row = TABLE[charm, name]
    assert isinstance(row, Good | Refused)
    unit = UNITS.get(charm) or cluster.beside("slurmd/0", charm)
    answer = cluster.ctl("run", unit, name, *row.arguments, "--format", "json")
    if isinstance(row, Refused):
        assert answer.code == 1, answer.out
        assert re.fullmatch(f"{name}: {row.error}", answer.error), answer.error
        return
    assert answer.code == 0, answer.err[-3000:]
    results: Json = answer.json()[unit]["results"]
    assert results, "an action says something"
    for key, pattern in row.results.items():
        assert re.fullmatch(pattern, str(results[key]).strip()), (key, results)
