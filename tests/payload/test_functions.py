"""Functions as jobs, with a double of `ddp` that runs the ranks on this machine."""

import asyncio
import functools
import json
import os
import pathlib
import signal
import stat
import subprocess
import sys
import time
import typing

import pytest

from ddptrain import submit
from ddptrain.functions import calls, errors, outcomes, pickles

DOUBLE = pathlib.Path(__file__).with_name("ddp_double.py")


@pytest.fixture
def double(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of a double of `ddp`, which is on PATH."""
    home = tmp_path / "double"
    (home / "runs").mkdir(parents=True)
    (home / "bin").mkdir()
    command = home / "bin" / "ddp"
    payload = pathlib.Path(pickles.__file__).parents[2]
    command.write_text(f'#!/bin/sh\nPYTHONPATH={payload} exec {sys.executable} {DOUBLE} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("DDP_DOUBLE", str(home))
    return home


def asked(double: pathlib.Path) -> list[list[str]]:
    return [json.loads(line) for line in (double / "asked").read_text().splitlines()]


def local(function: typing.Callable[..., typing.Any]) -> typing.Callable[..., typing.Any]:
    """Return a function as one of a notebook, which is pickled by value."""
    function.__module__ = "__main__"
    return function


def scaled(x: int, lr: float = 1.0) -> float:
    return x * lr


def rank() -> int:
    return int(os.environ["RANK"])


def boom(which: int) -> None:
    if rank() == which:
        raise ValueError(f"boom on {which}")
    time.sleep(1 if which else 0)


def killed() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    raise RuntimeError("connection closed by peer")


class OddError(Exception):
    """An exception that cannot be loaded again, as its class takes more than a text."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)


def odd() -> None:
    raise OddError("strange", 3)


def test_a_function_is_called_with_its_arguments_and_its_result_comes_back(double: pathlib.Path):
    job = submit(local(scaled), 3, lr=0.5, nodes=1)
    assert job.result(timeout=240) == 1.5
    assert job.done()
    assert (job.run, job.job_id) == ("scaled-0", "40")
    (words,) = [words for words in asked(double) if words[0] == "submit"]
    assert "--nodes=1" in words
    assert words[-2:] == ["-m", "ddptrain.functions"]


def test_each_rank_returns_its_own_result_and_rank_0s_is_the_jobs(double: pathlib.Path):
    job = submit(local(rank), nodes=2, ranks_per_node=2)
    assert job.results(timeout=240) == [0, 1, 2, 3]
    assert job.result() == 0


@pytest.mark.parametrize("which", [0, 1])
def test_the_exception_of_the_rank_that_failed_is_raised_with_its_traceback(
    double: pathlib.Path, which: int
):
    job = submit(local(boom), which, nodes=2)
    with pytest.raises(ValueError, match=f"boom on {which}") as caught:
        job.result(timeout=240)
    trace = str(caught.value.__cause__)
    assert f"rank {which} of 2 on" in trace
    assert "in boom" in trace
    assert "ddptrain/functions" not in trace, "frames of ours"
    assert isinstance(job.exception(), ValueError)


def test_a_rank_that_was_killed_is_named_and_not_one_that_lost_it(double: pathlib.Path):
    job = submit(local(killed), nodes=2)
    with pytest.raises(errors.FailedJobError, match=r"is FAILED: .*rank 1 ended with -9"):
        job.result(timeout=240)


def test_an_exception_that_cannot_be_loaded_is_shown_by_its_text(double: pathlib.Path):
    job = submit(local(odd))
    with pytest.raises(errors.FailedJobError, match="OddError: strange"):
        job.result(timeout=240)


def test_a_map_gives_its_results_in_order(double: pathlib.Path):
    jobs = submit.map(local(scaled), [1, 2], lr=[0.5, 3], nodes=1, parallel=2)
    assert jobs.results(timeout=240) == [0.5, 3, 1, 6]
    assert [job.job_id for job in jobs] == ["40_0", "40_1", "40_2", "40_3"]
    (words,) = [words for words in asked(double) if words[0] == "sweep"]
    assert {"--grid=call=0,1,2,3", "--parallel=2", "--nodes=1"} <= set(words)


def test_a_job_and_jobs_are_awaited(double: pathlib.Path):
    async def both() -> tuple[float, list[float]]:
        one = submit(local(scaled), 2)
        many = submit.map(local(scaled), [3, 4])
        return await one, await many

    assert asyncio.run(both()) == (2, [3, 4])


def test_keywords_go_to_the_function_or_to_the_job_and_never_by_guess(double: pathlib.Path):
    def layered(nodes: int, **more: int) -> list[int]:
        return [nodes, *more.values()]

    with pytest.raises(errors.FunctionError, match=r"submit.options\(nodes=...\)"):
        submit(layered, nodes=3)
    assert submit.options(nodes=1)(local(layered), nodes=3, memory=4).result(timeout=240) == [3, 4]
    with pytest.raises(
        errors.FunctionError,
        match="node is not an option of a job; there are: accept_risk, account",
    ):
        submit.options(node=1)


def test_what_ddp_refuses_is_raised_in_its_words(double: pathlib.Path):
    with pytest.raises(errors.FunctionError, match=r"^--partition: no partition 'nowhere'$"):
        submit(local(scaled), 1, partition="nowhere")
    with pytest.raises(errors.FunctionError, match="no run gone"):
        submit.job("gone")


def test_a_job_is_found_again_by_its_runs_name(double: pathlib.Path):
    run = submit(local(scaled), 5, run="mine").run
    assert submit.job(run).result(timeout=240) == 5


def test_a_log_is_read_and_a_job_is_cancelled(double: pathlib.Path):
    def speaks() -> None:
        print("hello", flush=True)
        time.sleep(60)

    job = submit(local(speaks))
    with pytest.raises(TimeoutError, match="it goes on"):
        job.wait(timeout=0.1)
    until = time.monotonic() + 240
    while "hello" not in job.log():
        assert time.monotonic() < until
        time.sleep(0.2)
    job.cancel()
    with pytest.raises(errors.UncompletedJobError, match="is CANCELLED: job 40 CANCELLED"):
        job.result(timeout=240)
    assert asked(double)[-2][0] == "cancel" or ["cancel", job.run] in asked(double)


def test_without_ddp_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        errors.FunctionError, match="there is no command ddp on this host; install it"
    ):
        submit(local(scaled), 1)


# -- the files ------------------------------------------------------------------------------------


def test_files_are_private_and_another_accounts_is_not_loaded(tmp_path: pathlib.Path):
    path = tmp_path / "one.pkl"
    pickles.write(path, {"a": 1})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert pickles.read(path) == {"a": 1}
    path.chmod(0o620)
    with pytest.raises(errors.FunctionError, match="is not a file that only you can write"):
        pickles.read(path)
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(errors.FunctionError, match="link cannot be read"):
        pickles.read(tmp_path / "link")
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        with pytest.raises(errors.FunctionError, match="belongs to uid 65534"):
            pickles.read(path)


def test_another_version_of_python_is_named(tmp_path: pathlib.Path):
    path = tmp_path / "f.pkl"
    calls.write(path, [calls.Call(scaled, (1,))])
    held = pickles.read(path)
    pickles.write(path, {**held, "python": "3.8", "calls": [b"not a pickle"]})
    with pytest.raises(errors.FunctionError, match=r"pickled by Python 3\.8, and the job's is 3\."):
        calls.read(path)


def test_modules_beside_a_script_are_found_in_the_copy_of_its_project(tmp_path: pathlib.Path):
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    (project / "scripts" / "beside.py").write_text(
        "def f():\n    return WORD\nWORD = 'as submitted'\n"
    )
    (project / "scripts" / "launch.py").write_text(
        "import pathlib, sys, beside\nfrom ddptrain.functions import calls\n"
        "calls.write(pathlib.Path(sys.argv[1]), [calls.Call(beside.f)])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(pickles.__file__).parents[2])}
    argv = [sys.executable, "scripts/launch.py", str(tmp_path / "function.pkl")]
    subprocess.run(argv, check=True, cwd=project, env=env)
    copy = tmp_path / "run" / "code"
    copy.parent.mkdir()
    project.rename(copy)  # the original is missing, as on a node that does not share it
    reads = "import pathlib, sys; from ddptrain.functions import calls; print(calls.read(pathlib.Path(sys.argv[1]))())"
    done = subprocess.run(
        [sys.executable, "-c", reads, argv[-1]],
        capture_output=True,
        text=True,
        cwd=copy,
        env=env,
        check=True,
    )
    assert done.stdout == "as submitted\n"


def test_what_cannot_be_pickled_is_named(tmp_path: pathlib.Path):
    with pytest.raises(errors.FunctionError, match=r"^rank cannot be pickled \(TypeError: "):
        calls.write(tmp_path / "f", [calls.Call(rank, (sys._getframe(),))])


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (scaled, "scaled"),
        (functools.partial(scaled, 1), "scaled"),
        (lambda: 1, "function"),
        (OddError, "OddError"),
    ],
)
def test_a_run_is_named_after_its_function(function: typing.Callable[..., typing.Any], name: str):
    assert calls.Call(function).name == name


def test_an_earlier_attempts_result_does_not_count(tmp_path: pathlib.Path):
    outcomes.leave_result(tmp_path_made(tmp_path), 0, "old")
    outcomes.clear(tmp_path, 0)
    assert outcomes.read_all(tmp_path) == {}


def tmp_path_made(folder: pathlib.Path) -> pathlib.Path:
    (folder / outcomes.FOLDER).mkdir()
    return folder


def test_a_result_that_cannot_be_loaded_here_fails_only_when_it_is_read(tmp_path: pathlib.Path):
    pickles.write(
        tmp_path_made(tmp_path) / outcomes.FOLDER / "0.pkl",
        {
            "rank": 0,
            "world": 1,
            "host": "a",
            "at": 0.0,
            "is_ok": True,
            "data": b"\x80\x04\x8c\x07nowhere\x8c\x01x\x93.",
        },
    )
    (found,) = outcomes.read_all(tmp_path).values()
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        found.value()
