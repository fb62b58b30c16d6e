"""notebook: the job, what opens it, and that its token is shown nowhere."""

import json
import typing

import pytest
from cluster import Cluster, Job
from harness import Trainer

from ddp.actions import verbs
from ddp.options import fields
from ddp.problem import Problem
from ddp.settings import Settings

ABOUT: dict[str, object] = {"node": "slurmd-1", "address": "10.77.0.11", "port": 24861}


def notebook(settings: Settings, **given: object) -> dict[str, str]:
    verb = verbs.ALL["notebook"]
    options = {name.replace("_", "-"): value for name, value in given.items()}
    found = verb.do_when_ready(settings, fields.parse(verb.options, options), print)
    return typing.cast(dict[str, str], found)


@pytest.fixture
def serving(cluster: Cluster) -> Cluster:
    """Let each job serve as soon as it is submitted."""

    def serve(job: Job) -> None:
        folder = job.script.parent
        (folder / "url").write_text("http://localhost:24861/lab?token=hush\n")
        (folder / "control" / "notebook.json").write_text(json.dumps(ABOUT))

    cluster.submitted = serve
    cluster.states = [("RUNNING", 0)]
    return cluster


def test_it_returns_the_line_that_opens_it_and_no_token(
    settings: Settings, ready: Trainer, serving: Cluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.7 50000 198.51.100.4 2222")
    shown = notebook(settings)
    place = settings.workspace.runs / "notebook"
    user = settings.workspace.user
    assert shown["on-your-laptop"] == (
        f"ssh -L 24861:10.77.0.11:24861 -p 2222 {user}@198.51.100.4 cat {place}/url -"
    )
    assert "hush" not in json.dumps(shown)
    job = serving.job(int(shown["job-id"]))
    assert "exec /usr/bin/python3 -I -S -B" in job.text
    assert job.text.rstrip().endswith(f"notebook {place}/program/job.json")
    assert "#SBATCH --no-requeue" in job.text
    spec = json.loads((place / "program" / "job.json").read_text())
    assert spec["jupyter"]["layers"][0] == spec["environment"]["layers"][0]


def test_without_ssh_the_line_has_this_hosts_address_in_the_cluster(
    settings: Settings, ready: Trainer, serving: Cluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setitem(ABOUT, "address", "127.0.0.1")
    line = notebook(settings)["on-your-laptop"]
    assert line.startswith(f"ssh -L 24861:127.0.0.1:24861 {settings.workspace.user}@127.0.0.1 cat ")


def test_typed_again_it_shows_the_notebook_that_is_there(
    settings: Settings, ready: Trainer, serving: Cluster
):
    first = notebook(settings)
    assert notebook(settings) == first
    assert len(serving.jobs) == 1
    assert notebook(settings, run="second")["job-id"] != first["job-id"]


def test_if_its_job_ends_the_reason_of_the_log_is_shown(
    settings: Settings, ready: Trainer, cluster: Cluster
):
    def end(job: Job) -> None:
        log = job.script.parent / "logs" / f"{job.job_id}.out"
        log.write_text("[FATAL] slurmd-1: no port of 10.77.0.11 is free\n")

    cluster.submitted = end
    cluster.states = [("FAILED", 1 << 8)]
    with pytest.raises(Problem) as caught:
        notebook(settings)
    text = "the notebook's job 40 has ended: slurmd-1: no port of 10.77.0.11 is free"
    assert str(caught.value) == f"{text}; ddp log notebook"


def test_a_run_of_that_name_is_left_alone(settings: Settings, ready: Trainer, cluster: Cluster):
    ready.run("submit-ddp", workload="smoke", run="night")
    with pytest.raises(Problem, match="run: night exists and is not a notebook"):
        notebook(settings, run="night")
