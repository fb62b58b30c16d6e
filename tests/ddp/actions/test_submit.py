"""submit, sweep and prepare, called as by the charm: submissions, and traceless rejections."""

import json
import pathlib
import shutil
import threading
import typing

import pytest
import yaml
from cluster import Cluster, Job
from harness import META, ActionFailedError, Trainer
from hostile_values import FREE, NASTY, ROAMING, TEXTS, is_slurms
from left_by_jobs import add_dataset, write_result
from run_verbs import Program

from ddp import problem
from ddp.actions import prerequisites, verbs
from ddp.options import fields
from slurm_ddp import mounts
from slurm_ddp.commands import Completed
from slurm_ddp.slurm import nodes

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

OF_SLURM_ALONE = {"add-user", "sync-users"}  # they look at no mount
ASKS_NODES = (
    "submit-ddp",
    "submit-sweep",
    "prepare-dataset",
    "plan",
    "benchmark-collectives",
    "doctor",
)
BESIDE = {"submit-sweep": {"grid": "lr=1"}}  # required by an action


def test_one_command_from_nothing_to_a_result(trainer: Trainer, cluster: Cluster):
    def finish(job: Job) -> None:
        if job.name == "prepare-python-stdlib":
            add_dataset(trainer.workspace, "python-stdlib")
        write_result(
            job,
            workload="gpt",
            tokens_per_second=1832.05,
            checkpoint=str(job.script.parent / "epoch-0001"),
        )

    cluster.submitted = finish
    given = {"account": "chem", "qos": "gold", "partition": "slurmd", "sbatch": "--nice=5"}
    results = trainer.run("submit-ddp", wait=True, run="first", **given)
    directives = {"--account=chem", "--qos=gold", "--partition=slurmd", "--nice=5"}
    assert all(directives <= {*job.text.split()} for job in cluster.jobs), "the preparation's, too"
    folder = trainer.workspace / "runs" / "first"
    assert results == {
        "job-id": "41",
        "run": "first",
        "run-dir": str(folder),
        "log": str(folder / "logs" / "41.out"),
        "script": str(folder / "job.sbatch"),
        "state": "COMPLETED",
        "exit-code": "0",
        "loss": "0.586587",
        "first-loss": "1.39149",
        "best-loss": "0.5",
        "tokens-per-second": "1832.05",
        "samples-per-second": "56118.5",
        "steps": "16",
        "nodes": "2",
        "ranks": "2",
        "checkpoint": str(folder / "epoch-0001"),
        "curve": str(folder / "loss.png"),
        "device": "cpu",
        "curve-text": results["curve-text"],
    }
    assert [job.name for job in cluster.jobs] == ["prepare-python-stdlib", "first"]
    words = "\n".join(trainer.log)
    for step in (
        "making the environment: torch 2.13.0 for CPU",
        "the dataset python-stdlib does not exist yet",
        "job 40 prepares the dataset python-stdlib",
        "job 41: first on 2 nodes of slurmd, each 2 cores, 8000 MiB",
        "job 41 PENDING (Resources)",
        "job 41 RUNNING, step 16, loss 0.5000",
    ):
        assert step in words
    data = trainer.workspace / "datasets" / "python-stdlib"
    assert cluster.job(41).commands() == [
        f"--module ddptrain train --run-dir $RUN_DIR --data {data} --resume $resume"
    ]
    assert cluster.job(41).training().job_dir == str(folder)
    prepared = cluster.job(40).commands()
    assert (
        f"ddptrain prepare --source python-stdlib --output {data} --tokenizer auto --errors strict"
        in prepared
    )


def leave_training(folder: pathlib.Path, step: int, **settings: object) -> None:
    """Leave in a run's folder the record and the checkpoint of a training."""
    record = {
        "run_dir": str(folder),
        "lr": 0.003,
        "steps": 300,
        "epochs": None,
        "batch": 16,
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(record))
    (folder / "epoch-0004").mkdir()
    manifest = {"meta": {"step": step, "config": record}}
    (folder / "epoch-0004" / "manifest.json").write_text(json.dumps(manifest))
    (folder / "latest").symlink_to("epoch-0004")


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ("", []),
        ("--lr 0.003 --steps 300", []),
        ("--lr 0.001", ["lr 0.003 -> 0.001 from step 218"]),
        (
            "--steps 600 --batch 8",
            ["batch 16 -> 8 from step 218", "steps 300 -> 600 from step 218"],
        ),
        ("--timeout-minutes 5", []),
    ],
)
def test_a_run_that_goes_on_names_the_settings_that_change(
    ready: Trainer, cluster: Cluster, args: str, wanted: list[str]
):
    cluster.states = [("COMPLETED", 0)]
    ready.run("submit-ddp", run="first", args="--lr 0.003")
    leave_training(ready.workspace / "runs" / "first", 218)
    checks = ready.run("submit-ddp", run="first", args=args, dry_run=True)["checks"].splitlines()
    assert [line for line in checks if "->" in line] == wanted
    ready.run("submit-ddp", run="first", args=args)
    assert [line for line in ready.log if "->" in line] == wanted


def test_a_run_goes_on_with_its_own_dataset(ready: Trainer, cluster: Cluster):
    books = add_dataset(ready.workspace, "books")
    cluster.states = [("COMPLETED", 0)]
    ready.run("submit-ddp", run="first", dataset="books")
    ready.run("submit-ddp", run="first")
    assert cluster.jobs[-1].commands()[0].split()[5:7] == ["--data", str(books)]
    shutil.rmtree(books)
    gone = f"dataset: {books}, which the run was trained on, does not exist any more"
    assert ready.fails("submit-ddp", run="first") == gone


def test_without_wait_the_answer_comes_at_once(ready: Trainer, cluster: Cluster):
    results = ready.run("submit-ddp", workload="smoke")
    assert set(results) == {"job-id", "run", "run-dir", "log", "script"}
    assert results["run"].startswith("smoke-20")
    run_dir = pathlib.Path(results["run-dir"])
    record = json.loads((run_dir / "job.json").read_text())
    assert (record["job_id"], record["kind"], record["ranks_per_node"]) == (40, "smoke", 1)
    assert cluster.job(40).commands() == ["--module ddptrain smoke --run-dir $RUN_DIR"]


@pytest.mark.parametrize("action", sorted(META["actions"].keys() - OF_SLURM_ALONE))
def test_nodes_are_listed_while_the_mount_is_looked_at(
    trainer: Trainer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, action: str
):
    listing = threading.Event()

    def run(*argv: str, **more: typing.Any) -> Completed:
        if "nodes" in argv:
            listing.set()
        return cluster.run(*argv, **more)

    def probe(*_: object, **__: object) -> mounts.Result:
        seen = listing.wait(30 if action in ASKS_NODES else 0.2)
        return mounts.Result(
            mounts.State.HUNG, f"the nodes are {'' if seen else 'not '}being listed"
        )

    monkeypatch.setattr(nodes, "run", run)
    monkeypatch.setattr(prerequisites.mounts, "probe", probe)
    wanted = {
        "name": "web",
        "source": "python-stdlib",
        "runs": "a,b",
        "run": "a",
        "grid": "seed=1,2",
    }
    known = META["actions"][action].get("params", {})
    message = trainer.fails(
        action, **{name: value for name, value in wanted.items() if name in known}
    )
    words = "" if action in ASKS_NODES else "not "
    assert (
        message
        == f"the nodes are {words}being listed; is the filesystem's server up? see: juju status"
    )


def test_mock_gpus_are_reserved_and_the_job_trains_on_cpus(ready: Trainer, cluster: Cluster):
    for machine in cluster.machines:
        machine.gres = "gpu:mock_gpu:1(S:0)"
    ready.run("submit-ddp", workload="smoke", wait=False)
    assert "#SBATCH --gpus-per-node=1\n" in cluster.job(40).text
    assert (
        "the environment has torch for CPUs, so this job trains on them; for GPUs: juju run trainer/leader install-environment torch=cuda"
        in ready.log
    )


def test_a_script_of_the_users(ready: Trainer, cluster: Cluster):
    script = ready.workspace / "my train.py".replace(" ", "_")
    script.write_text("print('x')\n")
    results = ready.run(
        "submit-ddp", workload=str(script), args="--lr 3e-4 a=b", env="FOO=bar", nodes=1
    )
    assert results["run"].startswith("my_train-")
    job = cluster.job(40).training()
    assert cluster.job(40).commands() == [f"{results['run-dir']}/code/my_train.py --lr 3e-4 a=b"]
    assert (pathlib.Path(results["run-dir"]) / "code" / "my_train.py").read_text() == "print('x')\n"
    script.write_text("print('y')\n")
    again = ready.run("submit-ddp", workload=str(script), snapshot=False, nodes=1)
    assert cluster.job(41).commands() == [str(script)]
    assert not (pathlib.Path(again["run-dir"]) / "code").exists()
    assert ("FOO", "bar") in job.variables
    assert not job.leaves_outcome, "such a script need not leave an outcome"


def test_a_script_in_a_container_finds_the_payload(ready: Trainer, cluster: Cluster):
    """It imports ddptrain.resume."""
    script = ready.workspace / "train.py"
    script.write_text("print('x')\n")
    ready.run("submit-ddp", workload=str(script), container_image="hf/pytorch:1", nodes=1)
    (payload,) = (ready.workspace / "environments").glob("payload-*")
    job = cluster.job(40).training()
    assert job.container is not None
    assert (job.container.image, job.payload) == ("hf/pytorch:1", str(payload))


def test_a_dry_run_shows_everything_and_changes_nothing(trainer: Trainer, cluster: Cluster):
    before = trainer.files()
    results = trainer.run("submit-ddp", dry_run=True, wait=True, run="x")
    assert trainer.files() == before
    assert not cluster.changes
    assert results["script"].startswith("#!/bin/bash\n")
    assert results["verdict"] == (
        "Job 3 to start at 2026-11-20T18:48:42 using 2 processors on nodes slurmd-[0-1] in partition slurmd"
    )
    assert results["environment"] == "not installed yet; the submission installs it"
    assert results["dataset"] == f"{trainer.workspace}/datasets/python-stdlib (to be prepared)"
    assert results["resources"] == "2 nodes of slurmd, each 2 cores, 8000 MiB"


def test_a_dry_run_names_the_environment_that_is_there(ready: Trainer):
    results = ready.run("submit-ddp", dry_run=True)
    assert results["environment"].endswith(".tar.zst")
    assert json.loads(results["job"])["environment"]["layers"][0]["path"] == results["environment"]


def test_another_runs_checkpoint_can_be_the_beginning(ready: Trainer, cluster: Cluster):
    ready.run("submit-ddp", run="base")
    cluster.jobs[0].states = [("COMPLETED", 0)]
    line = "resume: base has no checkpoint to start from; juju run trainer/leader show-run run=base"
    assert ready.fails("submit-ddp", run="tuned", resume="base") == line
    ready.run("submit-ddp", run="later", resume="base", dependency="afterok:40", dry_run=True)
    (cluster.jobs[0].script.parent / "epoch-0001").mkdir()
    (cluster.jobs[0].script.parent / "latest").symlink_to("epoch-0001")
    ready.run("submit-ddp", run="tuned", resume="base")
    assert cluster.job(41).training().resume == f"{ready.workspace}/runs/base"


def refusals(trainer: Trainer) -> list[tuple[dict[str, typing.Any], str]]:
    """Return parameters that contradict the present state, and the line for each."""
    place = trainer.workspace
    (place / "fine.py").write_text("")
    (place / "out.py").symlink_to("/etc/hostname")
    (place / "folder").mkdir()
    (place / "runs" / "old").mkdir(parents=True)
    (place / "runs" / "old" / "notes.txt").touch()
    return [
        ({"nodes": 3}, "nodes: 3 requested, partition slurmd has 2 usable"),
        ({"partition": "gpu"}, "partition: no partition 'gpu'; there are: slurmd"),
        ({"workload": f"{place}/absent.x"}, f"workload: {place}/absent.x does not exist"),
        ({"workload": "/etc/passwd"}, f"workload: /etc/passwd is outside the workspace {place}"),
        (
            {"workload": f"{place}/out.py"},
            f"workload: {place}/out.py leads to /etc/hostname, outside the workspace {place}",
        ),
        ({"workload": f"{place}/folder"}, f"workload: {place}/folder is not a file"),
        (
            {"dataset": "nope"},
            f"dataset: no dataset 'nope' in {place}/datasets; there are: python-stdlib; "
            "make it; juju run trainer/leader prepare-dataset name=nope source=PATH",
        ),
        ({"dataset": f"{place}/nope"}, f"dataset: {place}/nope does not exist"),
        (
            {"dataset": f"{place}/folder"},
            f"dataset: {place}/folder has no dataset.json; juju run trainer/leader prepare-dataset source={place}/folder",
        ),
        (
            {"dataset": "python-stdlib", "workload": "smoke"},
            "dataset: only the workload gpt has it",
        ),
        (
            {"resume": "never", "workload": "smoke"},
            "resume: only the workload gpt has it; a script goes on in its own run: --run NAME",
        ),
        (
            {"resume": "nope"},
            f"resume: no run 'nope' of the workload gpt in {place}/runs; use auto, never or the name of one; "
            "juju run trainer/leader list-runs",
        ),
        (
            {"run": "old", "resume": "never"},
            "run: old exists already; choose another name, or resume auto",
        ),
        ({"run": "old", "workload": "smoke"}, "run: old exists already; choose another name"),
        ({"run": "old"}, f"run: {place}/runs/old exists and is not a gpt run; choose another name"),
        ({"profile_ranks": "1"}, "profile-ranks: needs profile=torch"),
        (
            {"profile": "torch", "workload": "smoke"},
            "profile: only the workload gpt has it; a script starts torch.profiler itself",
        ),
        (
            {"profile": "torch", "profile_ranks": "0,2"},
            "profile-ranks: no rank 2; the job has 2, from 0",
        ),
    ]


def test_impossible_options_are_refused_by_name_and_leave_no_trace(
    ready: Trainer, cluster: Cluster
):
    table = refusals(ready)
    before = ready.files()
    for params, line in table:
        with pytest.raises(ActionFailedError) as caught:
            ready.run("submit-ddp", **params)
        assert caught.value.message == line
        assert not ready.results
    assert not cluster.changes
    assert ready.files() == before


@pytest.mark.parametrize(("stderr", "line"), CASES["refusals_of_slurm_are_quoted"])
def test_refusals_of_slurm_are_quoted(ready: Trainer, cluster: Cluster, stderr: str, line: str):
    cluster.refusal = f"sbatch: error: Batch job submission failed\n{stderr}"
    before = ready.files()
    words = f"Batch job submission failed; {stderr}"
    assert ready.fails("submit-ddp", workload="smoke").startswith(f"{line}{words}")
    assert ready.files() == before


POLICY = "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    ("reason", "option", "whose"),
    [
        (
            "QOSMaxGRESPerUser",
            "gpus-per-node: ",
            "QOSMaxGRESPerUser is a limit of the QOS, not a missing account",
        ),
        (
            "QOSMaxSubmitJobPerUserLimit",
            "qos: ",
            "QOSMaxSubmitJobPerUserLimit is a limit of the QOS",
        ),
        (
            "AssocMaxWallDurationPerJobLimit",
            "time-limit: ",
            "is a limit of the account, not a missing account",
        ),
        (
            "AssocMaxSubmitJobLimit",
            "",
            "AssocMaxSubmitJobLimit is a limit of the account, not a missing account",
        ),
        ("", "", "it exceeds a limit of the QOS, the account or the partition"),
    ],
)
def test_a_limit_is_never_taken_for_a_missing_account(
    ready: Trainer, cluster: Cluster, reason: str, option: str, whose: str
):
    cluster.refusal = (
        f"sbatch: error: {reason}\nsbatch: error: {POLICY}"
        if reason
        else f"sbatch: error: {POLICY}"
    )
    line = ready.fails("submit-ddp", workload="smoke")
    assert line.startswith(f"{option}Slurm rejects the job: ")
    assert whose in line
    assert "sacctmgr show " in line


def test_a_job_that_slurm_refuses_at_last_leaves_no_run(ready: Trainer, cluster: Cluster):
    cluster.submit_refusal = "sbatch: error: QOSMaxSubmitJobPerUserLimit"
    line = ready.fails("submit-ddp", workload="smoke", run="x")
    assert line.startswith("qos: Slurm rejects the job: QOSMaxSubmitJobPerUserLimit; ")
    assert not (ready.workspace / "runs" / "x").exists()


@pytest.mark.parametrize(
    ("action", "name"),
    [(action, name) for action, name in TEXTS if name not in FREE and not is_slurms(action, name)],
)
def test_nothing_hostile_is_submitted_written_or_run(
    ready: Trainer, cluster: Cluster, action: str, name: str
):
    before, calls = ready.files(), len(cluster.calls)
    chosen = (NASTY + ROAMING)[:: len(NASTY) // 5]
    for nasty in chosen:  # the whole table is held against the parser in test_options
        line = ready.fails(action, **{name: nasty})
        assert line.startswith(f"{name}: ")
        assert len(line) < 400
    assert ready.files() == before
    assert all(call[:2] == ("scontrol", "ping") for call in cluster.calls[calls:])


def test_no_path_leads_out_of_the_workspace(ready: Trainer, cluster: Cluster):
    """Every path parameter of every action: a link, a link in the middle, a sibling folder."""
    secret = ready.workspace.parent / "secret"
    (secret / "inner").mkdir(parents=True)
    for name in ("dataset.json", "inner/dataset.json", "x.py"):
        (secret / name).write_text("{}")
    (ready.workspace / "file.py").symlink_to(secret / "x.py")
    (ready.workspace / "folder").symlink_to(secret)
    beside = ready.workspace.with_name(f"{ready.workspace.name}-beside")
    beside.symlink_to(secret)
    taken: set[tuple[str, str]] = set()
    before = ready.files()
    for action, name in TEXTS:
        for path in (
            "file.py",
            "folder",
            "folder/x.py",
            "folder/inner",
            f"../{beside.name}/x.py",
            "runs/../folder",
        ):
            given: dict[str, typing.Any] = {
                **BESIDE.get(action, {}),
                name: f"{ready.workspace}/{path}",
            }
            try:
                fields.parse(verbs.ACTIONS[action].options, given)
            except problem.ParameterError:
                continue
            is_for_the_job = name in ("args", "again")  # words, with the rights of its user
            if is_for_the_job or is_slurms(action, name):
                continue
            taken.add((action, name))
            line = ready.fails(action, **given)
            assert line.startswith(f"{name}: "), (action, path, line)
            assert "outside the workspace" in line or "does not exist" in line, (action, path, line)
    assert ready.files() == before
    assert not cluster.changes
    assert {
        ("submit-ddp", "workload"),
        ("submit-sweep", "workload"),
        ("prepare-dataset", "source"),
    } <= taken


def test_a_dataset_that_could_not_be_prepared_stops_the_training(ready: Trainer, cluster: Cluster):
    (ready.workspace / "datasets" / "python-stdlib" / "dataset.json").unlink()
    cluster.states = [("FAILED", 2 << 8)]
    assert ready.fails("submit-ddp", wait=True).startswith("job 40 FAILED, exit code 2")
    assert [job.name for job in cluster.jobs] == ["prepare-python-stdlib"]


def test_a_source_that_cannot_be_is_refused(ready: Trainer, cluster: Cluster):
    place = ready.workspace
    assert (
        ready.fails("prepare-dataset", source="/etc")
        == f"source: /etc is outside the workspace {place}"
    )
    assert (
        ready.fails("prepare-dataset", source=f"{place}/no") == f"source: {place}/no does not exist"
    )
    cluster.states = [("RUNNING", 0)]
    ready.run("prepare-dataset", wait=False)
    run = "prepare-python-stdlib"
    line = f"run: {run} is active as job 40 (RUNNING); wait for its end, or cancel it; juju run trainer/leader cancel-run run={run}"
    assert ready.fails("prepare-dataset") == line


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"run": "night", "workload": "smoke"}, "run: night exists already; choose another name"),
        ({"run": "table"}, "run: {runs}/table exists and is not a gpt run; choose another name"),
        ({"run": "notes"}, "run: {runs}/notes exists and is not a gpt run; choose another name"),
        (
            {"resume": "mine"},
            "resume: mine is a run of a script; it goes on in its own folder: --run mine; ddp list",
        ),
    ],
)
def test_a_run_of_another_kind_is_not_continued(
    motley: Program, cluster: Cluster, params: dict[str, typing.Any], line: str
):
    before = motley.files()
    assert motley.fails("submit-ddp", **params) == line.replace(
        "{runs}", str(motley.workspace / "runs")
    )
    assert motley.files() == before
    assert not cluster.changes


def test_a_bucket_for_checkpoints_goes_to_the_job_with_the_environment_that_copies(
    program: Program, cluster: Cluster
):
    program.run("submit-ddp", workload="smoke", mirror="s3://models/physics")
    wanted = cluster.jobs[-1].training().mirror
    assert wanted is not None
    assert wanted.url == "s3://models/physics"
    (stored,) = (program.workspace / "environments").glob("*.tar.zst")
    assert [layer.path for layer in wanted.environment.layers] == [str(stored)]
    why = program.fails("submit-ddp", workload="smoke", mirror="s3://me:secret@models/x")
    assert why.startswith("mirror: ")
    assert "a bucket without credentials" in why
