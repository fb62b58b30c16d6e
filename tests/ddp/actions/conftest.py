"""A temporary workspace with doubles of Slurm and pip, and the program called as by the charm."""

import json
import pathlib
import typing

import left_by_jobs
import pytest
import run_verbs
from cluster import Cluster
from harness import Trainer
from node_reports import NAMES, healthy
from pip_double import Pip
from run_verbs import Program
from trainer_fixtures import charm_dir, claims, installations, node, ready, settings, workspace

from ddp.doctor.facts import Facts
from ddp.options import config
from ddp.slurm import partition_list
from slurm_ddp import mounts

__all__ = ["charm_dir", "claims", "installations", "node", "ready", "settings", "workspace"]


@pytest.fixture
def host(
    monkeypatch: pytest.MonkeyPatch, workspace: pathlib.Path, charm_dir: pathlib.Path
) -> dict[str, typing.Any]:
    """A host with the workspace mounted; its probe's answer can be changed."""
    about: dict[str, typing.Any] = {
        "mount": str(workspace),
        "probe": mounts.Result(mounts.State.RIGHT),
    }

    def find(path: object) -> mounts.Mount | None:
        assert str(path) == str(workspace)
        where = about["mount"]
        return (
            mounts.Mount(1, "0:50", str(where), "fuse.juicefs", "JuiceFS:shared", ())
            if where
            else None
        )

    monkeypatch.setattr(mounts, "find", find)
    monkeypatch.setattr(mounts, "probe", lambda *_, **__: about["probe"])
    monkeypatch.setattr(config, "payload", lambda: charm_dir / "payload")
    return about


@pytest.fixture
def trainer(
    workspace: pathlib.Path,
    charm_dir: pathlib.Path,
    cluster: Cluster,
    pip: Pip,
    host: dict[str, typing.Any],
) -> Trainer:
    for name in ("runs", "datasets", "environments", "baselines"):
        (workspace / name).mkdir(exist_ok=True)
    (workspace / ".secrets").mkdir(mode=0o700, exist_ok=True)
    return Trainer(workspace, charm_dir, {"workspace": str(workspace)})


def make_model(folder: pathlib.Path) -> None:
    """Make the smallest folder that the payload takes for a whole model."""
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 2}')
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    (folder / "model.safetensors").write_bytes(content)


@pytest.fixture
def model(trainer: Trainer) -> pathlib.Path:
    """A model's folder and JSON lines in the workspace, and the option set."""
    trainer.config["transformers"] = True
    folder = trainer.workspace / "models" / "tiny"
    folder.mkdir(parents=True)
    make_model(folder)
    (trainer.workspace / "chat.jsonl").write_text('{"text": "hello"}\n')
    (trainer.workspace / "chat").mkdir()
    (trainer.workspace / "chat" / "train.jsonl").write_text('{"text": "hello"}\n')
    (trainer.workspace / "empty").mkdir()
    return folder


@pytest.fixture
def facts(settings: object) -> Facts:
    nodes = tuple(
        partition_list.Capacity(name, 2, 16000, 0, "IDLE", is_usable=True) for name in NAMES
    )
    return Facts(
        partition=partition_list.Partition("slurmd", True, True, None, None, nodes),
        asked=NAMES,
        left_out={},
        reports={name: healthy(name) for name in NAMES},
        trouble="",
        config={
            "KillWait": "30 sec",
            "AuthInfo": "cred_expire=30",
            "SlurmdTimeout": "60 sec",
            "SLURM_VERSION": "25.11.8",
            "AccountingStorageType": "accounting_storage/slurmdbd",
        },
        manifests=(),
    )


@pytest.fixture
def program(ready: Trainer) -> Program:
    return run_verbs.of(ready)


@pytest.fixture
def motley(program: Program) -> Program:
    """A training, a benchmark, a preparation, a user's script, and a folder of notes."""
    left_by_jobs.leave_training(program, "night")
    for name, kind in (("table", "collectives"), ("prepare-owt", "prepare"), ("mine", "script")):
        folder = program.workspace / "runs" / name
        folder.mkdir()
        (folder / "job.json").write_text(
            json.dumps({"job_id": 9, "kind": kind, "submitted": "2026-11-20T18:00:00Z"})
        )
    (program.workspace / "runs" / "notes").mkdir()
    (program.workspace / "runs" / "notes" / "monday.md").touch()
    return program
