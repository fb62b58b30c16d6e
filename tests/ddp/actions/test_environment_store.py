"""The jobs' environment: made once, stored whole, chosen by what goes in and by what the cluster is."""

import dataclasses
import json
import pathlib
import stat
import tarfile
import threading

import pytest
from cluster import Cluster
from pip_double import Pip

from ddp import base
from ddp.base import Settings, TrainerError
from ddp.environment import environments, question
from ddp.slurm.jobs import Capacity, Partition
from ddp.workspace import folders

pytestmark = pytest.mark.usefixtures("host")

CPU = (Partition("main", True, True, None, None, (Capacity("n0", 4, 8000, 0, "IDLE", True),)),)
GPU = (Partition("main", True, True, None, None, (Capacity("n0", 4, 8000, 8, "IDLE", True),)),)


def with_build(settings: Settings, build: str, index: str = "") -> Settings:
    return dataclasses.replace(settings, torch_build=build, torch_index=index)


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
    assert "./bin/python" in members
    assert "./lib/python3.12/site-packages/ddptrain/__init__.py" in members
    assert "./lib/python3.12/site-packages/torch/bin/torch_shm_manager" in members
    assert not [name for name in members if "/test" in name], "no run reads the packages' own tests"
    assert made.manifest.torch == "2.13.0+cpu"
    assert lines[0] == "making the environment: torch 2.13.0 for CPU (Slurm knows no node with GPUs)"
    assert not list(settings.node_cache.iterdir()), "the build's folder is removed"
    contents = folders.look(settings)
    assert environments.find(settings, contents, "cpu") == made
    assert environments.find(settings, contents, "cuda") is None


def test_a_second_time_nothing_is_made(settings: Settings, pip: Pip, cluster: Cluster):
    made, _ = install(settings)
    calls = len(pip.calls)
    again, lines = install(settings)
    assert (again, len(pip.calls)) == (made, calls)
    assert lines == [f"environment {made.manifest.hash} with torch 2.13.0+cpu is there already"]
    assert environments.ensure(settings, CPU, print) == made
    install(settings, force=True)
    assert len(pip.calls) == 2 * calls


def test_the_locked_packages_are_installed_by_their_hashes(settings: Settings, pip: Pip, cluster: Cluster):
    install(settings)
    locked = next(call for call in pip.calls if "--require-hashes" in call)
    path = pathlib.Path(locked[locked.index("-r") + 1])
    assert path == settings.payload / "requirements.txt"


@pytest.mark.parametrize("change", ["payload", "requirements", "python"])
def test_whatever_goes_in_makes_another_environment(
    settings: Settings, pip: Pip, cluster: Cluster, change: str, monkeypatch: pytest.MonkeyPatch
):
    made, _ = install(settings)
    if change == "payload":
        (settings.payload / "ddptrain" / "extra.py").write_text("x = 1\n")
    elif change == "requirements":
        (settings.payload / "requirements.txt").write_text("numpy==2.1 --hash=sha256:1\n")
    else:
        monkeypatch.setattr(environments, "_python_version", lambda: "3.13")
    assert environments.find(settings, folders.look(settings), "cpu") is None
    assert install(settings)[0].manifest.key != made.manifest.key


def test_a_half_written_archive_is_never_chosen(settings: Settings, pip: Pip, cluster: Cluster):
    made, _ = install(settings)
    archive = pathlib.Path(made.archive)
    archive.write_bytes(archive.read_bytes()[:-1])
    assert environments.find(settings, folders.look(settings), "cpu") is None


def test_without_an_index_of_cpu_wheels_pytorchs_own_is_asked_for_torch_alone(
    settings: Settings, pip: Pip, cluster: Cluster
):
    pip.cpu_wheel = False
    made, _ = install(settings)
    assert (made.manifest.torch, made.manifest.build) == ("2.13.0+cpu", "cpu")
    torch = [call for call in pip.calls if call[-1].startswith("torch==")]
    assert [call[-1] for call in torch] == ["torch==2.13.0+cpu"] * 2, "never the build for CUDA"
    assert torch[-1][-3:-1] == ("--no-deps", f"--index-url={environments.CPU_INDEX}")


def test_where_nobody_has_the_cpu_build_the_options_that_help_are_named(settings: Settings, pip: Pip, cluster: Cluster):
    pip.cpu_wheel = pip.pytorch_answers = False
    with pytest.raises(TrainerError) as error:
        install(settings)
    assert str(error.value) == (
        "no index offers torch 2.13.0+cpu, PyTorch's own included: set torch-index to one that does, "
        "or torch-build=cuda for the build that CUDA needs"
    )


def test_the_option_torch_index_is_searched_too(settings: Settings, pip: Pip, cluster: Cluster):
    install(with_build(settings, "cpu", "https://wheels.example/cpu"))
    torch = next(call for call in pip.calls if call[-1].startswith("torch=="))
    assert torch[-2:] == ("--extra-index-url=https://wheels.example/cpu", "torch==2.13.0+cpu")


def test_the_users_variables_say_where_packages_are_and_no_more(
    settings: Settings, pip: Pip, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.org/simple")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    install(settings)
    assert {"PIP_INDEX_URL": "https://example.org/simple"}.items() <= pip.env.items()
    assert "PIP_TARGET" not in pip.env


def test_pips_own_reason_is_reported_and_nothing_is_left(settings: Settings, pip: Pip, cluster: Cluster):
    pip.failure = (
        "WARNING: x\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    )
    with pytest.raises(TrainerError) as caught:
        install(settings)
    assert str(caught.value) == "pip: Could not install packages due to an OSError: [Errno 28] No space left on device"
    assert not list(settings.environments.iterdir())
    assert not list(settings.node_cache.iterdir())


def test_a_gpu_node_is_asked_for_its_driver(settings: Settings, pip: Pip, cluster: Cluster):
    cluster.driver = "driver 12080\n"
    made, lines = install(settings, GPU)
    assert made.manifest.build == "cuda"
    assert made.manifest.torch == "2.13.0"
    assert "asking a node with GPUs (n0 has 8) for its CUDA driver" in lines
    assert "making the environment: torch 2.13.0 for CUDA (the driver supports CUDA 12.8)" in lines


def test_a_gpu_node_without_a_driver_gets_the_build_for_cpus(settings: Settings, pip: Pip, cluster: Cluster):
    made, lines = install(settings, GPU)
    assert (made.manifest.build, made.manifest.driverless) == ("cpu", True)
    assert "making the environment: torch 2.13.0 for CPU (n0 has no CUDA driver)" in lines
    asked = len(cluster.calls)
    assert environments.ensure(settings, GPU, print, gpus=True) == made
    assert len(cluster.calls) == asked, "the node is not asked again for each job"


def test_gpus_that_came_later_are_asked_for_their_driver(settings: Settings, pip: Pip, cluster: Cluster):
    cpu, _ = install(settings, CPU)
    cluster.driver = "driver 13000\n"
    assert environments.ensure(settings, GPU, print, gpus=False) == cpu
    assert environments.ensure(settings, GPU, print, gpus=True).manifest.build == "cuda"


def test_an_environment_that_fits_after_all_is_not_made_again(settings: Settings, pip: Pip, cluster: Cluster):
    install(settings, CPU)
    calls = len(pip.calls)
    kept = environments.ensure(settings, GPU, print, gpus=True)
    assert (kept.manifest.driverless, len(pip.calls)) == (True, calls)
    asked = len(cluster.calls)
    assert environments.ensure(settings, GPU, print, gpus=True) == kept
    assert len(cluster.calls) == asked


def test_when_no_gpu_node_answers_nothing_is_guessed(settings: Settings, pip: Pip, cluster: Cluster):
    cluster.driver = ""
    with pytest.raises(TrainerError) as caught:
        install(settings, GPU)
    assert str(caught.value) == (
        "no GPU node reported its driver: Batch job submission failed: busy; try again when one is free, "
        "or set torch-build to cpu or cuda"
    )
    assert not pip.calls


def test_an_account_that_slurmctld_lacks_is_reported_with_what_to_type(settings: Settings, cluster: Cluster):
    cluster.driver_states, cluster.driver_reason = [("PENDING", 0)], "JobHeldAdmin"
    with pytest.raises(TrainerError) as caught:
        environments.choose_build(settings, GPU, print)
    add = f"juju exec --application slurmctld -- useradd --no-create-home --uid {settings.uid} {settings.user}"
    unknown = f"slurmctld does not know the account {settings.user} (uid {settings.uid})"
    assert str(caught.value) == f"{unknown}, so none of its jobs starts: {add}"


@pytest.mark.parametrize(
    ("states", "answer", "why"),
    [
        ([("FAILED", 256)], "python3: not found\n", "job 900 ended as FAILED: python3: not found"),
        ([("FAILED", 256)], "\n", "job 900 ended as FAILED: it printed nothing"),
        ([("NODE_FAIL", 1)], None, "job 900 ended as NODE_FAIL: it printed nothing"),
        (
            [("COMPLETED", 0)],
            None,
            "job 900 completed, and its output did not appear in WORKSPACE/environments within 0 s",
        ),
        ([("PENDING", 0)], "\n", "job 900 is PENDING (Resources) after 0 s"),
    ],
    ids=["with an error", "silently", "without its output", "completed without it", "never started"],
)
def test_a_driver_that_was_not_reported(
    settings: Settings,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    states: list[tuple[str, int]],
    answer: str | None,
    why: str,
):
    monkeypatch.setattr(question, "_START_S", 0.0)
    monkeypatch.setattr(question, "_APPEAR_S", 0.0)
    cluster.driver_states, cluster.driver = states, answer
    with pytest.raises(TrainerError) as caught:
        environments.choose_build(settings, GPU, print)
    hint = "try again when one is free, or set torch-build to cpu or cuda"
    why = why.replace("WORKSPACE", str(settings.folder))
    assert str(caught.value) == f"no GPU node reported its driver: {why}; {hint}"
    assert [call for call in cluster.calls if call[0] == "scancel"] == [("scancel", "900")] * (
        states[0][0] == "PENDING"
    )


def test_a_job_that_cannot_be_cancelled_hides_no_reason(
    settings: Settings, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(question, "_START_S", 0.0)
    cluster.driver_states, cluster.denial = [("PENDING", 0)], "scancel: error: Kill job error on job id 900"
    with pytest.raises(TrainerError, match=r": job 900 is PENDING \(Resources\) after 0 s; "):
        environments.choose_build(settings, GPU, print)
    assert ("scancel", "900") in cluster.calls


def test_the_option_and_the_parameter_decide_without_asking(settings: Settings, pip: Pip, cluster: Cluster):
    assert install(with_build(settings, "cuda"), CPU)[0].manifest.build == "cuda"
    assert install(settings, GPU, build="cpu")[0].manifest.build == "cpu"
    assert {call[0] for call in cluster.calls} == {"squeue"}, "no node is asked; what is in use is, before any goes"


def test_a_charm_without_payload_says_how_to_get_one(settings: Settings, pip: Pip, cluster: Cluster):
    (settings.payload / "requirements.txt").unlink()
    with pytest.raises(TrainerError) as caught:
        install(settings)
    assert str(caught.value) == f"there is no payload in {settings.payload}; install ddp again"


def test_a_full_disk_is_reported_before_anything_is_downloaded(
    settings: Settings, pip: Pip, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    for table, folder in (("_BUILD_BYTES", settings.node_cache), ("_STORE_BYTES", settings.environments)):
        with monkeypatch.context() as context:
            context.setitem(getattr(environments, table), "cpu", 1 << 60)
            with pytest.raises(
                TrainerError, match=rf"^{folder} has \d+ MiB free; the environment needs 1099511627776: make room$"
            ):
                install(settings)
        assert not pip.calls
    install(settings)


def test_progress_is_reported_while_something_takes_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "REPORT_S", 0.05)
    finished = threading.Event()
    lines: list[str] = []

    def log(text: str) -> None:
        lines.append(text)
        if len(lines) == 4:
            finished.set()

    assert base.with_progress(log, "making", lambda: finished.wait(10), lambda: "torch 90 MB") is True
    assert lines[0] == "making"
    assert lines[1] == "making: 0 s, torch 90 MB"


def test_a_failure_in_the_background_is_raised():
    def fail() -> None:
        raise TrainerError("no")

    with pytest.raises(TrainerError, match=r"^no$"):
        base.with_progress(lambda _: None, "x", fail)


def test_the_manifest_tells_what_is_inside(settings: Settings, pip: Pip, cluster: Cluster):
    made, _ = install(settings)
    record = json.loads((settings.environments / f"{made.manifest.hash}.json").read_text())
    assert record["unpacked_bytes"] > 0
    assert record["files"] > 0
    assert environments.describe(made) == {
        "environment": made.archive, "torch": "2.13.0+cpu", "python": "3.12", "size-mb": "0", "unpacked-mb": "0",
    }  # fmt: skip
