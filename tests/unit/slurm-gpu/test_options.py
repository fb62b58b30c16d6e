"""Resetting any option: `juju config --reset` restores the machine, Slurm and Juju."""

import collections.abc
import dataclasses
import fnmatch
import pathlib
import typing

import pytest
import yaml
from conftest import CARDS, COMPUTE, CONTROLLER, OPTIONS, PASSING, ROOT, context
from machine_double import MachineDouble
from ops import testing

import fake_exporter
import orders
from controller import gres_lines
from gpu import gres_conf
from maintenance import services
from node import health, health_timer, kept, resume, slurmd_options, slurmd_unit
from node import watch as node_watch

DECLARED = yaml.safe_load((ROOT / "charmcraft.yaml").read_text())["config"]["options"]
SICK = f"{health.REASON}Xid 79"
Snapshot = dict[str, object]


class Site:
    """A compute node with two cards, its controller, a unit on each, and the data between them."""

    def __init__(self, machine: MachineDouble, exporters: fake_exporter.FakeExporter) -> None:
        self.machine, self.slurm, self.exporters = machine, machine.slurm, exporters
        self.place = orders.Place(machine.root)
        self.contexts = {"node": context(), "controller": context("slurm-gpu-controller")}
        lines = testing.Relation(
            "node-gres", remote_app_name="slurm-gpu-controller", remote_units_data={0: {}}
        )
        merged = testing.Relation("gres", remote_app_name="slurm-gpu", remote_units_data={0: {}})
        self.states = {
            "node": testing.State(relations={COMPUTE, lines, fake_exporter.collector()}),
            "controller": testing.State(relations={CONTROLLER, merged}, leader=True),
        }
        slurmd_options.PATH.write_text(OPTIONS)
        gres_lines.SLURM_CONF.write_text("ClusterName=x\n")
        gres_conf.PATH.write_text("AutoDetect=nvidia\n")
        machine.add_card(CARDS[1])
        self.slurm.devices, self.slurm.types = 2, "gpu,shard"
        self.slurm.register()

    def configure(self, options: dict[str, typing.Any]) -> Snapshot:
        """Set these options on both applications, other options to defaults; return the state."""
        for name, state in self.states.items():
            self.states[name] = dataclasses.replace(state, config=options)
        for event in ("config_changed", "update_status"):
            for name in self.states:
                self.emit(name, event)
            while self.carry():
                pass
            self.slurm.end_jobs()
        return self.snapshot()

    def emit(self, name: str, event: str, *about: testing.Relation) -> None:
        ctx = self.contexts[name]
        self.states[name] = ctx.run(getattr(ctx.on, event)(*about), self.states[name])
        slurmd_unit.PUSHED.write_text(gres_conf.PATH.read_text())
        node_watch.Watch().step()
        record = self.slurm.record
        has_lines = "Name=shard" in slurmd_unit.PUSHED.read_text()
        assert has_lines or record is None or "shard" not in record.gres, (
            "Slurm would refuse the node"
        )
        if "gpu-health.timer" in self.machine.active and record and record.reason == SICK:
            health.State(reason=SICK, drained=True).save()

    def carry(self) -> bool:
        """Exchange the units' published data; return whether anything was new."""
        published = self.relation("node", "node-gres").local_unit_data
        is_new = self.receive("controller", "gres", remote_units_data={0: published})
        answered = self.relation("controller", "gres").local_app_data
        return self.receive("node", "node-gres", remote_app_data=answered) or is_new

    def receive(self, name: str, endpoint: str, **data: typing.Any) -> bool:
        old = self.relation(name, endpoint)
        new = dataclasses.replace(old, **data)
        if new == old:
            return False
        others = {one for one in self.states[name].relations if one.endpoint != endpoint}
        self.states[name] = dataclasses.replace(self.states[name], relations={*others, new})
        self.emit(name, "relation_changed", new)
        return True

    def relation(self, name: str, endpoint: str) -> testing.Relation:
        return typing.cast("testing.Relation", self.states[name].get_relations(endpoint)[0])

    def snapshot(self) -> Snapshot:
        machine, slurm = self.machine, self.slurm
        return {
            **{f"status of the {name}": state.unit_status for name, state in self.states.items()},
            "published": self.relation("node", "node-gres").local_unit_data,
            "answered": self.relation("controller", "gres").local_app_data,
            "in Slurm": (
                slurm.record and dataclasses.replace(slurm.record, author=""),
                slurm.maintained,
            ),
            "packages": sorted(machine.installed.items()),
            "held packages": sorted(machine.held),
            "services": (sorted(machine.active), sorted(machine.enabled)),
            "metrics": str(self.exporters.serving),
            # Before a node's first line, no record exists of the block that slurmctld read.
            **self.place.files(*PASSING, "var/slurm-gpu/live"),
        }


@pytest.fixture
def site(node: MachineDouble, uptime: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(
        health_timer.health, "check", lambda *_: health.Answer("ok", [], "", 0.0, "")
    )  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    return Site(node, fake_exporter.install(monkeypatch, ROOT))


def has_driver(site: Site) -> None:
    site.machine.install_driver("535", "535.288.01")
    services.PERSISTENCED_PROGRAM.touch()
    site.machine.held = {"nvidia-utils-535-server"}  # by an administrator


def is_new(site: Site) -> None:
    has_driver(site)
    site.slurm.set_down(resume.NEW)


def is_sick(site: Site) -> None:
    has_driver(site)
    site.configure({})
    site.slurm.update("drain", SICK)
    kept.note(health.KIND, site.slurm.name, SICK)


def has_no_shards(site: Site) -> None:
    has_driver(site)
    forget_shards(site)


def nothing(_: Site) -> None:
    """Leave the machine without a driver, or as it is."""


def reboot(site: Site) -> None:
    site.slurm.set_down(resume.REBOOTED)


def start_job(site: Site) -> None:
    site.slurm.jobs = ["40"]


def forget_shards(site: Site) -> None:
    site.slurm.types = "gpu"


@dataclasses.dataclass(frozen=True)
class Way:
    """Options that are set in one command and reset in one."""

    options: dict[str, typing.Any]
    shows: str  # the state while they are set has it, or the state before
    begins: collections.abc.Callable[[Site], None] = has_driver
    meanwhile: collections.abc.Callable[[Site], None] = nothing  # while they are set
    stays: tuple[
        str, ...
    ] = ()  # left behind by the reset, as charmcraft.yaml or README.md documents; patterns


SERVED = ("status of the node", "in Slurm", "var/slurm-gpu/served.json", "var/slurm-gpu/order.json")
SHARDS = {"shards-per-gpu": 4}
WAYS = [
    Way({"driver": "535"}, "gpu:nvidia_h100_80gb_hbm3:2", nothing, stays=("*",)),
    Way(
        {"driver": "535", "kernel-module": "proprietary", "fabric-manager": "always"},
        "fabricmanager",
        nothing,
        stays=("*",),
    ),
    Way({"driver": "550"}, "is not offered for these GPUs", nothing),
    Way({"driver": "580"}, "the option is driver=580: run upgrade-driver"),
    Way({"driver": "newest"}, "driver: use keep, or a branch such as 580"),
    Way({"kernel-module": "open"}, "open contradicts driver=keep"),
    Way({"fabric-manager": "always"}, "always contradicts driver=keep"),
    Way({"persistence-mode": False}, "nvidia-persistenced.service.d/10-slurm-gpu.conf"),
    Way({"hold-driver": False}, "held-packages"),
    Way({"health-check": "never"}, "gpu-health.timer"),
    Way({"health-check": "never"}, f"takes no jobs: drained ({SICK})", is_sick),
    Way({"health-check": "sometimes"}, "'sometimes' is none of auto, never"),
    Way({"health-xids": "+109 -74"}, "--xids=+109 -74"),
    Way({"health-xids": "109"}, "not '109'"),
    Way(
        {"resume-after-reboot": False},
        "takes no jobs: down (Node unexpectedly rebooted)",
        meanwhile=reboot,
    ),
    Way({"resume-when-ready": True}, '"resume_when_ready": true'),
    Way({"resume-when-ready": True}, '"resume_when_ready": true', is_new, stays=SERVED),
    Way(SHARDS, "Name=shard Count=4"),
    Way(SHARDS, "shard:8", meanwhile=start_job),
    Way(SHARDS, "set GresTypes=gpu,shard in slurm.conf", meanwhile=forget_shards),
    Way(SHARDS, "set GresTypes=gpu,shard in slurm.conf", has_no_shards),
    Way({"shards-per-gpu": 2000}, "2000 is not between"),
    Way(
        SHARDS | {"resume-when-ready": True, "health-xids": "+109", "persistence-mode": False},
        "shard:8",
    ),
]


def test_every_option_has_a_way_back():
    assert {name for way in WAYS for name in way.options} == set(DECLARED)


def listed() -> list[typing.Any]:
    """List the ways by their options; a missing driver is shown with as many packages as fit."""
    found: list[typing.Any] = []
    for way in WAYS:
        name = " ".join(f"{key}={value}" for key, value in way.options.items())
        found.append(
            pytest.param(way, id=name, marks=[pytest.mark.cut] if "driver" in way.options else [])
        )
    return found


@pytest.mark.parametrize("way", listed())
def test_a_reset_leaves_what_was_there_before(site: Site, way: Way):
    assert all(value != DECLARED[name]["default"] for name, value in way.options.items())
    way.begins(site)
    before = site.configure({})
    site.configure(way.options)
    way.meanwhile(site)
    for name in site.states:
        site.emit(name, "update_status")
    during = site.snapshot()
    assert (way.shows in str(before)) != (way.shows in str(during))
    kept = {key for pattern in way.stays for key in fnmatch.filter({*before, *during}, pattern)}
    wanted = {key: one for key, one in before.items() if key not in kept}
    wanted |= {key: one for key, one in during.items() if key in kept}
    after = site.configure({})
    assert after == wanted, orders.difference(wanted, after)
    assert site.slurm.ended == [], "no job is ended"
