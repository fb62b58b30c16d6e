"""The runs' metrics: what each follows, what is kept over a restart, and the relation with a collector."""

import collections.abc
import dataclasses
import json
import pathlib
import re
import typing

import pytest
from harness import SOURCE, Trainer
from ops import testing

import fake_exporter
import metrics
import program
from fake_exporter import FakeExporter
from slurm_ddp import exporter
from slurm_ddp.interfaces import cos_agent
from slurm_ddp.run import CommandError

UNIT = "trainer/0"
SETTINGS: dict[str, typing.Any] = {"unit": UNIT, "user": "ubuntu", "config": {"workspace": "/mnt/shared"}}
Json = dict[str, typing.Any]


def run(name: str = "owt", user: str = "ann", **changed: object) -> Json:
    record: Json = {
        "run": name,
        "user": user,
        "state": "running",
        "requeues": 0,
        "restarts": 0,
        "failures": {},
        "is_shown": True,
        "values": {"step": 10, "loss": 3.5},
        "events": [],
        "log": ["40.out", 100],
    }
    return record | changed


@dataclasses.dataclass
class FakeProgram:
    """The program ddp, which reports these runs."""

    runs: list[Json] = dataclasses.field(default_factory=list[Json])
    gpus: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    doctor: Json | None = None
    error: str = ""
    seen: Json = dataclasses.field(default_factory=dict[str, typing.Any])  # of the last request

    def ask(
        self, user: str, request: Json, log: collections.abc.Callable[[str], None], *, timeout_s: float
    ) -> program.Answer:
        self.seen = request.pop("seen")
        assert (user, request) == ("ubuntu", {"do": "metrics", "config": SETTINGS["config"], "unit": UNIT})
        assert 0 < timeout_s < 60
        if self.error:
            return program.Answer({}, self.error)
        return program.Answer({"runs": self.runs, "gpus": self.gpus, "doctor": self.doctor})


@pytest.fixture
def ddp(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> FakeProgram:
    double = FakeProgram()
    monkeypatch.setattr(program, "ask", double.ask)
    monkeypatch.setattr(exporter, "LOGS", tmp_path / "log")
    return double


@pytest.fixture
def totals(tmp_path: pathlib.Path) -> metrics.Totals:
    return metrics.Totals(tmp_path / "kept")


def read(totals: metrics.Totals) -> dict[str, float]:
    """Read the samples by name and label values."""
    found: dict[str, float] = {}
    for metric in metrics.read(SETTINGS, totals):
        for sample in metric.samples:
            labels = ",".join(sample.labels.values())
            found[sample.name.removeprefix("slurm_ddp_") + (f"[{labels}]" if labels else "")] = sample.value
    return found


def test_a_workspace_without_runs_has_every_counter_at_zero(ddp: FakeProgram, totals: metrics.Totals):
    states = ("pending", "running", "requeued", "completed", "failed", "cancelled")
    reasons = ("mistake", "program", "node", "filesystem", "network")
    assert read(totals) == {f"runs[{state}]": 0 for state in states} | {
        f"run_failures_total[{reason}]": 0 for reason in reasons
    }


def test_each_figure_of_a_run_follows_it(ddp: FakeProgram, totals: metrics.Totals):
    values = {
        "step": 10,
        "max_steps": 200,
        "loss": 3.5,
        "tokens_per_second": 1e6,
        "mfu_ratio": 0.4,
        "progress_timestamp_seconds": 5000.5,
        "checkpoint_timestamp_seconds": 4000,
        "checkpoint_stall_seconds": 0.5,
    }
    ddp.runs = [run(values=values, requeues=2, restarts=1)]
    found = read(totals)
    assert {name: found[f"run_{name}[owt,ann]"] for name in values} == values
    assert (found["run_requeues_total[owt,ann]"], found["run_restarts_total[owt,ann]"]) == (2, 1)
    ddp.runs = [run(values=values | {"step": 11}, requeues=3)]
    found = read(totals)
    assert (found["run_step[owt,ann]"], found["run_requeues_total[owt,ann]"]) == (11, 3)


def test_runs_by_state(ddp: FakeProgram, totals: metrics.Totals):
    ddp.runs = [run("a"), run("b"), run("c", state="failed"), run("d", state=None), run("e", is_shown=False)]
    found = read(totals)
    assert (found["runs[running]"], found["runs[failed]"], found["runs[pending]"]) == (2, 1, 0)
    running = {name: value for name, value in found.items() if name.startswith("run_running")}
    assert running == {
        "run_running[a,ann]": 1,
        "run_running[b,ann]": 1,
        "run_running[c,ann]": 0,
        "run_running[d,ann]": 0,
    }
    assert not [name for name in found if "[e," in name]


def test_a_run_without_figures_has_none(ddp: FakeProgram, totals: metrics.Totals):
    ddp.runs = [run(values={}), run("other", values={"step": 1})]
    assert [name for name in read(totals) if name.startswith(("run_step", "run_loss"))] == ["run_step[other,ann]"]


def test_failures_only_grow_also_when_runs_are_removed(ddp: FakeProgram, totals: metrics.Totals):
    ddp.runs = [run("a", failures={"node": 2}), run("b", failures={"node": 1, "program": 1}, is_shown=False)]
    assert read(totals)["run_failures_total[node]"] == 3
    assert read(totals)["run_failures_total[node]"] == 3
    ddp.runs = [run("a", failures={"node": 3})]
    found = read(totals)
    assert (found["run_failures_total[node]"], found["run_failures_total[program]"]) == (4, 1)


def test_totals_survive_a_restart_of_the_service(ddp: FakeProgram, totals: metrics.Totals):
    ddp.runs = [run(failures={"node": 2})]
    read(totals)
    assert read(metrics.Totals(totals.path))["run_failures_total[node]"] == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"failures": 1'])
def test_totals_that_cannot_be_read_start_anew(ddp: FakeProgram, tmp_path: pathlib.Path, text: str):
    (tmp_path / "kept").write_text(text)
    ddp.runs = [run(failures={"node": 2})]
    assert read(metrics.Totals(tmp_path / "kept"))["run_failures_total[node]"] == 2


def test_gpus_are_counted_for_the_time_that_they_are_held(totals: metrics.Totals):
    totals.add([], {"ann": 8}, 1000.0)
    assert totals.gpu_seconds == {"ann": 0}, "nothing is known of the time before the first look"
    totals.add([], {"ann": 8, "bob": 1}, 1060.0)
    assert totals.gpu_seconds == {"ann": 480, "bob": 60}
    totals.add([], {}, 1120.0)
    assert totals.gpu_seconds == {"ann": 480, "bob": 60}
    totals.add([], {"bob": 1}, 99999.0)
    assert totals.gpu_seconds == {"ann": 480, "bob": 360}, "a long gap is no proof that they were held in it"
    totals.add([], {"bob": 1}, 1.0)
    assert totals.gpu_seconds["bob"] == 360, "the clock was set back"


def test_gpu_seconds_are_shown(ddp: FakeProgram, totals: metrics.Totals):
    totals.gpu_seconds = {"ann": 480.0}
    assert read(totals)["gpu_seconds_total[ann]"] == 480


def test_doctors_last_findings(ddp: FakeProgram, totals: metrics.Totals):
    ddp.doctor = {"time": 5000.0, "error": 1}
    found = read(totals)
    assert (found["doctor_findings[error]"], found["doctor_findings[warning]"]) == (1, 0)
    assert found["doctor_timestamp_seconds"] == 5000


def event(kind: str = "CKPT", rank: str | None = "0", words: str = "step=9") -> Json:
    return {"event": kind, "rank": rank, "words": words}


def test_events_go_to_the_log_as_logfmt(ddp: FakeProgram, totals: metrics.Totals):
    words = 'cannot open "x\\y" run=other'
    ddp.runs = [
        run(events=[event(), event("FATAL", "3", words), event("RESTART", None, "1 of 3")]),
        run("old", events=[event()], is_shown=False),
    ]
    read(totals)
    path = exporter.log(UNIT)
    assert path.name == "trainer-0.log"
    times, lines = zip(*(line.split(" ", 1) for line in path.read_text().splitlines()), strict=True)
    assert all(re.fullmatch(r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", one) for one in times)
    assert lines == (
        'run="owt" user="ann" job_id="40" rank="0" event="CKPT" msg="step=9"',
        f'run="owt" user="ann" job_id="40" rank="3" event="FATAL" msg={json.dumps(words)}',
        'run="owt" user="ann" job_id="40" event="RESTART" msg="1 of 3"',
    )
    assert path.parent.stat().st_mode & 0o7777 == 0o750


def test_how_far_logs_were_read_is_kept_over_a_restart(ddp: FakeProgram, totals: metrics.Totals):
    ddp.runs = [run()]
    read(totals)
    assert ddp.seen == {}
    read(metrics.Totals(totals.path))
    assert ddp.seen == {"ann/owt": ["40.out", 100]}
    ddp.runs = []
    read(totals)
    read(totals)
    assert ddp.seen == {}, "of a run that was removed nothing is kept"


def test_the_log_of_events_is_bounded(ddp: FakeProgram, totals: metrics.Totals, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics, "_LOG_BYTES", 1000)
    ddp.runs = [run(events=[event()] * 40)]
    read(totals)
    files = sorted(exporter.log(UNIT).parent.iterdir())
    assert [path.name for path in files] == ["trainer-0.log", "trainer-0.log.1"]
    assert sum(path.stat().st_size for path in files) <= 2000


def test_a_log_that_cannot_be_written_costs_no_metric(ddp: FakeProgram, totals: metrics.Totals):
    exporter.LOGS.write_text("")
    ddp.runs = [run(events=[event()])]
    assert read(totals)["run_step[owt,ann]"] == 10


def test_a_program_that_fails_is_a_failure(ddp: FakeProgram, totals: metrics.Totals):
    ddp.error = "/mnt/shared gave no answer within 15 s"
    with pytest.raises(program.ProgramError, match="gave no answer"):
        read(totals)


def test_the_service_keeps_its_totals_beside_its_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    monkeypatch.setattr(exporter, "STATE", tmp_path)
    (source,) = metrics.sources(SETTINGS)
    assert source.name == "workspace"
    assert exporter.memory(UNIT) == tmp_path / "trainer-0.kept"


# --- the relation -----------------------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> FakeExporter:
    return fake_exporter.install(monkeypatch, SOURCE)


COLLECTOR = fake_exporter.collector()


def happen(trainer: Trainer, name: str, endpoint: str = "") -> testing.State:
    """Run an event of a unit with a collector; that of the relation at `endpoint`, if it is given."""
    ctx, state = trainer._context(), trainer.state()
    state = dataclasses.replace(state, relations={*state.relations, COLLECTOR})
    related = [relation for relation in state.relations if relation.endpoint == endpoint]
    return ctx.run(getattr(ctx.on, name)(*related), state)


def test_a_collector_gets_the_job(trainer: Trainer, served: FakeExporter):
    for out in (happen(trainer, "config_changed"), happen(trainer, "relation_joined", cos_agent.ENDPOINT)):
        (job,) = json.loads(out.get_relation(900).local_unit_data["config"])["metrics_scrape_jobs"]
        assert job["job_name"] == "trainer_runs"
        assert job["static_configs"][0]["targets"] == ["localhost:9701"]
    settings = served.serving[UNIT]
    assert settings["user"] == trainer.config["submit-user"]
    assert settings["config"]["workspace"] == str(trainer.workspace)
    assert settings["unit"] == UNIT


def test_the_service_goes_with_the_relation_and_with_the_unit(trainer: Trainer, served: FakeExporter):
    for name, endpoint in (("relation_broken", cos_agent.ENDPOINT), ("relation_broken", "juju-info"), ("remove", "")):
        happen(trainer, "config_changed")
        assert served.serving
        happen(trainer, name, endpoint)
        assert served.serving == {}


def test_without_a_collector_the_status_is_the_same(trainer: Trainer, served: FakeExporter):
    alone = trainer.event("config_changed").unit_status
    assert served.serving == {}
    assert happen(trainer, "config_changed").unit_status == alone


def test_a_wrong_option_publishes_nothing(trainer: Trainer, served: FakeExporter):
    trainer.config["submit-user"] = "no such account"
    out = happen(trainer, "config_changed")
    assert served.serving == {}
    assert "config" not in out.get_relation(900).local_unit_data
    assert isinstance(out.unit_status, testing.BlockedStatus)


def test_an_exporter_that_does_not_start_fails_no_hook(trainer: Trainer, served: FakeExporter):
    served.error = CommandError("systemctl exited 1")
    assert "config" not in happen(trainer, "config_changed").get_relation(900).local_unit_data
