"""Whom a failed attempt is blamed on: only evidence moves it off the program."""

import json
import pathlib
import tempfile

import hypothesis
import hypothesis.strategies as st
import pytest

from ddp.node import explain

HOSTS = ["gpu-0", "gpu-1"]
TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    work()\n'


def blame(folder: pathlib.Path, text: str, *others: str) -> tuple[str, str]:
    """Return the verdict on an attempt in which rank 1, of the second node, printed a text, and the others theirs."""
    (folder / "control").mkdir(exist_ok=True)
    (folder / "job.json").write_text(json.dumps({"ranks_per_node": 1, "launcher": "torchrun"}))
    for node, printed in enumerate((*others, text), 2 - len((*others, text))):
        logs = folder / "logs" / "12.r0" / f"node-{node}" / "12.r0_x" / "attempt_0" / "0"
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "stderr.log").write_text(printed)
    (folder / "logs" / "12.out").write_text("[ENV] job=12 attempt=12.r0 nodes=gpu-0 gpu-1\n")
    kind, node, _ = explain.blame(str(folder), "12", "12.r0", HOSTS)
    return kind, node if kind != "program" else ""


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (f"{TRACE}ModuleNotFoundError: No module named 'pynvml'\n", ("program", "")),
        (f"{TRACE}KeyError: 'taxid'\n", ("program", "")),
        (f"{TRACE}BrokenPipeError: [Errno 32] Broken pipe\n", ("program", "")),
        (
            f"{TRACE}requests.exceptions.ConnectionError: ('Connection aborted.', "
            "ConnectionResetError(104, 'Connection reset by peer'))\n",
            ("program", ""),
        ),
        (
            f"{TRACE}RuntimeError: DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.\n",
            ("program", ""),
        ),
        (f"{TRACE}RuntimeError: CUDA error: uncorrectable ECC error encountered\n", ("node", "gpu-1")),
        (f"{TRACE}torch.AcceleratorError: CUDA error: an uncorrectable NVLink error was detected\n", ("node", "gpu-1")),
        (
            f"{TRACE}torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error\n",
            ("node", "gpu-1"),
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\nRuntimeError: x\nNVRM: Xid (PCI): 79\n",
            ("node", "gpu-1"),
        ),
    ],
)
def test_a_fault_is_blamed_on_a_node_by_evidence_alone(tmp_path: pathlib.Path, text: str, verdict: tuple[str, str]):
    assert blame(tmp_path, text) == verdict


PEER_GONE = (
    "torch.distributed.DistBackendError: [7] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via "
    "c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer"
)


def test_a_lost_peer_is_a_consequence_and_the_rank_that_failed_first_the_cause(tmp_path: pathlib.Path):
    (tmp_path / "a").mkdir()
    assert blame(tmp_path / "a", f"{TRACE}KeyError: 'x'\n", f"{TRACE}{PEER_GONE}\n") == ("program", "")
    (tmp_path / "b").mkdir()
    assert blame(tmp_path / "b", f"{TRACE}{PEER_GONE}\n", f"{TRACE}{PEER_GONE}\n") == ("network", "-")


SUSPICIOUS = ("xid", "Xid", "nvml", "NVML", "ECC", "Bus error", "SIGBUS", "Connection reset by peer", "Broken pipe")


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.sampled_from(
        ["KeyError", "ValueError", "ModuleNotFoundError", "OSError", "requests.exceptions.ConnectionError"]
    ),
    st.lists(st.sampled_from(SUSPICIOUS) | st.text("abcxyz_ ", max_size=8), min_size=1, max_size=5),
)
def test_no_word_of_a_message_moves_the_blame_off_the_program(name: str, words: list[str]):
    with tempfile.TemporaryDirectory() as folder:
        assert blame(pathlib.Path(folder), f"{TRACE}{name}: {' '.join(words)}\n") == ("program", "")
