"""The Hugging Face token: who gets it, for how long, and where it never appears."""

import base64
import dataclasses
import json
import os
import pathlib
import signal
import stat
import typing
import urllib.parse

import pytest
from cluster import Cluster, Job
from conftest import USER
from harness import Trainer
from ops import testing
from script_texts import ENDS, MANIFEST, REQUEST, WAITS, stop, texts

from batch_host import Node
from ddp.base import Settings, TrainerError
from ddp.node import spec
from ddp.options import fields, models
from ddp.submit import scripts
from ddp.workspace import folders, operations, tokens
from ddp.workspace.files import RefusedError

TOKEN = "hf_%2F+Zsecret=/~0123456789abcdef"
FORMS = (
    TOKEN,
    urllib.parse.quote(TOKEN, safe=""),
    *(base64.b64encode(b" " * shift + TOKEN.encode()).decode()[4:-6] for shift in range(3)),
)


class Cloud:
    """A trainer's model with a user's secret."""

    def __init__(self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer = trainer
        self.content = {"token": TOKEN}
        self.is_granted = True
        secret = testing.Secret(self.content, owner=None)
        self.id = secret.id
        trainer.config["hf-token"] = self.id
        before = trainer.state

        def state() -> testing.State:
            secrets = [testing.Secret(self.content, id=self.id)] if self.is_granted else []
            return testing.State(
                config=dict(trainer.config), relations=before().relations, resources=before().resources, secrets=secrets
            )

        monkeypatch.setattr(trainer, "state", state)

    @property
    def files(self) -> dict[str, str]:
        """Return the runs that a file with a token is there for, and what it holds."""
        folder = self.trainer.workspace / ".secrets" / "trainer-0"
        return {path.name: path.read_text() for path in sorted(folder.glob("*"))}

    def change(self, token: str) -> None:
        self.content = {"token": token}

    def wake(self) -> testing.State:
        return self.trainer.event("update_status")

    def age(self) -> None:
        for path in (self.trainer.workspace / ".secrets" / "trainer-0").iterdir():
            os.utime(path, (1, 1))


@pytest.fixture
def cloud(ready: Trainer, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    return Cloud(ready, monkeypatch)


def everything(trainer: Trainer, cluster: Cluster) -> str:
    """Collect all text that an operator or another account may see."""
    seen = [*trainer.results.values(), *trainer.log, *(" ".join(call) for call in cluster.calls)]
    seen += [line.message for line in trainer.context.juju_log]
    seen += [str(path) for path in trainer.workspace.rglob("*")]
    for path in trainer.workspace.rglob("*"):
        if path.is_file() and ".secrets" not in path.parts:
            seen.append(path.read_bytes().decode("latin-1"))
    return "\n".join(seen)


@pytest.mark.parametrize("action", ["submit-ddp", "submit-sweep"])
def test_a_job_finds_the_token_by_the_path_of_a_file(cloud: Cloud, cluster: Cluster, action: str):
    cluster.states = [("RUNNING", 0)]
    name = {"run": "first"} if action == "submit-ddp" else {"name": "first", "grid": "lr=0.1,0.2"}
    cloud.trainer.run(action, workload="smoke", **name)
    path = cloud.trainer.workspace / ".secrets" / "trainer-0" / "first.hf-token"
    job = cluster.jobs[-1].training()
    assert ("HF_TOKEN_PATH", str(path)) in job.variables
    assert job.token_path == str(path)
    assert path.read_text().strip() == TOKEN
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in path.parents[:2]] == [0o700, 0o700]


@pytest.mark.parametrize("action", ["submit-ddp", "submit-sweep"])
@pytest.mark.parametrize("dry", [True, False])
def test_the_token_is_nowhere_else(cloud: Cloud, cluster: Cluster, action: str, dry: bool):
    cluster.states = [("RUNNING", 0)]
    name = {"run": "first"} if action == "submit-ddp" else {"name": "first", "grid": "lr=0.1,0.2"}
    cloud.trainer.run(action, workload="smoke", dry_run=dry, **name)
    text = everything(cloud.trainer, cluster)
    assert "HF_TOKEN_PATH" in text, "what is searched holds the script"
    assert [form for form in FORMS if form in text] == []
    assert ("first.hf-token" in cloud.files) is not dry
    for again in (cloud.wake, lambda: cloud.trainer.run("list-runs")):
        again()
        assert [form for form in FORMS if form in everything(cloud.trainer, cluster)] == []


def test_the_search_would_find_it(cloud: Cloud, cluster: Cluster):
    cloud.trainer.run("submit-ddp", workload="smoke", run="first")
    for given in (TOKEN, urllib.parse.quote(TOKEN, safe=""), base64.b64encode(f"a{TOKEN}".encode()).decode()):
        (cloud.trainer.workspace / "runs" / "first" / "note").write_text(f"x{given}x")
        assert [form for form in FORMS if form in everything(cloud.trainer, cluster)]


def test_settings_do_not_show_it(settings: Settings):
    assert "hf_" not in repr(dataclasses.replace(settings, token=TOKEN))


def test_without_the_option_there_is_none(cloud: Cloud, cluster: Cluster):
    cloud.trainer.config.pop("hf-token")
    cloud.trainer.run("submit-ddp", workload="smoke")
    assert "HF_TOKEN" not in spec.dump(cluster.jobs[-1].asked())
    assert not (cloud.trainer.workspace / ".secrets").exists()


def test_a_file_of_the_users_own_goes_before(cloud: Cloud, cluster: Cluster):
    cloud.trainer.run("submit-ddp", workload="smoke", env="HF_TOKEN_PATH=/mnt/shared/mine")
    job = cluster.jobs[-1].training()
    assert [value for name, value in job.variables if name == "HF_TOKEN_PATH"] == ["/mnt/shared/mine"]
    assert job.token_path == ""
    assert cloud.files == {}


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_a_token_in_env_is_refused_without_being_shown(cloud: Cloud, name: str):
    error = cloud.trainer.fails("submit-ddp", env=f"{name}=hf_mine")
    assert error == f"env: {name} would be in the job's script for others to read; use the trainer's hf-token"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "the secret does not exist or is not granted: juju grant-secret NAME trainer"),
        ({"key": TOKEN}, "the secret has no key token: juju update-secret NAME token=hf_..."),
        ({"token": f"{TOKEN}\n"}, "the secret's token has blanks, line breaks or characters that are not ASCII: "),
        ({"token": f"{TOKEN} x"}, "the secret's token has blanks, line breaks or characters that are not ASCII: "),
        ({"token": f"{TOKEN}\u00e9"}, "the secret's token has blanks, line breaks or characters that are not ASCII: "),
        ({"token": TOKEN * 200}, "the secret's token has 6600 characters, at most 4096: "),
    ],
)
def test_a_secret_that_cannot_be_says_why_in_one_line(cloud: Cloud, content: dict[str, str] | None, why: str):
    cloud.is_granted = content is not None
    cloud.content = content or {}
    out = cloud.wake()
    assert out.unit_status.name == "blocked"
    assert out.unit_status.message.startswith(f"fix config: hf-token: {why}")
    assert out.unit_status.message.isprintable()
    assert TOKEN not in out.unit_status.message
    assert cloud.trainer.fails("submit-ddp") == out.unit_status.message


def test_jobs_that_wait_take_a_new_token(cloud: Cloud, cluster: Cluster):
    cluster.states = [("PENDING", 0)]
    cloud.trainer.run("submit-ddp", workload="smoke", run="first")
    cloud.change("hf_new")
    context = cloud.trainer._context()  # pyright: ignore[reportPrivateUsage]
    state = cloud.trainer.state()
    context.run(context.on.secret_changed(next(iter(state.secrets))), state)
    assert cloud.files == {"first.hf-token": "hf_new\n"}
    assert stat.S_IMODE((cloud.trainer.workspace / ".secrets/trainer-0/first.hf-token").stat().st_mode) == 0o600


def test_a_token_that_is_taken_back_is_taken_from_the_jobs(cloud: Cloud, cluster: Cluster):
    cluster.states = [("RUNNING", 0)]
    cloud.trainer.run("submit-ddp", workload="smoke", run="first")
    cloud.trainer.config.pop("hf-token")
    cloud.wake()
    assert cloud.files == {}


def test_the_file_goes_with_its_job_and_not_before(cloud: Cloud, cluster: Cluster):
    cluster.states = [("RUNNING", 0)]
    cloud.trainer.run("submit-ddp", workload="smoke", run="first")
    cloud.trainer.run("submit-ddp", workload="smoke", run="second")
    cloud.age()
    cluster.jobs[0].states = [("CANCELLED", 15)]  # by scancel, without a notice
    cluster.jobs[1].states = [("REQUEUED", 0)]
    cluster.silent = 1000
    cloud.wake()
    assert len(cloud.files) == 2, "while Slurm does not respond nothing is known to be over"
    cluster.silent = 0
    cloud.wake()
    assert list(cloud.files) == ["second.hf-token"]


def test_a_job_that_is_being_submitted_keeps_its_file(settings: Settings):
    place: dict[str, typing.Any] = {"secrets": str(settings.workspace / ".secrets"), "owner": "trainer-0"}
    (settings.workspace / ".secrets").mkdir()
    operations.keep_token(**place, run="first", token="a")
    assert operations.sync_tokens(**place, token="a", active=[]) == {"removed": 0, "replaced": 0}


def test_cancelling_and_waiting_end_with_the_file_gone(cloud: Cloud, cluster: Cluster):
    cluster.states = [("PENDING", 0)]
    cloud.trainer.run("submit-ddp", workload="smoke", run="first")
    assert list(cloud.files) == ["first.hf-token"]
    cloud.trainer.run("cancel-run", run="40")
    assert cloud.files == {}
    cluster.states = [("RUNNING", 0), ("FAILED", 256)]
    cloud.trainer.fails("submit-ddp", workload="smoke", run="second", wait=True)
    assert cloud.files == {}


def test_the_file_of_a_run_stays_while_another_of_its_jobs_is_active(settings: Settings, cluster: Cluster):
    given = dataclasses.replace(settings, token=TOKEN)
    path = pathlib.Path(tokens.path(given, "first"))
    tokens.deliver(given, "first")
    cluster.jobs = [
        Job(number, USER, "first", path, "", [state]) for number, state in ((40, ("FAILED", 1)), (41, ("RUNNING", 0)))
    ]
    tokens.drop(given, "first")
    assert path.read_text() == f"{TOKEN}\n"
    cluster.silent = 1
    tokens.drop(given, "first")
    assert path.exists(), "while Slurm is away nothing is known to be over"
    cluster.jobs[1].states = [("COMPLETED", 0)]
    tokens.drop(given, "first")
    assert not path.exists()


@pytest.mark.parametrize("action", ["submit-ddp", "submit-sweep"])
def test_a_job_that_slurm_refuses_leaves_no_file(cloud: Cloud, cluster: Cluster, action: str):
    cluster.submit_refusal = "sbatch: error: no"
    name = {"run": "first"} if action == "submit-ddp" else {"name": "first", "grid": "lr=0.1,0.2"}
    cloud.trainer.fails(action, workload="smoke", **name)
    assert cloud.files == {}
    assert not list((cloud.trainer.workspace / "runs").iterdir())


def test_another_units_files_are_left_alone(cloud: Cloud, cluster: Cluster):
    cluster.states = [("RUNNING", 0)]
    cloud.trainer.run("submit-ddp", workload="smoke", run="first")
    other = cloud.trainer.workspace / ".secrets" / "other-0"
    other.mkdir(mode=0o700)
    (other / "theirs.hf-token").write_text("hf_theirs\n")
    os.utime(other / "theirs.hf-token", (1, 1))
    cloud.change("hf_new")
    cloud.wake()
    cloud.trainer.event("remove")
    assert cloud.files == {}, "a unit that goes takes its own with it"
    assert (other / "theirs.hf-token").read_text() == "hf_theirs\n"


@pytest.mark.parametrize(
    "case",
    [
        ("stop", "sackd/0", True),
        ("remove", "sackd/0", True),
        ("relation_broken", "sackd/0", True),
        ("relation_broken", "", True),
        ("relation_broken", "login/0", False),
    ],
)
def test_the_files_go_with_whichever_of_the_last_hooks_comes(
    cloud: Cloud, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, bool]
):
    """Juju 4.0.15 deleted a unit between relation-broken and stop; another principal's relation is not this unit's."""
    event, principal, is_removed = case
    cluster.states = [("RUNNING", 0)]
    cloud.trainer.run("submit-ddp", workload="smoke", run="first")
    assert cloud.files
    monkeypatch.setenv("JUJU_PRINCIPAL_UNIT", principal)
    cloud.trainer.event(event)
    assert bool(cloud.files) is not is_removed


def test_the_files_go_although_the_secret_cannot_be_read_any_more(cloud: Cloud, cluster: Cluster):
    """Juju answers nothing to a unit that it has deleted; and the secret may have been revoked before."""
    cluster.states = [("RUNNING", 0)]
    cloud.trainer.run("submit-ddp", workload="smoke", run="first")
    assert cloud.files
    cloud.is_granted = False
    cloud.trainer.event("remove")
    assert cloud.files == {}


@pytest.mark.parametrize(
    "event", [f"relation_{kind}" for kind in ("created", "joined", "changed", "departed", "broken")]
)
def test_another_principals_relation_changes_nothing(
    cloud: Cloud, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, event: str
):
    """Juju 4 sends a subordinate events of another machine's principal, in container scope, too."""
    cluster.states = [("RUNNING", 0)]
    cloud.trainer.run("submit-ddp", workload="smoke", run="first")
    before, files = cloud.wake().unit_status, cloud.files
    assert isinstance(before, testing.ActiveStatus)
    assert files
    folder, calls = cloud.trainer.files(), len(cluster.calls)
    monkeypatch.setenv("JUJU_PRINCIPAL_UNIT", "login/0")
    assert cloud.trainer.event(event).unit_status == before
    assert (cloud.files, cloud.trainer.files()) == (files, folder)
    assert {call[0] for call in cluster.calls[calls:]} <= {"scontrol", "squeue", "sinfo"}


def test_a_folder_of_another_account_or_a_link_is_not_used(settings: Settings, tmp_path: pathlib.Path):
    (tmp_path / "theirs").mkdir()
    secrets = settings.workspace / ".secrets"
    secrets.symlink_to(tmp_path / "theirs")
    with pytest.raises(RefusedError, match="is not a folder of this account"):
        operations.keep_token(str(secrets), "trainer-0", "first", "a")
    assert not list((tmp_path / "theirs").iterdir())
    secrets.unlink()
    secrets.mkdir(mode=0o777)
    secrets.chmod(0o777)
    operations.keep_token(str(secrets), "trainer-0", "first", "a")
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700


def test_the_token_is_in_no_error(settings: Settings):
    with pytest.raises(TrainerError) as caught:
        folders.call(settings, operations.keep_token, secrets="/nowhere", owner="x", run="first", token=TOKEN)
    assert TOKEN not in str(caught.value)


# -- in the job --------------------------------------------------------------------------------------------------------


@pytest.fixture
def given(settings: Settings) -> tuple[Settings, pathlib.Path]:
    """Settings with a token, and the file that the run first finds it in."""
    path = settings.workspace / ".secrets" / "trainer-0" / "first.hf-token"
    path.parent.mkdir(parents=True)
    path.write_text(TOKEN)
    return dataclasses.replace(settings, token=TOKEN), path


READS = 'cat "$HF_TOKEN_PATH" > "$NOTES/token"; '


def queued(settings: Settings, *, sweep: bool = False) -> dict[str, str]:
    """Return the files of a run, or of a sweep of two that the node runs the first one of."""
    if not sweep:
        return texts(settings)
    params = fields.parse(models.SubmitDdp, {})
    program = scripts.Program(("--module", "ddptrain", "smoke"), leaves_outcome=True)
    files = scripts.training(
        settings,
        REQUEST,
        params,
        MANIFEST,
        run="first",
        program=program,
        sweep=scripts.Sweep(1, 2),
    )
    folder = settings.runs / "first-0"
    for name in ("logs", "control"):
        (folder / name).mkdir(parents=True)
    (folder / "args").write_text("")
    return files


@pytest.mark.parametrize("end", [ENDS % "done", ENDS % "failed" + "; exit 1", "exit 137"])
def test_a_job_that_ends_by_itself_removes_the_file(given: tuple[Settings, pathlib.Path], node: Node, end: str):
    settings, path = given
    node.add("srun", READS + end)
    _, output = node.run(queued(settings))
    assert (node.notes / "token").read_text() == TOKEN, output
    assert not path.exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_job_that_was_stopped_may_come_back_and_keeps_the_file(
    given: tuple[Settings, pathlib.Path],
    node: Node,
    number: signal.Signals,
):
    settings, path = given
    node.add("srun", WAITS + ENDS % "preempted")
    stop(node, queued(settings), number)
    assert path.exists()


def test_a_job_that_is_queued_again_without_a_bad_node_keeps_the_file(
    given: tuple[Settings, pathlib.Path],
    node: Node,
):
    settings, path = given
    node.add("sinfo", "echo slurmd-2")
    node.add("srun", 'echo "0: [FATAL] slurmd-0: its disk is full"; ' + ENDS % "failed" + "; exit 78")
    _, output = node.run(texts(settings, max_restarts=1))
    assert node.requeued(), output
    assert path.exists()


@pytest.mark.parametrize(("left", "stays"), [("12_0", False), ("12_0 12_1", True), ("", True)])
def test_the_last_run_of_a_sweep_removes_the_file(
    given: tuple[Settings, pathlib.Path],
    node: Node,
    left: str,
    stays: bool,
):
    settings, path = given
    node.add("squeue", f"printf '%s\\n' {left}" if left else "exit 0")
    node.add("srun", READS + ENDS % "done")
    code, output = node.run(queued(settings, sweep=True), SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID="0")
    assert code == 0, output
    assert (node.notes / "token").read_text() == TOKEN
    assert path.exists() is stays


def test_a_job_without_the_file_says_so(given: tuple[Settings, pathlib.Path], node: Node):
    settings, path = given
    path.unlink()
    node.add("srun", ENDS % "done")
    code, output = node.run(queued(settings))
    assert code == 0
    assert "this job has no Hugging Face token; submit the run with the trainer to get one" in output


def test_in_a_container_the_path_is_known(given: tuple[Settings, pathlib.Path]):
    settings, _ = given
    job = json.loads(texts(settings, container_image="a/b:1")["program/job.json"])
    assert job["container"]["variables"].endswith(",HF_TOKEN_PATH")
