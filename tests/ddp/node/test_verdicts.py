"""Whom a failed attempt is blamed on: only evidence moves it off the program."""

import json
import pathlib
import tempfile

import hypothesis
import hypothesis.strategies as st
import pytest
import yaml

from ddp.node.diagnosis import verdicts

HOSTS = ["gpu-0", "gpu-1"]
TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    work()\n'
PEER_GONE = (
    "torch.distributed.DistBackendError: [7] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via "
    "c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer"
)


NCCL = f"{TRACE}torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error\n"
REFUSED = (
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
    "Last error:\nsocketStartConnect: Connect to 10.0.0.1<40000> failed : Connection refused\n"
)
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
CHAINED = "\nThe above exception was the direct cause of the following exception:\n\n"
MISSED = f"{TRACE}FileNotFoundError: 'cache'\n\nDuring handling of the above exception, another exception occurred:\n\n"
BUS = f"{TRACE}RuntimeError: DataLoader worker (pid 4) is killed by signal: Bus error. It is possible that\n"
UNGUARDED = (
    f"{TRACE}RuntimeError: \n        An attempt has been made to start a new process before the\n"
    "        current process has finished its bootstrapping phase.\n"
)
TEXTS = {
    "UNGUARDED": UNGUARDED,
    "MISSED": MISSED,
    "BUS": BUS,
    "NCCL": NCCL,
    "TRACE": TRACE,
    "REFUSED": REFUSED,
    "REMOTE": REMOTE,
    "CHAINED": CHAINED,
}
VERDICTS: list[list[object]] = yaml.safe_load(
    pathlib.Path(__file__).with_suffix(".yaml").read_text()
)["verdicts"]


def explained(folder: pathlib.Path, text: str, *others: str) -> verdicts.Verdict:
    """Return the verdict if rank 1, on the second node, printed `text`, and the others `others`."""
    (folder / "control").mkdir(exist_ok=True)
    (folder / "job.json").write_text(json.dumps({"ranks_per_node": 1}))
    for node, printed in enumerate((*others, text), 2 - len((*others, text))):
        logs = folder / "logs" / "12.r0" / f"node-{node}" / "12.r0_x" / "attempt_0" / "0"
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "stderr.log").write_text(printed)
    agent = "1: E1120 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 2)"
    (folder / "logs" / "12.out").write_text(
        f"[ENV] job=12 attempt=12.r0 nodes=gpu-0 gpu-1\n{agent}\n"
    )
    return verdicts.blame(str(folder), "12", "12.r0", HOSTS)


def blame(folder: pathlib.Path, text: str, *others: str) -> tuple[str, str]:
    found = explained(folder, text, *others)
    kind = f"{found.kind}, again" if found.comes_again else found.kind
    return kind, found.node if kind in ("node", "network") else ""


@pytest.mark.parametrize(("text", "verdict", "remedy"), VERDICTS)
def test_a_fault_is_blamed_by_evidence_alone(
    tmp_path: pathlib.Path, text: str, verdict: list[str], remedy: str
):
    for name, words in TEXTS.items():
        text = text.replace(f"<{name}>", words)
    assert blame(tmp_path, f"{text}\n") == (*verdict,)
    assert remedy in explained(tmp_path, f"{text}\n")[2]


def test_more_memory_than_the_job_has_is_not_tried_again(tmp_path: pathlib.Path):
    explained(tmp_path, "step 7\n")
    lines = "1: E1120 api.py:1002] failed (exitcode: -9) local_rank: 0\n"
    (tmp_path / "logs" / "12.out").write_text(lines)
    found = verdicts.blame(str(tmp_path), "12", "12.r0", HOSTS)
    assert found == ("unknown", "gpu-1", "killed by signal 9 (SIGKILL)", False)
    lines += "1: slurmstepd-gpu-1: error: Detected 1 oom_kill event in StepId=12.0.\n"
    (tmp_path / "logs" / "12.out").write_text(lines)
    kind, node, words, comes_again = verdicts.blame(str(tmp_path), "12", "12.r0", HOSTS)
    assert (kind, node, comes_again) == ("program", "gpu-1", True)
    assert words.endswith("submit it with a larger memory; or use a smaller batch")
    had = "had 1024 MiB, reached it on gpu-1: --memory 2G"
    lines = f"1: [ENV] gpu-1: a process was killed for memory: {had}\n{lines}"
    (tmp_path / "logs" / "12.out").write_text(lines)
    kind, node, words, comes_again = verdicts.blame(str(tmp_path), "12", "12.r0", HOSTS)
    assert (kind, node, comes_again) == ("program", "gpu-1", True)
    assert words == f"killed: it took more memory than the job has: {had}; or use a smaller batch"
    of_node = "gpu-1 itself ran out of memory; the job had 4096 MiB, reached 1024 MiB"
    (tmp_path / "logs" / "12.out").write_text(lines.replace(had, of_node))
    assert verdicts.blame(str(tmp_path), "12", "12.r0", HOSTS) == (
        "program",
        "gpu-1",
        f"killed: {of_node}",
        False,
    )


@pytest.mark.parametrize(
    "line", ["pid 7) is killed by signal: Killed. ", "pid(s) 7, 8) exited unexpectedly"]
)
def test_a_worker_of_dataloader_that_was_killed_for_memory_is_no_riddle(
    tmp_path: pathlib.Path, line: str
):
    assert blame(tmp_path, f"{TRACE}RuntimeError: DataLoader worker ({line}\n") == ("program", "")
    with (tmp_path / "logs" / "12.out").open("a") as log:
        log.write("1: [ENV] gpu-1: a process was killed for memory: had 1 MiB: --memory 2G\n")
    killed = "DataLoader worker killed: it took more memory than the job has: had 1 MiB: --memory 2G; or use a smaller"
    assert verdicts.blame(str(tmp_path), "12", "12.r0", HOSTS) == (
        "program",
        "gpu-1",
        f"{killed} batch",
        True,
    )


@pytest.mark.parametrize("words", [REFUSED, REMOTE])
def test_a_connection_of_nccl_that_both_ends_lost_is_the_networks(
    tmp_path: pathlib.Path, words: str
):
    assert blame(tmp_path, f"{NCCL}{words}", f"{NCCL}{words}") == ("network", "-")


def test_a_lost_peer_is_a_consequence_and_the_rank_that_failed_first_the_cause(
    tmp_path: pathlib.Path,
):
    for folder, other, verdict in (
        ("a", "KeyError: 'x'", ("program", "")),
        ("b", PEER_GONE, ("network", "-")),
    ):
        (tmp_path / folder).mkdir()
        assert blame(tmp_path / folder, f"{TRACE}{other}\n", f"{TRACE}{PEER_GONE}\n") == verdict


def test_a_cause_of_the_machine_counts_behind_the_exception_that_it_led_to(tmp_path: pathlib.Path):
    cause = f"{TRACE}torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might\n"
    chained = "\nThe above exception was the direct cause of the following exception:\n\n"
    assert blame(tmp_path, f"{cause}{chained}{TRACE}ValueError: step 7 failed\n") == (
        "node",
        "gpu-1",
    )
    assert blame(tmp_path, f"{cause}retrying\n{TRACE}ValueError: step 7 failed\n") == (
        "program",
        "",
    )


NO_FRAME = "Thread 0x00007fe80418d040 (most recent call first):\n  <no Python frame>"
IN_PYTHON = (
    'Current thread 0x00007fe80418d040 (most recent call first):\n  File "train.py", line 3 in work'
)


@pytest.mark.parametrize(
    ("reason", "place", "is_named"),
    [
        ("terminate called without an active exception\n", NO_FRAME, True),
        ("terminate called without an active exception\n", IN_PYTHON, False),
        ("", NO_FRAME, False),
    ],
)
def test_a_rank_that_torch_aborts_as_it_ends_learns_which_call_is_missing(
    tmp_path: pathlib.Path, reason: str, place: str, is_named: bool
):
    """A thread of gloo released the last tensor during Python's shutdown.

    Captured from torch 2.13.
    """
    explained(
        tmp_path, f"done\n{reason}Fatal Python error: Aborted\n\n{place}\n", f"{TRACE}{PEER_GONE}\n"
    )
    (tmp_path / "logs" / "12.out").write_text(
        "1: E1120 api.py:1002] failed (exitcode: -6) local_rank: 0\n"
    )
    kind, node, words, _ = verdicts.blame(str(tmp_path), "12", "12.r0", HOSTS)
    assert ("end it with torch.distributed.destroy_process_group()" in words) == is_named
    if is_named:
        assert (kind, node) == ("program", "gpu-1"), "another attempt may work"


SUSPICIOUS = [
    *"xid taxid nvml pynvml NVML_ cuda CUDA cudaError NVRM ECC hardware nccl gloo c10d SIGBUS SharedError".split(),
    *(
        "Input/output error",
        "Transport endpoint is not connected",
        "Stale file handle",
        "Bad file descriptor",
    ),
    *(
        "Bus error",
        "Connection reset by peer",
        "Broken pipe",
        "CUDA error",
        "leaves:",
        "ranks never joined within",
    ),
]
EXCEPTIONS = (
    "KeyError ValueError ModuleNotFoundError OSError RuntimeError my.NcclError requests.exceptions.ConnectionError"
).split()
MESSAGES = st.lists(
    st.sampled_from(SUSPICIOUS) | st.text("abcxyz_ ", max_size=8), min_size=1, max_size=6
).map(" ".join)


@hypothesis.settings(max_examples=200)
@hypothesis.given(st.sampled_from(EXCEPTIONS), MESSAGES, st.sampled_from(["", "fine\n", None]))
def test_no_word_of_a_message_moves_the_blame_off_the_program(
    name: str, message: str, other: str | None
):
    with tempfile.TemporaryDirectory() as folder:
        others = () if other is None else (other,)
        assert blame(pathlib.Path(folder), f"{TRACE}{name}: {message}\n", *others) == (
            "program",
            "",
        )


# Errors that recur on each try: errno.h's numbers, strerror(3)'s words, and a helpful option or
# command
AGAIN = {
    122: ("Disk quota exceeded", "quota -s"),
    28: ("No space left on device", "juicefs quota"),
    24: ("Too many open files", "ulimit -n"),
    2: ("No such file or directory", "on the nodes"),
}
PATHS = st.text("abc/._- 0123", max_size=12)


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    st.sampled_from(sorted(AGAIN)), st.sampled_from(["", "[rank1]: "]), PATHS, st.booleans()
)
def test_errors_that_would_return_are_not_tried_again_and_have_a_remedy(
    number: int, rank: str, path: str, has_words: bool
):
    what, remedy = AGAIN[number]
    name = "FileNotFoundError" if number == 2 else "OSError"
    line = f"{name}: [Errno {number}] {what}: {path!r}"
    if has_words and number != 2:  # as C++ libraries report it
        line = f"safetensors.SafetensorError: Error while serializing {path}: {what} (os error {number})"
    trace = "".join(f"{rank}{one}\n" for one in f"{TRACE}{line}".splitlines())
    with tempfile.TemporaryDirectory() as folder:
        found = explained(pathlib.Path(folder), trace)
    assert (found.kind, remedy in found.words, found.comes_again) == ("program", True, True)


# What would prove another fault if others than the program had written it
FORGED = (
    "[FATAL] gpu-0: its disk is full",
    "[ENV] gpu-0: /mnt/shared does not respond (Input/output error); waiting for it, 0 s",
    "srun: error: Node failure on gpu-0",
    "0: srun: error: Node failure on gpu-0",
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "pynvml.NVMLError_GpuIsLost: GPU is lost",
    "killed by signal 7 (SIGBUS)",
    "1 of 2 ranks never joined within 120 s: 0",
    "rank 0 leaves: rank 1 gave up",
    PEER_GONE,
)


@pytest.mark.parametrize("forged", FORGED)
@hypothesis.settings(max_examples=10)
@hypothesis.given(before=st.lists(MESSAGES, max_size=3), after=st.lists(MESSAGES, max_size=3))
def test_nothing_that_a_program_prints_moves_the_blame_to_a_node(
    forged: str, before: list[str], after: list[str]
):
    lines = [*before, forged, *after]
    printed = "".join(f"{line}\n" for line in lines)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        explained(folder, f"{printed}{TRACE}ValueError: boom\n", "")
        label = "1: [rank1]: "
        with (folder / "logs" / "12.out").open("a") as log:
            log.write(
                "".join(f"{label}{line}\n" for line in lines)
                + "srun: error: gpu-1: task 1: Exited with exit code 1\n"
            )
        assert verdicts.blame(str(folder), "12", "12.r0", HOSTS) == (
            "program",
            "gpu-1",
            "ValueError: boom",
            False,
        )
