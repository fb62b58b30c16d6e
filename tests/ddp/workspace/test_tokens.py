"""The file with the Hugging Face token: whose it is, and for how long it stays."""

import dataclasses
import json
import os
import pathlib
import pwd
import signal
import stat

import pytest
from cluster import Cluster, Job
from script_texts import ENDS, MANIFEST, REQUEST, WAITS, stop, texts
from trainer_fixtures import charm_dir, claims, node, settings, workspace

from batch_host import Node
from ddp.host.files import RefusedError
from ddp.options import fields, models
from ddp.problem import Problem
from ddp.settings import Settings
from ddp.submit import scripts, tokens
from ddp.workspace import operations
from storage import leaks

__all__ = ["charm_dir", "claims", "node", "settings", "workspace"]
USER = pwd.getpwuid(os.geteuid()).pw_name
TOKEN = "hf_secret"
READS = 'cat "$HF_TOKEN_PATH" > "$NOTES/token"; '
REQUEUED = 'echo "0: [FATAL] slurmd-0: its disk is full"; ' + ENDS % "failed" + "; exit 78"


@pytest.fixture
def given(settings: Settings) -> tuple[Settings, pathlib.Path]:
    """Settings with a token, and the file that holds it for the run `first`."""
    path = settings.workspace.path / ".secrets" / "trainer-0" / "first.hf-token"
    path.parent.mkdir(parents=True)
    path.write_text(TOKEN)
    return dataclasses.replace(settings, token=TOKEN), path


def test_settings_and_errors_do_not_show_it(settings: Settings):
    assert TOKEN not in repr(dataclasses.replace(settings, token=TOKEN))
    with pytest.raises(Problem) as caught:
        settings.workspace.do(
            operations.keep_secret,
            secrets="/nowhere",
            owner="x",
            name="first",
            text=TOKEN,
        )
    assert TOKEN not in str(caught.value)


def test_a_job_that_is_being_submitted_keeps_its_file(settings: Settings):
    secrets = str(settings.workspace.path / ".secrets")
    pathlib.Path(secrets).mkdir()
    operations.keep_secret(secrets, "trainer-0", "first.hf-token", "a\n")
    synced = operations.sync_tokens(secrets, "trainer-0", token="a", active=[])
    assert synced == operations.Synced(removed=0, replaced=0)


def test_the_file_of_a_run_stays_while_another_of_its_jobs_is_active(
    settings: Settings, cluster: Cluster
):
    given = dataclasses.replace(settings, token=TOKEN)
    path = pathlib.Path(tokens.path(given.workspace, "first"))
    tokens.deliver(given.workspace, "first", TOKEN)
    states = {40: ("FAILED", 1), 41: ("RUNNING", 0)}
    cluster.jobs = [
        Job(number, USER, "first", path, "", [state]) for number, state in states.items()
    ]
    tokens.drop(given.workspace, "first")
    assert path.read_text() == f"{TOKEN}\n"
    cluster.silent = 1
    tokens.drop(given.workspace, "first")
    assert path.exists(), "while Slurm is away nothing is known to be over"
    cluster.jobs[1].states = [("COMPLETED", 0)]
    tokens.drop(given.workspace, "first")
    assert not path.exists()


def test_a_folder_of_another_account_or_a_link_is_not_used(
    settings: Settings, tmp_path: pathlib.Path
):
    (tmp_path / "theirs").mkdir()
    secrets = settings.workspace.path / ".secrets"
    secrets.symlink_to(tmp_path / "theirs")
    with pytest.raises(RefusedError, match="is not a folder of this account"):
        operations.keep_secret(str(secrets), "trainer-0", "first.hf-token", "a\n")
    assert not list((tmp_path / "theirs").iterdir())
    secrets.unlink()
    secrets.mkdir()
    secrets.chmod(0o777)
    operations.keep_secret(str(secrets), "trainer-0", "first.hf-token", "a\n")
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700


# -- in the job -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [ENDS % "done", ENDS % "failed" + "; exit 1", "exit 137"])
def test_a_job_that_ends_by_itself_removes_the_file(
    given: tuple[Settings, pathlib.Path], node: Node, end: str
):
    node.add("srun", READS + end)
    _, output = node.run(texts(given[0]))
    assert (node.notes / "token").read_text() == TOKEN, output
    assert not given[1].exists()


@pytest.mark.parametrize("how", [signal.SIGUSR1, signal.SIGTERM, "requeued"])
def test_a_job_that_may_come_back_keeps_the_file(
    given: tuple[Settings, pathlib.Path], node: Node, how: signal.Signals | str
):
    node.add("sinfo", "echo slurmd-2")
    node.add("srun", WAITS + ENDS % "preempted" if isinstance(how, signal.Signals) else REQUEUED)
    if isinstance(how, signal.Signals):
        stop(node, texts(given[0]), how)
    else:
        _, output = node.run(texts(given[0], max_restarts=1))
        assert node.requeued(), output
    assert given[1].exists()


@pytest.mark.parametrize(("left", "stays"), [("12_0", False), ("12_0 12_1", True), ("", True)])
def test_the_last_run_of_a_sweep_removes_the_file(
    given: tuple[Settings, pathlib.Path], node: Node, left: str, stays: bool
):
    settings, path = given
    program = scripts.Program(("--module", "ddptrain", "smoke"), leaves_outcome=True)
    params = fields.parse(models.SubmitDdp, {})
    array = scripts.Array(2, 2)
    job = scripts.TrainingJob(settings, REQUEST, params, "first", program, array=array)
    files = job.texts(MANIFEST)
    for name in ("logs", "control"):
        (settings.workspace.runs / "first-0" / name).mkdir(parents=True)
    (settings.workspace.runs / "first-0" / "args").write_text("")
    node.add("squeue", f"printf '%s\\n' {left}" if left else "exit 0")
    node.add("srun", READS + ENDS % "done")
    code, output = node.run(files, SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID="0")
    assert (code, (node.notes / "token").read_text()) == (0, TOKEN), output
    assert path.exists() is stays


def test_a_job_without_the_file_says_so(given: tuple[Settings, pathlib.Path], node: Node):
    given[1].unlink()
    node.add("srun", ENDS % "done")
    code, output = node.run(texts(given[0]))
    assert code == 0
    assert (
        "this job has no Hugging Face token; submit the run with the trainer to get one" in output
    )


@pytest.mark.parametrize("exists", [True, False])
def test_the_ranks_get_the_variables_of_the_file_and_the_script_has_their_names_at_most(
    settings: Settings, node: Node, exists: bool
):
    ends = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSPHRASE")
    variables = {f"MY_{end}": f"a b'$x-{end}" for end in ends} | {"WANDB_API_KEY": "a b'$x"}
    files = texts(settings, secrets=tuple(variables))
    if exists:
        tokens.deliver_variables(settings.workspace, "first", variables)
    assert pathlib.Path(tokens.path(settings.workspace, "first", ".env")).exists() is exists
    node.add("srun", 'printf %s "$WANDB_API_KEY" > "$NOTES/key"; ' + ENDS % "done")
    code, output = node.run(files)
    assert not leaks.within((output + "".join(files.values())).encode(), variables.values())
    assert not leaks.in_files(settings.workspace.path, *variables.values())
    assert not list(settings.workspace.path.rglob(".secrets/*/*"))
    if exists:
        assert (code, (node.notes / "key").read_text()) == (0, "a b'$x"), output
    else:
        assert (
            "the job's secret variables: No such file or directory; submit the run again with env-file"
            in output
        )


def test_variables_of_runs_that_ended_are_removed_with_the_next(
    settings: Settings, cluster: Cluster
):
    for run in ("first", "second", "third"):
        tokens.deliver_variables(settings.workspace, run, {"A": "x"})
    paths = {
        run: pathlib.Path(tokens.path(settings.workspace, run, ".env"))
        for run in ("first", "second", "third")
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths.values()} == {0o600}
    for run in ("first", "second"):
        os.utime(paths[run], (1, 1))
    cluster.jobs = [Job(40, USER, "second", paths["second"], "", [("PENDING", 0)])]
    operations.sync_tokens(
        str(settings.workspace.path / ".secrets"), "trainer-0", token="", active=None
    )
    tokens.deliver_variables(settings.workspace, "fourth", {"A": "y"})
    assert {run for run, path in paths.items() if path.exists()} == {"second", "third"}
    tokens.drop(settings.workspace, "third")
    assert not paths["third"].exists()


def test_in_a_container_the_path_is_known(given: tuple[Settings, pathlib.Path]):
    job = json.loads(texts(given[0], container_image="a/b:1")["program/job.json"])
    assert job["container"]["variables"].endswith(",HF_TOKEN_PATH")
