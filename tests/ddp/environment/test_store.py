"""The jobs' environment: made once, stored whole, chosen by its inputs."""

import dataclasses
import json
import os
import pathlib
import stat
import tarfile

import pytest
from cluster import Cluster, Job
from pip_double import Pip

from ddp.environment import archives, builder, store
from ddp.problem import Problem
from ddp.settings import Settings
from ddp.workspace import folders


def install(
    settings: Settings, build: str = "cpu", *, force: bool = False
) -> tuple[folders.Manifest, list[str]]:
    lines: list[str] = []
    return store.Store(settings).install(builder.Request(build), lines.append, force=force), lines


def test_an_environment_is_made_stored_and_found(settings: Settings, pip: Pip, cluster: Cluster):
    made, lines = install(settings)
    folder = settings.workspace.environments
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"{made.hash}.json", f"{made.hash}.tar.zst"]
    assert stat.S_IMODE((folder / names[1]).stat().st_mode) == 0o644
    with tarfile.open(
        folder / names[1], ignore_zeros=True
    ) as tar:  # the double of zstd compresses nothing
        members = tar.getnames()
    site = "./lib/python3.12/site-packages"
    assert {
        "./bin/python",
        f"{site}/ddptrain/__init__.py",
        f"{site}/torch/bin/torch_shm_manager",
    } <= set(members)
    assert not [name for name in members if "/test" in name], "no run reads the packages' own tests"
    assert lines[0] == "making the environment: torch 2.13.0 for CPU"
    assert not (settings.workspace.node_cache / "build").exists()
    contents = settings.workspace.look()
    assert store.Store(settings).find(contents, builder.Request("cpu")) == made
    assert store.Store(settings).find(contents, builder.Request("cuda")) is None
    assert store.describe(made) == {
        "environment": made.archive,
        "torch": "2.13.0+cpu",
        "python": "3.12",
        "size-mb": "0",
        "unpacked-mb": "0",
    }


def test_a_second_time_nothing_is_made(settings: Settings, pip: Pip, cluster: Cluster):
    made, _ = install(settings)
    calls = len(pip.calls)
    again, lines = install(settings)
    assert (again, len(pip.calls)) == (made, calls)
    assert lines == [f"environment {made.hash} with torch 2.13.0+cpu exists already"]
    assert store.Store(settings).ensure(print) == made
    install(settings, force=True)
    assert len(pip.calls) == 2 * calls - 3, "uv is kept, with its pip"


@pytest.mark.parametrize("change", ["payload", "requirements", "python", "a half written archive"])
def test_each_input_makes_another_environment(
    settings: Settings, pip: Pip, cluster: Cluster, change: str, monkeypatch: pytest.MonkeyPatch
):
    made, _ = install(settings)
    match change:
        case "payload":
            (settings.payload / "ddptrain" / "extra.py").write_text("x = 1\n")
        case "requirements":
            (settings.payload / "requirements.txt").write_text("numpy==2.1 --hash=sha256:1\n")
        case "python":
            monkeypatch.setattr(builder, "python_version", lambda: "3.13")
        case _:
            os.truncate(made.archive, made.size_bytes - 1)
    assert store.Store(settings).find(settings.workspace.look(), builder.Request("cpu")) is None


def test_the_installers_reason_is_reported_and_nothing_is_left(
    settings: Settings, pip: Pip, cluster: Cluster
):
    pip.failure = "warning: x\nerror: Failed to extract archive\n  cause: No space left on device (os error 28)\n"
    with pytest.raises(Problem) as caught:
        install(settings)
    assert (
        str(caught.value) == "uv: Failed to extract archive: No space left on device (os error 28)"
    )
    assert not list(settings.workspace.environments.iterdir())
    assert not (settings.workspace.node_cache / "build").exists()


@pytest.mark.parametrize(
    ("gres", "option", "torch"),
    [
        ("", "auto", "2.13.0+cpu"),
        ("gpu:a100:8", "auto", "2.13.0"),
        ("gpu:a100:8", "cpu", "2.13.0+cpu"),
        ("", "cuda", "2.13.0"),
    ],
)
def test_the_build_of_torch_is_the_option_or_what_the_cluster_has(
    settings: Settings, pip: Pip, cluster: Cluster, gres: str, option: str, torch: str
):
    cluster.machines[1].gres, cluster.machines[1].state = gres, "DOWN"
    made = store.Store(dataclasses.replace(settings, torch_build=option)).ensure(print)
    assert (made.torch, made.build) == (torch, "cpu" if torch.endswith("+cpu") else "cuda")
    wanted = (
        "torch==2.13.0+cpu" if made.build == "cpu" else "torch==2.13.0,!=2.13.0+cpu"
    )  # both may be in a folder
    assert [call[-1] for call in pip.calls if "torch==" in call[-1]] == [wanted]


@pytest.mark.parametrize(
    ("configured", "wanted", "torch"),
    [
        ("", None, "2.13.0+cpu"),
        ("2.15.0", None, "2.15.0+cpu"),
        ("2.15.0", "2.13.0", "2.13.0+cpu"),
        ("2.15.0", "cuda", "2.15.0"),
    ],
)
def test_the_version_of_torch_is_that_of_the_command_or_the_option(
    settings: Settings,
    pip: Pip,
    cluster: Cluster,
    configured: str,
    wanted: str | None,
    torch: str,
):
    settings = dataclasses.replace(settings, torch_build="cpu", torch_version=configured)
    chosen = store.with_torch(settings, wanted)
    assert store.Store(chosen).ensure(print).torch == torch
    contents = settings.workspace.look()
    assert store.Store(chosen).installed(contents) is not None
    if chosen != settings:
        assert store.Store(settings).installed(contents) is None


def test_a_version_of_torch_that_is_not_tested_is_named(
    settings: Settings, pip: Pip, cluster: Cluster
):
    lines: list[str] = []
    untested = dataclasses.replace(settings, torch_version="2.14.0")
    store.Store(untested).ensure(lines.append)
    assert "torch 2.14.0 is not one that slurm-ddp is tested with: 2.13.0, 2.15.0" in lines


def test_a_program_without_its_payload_reports_it(settings: Settings, pip: Pip, cluster: Cluster):
    (settings.payload / "requirements.txt").unlink()
    with pytest.raises(Problem, match=f"^{settings.payload} has no payload; install ddp again$"):
        install(settings)


def test_a_build_happens_in_a_private_folder(tmp_path: pathlib.Path):
    base = tmp_path / "cache"
    folder = pathlib.Path(archives.open_build(str(base)))
    (folder / "left").touch()
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    assert archives.open_build(str(base)) == str(folder)
    assert not list(folder.iterdir()), "a killed build's"
    planted = tmp_path / "planted"
    planted.symlink_to(base)
    os.chown(planted, 33, 33, follow_symlinks=False)
    other = pathlib.Path(archives.open_build(str(planted)))
    assert other.parent.name.startswith("planted."), "another account had made it"


def test_old_environments_go_and_used_ones_stay(settings: Settings, pip: Pip, cluster: Cluster):
    made, _ = install(settings)
    folder, names = settings.workspace.environments, [f"{number:016x}" for number in range(5)]

    def store(digest: str, **more: str) -> None:
        about = (
            made.model_dump()
            | {"hash": digest, "size_bytes": 1, "created": f"2025-01-0{digest[-1]}"}
            | more
        )
        (folder / f"{digest}.json").write_text(json.dumps(about))
        (folder / f"{digest}.tar.zst").write_text("x")

    for name in names:
        store(name)
    store("a" * 16, build="cuda", created="2024")
    store("b" * 16, name="mine", created="2024")
    (folder / "note.json").write_text("{}")
    for letter, age in (("x", 1), ("y", None)):
        (folder / f".environment-{letter}.tmp").write_text("half")
        os.utime(folder / f".environment-{letter}.tmp", (age, age) if age else None)
    (settings.workspace.runs / "busy").mkdir()
    (settings.workspace.runs / "busy" / "job.json").write_text(
        json.dumps({"environment": names[1]})
    )
    cluster.jobs.append(
        Job(7, cluster.user, "busy", settings.workspace.runs / "busy", "", [("RUNNING", 0)])
    )
    install(settings, force=True)
    left = {path.name for path in folder.iterdir()}
    assert (
        not {f"{names[0]}.json", f"{names[0]}.tar.zst", f"{names[2]}.json", ".environment-x.tmp"}
        & left
    )
    assert {"note.json", ".environment-y.tmp"} <= left
    for name in (names[1], names[4], "a" * 16, "b" * 16):
        assert {f"{name}.json", f"{name}.tar.zst"} <= left
