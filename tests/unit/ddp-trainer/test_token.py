"""The Hugging Face token: which jobs get it, for how long, and that it never leaks."""

import base64
import json
import os
import pathlib
import stat
import urllib.parse

import pytest
from cluster import Cluster
from harness import Trainer
from ops import testing

from ddp.node import spec

TOKEN = "hf_%2F+Zsecret=/~0123456789abcdef"
FORMS = (
    TOKEN,
    urllib.parse.quote(TOKEN, safe=""),
    *(base64.b64encode(b" " * shift + TOKEN.encode()).decode()[4:-6] for shift in range(3)),
)
AGAIN = "juju update-secret NAME token=hf_..."
ID = testing.Secret({"token": TOKEN}).id
SUBMISSIONS = pytest.mark.parametrize(
    ("action", "params"),
    [("submit-ddp", {"run": "first"}), ("submit-sweep", {"name": "first", "grid": "lr=0.1,0.2"})],
)


def grant(trainer: Trainer, content: dict[str, str] | None) -> None:
    """Set the option to a secret of this content; None: one that is not granted."""
    trainer.config["hf-token"] = ID
    trainer.secrets = [] if content is None else [testing.Secret(content, id=ID)]


@pytest.fixture
def cloud(ready: Trainer) -> Trainer:
    """A trainer with a token."""
    grant(ready, {"token": TOKEN})
    return ready


@pytest.fixture
def running(cloud: Trainer, cluster: Cluster) -> Trainer:
    """A trainer whose run `first` has a token."""
    cluster.states = [("RUNNING", 0)]
    cloud.run("submit-ddp", workload="smoke", run="first")
    assert files(cloud) == {"first.hf-token": f"{TOKEN}\n"}
    return cloud


def folder(trainer: Trainer) -> pathlib.Path:
    return trainer.workspace / ".secrets" / "trainer-0"


def files(trainer: Trainer) -> dict[str, str]:
    """Return the content of the files with a token, by name."""
    return {path.name: path.read_text() for path in sorted(folder(trainer).glob("*"))}


def shown(trainer: Trainer, cluster: Cluster) -> list[str]:
    """List the forms of the token that an operator or another account can see, scripts included."""
    seen = [*trainer.results.values(), *trainer.log, *(" ".join(call) for call in cluster.calls)]
    seen += [line.message for line in trainer.context.juju_log]
    seen += [str(path) for path in trainer.workspace.rglob("*")]
    for path in trainer.workspace.rglob("*"):
        if path.is_file() and ".secrets" not in path.parts:
            seen.append(path.read_bytes().decode("latin-1"))
    return [form for form in (*FORMS, "HF_TOKEN_PATH") if form in "\n".join(seen)]


@SUBMISSIONS
@pytest.mark.parametrize("dry", [True, False])
def test_a_job_finds_the_token_in_a_file_and_nothing_else_holds_it(
    cloud: Trainer, cluster: Cluster, action: str, params: dict[str, str], dry: bool
):
    cluster.states = [("RUNNING", 0)]
    cloud.run(action, workload="smoke", dry_run=dry, **params)
    assert shown(cloud, cluster) == ["HF_TOKEN_PATH"]
    assert ("first.hf-token" in files(cloud)) is not dry
    if not dry:
        path = folder(cloud) / "first.hf-token"
        job = cluster.jobs[-1].training()
        assert (("HF_TOKEN_PATH", str(path)) in job.variables, job.token_path) == (True, str(path))
        assert [stat.S_IMODE(one.stat().st_mode) for one in (path, *path.parents[:2])] == [
            0o600,
            0o700,
            0o700,
        ]
        cloud.event("update_status")
        assert shown(cloud, cluster) == ["HF_TOKEN_PATH"]


@SUBMISSIONS
def test_a_variable_of_env_file_is_in_a_file_and_nothing_else_holds_it(
    cloud: Trainer, cluster: Cluster, action: str, params: dict[str, str]
):
    cloud.config.pop("hf-token")
    cluster.states = [("RUNNING", 0)]
    path = cloud.workspace / "mine.env"
    path.write_text(f"WANDB_API_KEY={TOKEN}\n")
    asked = {"workload": "smoke", "env_file": str(path), **params}
    assert (
        cloud.fails(action, **asked)
        == f"env-file: {path} can be read by others; type: chmod 600 {path}"
    )
    path.chmod(0o600)
    cloud.run(action, **asked)
    cloud.event("update_status")
    path.unlink()
    assert shown(cloud, cluster) == []
    assert [json.loads(text) for text in files(cloud).values()] == [{"WANDB_API_KEY": TOKEN}]
    (kept,) = folder(cloud).glob("*.env")
    assert (stat.S_IMODE(kept.stat().st_mode), cluster.jobs[-1].training().secrets_path) == (
        0o600,
        str(kept),
    )


def test_the_search_would_find_it(running: Trainer, cluster: Cluster):
    for given in (
        TOKEN,
        urllib.parse.quote(TOKEN, safe=""),
        base64.b64encode(f"a{TOKEN}".encode()).decode(),
    ):
        (running.workspace / "runs" / "first" / "note").write_text(f"x{given}x")
        assert shown(running, cluster) != ["HF_TOKEN_PATH"]


def test_without_the_option_there_is_none(cloud: Trainer, cluster: Cluster):
    cloud.config.pop("hf-token")
    cloud.run("submit-ddp", workload="smoke")
    assert "HF_TOKEN" not in spec.dump(cluster.jobs[-1].asked())
    assert files(cloud) == {}


def test_a_file_of_the_users_own_goes_before(cloud: Trainer, cluster: Cluster):
    cloud.run("submit-ddp", workload="smoke", env="HF_TOKEN_PATH=/mnt/shared/mine")
    job = cluster.jobs[-1].training()
    assert [value for name, value in job.variables if name == "HF_TOKEN_PATH"] == [
        "/mnt/shared/mine"
    ]
    assert job.token_path == ""
    assert files(cloud) == {}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "juju grant-secret NAME trainer: the secret does not exist or is not granted"),
        ({"key": TOKEN}, f"{AGAIN}: the secret has no key token"),
        *(
            ({"token": TOKEN + more}, f"{AGAIN}: the secret's token has blanks or is not ASCII")
            for more in ("\n", " x", "\u00e9")
        ),
        ({"token": TOKEN * 200}, f"{AGAIN}: the secret's token has 6600 characters, at most 4096"),
    ],
)
def test_a_secret_that_cannot_be_says_why_in_one_line(
    cloud: Trainer, content: dict[str, str] | None, why: str
):
    grant(cloud, content)
    status = cloud.event("update_status").unit_status
    assert (status.name, status.message.isprintable(), TOKEN in status.message) == (
        "blocked",
        True,
        False,
    )
    assert status.message.startswith(f"fix config: hf-token: {why}")
    assert cloud.fails("submit-ddp") == status.message


def test_jobs_take_a_new_token_and_lose_one_that_is_taken_back(running: Trainer):
    grant(running, {"token": "hf_new"})
    running.event("secret_changed")
    assert files(running) == {"first.hf-token": "hf_new\n"}
    assert stat.S_IMODE((folder(running) / "first.hf-token").stat().st_mode) == 0o600
    running.config.pop("hf-token")
    running.event("update_status")
    assert files(running) == {}


def test_cancelling_and_waiting_end_with_the_file_gone(running: Trainer, cluster: Cluster):
    running.run("cancel-run", run="40")
    assert files(running) == {}
    cluster.states = [("RUNNING", 0), ("FAILED", 256)]
    running.fails("submit-ddp", workload="smoke", run="second", wait=True)
    assert files(running) == {}


@SUBMISSIONS
def test_a_job_that_slurm_refuses_leaves_no_file(
    cloud: Trainer, cluster: Cluster, action: str, params: dict[str, str]
):
    cluster.submit_refusal = "sbatch: error: no"
    cloud.fails(action, workload="smoke", **params)
    assert files(cloud) == {}
    assert not list((cloud.workspace / "runs").iterdir())


def test_another_units_files_are_left_alone(running: Trainer):
    other = running.workspace / ".secrets" / "other-0"
    other.mkdir(mode=0o700)
    (other / "theirs.hf-token").write_text("hf_theirs\n")
    os.utime(other / "theirs.hf-token", (1, 1))
    grant(running, {"token": "hf_new"})
    running.event("update_status")
    running.event("remove")
    assert files(running) == {}, "a unit that goes takes its own with it"
    assert (other / "theirs.hf-token").read_text() == "hf_theirs\n"


@pytest.mark.parametrize("is_granted", [True, False])
@pytest.mark.parametrize(
    ("event", "principal"),
    [
        ("stop", "sackd/0"),
        ("remove", "sackd/0"),
        ("relation_broken", "sackd/0"),
        ("relation_broken", ""),
    ],
)
def test_the_files_go_with_whichever_of_the_last_hooks_comes(
    running: Trainer, monkeypatch: pytest.MonkeyPatch, event: str, principal: str, is_granted: bool
):
    """Juju 4.0.15 deletes a unit after relation-broken.

    It then cannot read secrets or set a status.
    """
    running.secrets = running.secrets if is_granted else []
    monkeypatch.setenv("JUJU_PRINCIPAL_UNIT", principal)
    assert running.event(event).unit_status == testing.UnknownStatus()
    assert (files(running), running.context.unit_status_history) == ({}, [])


@pytest.mark.parametrize("kind", ["created", "joined", "changed", "departed", "broken"])
def test_another_principals_relation_changes_nothing(
    running: Trainer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, kind: str
):
    """Juju 4 sends a subordinate events of another machine's principal, in container scope, too."""
    before = running.event("update_status").unit_status
    held = running.files()
    calls = len(cluster.calls)
    monkeypatch.setenv("JUJU_PRINCIPAL_UNIT", "login/0")
    status = running.event(f"relation_{kind}").unit_status
    assert status in (before, testing.UnknownStatus())  # which it was before the event
    assert (list(files(running)), running.files()) == (["first.hf-token"], held)
    assert {call[0] for call in cluster.calls[calls:]} <= {"scontrol", "squeue", "sinfo"}
