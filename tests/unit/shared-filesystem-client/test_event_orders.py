"""Random orders of events, with faults of the machine and hooks that die in between.

Whatever the order: no event raises, and once the faults are over the next two events reach the state of a unit that
saw none of them.
"""

import dataclasses
import os
import shutil
import typing

import hypothesis
import pytest
from fake_mounter import Site, beside, offer, volume
from hypothesis import strategies
from ops import testing

import mount_plan
from slurm_ddp import juicefs, mounts
from slurm_ddp.interfaces import filesystem_info as fs
from slurm_ddp.run import CommandError

ORDERS = int(os.environ.get("SLURM_DDP_TEST_ORDERS", "1000"))
SECRET = testing.Secret({"meta-password": "one", "access-key": "two", "secret-key": "three"})
EVENTS = (
    "install", "start", "config_changed", "update_status", "upgrade_charm", "leader_elected", "secret_changed", "stop",
    "filesystem created", "filesystem changed", "filesystem broken", "mount created", "mount changed", "mount broken",
    "juju-info created", "juju-info broken",
)  # fmt: skip
FAULTS: dict[str, tuple[str, object]] = {
    "the mount fails": ("error", CommandError("mount failed: wrong fs type")),
    "the servers are away": ("error", juicefs.UnreachableError("nothing answers at 10.0.0.5:6379")),
    "the mountpoint is taken": ("error", mount_plan.MountError("mountpoint /mnt/shared holds files: move them away")),
    "it must wait": ("error", mount_plan.NotYetError("the kernel's modules are on their way")),
    "the mount hangs": ("look", mounts.Result(mounts.State.HUNG, "no answer within 5 s")),
    "there is no FUSE": ("fuse_error", mount_plan.MountError("/dev/fuse does not open")),
    "the program cannot be fetched": ("program_error", juicefs.DownloadError("https://github.com does not answer")),
    "the mount stays": ("kept", "/mnt/shared is in use: it stays"),
}
OFFERS = (offer(volume(SECRET)), offer(None), offer("nonsense://?"), offer(fs.Nfs(host="10.0.0.9", path="/srv")))
CONFIGS = ({"mountpoint": "/mnt/shared"}, {}, {"mountpoint": "/etc"}, {"mountpoint": "/data", "cache-size": "lots"})
STEPS = strategies.one_of(
    strategies.sampled_from(EVENTS).map(lambda name: ("event", name)),
    strategies.sampled_from(EVENTS).map(lambda name: ("dies", name)),  # what the hook wrote to Juju is lost
    strategies.sampled_from(sorted(FAULTS)).map(lambda name: ("fault", name)),
    strategies.sampled_from(range(len(OFFERS))).map(lambda number: ("offer", number)),
    strategies.sampled_from(range(len(CONFIGS))).map(lambda number: ("config", number)),
    strategies.just(("over", 0)),
)


class Unit:
    """The charm, its machine, and what Juju holds of the unit."""

    def __init__(self, site: Site) -> None:
        self.site, self.clean = site, dataclasses.asdict(site.mounter)
        self.state = site.state(OFFERS[0], secrets=[SECRET])

    def take(self, kind: str, what: typing.Any) -> None:
        """Let one thing happen."""
        if kind == "fault":
            setattr(self.site.mounter, *FAULTS[what])
        elif kind == "over":
            self.mend()
        elif kind == "offer":
            others = {relation for relation in self.state.relations if relation.endpoint != "filesystem"}
            self.state = dataclasses.replace(self.state, relations={*others, OFFERS[what]})
        elif kind == "config":
            self.state = dataclasses.replace(self.state, config=CONFIGS[what])
        else:
            self.emit(what, dies=kind == "dies")

    def mend(self) -> None:
        """End every fault of the machine."""
        for name, _ in FAULTS.values():
            setattr(self.site.mounter, name, self.clean[name] if name != "look" else mounts.Result(mounts.State.RIGHT))

    def emit(self, name: str, *, dies: bool = False) -> None:
        """Run one event, if Juju could send it now."""
        endpoint, _, kind = name.partition(" ")
        events = self.site.ctx.on
        if not kind:
            event = events.secret_changed(SECRET) if name == "secret_changed" else getattr(events, name)()
        else:
            relations = self.state.get_relations(endpoint)
            if not relations and kind == "created" and endpoint == "mount":
                relation = testing.SubordinateRelation("mount", id=2, remote_app_name="slurmctld")
                self.state = dataclasses.replace(self.state, relations={*self.state.relations, relation})
                relations = [relation]
            if not relations:
                return
            event = getattr(events, f"relation_{kind}")(
                relations[0], **({"remote_unit": 0} if kind == "changed" else {})
            )
        if name == "secret_changed" and SECRET not in self.state.secrets:
            return
        out = self.site.ctx.run(event, self.state)
        if kind == "broken":
            gone = next(relation.id for relation in relations)
            out = dataclasses.replace(out, relations={one for one in out.relations if one.id != gone})
        if not dies:
            self.state = out

    def settle(self) -> testing.State:
        """End what is wrong, and let Juju send what it sends in the end."""
        self.mend()
        kept = {relation for relation in self.state.relations if relation.endpoint == "mount"}
        self.state = dataclasses.replace(
            self.state, config=CONFIGS[0], relations={*kept, OFFERS[0], beside()}, secrets={SECRET}
        )
        for name in ("mount broken", "filesystem changed", "update_status"):
            self.emit(name)
        return self.state


@pytest.mark.timeout(3600)
def test_every_order_ends_in_the_same_state(site: Site):
    fresh = Unit(site)
    wanted = fresh.settle()
    assert wanted.unit_status == testing.ActiveStatus("JuiceFS:shared is mounted at /mnt/shared")
    plan = site.mounter.mounted

    @hypothesis.settings(
        max_examples=ORDERS, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(strategies.lists(STEPS, min_size=1, max_size=12))
    def orders(steps: list[tuple[str, typing.Any]]) -> None:
        site.mounter.mounted = None
        site.mounter.units.clear()
        shutil.rmtree(mount_plan.STATE, ignore_errors=True)
        unit = Unit(site)
        unit.mend()
        for kind, what in steps:
            unit.take(kind, what)
        found = unit.settle()
        assert found.unit_status == wanted.unit_status
        assert found.get_relation(1).local_unit_data == wanted.get_relation(1).local_unit_data
        assert site.mounter.mounted == plan
        assert site.mounter.units == {"shared-filesystem-client/0"}

    orders()
