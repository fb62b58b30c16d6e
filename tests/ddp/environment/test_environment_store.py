"""The jobs' environment: made once, stored whole, chosen by its inputs and by what the cluster is."""

import dataclasses
import os
import pathlib
import stat
import tarfile

import pytest
from cluster import Cluster
from pip_double import Pip

from ddp.base import Settings, TrainerError
from ddp.environment import archives, builder, environments
from ddp.slurm.jobs import Capacity, Partition
from ddp.workspace import folders
from ddp.workspace.files import RefusedError

CPU = (Partition("main", True, True, None, None, (Capacity("n0", 4, 8000, 0, "IDLE", True),)),)
GPU = (Partition("main", True, True, None, None, (Capacity("n0", 4, 8000, 8, "IDLE", True),)),)


def install(
    settings: Settings, partitions: tuple[Partition, ...] = CPU, **more: object
) -> tuple[environments.Environment, list[str]]:
    lines: list[str] = []
    return environments.install(settings, partitions, lines.append, **more), lines  # pyright: ignore[reportArgumentType]


def test_an_environment_is_made_stored_and_found(settings: Settings, pip: Pip, cluster: Cluster):
    made, lines = install(settings)
    folder = settings.environments
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"{made.manifest.hash}.json", f"{made.manifest.hash}.tar.zst"]
    assert stat.S_IMODE((folder / names[1]).stat().st_mode) == 0o644
    with tarfile.open(folder / names[1], ignore_zeros=True) as tar:  # the double of zstd compresses nothing
        members = tar.getnames()
    site = "./lib/python3.12/site-packages"
    assert {"./bin/python", f"{site}/ddptrain/__init__.py", f"{site}/torch/bin/torch_shm_manager"} <= set(members)
    assert not [name for name in members if "/test" in name], "no run reads the packages' own tests"
    assert lines[0] == "making the environment: torch 2.13.0 for CPU (Slurm has no node with GPUs)"
    assert not list(settings.node_cache.iterdir()), "the build's folder is removed"
    contents = folders.look(settings)
    assert environments.find(settings, contents, "cpu") == made
    assert environments.find(settings, contents, "cuda") is None
    assert environments.describe(made) == {
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
    assert lines == [f"environment {made.manifest.hash} with torch 2.13.0+cpu exists already"]
    assert environments.ensure(settings, CPU, print) == made
    install(settings, force=True)
    assert len(pip.calls) == 2 * calls


@pytest.mark.parametrize("change", ["payload", "requirements", "python"])
def test_each_input_makes_another_environment(
    settings: Settings, pip: Pip, cluster: Cluster, change: str, monkeypatch: pytest.MonkeyPatch
):
    made, _ = install(settings)
    if change == "payload":
        (settings.payload / "ddptrain" / "extra.py").write_text("x = 1\n")
    elif change == "requirements":
        (settings.payload / "requirements.txt").write_text("numpy==2.1 --hash=sha256:1\n")
    else:
        monkeypatch.setattr(builder, "python_version", lambda: "3.13")
    assert environments.find(settings, folders.look(settings), "cpu") is None
    assert install(settings)[0].manifest.key != made.manifest.key


def test_a_half_written_archive_is_never_chosen(settings: Settings, pip: Pip, cluster: Cluster):
    made, _ = install(settings)
    archive = pathlib.Path(made.archive)
    archive.write_bytes(archive.read_bytes()[:-1])
    assert environments.find(settings, folders.look(settings), "cpu") is None


def test_the_installers_reason_is_reported_and_nothing_is_left(settings: Settings, pip: Pip, cluster: Cluster):
    pip.failure = "warning: x\nerror: Failed to extract archive\n  cause: No space left on device (os error 28)\n"
    with pytest.raises(TrainerError) as caught:
        install(settings)
    assert str(caught.value) == "uv: Failed to extract archive: No space left on device (os error 28)"
    assert not list(settings.environments.iterdir())
    assert not list(settings.node_cache.iterdir())


def test_a_cluster_with_a_driver_gets_the_build_for_cuda(settings: Settings, pip: Pip, cluster: Cluster):
    cpu, _ = install(settings, CPU)
    cluster.driver = "present"
    assert environments.ensure(settings, GPU, print, gpus=False) == cpu
    made = environments.ensure(settings, GPU, print, gpus=True)
    assert (made.manifest.build, made.manifest.torch) == ("cuda", "2.13.0")
    (call,) = (call for call in pip.calls if call[-1].startswith("torch==2.13.0,"))
    assert call[-1] == "torch==2.13.0,!=2.13.0+cpu", "a wheel of the CPU build beside it is not taken"


@pytest.mark.parametrize("is_made_before", [False, True])
def test_nodes_without_a_driver_are_asked_once(settings: Settings, pip: Pip, cluster: Cluster, is_made_before: bool):
    if is_made_before:
        install(settings, CPU)
    calls = len(pip.calls)
    found = environments.ensure(settings, GPU, print, gpus=True)
    assert (found.manifest.build, found.manifest.driverless) == ("cpu", True)
    assert (len(pip.calls) == calls) == is_made_before, "an environment that fits is not made again"
    asked = len(cluster.questions)
    assert environments.ensure(settings, GPU, print, gpus=True) == found
    assert len(cluster.questions) == asked == 1


def test_the_option_and_the_parameter_decide_without_a_question(settings: Settings, pip: Pip, cluster: Cluster):
    assert install(dataclasses.replace(settings, torch_build="cuda"), CPU)[0].manifest.build == "cuda"
    assert install(settings, GPU, build="cpu")[0].manifest.build == "cpu"
    assert not cluster.questions


def test_a_program_without_its_payload_reports_it(settings: Settings, pip: Pip, cluster: Cluster):
    (settings.payload / "requirements.txt").unlink()
    with pytest.raises(TrainerError, match=f"^{settings.payload} has no payload; install ddp again$"):
        install(settings)


@pytest.mark.parametrize("table", ["_BUILD_BYTES", "_STORE_BYTES"])
@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_a_full_disk_is_reported_before_anything_is_downloaded(
    settings: Settings, pip: Pip, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, table: str, build: str
):
    """Of the default build, which is as large as that for CUDA, too."""
    pip.cpu_wheel = build == "cpu"
    monkeypatch.setitem(getattr(builder, table), build, 1 << 60)
    folder = {"_BUILD_BYTES": settings.node_cache, "_STORE_BYTES": settings.environments}[table]
    with pytest.raises(
        TrainerError, match=rf"^{folder} has \d+ MiB free, and the environment needs 1099511627776; make"
    ):
        install(settings)
    assert "torch==2.13.0" not in [call[-1] for call in pip.calls]
    assert build == "cuda" or not pip.calls


def test_a_build_happens_in_a_private_folder(tmp_path: pathlib.Path):
    base = tmp_path / "cache"
    folder = pathlib.Path(archives.open_build(str(base)))
    assert folder.parent == base
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    (base / "build-old").mkdir()
    os.utime(base / "build-old", (1, 1))
    archives.open_build(str(base))
    assert not (base / "build-old").exists()
    assert folder.exists()
    (tmp_path / "planted").symlink_to(base)
    with pytest.raises(RefusedError, match="is not a folder of this account"):
        archives.open_build(str(tmp_path / "planted"))
