"""System errors that prove a fault of the shared filesystem: their wording and origin."""

import json
import os
import pathlib
import tempfile

import hypothesis
import hypothesis.strategies as st
import pytest

from ddp.node import storage
from ddp.node.diagnosis import verdicts
from ddptrain.ground import errors

HOSTS = ["gpu-0", "gpu-1"]
OURS, OTHERS = (
    sorted(storage.LOST_ERRORS),
    [1, 2, 11, 12, 13, 17, 22, 24, 28, 32, 36, 98, 104, 111, 122],
)
AGENT = "{0}: E1120 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 2)"
TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    work()\n'
# Messages of programs about a path; torch's, safetensors', pyarrow's, h5py's and C++'s as seen
WITH_PATH = {
    "Python": "OSError: [Errno {number}] {words}: '{path}'",
    "Python, of two paths": "OSError: [Errno {number}] {words}: '/dev/null' -> '{path}'",
    "a subclass": "my.trainer.StorageError: [Errno {number}] {words}: '{path}'",
    "shutil.copytree": "shutil.Error: [('/tmp/a', '{path}', \"[Errno {number}] {words}: '{path}'\")]",
    "torch": "RuntimeError: unable to open file <{path}> in read-only mode: {words} ({number})",
    "safetensors": "safetensors_rust.SafetensorError: Error while serializing {path}: {words} (os error {number})",
    "pyarrow": "OSError: [Errno {number}] Failed to open local file '{path}'. Detail: [errno {number}] {words}",
    "h5py": "OSError: Unable to open file (name = '{path}', errno = {number}, error message = '{words}')",
    "C++": "  what():  filesystem error: cannot rename: {words} [{path}]",
    "the payload": "ERROR:ddptrain:[FATAL] {path}: {words}; look at the filesystem and its server, then run it again",
    "the payload, of a checkpoint": "[FATAL] a checkpoint could not be written: {path}: {words}; look at the filesystem",
    "a command": "cat: {path}: {words}",
}
WITHOUT_PATH = {
    "Python": "OSError: [Errno {number}] {words}",
    "of a descriptor": "OSError: [Errno {number}] {words}: 3",
    "torch": "RuntimeError: write failed: {words}",
    "a socket": "ConnectionError: [Errno {number}] {words}",
}
AWAY = {
    "the spool": "[ENV] {node}: output cannot be written (Bad file descriptor) and waits on this node's disk",
    "storage": "0: [ENV] {node}: /mnt/x does not respond (Transport endpoint is not connected); waiting for it, 0 s",
    "the witness": "1: [ENV] {node}: /mnt/x lost the files that were open (Bad file descriptor)",
}


class Attempt:
    """The files of an attempt of two ranks, on a node each, in a run of the workspace `top`."""

    def __init__(self, top: pathlib.Path) -> None:
        self.top = top.resolve()
        self.folder = self.top / "runs" / "nano"
        for name in ("control", "logs"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "job.json").write_text('{"ranks_per_node": 1}')
        self.log = ["[ENV] job=12 attempt=12.r0 nodes=gpu-0 gpu-1"]

    def fails(self, rank: int, line: str, *, way: str) -> None:
        """Let a rank leave a line, and end with code 1."""
        logs = self.folder / "logs" / "12.r0" / f"node-{rank}" / "12.r0_x" / "attempt_0" / "0"
        logs.mkdir(parents=True)
        self.log.append(AGENT.format(rank))
        if way == "bare":
            (logs / "stderr.log").write_text(f"{line}\n")
        elif way == "stderr":
            (logs / "stderr.log").write_text(f"{TRACE}{line}\n")
        elif way == "a cause":
            chained = "\nThe above exception was the direct cause of the following exception:\n\n"
            (logs / "stderr.log").write_text(
                f"{TRACE}{line}\n{chained}{TRACE}RuntimeError: step 7 failed\n"
            )
        elif way == "its context":
            chained = "\nDuring handling of the above exception, another exception occurred:\n\n"
            printed = f"{TRACE}{line}\n{chained}{TRACE}KeyError: 7"
            (logs / "stderr.log").write_text(
                "".join(f"[rank{rank}]: {one}\n" for one in printed.splitlines())
            )
        elif way == "torch's error file":
            more = {"py_callstack": f"{TRACE}{line}\n", "timestamp": "1800000000"}
            (logs / "error.json").write_text(
                json.dumps({"message": {"message": line, "extraInfo": more}})
            )

    def reports(self, rank: int, **facts: object) -> None:
        """Let a rank leave the payload's error file."""
        self.fails(rank, "", way="none")
        (path,) = self.folder.glob(f"logs/12.r0/node-{rank}/*/attempt_0/0")
        text = str(facts.pop("text", "a text that says nothing"))
        more = {"py_callstack": f"[FATAL] {text}\n", "timestamp": "1800000000", **facts}
        (path / "error.json").write_text(
            json.dumps({"message": {"message": text, "extraInfo": more}})
        )

    def blame(self) -> verdicts.Verdict:
        (self.folder / "logs" / "12.out").write_text("".join(f"{line}\n" for line in self.log))
        return verdicts.blame(str(self.folder), "12", "12.r0", HOSTS)


WAYS = ("stderr", "a cause", "its context", "torch's error file")
NAMES = st.text("abc._- 0123", min_size=1, max_size=12).map(lambda name: f"x{name}x")


@pytest.fixture
def attempt(tmp_path: pathlib.Path) -> Attempt:
    return Attempt(tmp_path)


def test_the_payload_and_the_job_know_the_same_errors():
    assert set(storage.LOST_ERRORS) == errors.OF_FILESYSTEM
    assert {number: os.strerror(number) for number in storage.LOST_ERRORS} == storage.LOST_ERRORS


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(
    st.sampled_from(OURS),
    st.sampled_from(sorted(WITH_PATH)),
    st.sampled_from(WAYS),
    NAMES,
    st.integers(0, 1),
    st.data(),
)
def test_a_path_of_the_workspace_makes_it_the_filesystems_and_another_one_does_not(
    number: int, wording: str, way: str, name: str, rank: int, data: st.DataObject
):
    is_inside = data.draw(st.booleans())
    is_away = data.draw(st.booleans())
    hypothesis.assume(wording != "C++" or way == "stderr")  # which ends the process
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as elsewhere:
        one = Attempt(pathlib.Path(folder))
        place = f"{one.top if is_inside else elsewhere}/data/{name.replace(' ', '_')}"
        words = storage.LOST_ERRORS[number]
        one.fails(rank, WITH_PATH[wording].format(number=number, words=words, path=place), way=way)
        if is_away:
            one.log.append(AWAY["storage"].format(node=HOSTS[rank]))
        found = one.blame()
    assert (found.kind, found.node) == ("filesystem" if is_inside else "program", HOSTS[rank])


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    st.sampled_from(OURS),
    st.sampled_from(sorted(WITHOUT_PATH)),
    st.sampled_from(WAYS),
    st.sampled_from([None, *sorted(AWAY)]),
    st.integers(0, 1),
    st.integers(0, 1),
)
def test_without_a_path_it_takes_another_sign_from_the_same_node(
    number: int, wording: str, way: str, sign: str | None, rank: int, away: int
):
    with tempfile.TemporaryDirectory() as folder:
        one = Attempt(pathlib.Path(folder))
        one.fails(
            rank,
            WITHOUT_PATH[wording].format(number=number, words=storage.LOST_ERRORS[number]),
            way=way,
        )
        if sign:
            one.log.append(AWAY[sign].format(node=HOSTS[away]))
        found = one.blame()
    is_proved = bool(sign) and away == rank
    assert (found.kind, found.node) == ("filesystem" if is_proved else "program", HOSTS[rank])


@pytest.mark.parametrize("number", OTHERS)
@pytest.mark.parametrize("is_away", [False, True])
def test_other_errors_on_a_path_of_the_workspace_take_another_sign_and_limits_never_count(
    attempt: Attempt, number: int, is_away: bool
):
    line = f"OSError: [Errno {number}] {os.strerror(number)}: '{attempt.top}/x'"
    attempt.fails(1, line, way="stderr")
    if is_away:
        attempt.log.append(AWAY["the spool"].format(node="gpu-1"))
    is_limit = number in (12, 24, 28, 122)
    assert attempt.blame().kind == ("filesystem" if is_away and not is_limit else "program")


@pytest.mark.parametrize("full", ["No space left on device", "Disk quota exceeded"])
def test_a_full_disk_that_takes_no_output_is_no_fault_of_the_filesystem(
    attempt: Attempt, full: str
):
    attempt.fails(1, "OSError: [Errno 9] Bad file descriptor", way="stderr")
    attempt.log.append(
        f"[ENV] gpu-1: output cannot be written ({full}) and waits on this node's disk"
    )
    assert attempt.blame().kind == "program"


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    st.sampled_from([*OURS, *OTHERS]),
    st.sampled_from(["workspace", "elsewhere", ""]),
    st.integers(0, 1),
    st.sampled_from(["", *HOSTS]),
    st.booleans(),
    st.booleans(),
)
def test_the_payloads_error_file_counts_whatever_its_text_says(
    number: int, place: str, rank: int, node: str, is_away: bool, may_retry: bool
):
    with tempfile.TemporaryDirectory() as folder:
        one = Attempt(pathlib.Path(folder))
        path = {"workspace": f"{one.top}/a b", "elsewhere": "/nowhere/a", "": ""}[place]
        one.reports(rank, errno=number, path=path, node=node)
        (one.folder / "control" / "12.r0.outcome").write_text(
            json.dumps({"outcome": "failed", "retry": may_retry})
        )
        where = node or HOSTS[rank]
        if is_away:
            one.log.append(AWAY["storage"].format(node=where))
        found = one.blame()
    is_shared = place == "workspace" and number in OURS
    is_signed = is_away and place != "elsewhere" and number not in (12, 24, 28, 122)
    if is_shared or is_signed:
        assert (found.kind, found.node, found.comes_again) == ("filesystem", where, False)
    else:
        assert found.kind == ("program" if may_retry else "parameters")


# Who tells it: each leaves the words of rank 0 to rank 1, which is all that is left
REPORTED = {
    "the payload's watch": "rank 1 leaves: rank 0 on gpu-0: {error}",
    "a script with resume.Run": "ddptrain.ground.errors.SharedError: rank 0 on gpu-0: {error}",
}


@pytest.mark.parametrize("number", OURS)
@pytest.mark.parametrize("by", REPORTED)
@pytest.mark.parametrize("wording", ["Python", "the payload, of a checkpoint"])
@pytest.mark.parametrize("is_listed", [True, False])
def test_an_error_that_rank_1_passes_on_belongs_to_rank_0(
    attempt: Attempt, number: int, by: str, wording: str, is_listed: bool
):
    words = WITH_PATH[wording].removeprefix("[FATAL] ")
    error = words.format(
        number=number, words=storage.LOST_ERRORS[number], path=f"{attempt.top}/metrics.jsonl"
    )
    attempt.fails(1, REPORTED[by].format(error=error), way="bare")
    if is_listed:
        attempt.log.append(AGENT.format(0))  # which left no word
    found = attempt.blame()
    assert (found.kind, found.node) == ("filesystem", "gpu-0")
    assert "metrics.jsonl" in found.words


def test_a_bug_that_rank_1_reports_belongs_to_the_program(attempt: Attempt):
    attempt.fails(1, "rank 1 leaves: rank 0 on gpu-0: KeyError: 'x'", way="bare")
    found = attempt.blame()
    assert (found.kind, found.node) == ("program", "gpu-0")


LOST = "a rank was lost, killed (out of memory?) or with its host; look at its log: Connection closed by peer [::1]:2"


@pytest.mark.parametrize("way", ["error file", "stderr"])
def test_a_killed_rank_is_reported_on_its_own_node(attempt: Attempt, way: str):
    if way == "stderr":
        attempt.fails(0, f"ERROR:ddptrain:[FATAL] {LOST}", way=way)
    else:
        attempt.reports(0, text=LOST, of_peer=True)
    attempt.log.append(AGENT.format(1).replace("exitcode: 1", "exitcode: -9"))
    assert attempt.blame() == ("unknown", "gpu-1", "killed by signal 9 (SIGKILL)", False)
