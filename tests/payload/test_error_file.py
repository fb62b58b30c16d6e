"""Each rank's error file, in the format of torch.distributed.elastic; the job reads it."""

import errno
import json
import os
import pathlib
import typing

import hypothesis
import hypothesis.strategies as st
import pytest
import ranks

from ddptrain import cli
from ddptrain.ground import errors, files

TINY = "--layers 1 --heads 1 --width 16 --seq-len 16 --batch 2 --precision fp32 --eval-rows 4 --epoch-steps 2"


def test_a_mistake_and_a_bug_are_left_for_the_launcher(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert (
        cli.main(["train", "--data", str(tmp_path / "none"), "--run-dir", str(tmp_path / "run")])
        == 2
    )
    error = json.loads(path.read_text())["message"]
    fatal = next(line for line in capsys.readouterr().out.splitlines() if "[FATAL] " in line)
    assert fatal.endswith(f"[FATAL] {error['message']}")
    assert error["extraInfo"]["py_callstack"] == f"[FATAL] {error['message']}\n", (
        "a mistake needs no stack"
    )
    assert int(error["extraInfo"]["timestamp"]) > 0
    monkeypatch.setattr(cli, "_parser", lambda argv: {}["bug"])
    assert cli.main(["train"]) == 1
    stack = json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]
    assert stack.startswith("Traceback (most recent call last):\n")
    assert stack.endswith("[FATAL] KeyError: 'bug'\n")


def fail(
    folder: pathlib.Path, data: pathlib.Path, accident: str, **env: str
) -> list[dict[str, typing.Any]]:
    """Return two ranks' error files after a failed training, {} for a rank without one."""
    places = {"RUN_ATTEMPT_ID": "3.r0", "TORCHELASTIC_ERROR_FILE": f"{folder}/{{rank}}.json"}
    result = ranks.train(
        2, data, folder / "run", TINY, "--steps 4", accident=accident, **places, **env
    )
    assert all(result.codes), result.output
    paths = [folder / f"{rank}.json" for rank in range(2)]
    return [
        json.loads(path.read_text())["message"]["extraInfo"] if path.exists() else {}
        for path in paths
    ]


def outcome(folder: pathlib.Path) -> dict[str, typing.Any]:
    return json.loads((folder / "run" / "control" / "3.r0.outcome").read_text())


@pytest.mark.parametrize(
    ("where", "number"),
    [("run/.summary.json", "ENOTCONN"), ("epoch-0001.tmp-3.r0/dcp/__0_0.distcp", "EBADF")],
)
def test_a_system_error_is_in_the_file_as_data(
    dataset: pathlib.Path, tmp_path: pathlib.Path, where: str, number: str
):
    accident = f"accident_os FAIL_AT={where} FAIL_ERRNO={number} FAIL_MODE=wax+"
    own, peers = fail(tmp_path, dataset, accident, SLURMD_NODENAME="slurmd-{rank}")
    assert (own["errno"], own.get("of_peer")) == (getattr(errno, number), None)
    assert own["path"].startswith(f"{tmp_path}/run/")
    assert outcome(tmp_path)["retry"], "a filesystem that has failed comes back"
    if peers:  # which passes it on
        assert (peers["errno"], peers["path"], peers["node"]) == (
            own["errno"],
            own["path"],
            "slurmd-0",
        )
        assert peers["of_peer"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_only_lost_another_one_says_so(
    dataset: pathlib.Path, tmp_path: pathlib.Path, rank: int
):
    found = fail(tmp_path, dataset, f"accident_step DO=kill AT=3 OF={rank}")
    assert found[rank] == {}
    assert found[1 - rank]["of_peer"] is True
    assert "errno" not in found[1 - rank]


def raised(e: Exception, causes: list[Exception], *, is_cause: bool) -> Exception:
    """Return an exception that was raised from, or after, others in turn."""
    try:
        if causes:
            try:
                raise raised(causes[0], causes[1:], is_cause=is_cause)
            except Exception as before:
                if is_cause:
                    raise e from before
                raise e  # noqa: B904 - without an explicit cause
        raise e
    except Exception as whole:
        return whole


CAUSES = st.sampled_from(
    [errno.ENOTCONN, errno.EBADF, errno.ESTALE, errno.ENOENT, errno.ENOSPC, None]
)


@hypothesis.given(st.lists(CAUSES, max_size=4), st.booleans(), st.booleans())
def test_a_system_error_is_found_behind_the_errors_that_it_caused(
    numbers: list[int | None], is_cause: bool, is_shared: bool
):
    links: list[Exception] = [
        OSError(n, os.strerror(n), f"/x/{n}") if n else ValueError("other words") for n in numbers
    ]
    e = raised(errors.UserError("it failed"), links, is_cause=is_cause)
    if is_shared:
        e = errors.SharedError("rank 1 on b: it failed", cause=errors.cause_of(e))
    of_filesystem = [n for n in numbers if n in errors.OF_FILESYSTEM]
    known = [n for n in numbers if n]
    expected = [*of_filesystem, *known][:1]
    found = errors.cause_of(e)
    assert ([found.errno] if found else []) == expected
    assert files.describe(e) == (str(e), bool(of_filesystem))


def test_an_exception_that_leads_to_itself_has_an_end():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert errors.cause_of(first) is None
