"""prune: old and unused items are shown with their sizes, and removed only with yes."""

import json
import os
import pathlib
import time
import typing

import left_by_jobs
import pytest
from cluster import Cluster
from pip_double import Pip
from run_verbs import Program

OLD = time.time() - 40 * 86400


def age(path: pathlib.Path, when: float = OLD) -> None:
    """Let a folder and all that is in it have changed last at a time."""
    for one in [path, *path.rglob("*")]:
        os.utime(one, (when, when), follow_symlinks=False)


def leave_old(program: Program, name: str) -> pathlib.Path:
    path = left_by_jobs.leave_training(program, name)
    age(path)
    return path


def leave_checkpoints(program: Program, name: str, steps: int) -> pathlib.Path:
    """Leave an old training with checkpoints, the second of which is the best."""
    path = left_by_jobs.leave_training(program, name)
    for step in range(1, steps + 1):
        folder = path / f"epoch-{step:04d}"
        folder.mkdir(exist_ok=True)
        (folder / "manifest.json").write_text(json.dumps({"meta": {"step": step}}))
    for link, target in (("latest", steps), ("best", 2)):
        (path / link).unlink()
        (path / link).symlink_to(f"epoch-{target:04d}")
    age(path)
    return path


def names(program: Program, **params: typing.Any) -> list[str]:
    """Prune, and return the names of runs and checkpoints, without environments."""
    program.run("prune", **params)
    items = program.record["items"]
    return [item["name"] for item in items if item["kind"] in ("run", "checkpoint")]


def left(program: Program) -> list[str]:
    return sorted(path.name for path in (program.workspace / "runs").iterdir())


@pytest.mark.parametrize("params", [{}, {"dry_run": True}, {"dry_run": True, "yes": True}])
def test_without_yes_it_shows_what_would_go_and_removes_nothing(
    program: Program, params: dict[str, bool]
):
    leave_old(program, "old")
    left_by_jobs.leave_training(program, "new")
    before = program.files()
    assert names(program, **params) == ["old"]
    assert program.results["to-remove-them"] == "ddp prune --older 30d --yes"
    assert program.record["bytes"] == sum(item["bytes"] for item in program.record["items"]) > 0
    assert program.files() == before


def test_with_yes_old_runs_go_and_younger_ones_stay(program: Program):
    leave_old(program, "old")
    left_by_jobs.leave_training(program, "new")
    assert names(program, yes=True) == ["old"]
    assert left(program) == ["new"]
    assert names(program, yes=True) == []
    assert program.results["count"] == "0"


def test_an_old_run_in_the_queue_or_read_by_a_job_stays(program: Program, cluster: Cluster):
    leave_old(program, "source")
    cluster.states = [("PENDING", 0)]
    program.run("submit-ddp", run="again", resume="source")
    age(program.workspace / "runs" / "again")
    assert names(program, yes=True) == []
    assert left(program) == ["again", "source"]


@pytest.mark.parametrize(
    ("params", "gone"),
    [
        ({"keep_best": True}, [1, 3, 4, 5]),
        ({"keep_last": 2}, [1, 2, 3]),
        ({"keep_last": 2, "keep_best": True}, [1, 3]),
        ({"keep_last": 9}, []),
    ],
)
def test_runs_stay_with_the_checkpoints_that_are_kept(
    program: Program, params: dict[str, typing.Any], gone: list[int]
):
    path = leave_checkpoints(program, "night", 5)
    expected = [f"night/epoch-{number:04d}" for number in gone]
    assert names(program, yes=True, **params) == expected
    kept = sorted(one.name for one in path.glob("epoch-*"))
    assert kept == [f"epoch-{number:04d}" for number in range(1, 6) if number not in gone]
    assert (path / "metrics.jsonl").is_file()
    assert (path / "best").is_symlink() == (2 not in gone)
    assert (path / "latest").is_symlink() == (5 not in gone)


def test_without_a_known_best_checkpoint_the_newest_stays(program: Program):
    path = leave_checkpoints(program, "night", 3)
    (path / "best").unlink()
    assert names(program, keep_best=True, yes=True) == ["night/epoch-0001", "night/epoch-0002"]


def test_a_sweep_goes_whole_and_only_once_all_its_runs_are_old(program: Program):
    runs = program.workspace / "runs"
    (runs / "lrs").mkdir()
    about = {"kind": "sweep", "count": 2, "submitted": "2026-11-20T18:00:00Z"}
    (runs / "lrs" / "job.json").write_text(json.dumps(about))
    for number in range(2):
        element = left_by_jobs.leave_training(program, f"lrs-{number}")
        record = json.loads((element / "job.json").read_text())
        (element / "job.json").write_text(json.dumps({**record, "sweep": "lrs"}))
    for name in ("lrs", "lrs-0"):
        age(runs / name)
    assert names(program) == []
    age(runs / "lrs-1")
    assert names(program, yes=True) == ["lrs-0", "lrs-1", "lrs"]
    assert left(program) == []


# -- environments ---------------------------------------------------------------------------------


def store_old(program: Program, digit: str, **about: str) -> str:
    """Store another environment that was made long ago; return its hash."""
    folder = program.workspace / "environments"
    (known,) = [one for one in folder.glob("*.json") if not json.loads(one.read_text())["name"]][:1]
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(OLD))
    name = digit * 16
    manifest = {**json.loads(known.read_text()), "hash": name, "created": made, **about}
    (folder / f"{name}.json").write_text(json.dumps(manifest))
    (folder / f"{name}.tar.zst").write_bytes(known.with_suffix(".tar.zst").read_bytes())
    return name


def kinds(program: Program) -> dict[str, str]:
    return {item["name"]: item["kind"] for item in program.record["items"]}


def test_environments_layers_and_images_go_unless_a_run_uses_them(program: Program, pip: Pip):
    used = store_old(program, "1", name="mine")
    unused = store_old(program, "2", name="other")
    below = store_old(program, "3", name="below")
    layer = store_old(program, "4", base=below, requirements="a" * 64)
    free_layer = store_old(program, "5", base=used, requirements="b" * 64)
    image = store_old(program, "6", name="img", digest=f"sha256:{'0' * 64}")
    for run, one in (("a", used), ("b", layer)):
        path = left_by_jobs.leave_training(program, run)
        record = json.loads((path / "job.json").read_text())
        (path / "job.json").write_text(json.dumps({**record, "environment": one}))

    program.run("prune", yes=True)
    assert kinds(program) == {
        f"other ({unused})": "environment",
        free_layer: "layer",
        f"img ({image})": "image",
    }
    stored = {path.name[:16] for path in (program.workspace / "environments").iterdir()}
    assert {used, below, layer} < stored
    assert len(stored) == 4, "the newest stays, too"


def test_environments_that_other_users_runs_need_stay(program: Program):
    used, unused = store_old(program, "1", name="a"), store_old(program, "2", name="b")
    theirs = program.workspace / "users" / "ann" / "runs" / "night"
    theirs.mkdir(parents=True)
    (theirs / "job.json").write_text(json.dumps({"environment": used}))
    program.run("prune")
    assert list(kinds(program)) == [f"b ({unused})"]


def test_an_environment_goes_with_the_last_run_that_used_it(program: Program):
    used = store_old(program, "1", name="mine")
    path = leave_old(program, "old")
    record = json.loads((path / "job.json").read_text())
    (path / "job.json").write_text(json.dumps({**record, "environment": used}))
    program.run("prune", older="50d")
    assert kinds(program) == {}
    age(path)
    program.run("prune", yes=True)
    assert kinds(program) == {"old": "run", f"mine ({used})": "environment"}
