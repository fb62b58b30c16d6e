"""The newest checkpoint of a run: by its link, or by the manifests if there are no links."""

import json
import pathlib

import pytest

from ddp.node import checkpoints


def leave(run_dir: pathlib.Path, name: str, step: int, best_step: int | None = None) -> None:
    """Leave a checkpoint."""
    path = run_dir / name
    path.mkdir()
    meta = {"step": step, "progress": {"best_step": best_step}}
    (path / checkpoints.MANIFEST).write_text(json.dumps({"meta": meta}))


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    leave(tmp_path, "epoch-0001", 10, 10)
    leave(tmp_path, "epoch-0002", 20, 10)
    leave(tmp_path, "epoch-0003.tmp-7.r0", 30)
    leave(tmp_path, "epoch-0004.trash-1234", 40)
    (tmp_path / "epoch-0005").mkdir()
    return tmp_path


def test_the_link_counts_where_there_is_one(run_dir: pathlib.Path):
    (run_dir / "latest").symlink_to("epoch-0001")
    (run_dir / "best").symlink_to("epoch-0002")
    assert checkpoints.newest(run_dir) == run_dir / "epoch-0001"
    assert checkpoints.best(run_dir) == run_dir / "epoch-0002"


def test_without_links_the_manifests_count(run_dir: pathlib.Path):
    assert checkpoints.newest(run_dir) == run_dir / "epoch-0002"
    assert checkpoints.best(run_dir) == run_dir / "epoch-0001"


def test_a_trainers_checkpoint_counts_once_it_has_a_manifest(tmp_path: pathlib.Path):
    (tmp_path / "checkpoint-5").mkdir()
    assert checkpoints.newest(tmp_path) is None
    leave(tmp_path, "checkpoint-10", 10)
    assert checkpoints.newest(tmp_path) == tmp_path / "checkpoint-10"
    assert checkpoints.best(tmp_path) is None


def test_a_link_to_nothing_is_none(run_dir: pathlib.Path):
    (run_dir / "latest").symlink_to("epoch-0099")
    assert checkpoints.newest(run_dir) == run_dir / "epoch-0002"
