"""The scripts of docs/howto/resume.md, under torchrun: stopped, torn and resumed, same end."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import functools
import json
import pathlib
import re
import subprocess
import sys
import threading
import types
import typing

import conftest
import pytest
import ranks

from ddp.run import metrics
from ddptrain import resume
from ddptrain.checkpoint import stored
from ddptrain.world import agreement

BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (conftest.ROOT / "docs/howto/resume.md").read_text(), re.M | re.S
)
SCRIPTS = {"plain": BLOCKS[0], "trainer": BLOCKS[1]}
STEPS = {"plain": 200, "trainer": 60}
SAVE_EVERY = {"plain": 50, "trainer": 20}


class Job:
    """Attempts at one run of a script of the page, on two ranks."""

    def __init__(self, kind: str, folder: pathlib.Path) -> None:
        self.kind, self.script, self.run_dir = kind, folder / "train.py", folder / "run"
        self.stop_file = folder / "stop"
        self.script.write_text(SCRIPTS[kind])

    def start(self, attempt: str, *, launched: bool = False, **env: typing.Any) -> ranks.Result:
        """Run the script to its end, `DO=` with an accident, under torchrun or as forked ranks."""
        self.stop_file.unlink(missing_ok=True)
        job = {
            "RUN_DIR": str(self.run_dir),
            "RUN_ATTEMPT_ID": attempt,
            "STOP_FILE": str(self.stop_file),
        }
        run = conftest.torchrun if launched else ranks.run
        env = {"DO": "nothing", "AT": "0", "CUDA_VISIBLE_DEVICES": "", **job, **env}
        return run(2, self.script, accident=ranks.SCRIPT, **env)

    def finish(self, attempt: str) -> ranks.Result:
        """Run the script, which must be done at its end."""
        result = self.start(attempt)
        assert result.returncode == 0, result.output
        assert self.outcome(attempt)["outcome"] == "done"
        assert self.outcome(attempt)["step"] == STEPS[self.kind]
        return result

    def outcome(self, attempt: str) -> dict:
        return conftest.outcome(self.run_dir, attempt)

    def ending(self) -> list[dict]:
        """Return the last checkpoint's files: names, sizes and CRC-32s of weights and moments."""
        found = stored.verify((self.run_dir / "latest").resolve())
        assert found.step == STEPS[self.kind]
        listed = json.loads((found.path / stored.MANIFEST).read_text())["files"]
        return [
            entry
            for entry in listed
            if not entry["file"].endswith(("trainer_state.json", "training_args.bin"))
        ]

    def losses(self) -> object:
        """Return the last loss of the plain script, or the Trainer's losses of all steps."""
        if self.kind == "plain":
            return self.outcome(
                max(path.stem for path in (self.run_dir / "control").glob("*.outcome"))
            )["loss"]
        state = json.loads((self.run_dir / "latest" / "trainer_state.json").read_text())
        return [(entry["step"], entry["loss"]) for entry in state["log_history"] if "loss" in entry]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> collections.abc.Callable[[str], Job]:
    """Return a script's run without a break, made when it is first asked for."""

    @functools.cache
    def made(kind: str) -> Job:
        job = Job(kind, tmp_path_factory.mktemp(kind))
        job.finish("1.r0")
        return job

    return made


@pytest.mark.parametrize(
    ("kind", "do", "rank"),
    [
        ("plain", "stop", "0"),
        pytest.param("plain", "USR1", "1", marks=pytest.mark.long),
        pytest.param("plain", "TERM", "0", marks=pytest.mark.long),
        pytest.param("trainer", "stop", "0", marks=pytest.mark.long),
    ],
)
def test_asked_to_stop_it_saves_and_the_rest_is_the_same_bit_for_bit(
    kind: str,
    do: str,
    rank: str,
    whole: collections.abc.Callable[[str], Job],
    tmp_path: pathlib.Path,
):
    job = Job(kind, tmp_path)
    stopped = job.start("7.r0", launched=rank == "1", DO=do, AT="5", AT_RANK=rank)
    assert stopped.returncode == 0, stopped.output
    record = job.outcome("7.r0")
    assert record["outcome"] == "preempted"
    assert 5 <= record["step"] < STEPS[kind]
    assert stored.verify(pathlib.Path(record["checkpoint"])).step == record["step"]

    result = job.finish("7.r1")

    (resumed,) = [line for line in result.marked("CKPT") if "resumed" in line]
    assert int(resumed["step"]) == record["step"]
    assert job.losses() == whole(kind).losses()
    assert job.ending() == whole(kind).ending()
    measured = metrics.Reader(job.run_dir / "metrics.jsonl").read()
    assert [step for step, _ in measured.points("loss", 999)] == list(range(1, STEPS[kind] + 1))
    assert (measured.total_steps, measured.bad_lines) == (STEPS[kind], 0)


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.long), "trainer"])
def test_killed_while_it_saves_it_resumes_from_the_checkpoint_before(
    kind: str, whole: collections.abc.Callable[[str], Job], tmp_path: pathlib.Path
):
    job = Job(kind, tmp_path)
    assert job.start("7.r0", DO="torn", AT="2").returncode != 0
    torn = [
        path
        for path in job.run_dir.iterdir()
        if path.is_dir() and str(2 * SAVE_EVERY[kind]) in path.name
    ]
    assert torn, "the kill came before the second checkpoint was written"

    result = job.finish("7.r0t1")

    (resumed,) = [line for line in result.marked("CKPT") if "resumed" in line]
    assert int(resumed["step"]) == SAVE_EVERY[kind]
    assert job.losses() == whole(kind).losses()
    assert job.ending() == whole(kind).ending()
    assert not list(job.run_dir.glob("*.tmp-*"))


def test_a_rank_that_fails_while_it_saves_leaves_no_checkpoint_and_none_waiting(
    tmp_path: pathlib.Path,
):
    job = Job("plain", tmp_path)
    changed = SCRIPTS["plain"].replace(
        "            if run.rank == 0:", "            assert run.rank == 0\n            if 1:"
    )
    assert changed != SCRIPTS["plain"]
    job.script.write_text(changed)
    result = job.start("7.r0")
    assert result.returncode != 0
    assert "AssertionError" in result.output
    assert not list(job.run_dir.glob("epoch-*"))
    assert not (job.run_dir / "control").exists(), "an outcome of a script that failed"


def test_ranks_that_are_not_connected_are_refused(tmp_path: pathlib.Path):
    job = Job("plain", tmp_path)
    job.script.write_text("from ddptrain import resume\nresume.Run()\n")
    result = job.start("7.r0")
    assert result.returncode != 0
    assert "call torch.distributed.init_process_group before" in result.output


ALONE = """
import os
os.chdir("{folder}")
from ddptrain import resume
run = resume.Run()
print(run.step, run.resumed, run.attempt)
for step in range(run.step + 1, 4):
    assert not run.should_stop()
    with run.saving(step) as folder:
        (folder / "notes").mkdir()
        (folder / "notes" / "step").write_text(str(step))
run.done(step=3)
"""


def alone(script: pathlib.Path, code: str, **env: typing.Any) -> ranks.Result:
    script.write_text(code)
    return ranks.run(
        1, script, accident=ranks.SCRIPT, DO="nothing", AT="0", RANK="0", WORLD_SIZE="1", **env
    )


def test_a_script_saves_seals_and_resumes_without_symbolic_links(tmp_path: pathlib.Path):
    code = f"import accident_links\n{ALONE.format(folder=tmp_path)}".replace(
        "run.done(step=3)",
        'path = run.folder / "checkpoint-9"\npath.mkdir(exist_ok=True)\nrun.seal(path, 9)',
    )
    result = alone(tmp_path / "train.py", code)
    assert "0 None local" in result.output
    assert result.output.count("without symbolic links") == 1
    assert f"9 {tmp_path}/run/checkpoint-9 local\n" in alone(tmp_path / "train.py", code).output


def test_outside_of_a_job_one_process_saves_below_the_current_directory(tmp_path: pathlib.Path):
    for expected in ("0 None", f"3 {tmp_path}/run/epoch-0000-step-000003"):
        result = alone(tmp_path / "train.py", ALONE.format(folder=tmp_path))
        assert f"{expected} local\n" in result.output
    assert (tmp_path / "run" / "latest" / "rank-0000" / "notes" / "step").read_text() == "3"
    assert len(list((tmp_path / "run").glob("epoch-*"))) == 2
    for path in ("run", "run/latest"):
        assert (
            ranks.succeed(1, "inspect", tmp_path / path).output.splitlines()[-1]
            == "verified: whole"
        )
    for manifest in tmp_path.glob("run/epoch-*/manifest.json"):
        manifest.unlink()
    refused = alone(tmp_path / "train.py", ALONE.format(folder=tmp_path))
    assert refused.returncode != 0
    assert (
        "is not a checkpoint: it has no manifest.json); move them away to start over"
        in refused.output
    )


@pytest.mark.parametrize("saves", ["with run.saving(step): pass", "run.seal(made(step), step)"])
def test_a_killed_script_has_the_lines_of_its_checkpoints_steps(saves: str, tmp_path: pathlib.Path):
    code = f"""
import os, signal
os.chdir("{tmp_path}")
from ddptrain import resume
def made(step):
    path = run.folder / f"checkpoint-{{step}}"
    path.mkdir()
    return path
run = resume.Run()
for step in (1, 2):
    run.log(step, loss=0.5)
    {saves}
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert alone(tmp_path / "train.py", code).returncode != 0
    found = metrics.Reader(tmp_path / "run" / "metrics.jsonl").read()
    assert found.points("loss", 9) == [(1, 0.5), (2, 0.5)]


def test_it_is_imported_without_torch(tmp_path: pathlib.Path):
    code = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; from ddptrain import resume; print(resume.folder())"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.strip() == str(tmp_path / "run")


@pytest.mark.parametrize(("step_s", "agreements"), [(0.001, 3), (0.1, 11), (3.0, 101)])
def test_quick_steps_agree_seldom_and_slow_ones_each_time(
    step_s: float, agreements: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(resume.STOP_FILE, raising=False)
    gathered: list[object] = []
    world = types.SimpleNamespace(
        is_main=True,
        stop_requested=threading.Event(),
        gather=lambda values: gathered.append(values) or [values],
        share=lambda values: values,
    )
    ranks_agree = agreement.Agreement(world)  # pyright: ignore[reportArgumentType]
    since = 0
    for step in range(1, 102):
        if ranks_agree.is_due():
            agreed = ranks_agree.reach((step - since) * step_s, [5.0], own=0.5)
            assert agreed == agreement.Agreed(stop=False, sums=[5.0], own=[0.5])
            since = step
    assert len(gathered) == agreements
