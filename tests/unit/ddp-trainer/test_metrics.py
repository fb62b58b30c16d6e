"""The runs' metrics: their sources, the state kept over a restart, and the collector's relation."""

import collections.abc
import dataclasses
import json
import pathlib
import typing

import pytest
from harness import SOURCE, Trainer
from ops import testing

import fake_exporter
import metrics
import program
from fake_exporter import FakeExporter
from slurm_ddp.interfaces import cos_agent

UNIT = "trainer/0"
SETTINGS: dict[str, typing.Any] = {
    "unit": UNIT,
    "user": "ubuntu",
    "config": {"workspace": "/mnt/shared"},
}
COLLECTOR = fake_exporter.collector()
Json = dict[str, typing.Any]


def run(name: str = "owt", **changed: object) -> Json:
    record: Json = {
        "run": name,
        "user": "ann",
        "state": "running",
        "requeues": 0,
        "restarts": 0,
        "failures": {},
    }
    return record | {"is_shown": True, "values": {"step": 10}, "slowest": [], "sites": {}} | changed


@dataclasses.dataclass
class FakeProgram:
    """The program ddp, which reports these runs; checks its requests."""

    runs: list[Json] = dataclasses.field(default_factory=list[Json])
    doctor: Json | None = None
    error: str = ""

    def ask(
        self,
        user: str,
        request: Json,
        log: collections.abc.Callable[[str], None],
        *,
        timeout_s: float,
    ) -> program.Answer:
        assert (user, request) == (
            "ubuntu",
            {"do": "metrics", "config": SETTINGS["config"], "unit": UNIT},
        )
        assert 0 < timeout_s < 60
        return program.Answer({"runs": self.runs, "gpus": {}, "doctor": self.doctor}, self.error)


@pytest.fixture
def ddp(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> FakeProgram:
    double = FakeProgram()
    monkeypatch.setattr(program, "ask", double.ask)
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
            found[sample.name.removeprefix("slurm_ddp_") + (f"[{labels}]" if labels else "")] = (
                sample.value
            )
    return found


def test_a_workspace_without_runs_has_every_counter_at_zero(
    ddp: FakeProgram, totals: metrics.Totals
):
    states = ("pending", "running", "requeued", "completed", "failed", "cancelled")
    reasons = ("program", "parameters", "node", "filesystem", "network", "unknown")
    assert read(totals) == {f"runs[{state}]": 0 for state in states} | {
        f"run_failures_total[{reason}]": 0 for reason in reasons
    }


def test_each_figure_of_a_run_follows_it(ddp: FakeProgram, totals: metrics.Totals):
    values = {name: float(number) for number, name in enumerate(metrics._VALUES)}
    states = {"b": "running", "c": "failed", "d": None}
    ddp.runs = [
        run(values=values, requeues=2, restarts=1),
        *(run(key, state=states[key], values={}) for key in states),
    ]
    ddp.runs += [run("e", is_shown=False), run("f", slowest=[3, "slurmd-1", 1.83])]
    ddp.runs.append(run("g", sites={"slurmd-0": 0, "slurmd-1": 1}))
    ddp.doctor = {"time": 5000.0, "error": 1}
    found = read(totals)
    assert {name: found[f"run_{name}[owt,ann]"] for name in values} == values
    assert (found["run_requeues_total[owt,ann]"], found["run_restarts_total[owt,ann]"]) == (2, 1)
    assert found["run_slowest_rank_ratio[f,ann,3,slurmd-1]"] == 1.83
    assert [found[f"run_site[g,ann,slurmd-{number}]"] for number in (0, 1)] == [0, 1]
    assert (found["runs[running]"], found["runs[failed]"], found["runs[pending]"]) == (4, 1, 0)
    assert [found[f"run_running[{name},ann]"] for name in ("owt", "b", "c", "d")] == [1, 1, 0, 0]
    assert not [name for name in found if "[e," in name or name == "run_step[b,ann]"]
    assert (found["doctor_findings[error]"], found["doctor_findings[warning]"]) == (1, 0)
    assert found["doctor_timestamp_seconds"] == 5000


def test_failures_only_grow_also_over_a_restart_and_when_runs_are_removed(
    ddp: FakeProgram, totals: metrics.Totals
):
    ddp.runs = [
        run("a", failures={"node": 2}),
        run("b", failures={"node": 1, "program": 1}, is_shown=False),
    ]
    for again in (totals, totals, metrics.Totals(totals.path)):
        assert read(again)["run_failures_total[node]"] == 3
    ddp.runs = [run("a", failures={"node": 3})]
    found = read(totals)
    assert (found["run_failures_total[node]"], found["run_failures_total[program]"]) == (4, 1)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"failures": 1'])
def test_totals_that_cannot_be_read_start_again(
    ddp: FakeProgram, tmp_path: pathlib.Path, text: str
):
    (tmp_path / "kept").write_text(text)
    ddp.runs = [run(failures={"node": 2})]
    assert read(metrics.Totals(tmp_path / "kept"))["run_failures_total[node]"] == 2


def test_gpus_are_counted_for_the_time_that_they_are_held(ddp: FakeProgram, totals: metrics.Totals):
    looks: list[tuple[dict[str, int], float]] = [
        ({"ann": 8}, 1000),
        ({"ann": 8, "bob": 1}, 1060),
        ({}, 1120),
    ]
    for held, now in looks:  # nothing is known of the time before the first look
        totals.add([], held, now)
    assert totals.gpu_seconds == {"ann": 480, "bob": 60}
    totals.add([], {"bob": 1}, 99999.0)  # a long gap does not prove that they were held throughout
    totals.add([], {"bob": 1}, 1.0)  # the clock was set back
    assert read(totals)["gpu_seconds_total[bob]"] == 360


def test_a_program_that_fails_is_a_failure(ddp: FakeProgram, totals: metrics.Totals):
    ddp.runs = [run()]
    assert read(totals)["run_step[owt,ann]"] == 10
    ddp.error = "/mnt/shared gave no answer within 15 s"
    with pytest.raises(program.ProgramError, match="gave no answer"):
        read(totals)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> FakeExporter:
    return fake_exporter.install(monkeypatch, SOURCE)


def happen(trainer: Trainer, name: str, endpoint: str = "") -> testing.State:
    """Run an event of a unit with a collector; with `endpoint`, that relation's event."""
    ctx, state = trainer.new_context(), trainer.state()
    state = dataclasses.replace(state, relations={*state.relations, COLLECTOR})
    related = [relation for relation in state.relations if relation.endpoint == endpoint]
    return ctx.run(getattr(ctx.on, name)(*related), state)


def test_the_service_comes_with_a_collector_and_goes_with_it_and_with_the_unit(
    trainer: Trainer, served: FakeExporter
):
    for name, endpoint in (
        ("relation_broken", cos_agent.ENDPOINT),
        ("relation_broken", "juju-info"),
        ("remove", ""),
    ):
        out = happen(trainer, "config_changed")
        (job,) = json.loads(out.get_relation(900).local_unit_data["config"])["metrics_scrape_jobs"]
        assert (job["job_name"], job["static_configs"][0]["targets"]) == (
            "trainer_runs",
            ["localhost:9701"],
        )
        settings = served.serving[UNIT]
        assert (settings["user"], settings["unit"]) == (trainer.config["submit-user"], UNIT)
        assert settings["config"]["workspace"] == str(trainer.workspace)
        happen(trainer, name, endpoint)
        assert served.serving == {}


def test_a_wrong_option_publishes_nothing(trainer: Trainer, served: FakeExporter):
    trainer.config["submit-user"] = "no such account"
    out = happen(trainer, "config_changed")
    assert (served.serving, "config" in out.get_relation(900).local_unit_data) == ({}, False)
    assert isinstance(out.unit_status, testing.BlockedStatus)
