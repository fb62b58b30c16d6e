"""Odd answers, refusals and delays of Slurm at a submission; and a run submitted again."""

import collections.abc
import datetime
import errno
import itertools
import json
import os
import pathlib
import shutil
import typing
import unittest.mock

import pytest
from cluster import Cluster, Job
from hypothesis import example, given
from hypothesis import strategies as st
from pip_double import Pip

from ddp.actions import verbs
from ddp.host import files
from ddp.options import fields
from ddp.problem import Problem
from ddp.results.result import texts_of
from ddp.run import catalog, folder
from ddp.settings import Settings
from ddp.slurm import jobs, submissions
from slurm_ddp.commands import Completed

REFUSAL = "sbatch: error: Batch job submission failed: QOSMaxSubmitJobPerUserLimit"


@pytest.fixture(autouse=True)
def outside_of_git(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))


def do(settings: Settings, action: str, **given: object) -> dict[str, str]:
    verb = verbs.ACTIONS[action]
    with settings.workspace.claims:
        return texts_of(verb.do(settings, fields.parse(verb.options, given), lambda _: None) or {})


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_script_s_run(settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path):
    (tmp_path / "project").mkdir()
    script = tmp_path / "project" / "train.py"
    script.write_text("print(1)\n")
    cluster.states = [("COMPLETED", 0)]
    do(settings, "submit-ddp", workload=str(script), run="night", nodes=1)
    before = contents(settings.workspace.runs / "night")
    assert json.loads(before["job.json"])["job_id"] == 40
    script.write_text("print(2)\n")
    cluster.submit_refusal = REFUSAL
    with pytest.raises(Problem, match="QOSMaxSubmitJobPerUserLimit"):
        do(settings, "submit-ddp", workload=str(script), run="night", nodes=2, args="--lr 1")
    assert contents(settings.workspace.runs / "night") == before
    cluster.submit_refusal = ""
    do(settings, "submit-ddp", workload=str(script), run="night", nodes=2, args="--lr 1")
    after = json.loads((settings.workspace.runs / "night" / "job.json").read_text())
    assert (after["job_id"], after["code"]["folder"]) == (41, "code")


def record(settings: Settings, run: str = "first") -> dict[str, typing.Any]:
    return json.loads((settings.workspace.runs / run / "job.json").read_text())


def fill(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, cluster: Cluster, number: int
) -> None:
    """Let every write fail with this error once sbatch has answered."""

    def full(*_: object, **__: object) -> typing.NoReturn:
        raise OSError(number, os.strerror(number), str(settings.workspace.runs))

    cluster.submitted = lambda _: monkeypatch.setattr(folder, "replace", full)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOTCONN], ids=["disk full", "mount lost"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_job_that_slurm_accepted_before_a_write_failed_is_found(
    settings: Settings,
    cluster: Cluster,
    pip: Pip,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    *,
    is_there: bool,
):
    (settings.workspace.datasets / "python-stdlib").mkdir()
    (settings.workspace.datasets / "python-stdlib" / "dataset.json").write_text("{}")
    if is_there:
        cluster.states = [("COMPLETED", 0)]
        do(settings, "submit-ddp", workload="gpt", run="first", nodes=1)
    cluster.states = [("RUNNING", 0)]
    with monkeypatch.context() as patch:
        fill(settings, patch, cluster, number)
        assert do(settings, "submit-ddp", workload="gpt", run="first", nodes=1)["job-id"] == str(
            40 + is_there
        )
    written = record(settings)
    assert (written["job_id"], cluster.jobs[-1].comment) == (None, written["submission"])
    assert ("previous" in written) == is_there
    with pytest.raises(Problem, match=r"run: first is active as job 4\d"):
        do(settings, "submit-ddp", workload="gpt", run="first", nodes=1)
    assert len(cluster.jobs) == 1 + is_there, "it is not submitted a second time"
    cluster.jobs[-1].states = [("FAILED", 256)]
    run = catalog.load(settings.workspace, ["first"])[0][0]
    assert (run.job_id, run.state) == (40 + is_there, "FAILED")
    assert record(settings)["job_id"] == 40 + is_there, "the later look completes it"
    assert "previous" not in record(settings)


LOST = (  # slurm_errno.c, errno.h
    "Socket timed out on send/recv",
    "Zero Bytes were transmitted or received",
    "Connection reset by peer",
    "Transport endpoint is not connected",
    "Communication connection failure",
)


@pytest.mark.parametrize(
    ("verb", "params", "name"),
    [
        ("submit-ddp", {"workload": "smoke", "run": "first"}, "first"),
        ("submit-sweep", {"workload": "smoke", "grid": "lr=1,2", "name": "first"}, "first"),
        ("prepare-dataset", {"wait": False}, "prepare-python-stdlib"),
    ],
)
@pytest.mark.parametrize("answer", ["banner", "digits", "noise", "replaced", *LOST])
def test_whatever_sbatch_answers_an_accepted_job_is_known(
    settings: Settings,
    cluster: Cluster,
    pip: Pip,
    verb: str,
    params: dict[str, object],
    name: str,
    answer: str,
):
    answers = {
        "banner": lambda job: Completed(0, f"Welcome to the cluster\n{job.job_id};west\nbye\n", ""),
        "digits": lambda job: Completed(0, f"2026\n{job.job_id}\n", ""),
        "replaced": lambda job: (
            setattr(job, "comment", "the site's own") or Completed(0, "Welcome\n", "")
        ),
        "noise": lambda job: Completed(0, "Welcome to the cluster\n", ""),
    }
    lost = Completed(1, "", f"sbatch: error: Batch job submission failed: {answer}")
    cluster.answers = answers.get(answer, lambda _: lost)
    assert do(settings, verb, **params)["job-id"] == "40"
    assert record(settings, name)["job_id"] == 40


def test_a_submission_that_nobody_can_confirm_keeps_its_folder(
    settings: Settings, cluster: Cluster, pip: Pip
):
    def vanish(_: Job) -> Completed:
        cluster.silent = 1
        return Completed(
            1,
            "",
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        )

    cluster.answers = vanish
    with pytest.raises(Problem, match="Slurm may have accepted the job; ddp list"):
        do(settings, "submit-ddp", workload="smoke", run="first")
    assert record(settings)["job_id"] is None
    assert catalog.load(settings.workspace, ["first"])[0][0].job_id == 40


def test_an_intent_that_came_to_nothing_gives_way_to_the_former_record(
    settings: Settings, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    path = settings.workspace.runs / "first"
    path.mkdir()
    (path / "control").mkdir()
    (path / "control" / "7.r0.outcome").write_text('{"outcome": "done"}')
    before = {"job_id": 7, "kind": "gpt"}
    folder.write_record(
        path, {"job_id": None, "kind": "gpt", "submission": "ddp:x", "previous": before}
    )
    assert catalog.load(settings.workspace, ["first"])[0][0].job_id is None, (
        "a submission may be under way"
    )
    monkeypatch.setattr(folder, "_SUBMISSION_S", -1.0)
    assert (catalog.load(settings.workspace, ["first"])[0][0].state, record(settings)) == (
        "COMPLETED",
        before,
    )
    folder.write_record(path, {"job_id": None, "kind": "gpt", "submission": "ddp:x"})
    catalog.load(settings.workspace, ["first"])[0][0]
    assert record(settings) == {"job_id": None, "kind": "gpt"}, "and nobody asks Slurm again"


@pytest.mark.parametrize("refused", ["parts.sbatch", "job.sbatch"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_preparation_by_an_array(
    settings: Settings, cluster: Cluster, pip: Pip, *, refused: str, is_there: bool
):
    raw = settings.workspace.path / "raw"
    raw.mkdir()
    (raw / "a.txt").write_text("x\n")
    run = settings.workspace.runs / "prepare-raw"
    cluster.states = [("COMPLETED", 0)]
    if is_there:
        do(settings, "prepare-dataset", source=str(raw), wait=False)
    before = contents(run) if is_there else {}

    def refuse(_: Job) -> None:
        cluster.submit_refusal = REFUSAL

    if refused == "parts.sbatch":
        cluster.submit_refusal = REFUSAL
    else:
        cluster.submitted = refuse  # the array is taken, and the job behind it is not
    with pytest.raises(Problem, match="QOSMaxSubmitJobPerUserLimit"):
        do(settings, "prepare-dataset", source=str(raw), elements=2, wait=False)
    assert contents(run) == before
    assert run.exists() == is_there


LINES = st.lists(
    st.text(st.characters(codec="utf-8")) | st.integers(1, 99).map(str), max_size=4
).map("\n".join)
AUKS = "Thu Nov 26 15:08:22 2026 [INFO4] auks_krb5_cred: kerberos context successfully initialized"


@given(
    before=LINES, after=LINES, job_id=st.integers(1, 2**32), cluster=st.sampled_from(["", ";west"])
)
@example(before=AUKS, after="", job_id=31, cluster="")
def test_the_id_is_found_among_any_lines_or_doubted(
    before: str, after: str, job_id: int, cluster: str
):
    answer = Completed(0, f"{before}\n{job_id}{cluster}\n{after}\n", "")
    with unittest.mock.patch.object(jobs, "run", lambda *_, **__: answer):
        try:
            assert submissions.submit("job.sbatch") == job_id
        except jobs.UncertainError:
            assert any(
                line.partition(";")[0].strip().isdecimal()
                for line in f"{before}\n{after}".splitlines()
            )


WAITS = "Slurm rejects the job: job 41 can never start:"


@pytest.mark.parametrize(
    ("state", "reason", "wanted"),
    [
        ("RUNNING", "Resources", ""),
        ("RUNNING", "AssocGrpGRES", "AssocGrpGRES"),
        ("RUNNING", "AssocMaxJobsLimit", "AssocMaxJobsLimit"),
        ("FAILED", "AssocMaxJobsLimit", "Slurm rejects"),
        ("FAILED", "QOSMaxJobsPerUserLimit", "qos: Slurm rejects"),
        ("RUNNING", "QOSMaxNodePerJobLimit", "nodes: Slurm rejects"),
        ("RUNNING", "PartitionNodeLimit", f"nodes: {WAITS} PartitionNodeLimit"),
        (
            "RUNNING",
            "PartitionConfig",
            f"account: {WAITS} partition slurmd does not take physics: AllowAccounts=chem;",
        ),
        ("RUNNING", "MaxMemPerLimit", "memory: Slurm rejects"),
        (
            "RUNNING",
            "Job's account not permitted to use this partition (p allows a not b)",
            "account: Slurm rejects",
        ),
    ],
)
def test_a_limit_is_reported_and_one_that_nothing_ends_is_refused(
    settings: Settings, cluster: Cluster, pip: Pip, state: str, reason: str, wanted: str
):
    cluster.states = [(state, 0)]  # of the user's other job
    do(settings, "submit-ddp", workload="smoke")
    cluster.states = [("PENDING", 0)]
    cluster.submitted = lambda job: setattr(job, "reason", reason)
    cluster.takes = f"AllowAccounts={'chem' if reason == 'PartitionConfig' else 'ALL'} AllowQos=ALL"
    try:
        answer = do(settings, "submit-ddp", workload="smoke", run="night").get("waits-for", "")
    except Problem as e:
        answer = str(e)
        assert cluster.job(41).cancelled
        assert not (settings.workspace.runs / "night").exists()
    assert answer.startswith(wanted)
    assert bool(answer) == bool(wanted)


class DyingMount:
    """Fail a folder's n-th change and all later ones, like a mount that lost its client."""

    def __init__(self, patch: pytest.MonkeyPatch, top: pathlib.Path, number: int) -> None:
        self.top, self.number, self.changes = top, number, itertools.count()
        self.is_dead = False
        for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "symlink_to"):
            patch.setattr(pathlib.Path, name, self._failing(getattr(pathlib.Path, name)))
        patch.setattr(files.tempfile, "mkstemp", self._failing(files.tempfile.mkstemp, "dir"))
        patch.setattr(shutil, "rmtree", self._failing(shutil.rmtree, "path"))

    def _failing(
        self, real: collections.abc.Callable[..., typing.Any], named: str = ""
    ) -> typing.Any:
        def change(*args: typing.Any, **given: typing.Any) -> typing.Any:
            place = given.get(named) if named in given else args[0]
            if pathlib.Path(str(place)).is_relative_to(self.top):
                self.is_dead = self.is_dead or next(self.changes) >= self.number
                if self.is_dead:
                    raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(place))
            return real(*args, **given)

        return change


@pytest.mark.parametrize("workload", ["script", "smoke"])
def test_a_run_that_a_dying_mount_left_unfinished_is_used_again(
    settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path, workload: str
):
    """After any last change that reached the filesystem, the same line starts a job."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("print(1)\n")
    program = str(tmp_path / "project" / "train.py") if workload == "script" else workload
    do(
        settings, "submit-ddp", workload=program, run="first", nodes=1
    )  # which makes the environment
    expected = sorted(contents(settings.workspace.runs / "first"))
    number = 0
    for number in itertools.accumulate(itertools.count(1), initial=0):
        run, num_jobs = f"night-{number}", len(cluster.jobs)
        with pytest.MonkeyPatch.context() as patch:
            mount = DyingMount(patch, settings.workspace.runs, number)
            try:
                do(settings, "submit-ddp", workload=program, run=run, nodes=1)
            except Problem as e:
                assert "Transport endpoint is not connected" in str(e)
        if len(cluster.jobs) > num_jobs:  # the job was submitted before the mount died
            break
        assert mount.is_dead
        do(settings, "submit-ddp", workload=program, run=run, nodes=1)
        left = sorted(
            name
            for name in contents(settings.workspace.runs / run)
            if not pathlib.Path(name).name.startswith(".")
        )
        assert left == expected, f"after {number} changes"
        assert record(settings, run)["job_id"] == cluster.jobs[-1].job_id
    assert number > 10, "the mount died early and late in a submission"


@pytest.mark.long
def test_a_sweep_that_a_dying_mount_left_unfinished_is_used_again(
    settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path
):
    do(settings, "submit-ddp", workload="smoke", run="first", nodes=1)
    number = 0
    for number in itertools.accumulate(itertools.count(1), initial=0):
        name, num_jobs = f"s{number}", len(cluster.jobs)
        with pytest.MonkeyPatch.context() as patch:
            DyingMount(patch, settings.workspace.runs, number)
            try:
                do(
                    settings,
                    "submit-sweep",
                    workload="smoke",
                    name=name,
                    grid="epochs=1,2",
                    nodes=1,
                )
            except Problem as e:
                assert "Transport endpoint is not connected" in str(e)
        if len(cluster.jobs) > num_jobs:
            break
        do(settings, "submit-sweep", workload="smoke", name=name, grid="epochs=1,2", nodes=1)
    assert number > 6


def test_a_run_whose_record_is_lost_goes_on_and_says_so(
    settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path
):
    cluster.states = [("COMPLETED", 0)]
    script = settings.workspace.path / "train.py"
    script.write_text("")
    given: dict[str, object] = {
        "workload": str(script),
        "snapshot": False,
        "run": "night",
        "nodes": 1,
    }
    do(settings, "submit-ddp", **given)
    run = settings.workspace.runs / "night"
    (run / "metrics.jsonl").write_text('{"kind": "step", "step": 7, "loss": 0.5}\n')
    (run / "job.json").write_text("[")
    shown = do(settings, "submit-ddp", **given, **{"dry-run": True})
    assert (
        "job.json of night is missing or damaged: it goes on with the options of this submission"
        in shown["checks"]
    )
    do(settings, "submit-ddp", **given)
    assert record(settings, "night")["job_id"] == 41
    for left, is_run in (("notes.txt", False), ("code", False), ("metrics.jsonl", True)):
        place = settings.workspace.runs / left.partition(".")[0]
        place.mkdir()
        (place / left).mkdir() if left == "code" else (place / left).write_text(
            '{"step": 1, "loss": 1}\n'
        )
        given["run"] = place.name
        if is_run:
            (place / "job.sbatch").touch()
            do(settings, "submit-ddp", **given)
            continue
        with pytest.raises(
            Problem, match=f"{place} exists and is not a script run; choose another name"
        ):
            do(settings, "submit-ddp", **given)


@pytest.mark.parametrize(
    ("start", "limit", "elapsed", "nodes", "is_kept"),
    [
        ({"days": 366}, "UNLIMITED", "0:07", "slurmd-0", False),
        ({"days": 364}, "UNLIMITED", "2-00:00:00", "slurmd-0", False),
        (
            {"days": 364},
            "UNLIMITED",
            "0:07",
            "slurmd-0",
            True,
        ),  # it would start before that job's end as Slurm has it
        ({"days": 366}, "UNLIMITED", "0:07", "slurmd-7", True),  # that job is on another node
        ({"days": 366}, "365-00:00:00", "0:07", "slurmd-0", True),
        ({"minutes": 5}, "UNLIMITED", "0:07", "slurmd-0", True),
        (
            {"days": 994_000},
            "UNLIMITED",
            "0:07",
            "slurmd-0",
            False,
        ),  # the year 4748, behind several
    ],
)
def test_a_dry_run_shows_no_start_that_slurm_only_makes_up(
    settings: Settings,
    cluster: Cluster,
    pip: Pip,
    monkeypatch: pytest.MonkeyPatch,
    start: dict[str, int],
    limit: str,
    elapsed: str,
    nodes: str,
    *,
    is_kept: bool,
):
    when = (datetime.datetime.now() + datetime.timedelta(**start)).isoformat(timespec="seconds")
    words = f"Job 3 to start at {when} using 2 processors on nodes slurmd-0 in partition slurmd"
    line = f"9|ann|RUNNING|0:0|0|1|slurmd|{elapsed}|{limit}|N/A|N/A|1|None|{nodes}|9|N/A|endless|\n"
    real = cluster.run

    def run(*argv: str, **given: typing.Any) -> Completed:
        if argv[1:] == ("--test-only",):
            return Completed(0, "", f"sbatch: {words}")
        if argv[:5] == ("/usr/bin/squeue", "-h", "-a", "-t", "all") and argv[5] == "-O":
            return Completed(0, line, "")
        return real(*argv, **given)

    monkeypatch.setattr(jobs, "run", run)
    verdict = do(settings, "submit-ddp", workload="smoke", nodes=1, **{"dry-run": True})["verdict"]
    behind = "at no known time, behind job 9 of ann, which has no time limit,"
    assert verdict == (words if is_kept else words.replace(f"at {when}", behind))


def test_the_url_that_a_run_notifies_is_in_one_private_file(
    settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path
):
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print(1)\n")
    url = "https://hooks.slack.com/services/T0/SECRET"
    (project / "hook").write_text(f"{url}\n")
    (project / "hook").chmod(0o644)
    given = {"workload": str(project / "train.py"), "run": "night", "nodes": 1}
    given["notify"] = str(project / "hook")
    with pytest.raises(Problem, match=r"notify: .*hook can be read by others; type: chmod 600"):
        do(settings, "submit-ddp", **given)
    (project / "hook").chmod(0o600)
    do(settings, "submit-ddp", **given)
    run = settings.workspace.runs / "night"
    assert b"SECRET" not in b"".join(contents(run).values())
    kept = json.loads((run / "program" / "job.json").read_text())["notify_path"]
    assert pathlib.Path(kept).read_text() == f"{url}\n"
    assert pathlib.Path(kept).stat().st_mode & 0o777 == 0o600
    assert not (run / "code" / "hook").exists()
    cluster.states = [("COMPLETED", 0)]
    do(settings, "submit-ddp", **given | {"run": "dawn", "notify": url, "wait": True})
    assert not pathlib.Path(kept).with_name("dawn.notify").exists(), "the run has ended"


@pytest.mark.parametrize("url", ["hooks.slack.com/SECRET", "ftp://x/SECRET", "http://x/SECRET \n"])
def test_a_url_that_is_none_is_refused_without_showing_it(settings: Settings, url: str):
    with pytest.raises(Problem) as refused:
        do(settings, "submit-ddp", workload="smoke", notify=url)
    assert "SECRET" not in str(refused.value)
    assert str(refused.value).startswith("notify: is not an http(s) URL; give one")
