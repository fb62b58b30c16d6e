"""The stand-in of opentelemetry-collector reads cos-agent as strictly as the real one; the functional tests run it."""

import importlib
import json
import pathlib
import sys
import types
import typing

import pytest
import yaml
from ops import testing

from slurm_ddp.interfaces import cos_agent
from slurm_ddp.run import CommandError, Completed

ROOT = pathlib.Path(__file__).resolve().parents[2]
STANDIN = ROOT / "sandbox" / "standins" / "opentelemetry-collector"
UUID = "d28c42cc-6e8e-4f1e-8a3c-3f3b0b1f6f5e"
RULES = "groups: [{name: runs, rules: [{alert: Stalled, expr: 'up == 0'}]}]\n"
ACTIVE = testing.ActiveStatus()


class Machine(typing.NamedTuple):
    """The stand-in's modules on a machine in a temporary folder."""

    ctx: testing.Context[typing.Any]
    etc: pathlib.Path
    dashboards: pathlib.Path
    ran: list[str]
    refusal: list[str]

    def run(self, event: object, *relations: testing.SubordinateRelation) -> testing.State:
        return self.ctx.run(typing.cast(typing.Any, event), testing.State(relations=relations))

    def scraped(self) -> list[typing.Any]:
        return yaml.safe_load((self.etc / "prometheus.yml").read_text())["scrape_configs"]


@pytest.fixture
def machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for path in (STANDIN / "src", ROOT / "sandbox" / "standins"):
        monkeypatch.syspath_prepend(str(path))
    monkeypatch.delitem(sys.modules, "charm", raising=False)
    prometheus: types.ModuleType = importlib.import_module("prometheus")
    charm = importlib.import_module("charm")
    monkeypatch.delitem(sys.modules, "charm")
    ran: list[str] = []
    refusal: list[str] = []

    def run(*argv: object, check: bool = True) -> Completed:
        assert str(argv[0]) in ("/usr/bin/systemctl", "/usr/bin/promtool"), argv
        ran.append(" ".join(map(str, argv[1:3])))
        if refusal and argv[0] == "/usr/bin/promtool":
            raise CommandError(refusal[0])
        return Completed(0, "", "")

    etc, dashboards = tmp_path / "etc", tmp_path / "dashboards"
    for name, value in {
        "run": run,
        "ETC": etc,
        "_RULES": etc / "rules",
        "DASHBOARDS": dashboards,
    }.items():
        monkeypatch.setattr(prometheus, name, value)
    declared = yaml.safe_load((STANDIN / "charmcraft.yaml").read_text())
    config = declared.pop("config")
    ctx = testing.Context(charm.CollectorCharm, meta=declared, config=config, app_name="collector")
    return Machine(ctx, etc, dashboards, ran, refusal)


def published(tmp_path: pathlib.Path, app: str = "trainer", **changes: object) -> testing.SubordinateRelation:
    folder = tmp_path / app
    for name, file, text in (("alerts", "a.yaml", RULES), ("dashboards", "d.json", '{"title": "Runs"}')):
        (folder / name).mkdir(parents=True)
        (folder / name / file).write_text(text)
    topology = cos_agent.Topology("hpc", UUID, app, app)
    config = json.loads(cos_agent.dump(topology, [cos_agent.Job("runs", 9701, "juju-1")], folder)["config"]) | changes
    return testing.SubordinateRelation(
        "cos-agent", remote_app_name=app, remote_unit_id=3, remote_unit_data={"config": json.dumps(config)}
    )


def test_jobs_get_jujus_labels_and_rules_and_dashboards_are_kept(machine: Machine, tmp_path: pathlib.Path):
    relation = published(tmp_path)
    out = machine.run(machine.ctx.on.relation_changed(relation, remote_unit=3), relation)
    assert out.unit_status == ACTIVE
    (job,) = machine.scraped()
    labels = job["static_configs"][0]["labels"]
    assert labels == {
        "instance": "juju-1",
        "juju_model": out.model.name,
        "juju_model_uuid": out.model.uuid,
        "juju_application": "trainer",
        "juju_unit": "trainer/3",
    }
    rules = yaml.safe_load((machine.etc / "rules" / "trainer-3.yaml").read_text())
    assert rules["groups"][0]["rules"][0]["alert"] == "Stalled"
    assert json.loads((machine.dashboards / "trainer-3-0.json").read_text())["title"] == "Runs"


def test_what_is_published_no_more_goes(machine: Machine, tmp_path: pathlib.Path):
    first, second = published(tmp_path), published(tmp_path, "proxy")
    machine.run(machine.ctx.on.update_status(), first, second)
    assert len(machine.scraped()) == 2
    machine.run(machine.ctx.on.relation_broken(first), first, second)
    assert [job["job_name"] for job in machine.scraped()] == ["proxy_runs"]
    assert [path.name for path in (machine.etc / "rules").iterdir()] == ["proxy-3.yaml"]
    assert [path.name for path in machine.dashboards.iterdir()] == ["proxy-3-0.json"]


@pytest.mark.parametrize(
    "changes",
    [
        {"dashboards": ["bm90IHh6"]},
        {"dashboards": [{}]},
        {"metrics_scrape_jobs": {}},
        {"log_slots": None},
        {"metrics_alert_rules": []},
    ],
)
def test_an_invalid_config_is_blocked_by_name(machine: Machine, tmp_path: pathlib.Path, changes: dict[str, typing.Any]):
    out = machine.run(machine.ctx.on.update_status(), published(tmp_path, **changes))
    assert isinstance(out.unit_status, testing.BlockedStatus)
    assert out.unit_status.message.startswith("trainer/3 published an invalid config: ")


def test_rules_that_prometheus_refuses_are_blocked(machine: Machine, tmp_path: pathlib.Path):
    machine.refusal.append("promtool exited 1: could not parse expression")
    out = machine.run(machine.ctx.on.update_status(), published(tmp_path))
    assert out.unit_status == testing.BlockedStatus("promtool exited 1: could not parse expression")


def test_nothing_is_left(machine: Machine, tmp_path: pathlib.Path):
    machine.run(machine.ctx.on.update_status(), published(tmp_path))
    machine.run(machine.ctx.on.stop())
    assert machine.ran[-1] == "disable --now"
    assert not machine.dashboards.exists()
    assert not (machine.etc / "rules").exists()
