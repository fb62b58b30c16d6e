"""Random orders of events on a compute node: see tests/orders.py."""

import collections.abc
import dataclasses
import datetime
import json
import pathlib
import shutil
import time
import typing

import pytest
from conftest import CARDS, OPTIONS, PASSING, context
from machine_double import MachineDouble, MigCard
from ops import testing

import charm
import orders
from node import health_timer, slurmd_options
from node import resume as bring_up
from node import watch as node_watch
from slurm_ddp.interfaces.slurm_gres import NodeGres

ADMIN = "maintenance until noon"
ORDERED = {ADMIN, bring_up.NEW}  # why a node keeps away from jobs until an operator ends that


class Compute(orders.Unit):
    """A unit on a compute node with two cards."""

    relations: typing.ClassVar = {
        "compute": testing.SubordinateRelation(
            "compute", interface="juju-info", remote_app_name="slurmd"
        ),
        "node-gres": testing.Relation(
            "node-gres", remote_app_name="controller", remote_units_data={0: {}}
        ),
    }
    actions: typing.ClassVar = {
        "detect": {},
        "show-gres": {},
        "accept-gpus": {},
        "health-check": {},
        "reset-gpu": {"gpu": CARDS[0], "wait": 60},
        "set-mig": {"gpu": CARDS[1], "profiles": "3g.20gb,3g.20gb", "wait": 60},
        "set-mig none": {"gpu": "all", "profiles": "none", "wait": 60},
    }
    configs: typing.ClassVar[tuple[dict[str, typing.Any], ...]] = (
        {},
        {"health-xids": "+109 -74"},
        {"health-check": "never"},
        {"health-check": "sometimes"},
        {"resume-after-reboot": False},
        {"hold-driver": False, "persistence-mode": False},
        {"driver": "580", "kernel-module": "proprietary", "fabric-manager": "always"},
        {"kernel-module": "open"},
        {"resume-when-ready": True},
        {"shards-per-gpu": 3, "resume-when-ready": True, "resume-after-reboot": False},
    )

    def __init__(
        self,
        ctx: testing.Context[charm.SlurmGpuCharm],
        calls: orders.Calls,
        machine: MachineDouble,
        clock: orders.Clock,
    ) -> None:
        super().__init__(ctx, testing.State(relations=set(self.relations.values())), calls)
        self.clock, self.booted = clock, clock.now
        self.machine, self.slurm = machine, machine.slurm

    def changes(self) -> dict[str, collections.abc.Callable[[], object]]:
        return {
            "slurmctld stops responding": lambda: vars(self.slurm).update(answering=False),
            "slurmctld responds": lambda: vars(self.slurm).update(answering=True),
            "slurmd stops": lambda: vars(self.slurm).update(slurmd_active=False),
            "slurmd never registers": lambda: vars(self.slurm).update(registers=False),
            "slurmd registers": self.start_slurmd,
            "upstream sets the node idle": lambda: (
                self.slurm.record and self.slurm.upstream_sets_idle()
            ),
            "a job starts": self.start_job,
            "jobs end": self.slurm.end_jobs,
            "a reservation begins": lambda: vars(self.slurm).update(reservations=["training"]),
            "a reservation ends": lambda: vars(self.slurm).update(reservations=[]),
            "the admin drains": lambda: self.slurm.record and self.slurm.update("drain", ADMIN),
            "the admin resumes": self.resume,
            "upstream registers the node as new": lambda: (
                self.slurm.record and self.slurm.set_down(bring_up.NEW)
            ),
            "cards are shared": self.share_cards,
            "slurm.conf loses shards": lambda: vars(self.slurm).update(types="gpu"),
            "slurm.conf has shards": lambda: vars(self.slurm).update(types="gpu,shard"),
            "a card is lost": self.lose_card,
            "the card is back": self.bring_back,
            "the machine reboots": self.reboot,
            "the controller hands out the lines": self.hand_out,
            "the controller takes them back": lambda: self.answer(autodetect="nvidia", applied=[]),
            "the controller publishes malformed data": lambda: self.write(
                "node-gres", remote_app_data={"applied": "?"}
            ),
            **{
                f"config {number}": self.configure(config)
                for number, config in enumerate(self.configs)
            },
        }

    def configure(self, config: dict[str, typing.Any]) -> collections.abc.Callable[[], None]:
        return lambda: self.replace(config=config)

    def share_cards(self) -> None:
        self.replace(config={"shards-per-gpu": 2})
        for name in ("compute created", "node-gres created", "config_changed", "node-gres changed"):
            self.emit(name)
            self.hand_out()

    def emit(self, name: str, fault: str = "", call: int = 0) -> None:
        ended = list(self.slurm.ended)
        self.clock.passes(60)
        bring_up.UPTIME.write_text(f"{self.clock.now - self.booted:.2f} 1.00\n")
        super().emit(name, fault, call)
        assert self.slurm.ended == ended, f"{name} ended a job"

    def start_slurmd(self) -> None:
        self.slurm.registers = self.slurm.slurmd_active = True
        if self.slurm.answering:
            self.slurm.register()

    def start_job(self) -> None:
        self.slurm.waiting = ["40"]
        self.slurm.schedule()

    def resume(self) -> None:
        if self.slurm.record is not None and "INVALID_REG" not in self.slurm.record.flags:
            self.slurm.update("resume", "")

    def end_order(self) -> None:
        """Resume the node if an operator keeps it: a hook may have put that back, see as_found."""
        if self.slurm.record is not None and self.slurm.record.reason in ORDERED:
            self.resume()

    def lose_card(self) -> None:
        shutil.rmtree(self.machine.root / "proc/driver/nvidia/gpus" / CARDS[1], ignore_errors=True)
        self.machine.lost = {CARDS[1]}
        self.slurm.devices = 1

    def bring_back(self) -> None:
        self.machine.lost = set()
        self.machine.load(self.machine.loaded)
        self.slurm.devices = 2

    def reboot(self) -> None:
        self.machine.boots += 1
        started = set(self.machine.active)
        self.machine.boot()
        self.machine.active |= started  # all that are enabled
        self.booted = self.clock.now
        self.slurm.booted = datetime.datetime.fromtimestamp(self.booted).strftime(
            "%Y-%m-%dT%H:%M:%S"
        )
        self.slurm.slurmd_since = time.monotonic()
        self.slurm.ended += self.slurm.jobs
        self.slurm.jobs = []
        if self.slurm.answering and self.slurm.registers:
            self.slurm.register()

    def answer(self, **fields: typing.Any) -> None:
        self.write(
            "node-gres", remote_app_data={key: json.dumps(value) for key, value in fields.items()}
        )

    def hand_out(self) -> None:
        relation = self.relation("node-gres")
        data = relation.local_unit_data if relation is not None else {}
        if "node" in data:
            offered = NodeGres.model_validate(
                {key: json.loads(data[key]) for key in NodeGres.model_fields if key in data}
            )
            self.answer(autodetect="nvidia", applied=[offered.digest] if offered.awaits else [])

    def settle(self) -> object:
        slurm = self.slurm
        self.clock.passes(2 * 86400)  # refused versions are tried again
        slurm.maintained = []  # none lasts longer than an hour (hold.LASTS_S) unless it is prolonged
        slurm.answering, slurm.reservations, slurm.waiting, slurm.types = True, [], [], "gpu,shard"
        slurm.end_jobs()
        self.bring_back()
        self.start_slurmd()
        if slurm.record is not None and (
            slurm.record.reason in ORDERED or "by hand" in slurm.record.reason
        ):
            self.resume()
        self.replace(config={})
        for name in (
            "compute created",
            "config_changed",
            "node-gres created",
            "action set-mig none",
            "update_status",
        ):
            self.end_order()
            self.emit(name)
            node_watch.Watch().step()  # as the service does at once
            slurm.end_jobs()
        self.hand_out()
        for name in ("node-gres changed", "update_status", "update_status"):
            self.end_order()
            self.emit(name)
            node_watch.Watch().step()
        relation = self.relation("node-gres")
        return {
            "status": self.state.unit_status,
            "record": slurm.record and dataclasses.replace(slurm.record, author=""),
            "node": (slurm.reservations, slurm.maintained, slurm.slurmd_active),
            "databag": {key: relation.local_unit_data.get(key) for key in NodeGres.model_fields},
            "units": (self.machine.active, self.machine.enabled, self.machine.held),
            "files": self.place.files(*PASSING),
        }

    place: orders.Place


@pytest.mark.timeout(7200)
def test_every_order_of_a_compute_node_ends_in_the_same_state(
    paths: pathlib.Path, node: MachineDouble, monkeypatch: pytest.MonkeyPatch
):
    clock = orders.Clock(monkeypatch)
    monkeypatch.setattr(bring_up, "UPTIME", paths / "proc/uptime")
    monkeypatch.setattr(
        health_timer.health, "check", lambda *_: health_timer.health.Answer("ok", [], "", 0.0, "")
    )  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    slurmd_options.PATH.write_text(OPTIONS)
    node.add_card(CARDS[1])
    node.install_driver("535", "535.288.01")
    node.slurm.devices, node.slurm.types = 2, "gpu,shard"
    node.slurm.register()
    node.smi.cards = {bus_id: MigCard("NVIDIA A100-SXM4-40GB") for bus_id in CARDS}
    calls = orders.Calls()
    calls.watch_files(monkeypatch)
    calls.watch_answers(node.slurm)
    calls.watch_answers(node)
    ctx = context()
    place = orders.Place(paths, node.slurm, node)

    def make() -> Compute:
        place.restore()
        clock.restart()
        unit = Compute(ctx, calls, node, clock)
        unit.place = place
        return unit

    orders.check(monkeypatch, make)
