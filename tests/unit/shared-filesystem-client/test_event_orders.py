"""Random orders of events, with faults of the machine between them: see tests/orders.py."""

import collections.abc
import dataclasses
import pathlib
import typing

import pytest
from fake_mounter import RIGHT, Site, beside, offer, volume
from ops import testing

import mount_plan
import orders
from mount import mounter
from slurm_ddp import juicefs, mounts
from slurm_ddp.commands import CommandError
from slurm_ddp.interfaces import filesystem_info as fs

SECRET = testing.Secret({"meta-password": "one", "access-key": "two", "secret-key": "three"})
FAULTS: dict[str, tuple[str, object]] = {
    "the mount fails": ("error", CommandError("mount failed: wrong fs type")),
    "the servers are away": ("error", juicefs.UnreachableError("nothing answers at 10.0.0.5:6379")),
    "the mountpoint is taken": (
        "error",
        mount_plan.MountError("mountpoint /mnt/shared holds files: move them away"),
    ),
    "it must wait": ("error", mount_plan.NotYetError("the kernel's modules are on their way")),
    "the mount hangs": ("look", mounts.Result(mounts.State.HUNG, "no answer within 5 s")),
    "there is no FUSE": ("fuse_error", mount_plan.MountError("/dev/fuse does not open")),
    "the program cannot be fetched": (
        "program_error",
        juicefs.DownloadError("https://github.com does not answer"),
    ),
}
OFFERS = {
    "a volume": volume(SECRET),
    "nothing": None,
    "malformed": "unreadable://?",
    "NFS": "nfs://(10.0.0.9)/srv",
}
CONFIGS: dict[str, dict[str, str]] = {
    "config": {"mountpoint": "/mnt/shared"},
    "config without a mountpoint": {},
    "config of a system's folder": {"mountpoint": "/etc"},
    "config malformed": {"mountpoint": "/data", "cache-size": "lots"},
}


class Machine(orders.Unit):
    """The unit next to a slurmd, with a volume to mount."""

    relations: typing.ClassVar = {
        "filesystem": offer(volume(SECRET)),
        "mount": testing.SubordinateRelation("mount", remote_app_name="slurmctld"),
        "juju-info": beside(),
    }
    actions: typing.ClassVar = {"status": {}, "remount": {}}
    hooks: typing.ClassVar = (*orders.Unit.hooks, "secret_changed")

    def __init__(self, site: Site, calls: orders.Calls, place: orders.Place) -> None:
        super().__init__(site.ctx, site.state(offer(volume(SECRET)), secrets=[SECRET]), calls)
        self.site, self.place = site, place
        self.clean = dataclasses.replace(site.mounter)

    def changes(self) -> dict[str, collections.abc.Callable[[], object]]:
        return {
            **{name: self.fail(*fault) for name, fault in FAULTS.items()},
            "the faults end": self.repair,
            **{f"the offer is {name}": self.offer(what) for name, what in OFFERS.items()},
            **{name: self.configure(config) for name, config in CONFIGS.items()},
            "the secret is withdrawn": lambda: self.replace(secrets=set()),
        }

    def fail(self, name: str, value: object) -> collections.abc.Callable[[], None]:
        return lambda: setattr(self.site.mounter, name, value)

    def offer(self, what: fs.Juicefs | str | None) -> collections.abc.Callable[[], None]:
        return lambda: self.write("filesystem", remote_app_data=offer(what).remote_app_data)

    def configure(self, config: dict[str, str]) -> collections.abc.Callable[[], None]:
        return lambda: self.replace(config=config)

    def event(self, name: str) -> typing.Any:
        if name == "secret_changed":
            return self.ctx.on.secret_changed(SECRET) if SECRET in self.state.secrets else None
        return super().event(name)

    def repair(self) -> None:
        """End every fault of the machine."""
        for name, _ in FAULTS.values():
            setattr(self.site.mounter, name, getattr(self.clean, name) if name != "look" else RIGHT)

    def settle(self) -> object:
        self.repair()
        self.replace(config=CONFIGS["config"], secrets={SECRET})
        for name in ("mount broken", "juju-info created", "filesystem created"):
            self.emit(name)
        self.offer(OFFERS["a volume"])()
        for name in ("filesystem changed", "update_status"):
            self.emit(name)
        double = self.site.mounter
        return {
            "status": self.state.unit_status,
            "databag": self.relation("filesystem").local_unit_data,
            "mounted": (double.mounted, double.units),
            "wakes": double.wakes,
            "files": self.place.files(),
        }


@pytest.mark.timeout(7200)
def test_every_order_ends_in_the_same_state(
    site: Site, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    calls = orders.Calls()
    calls.watch_files(monkeypatch)
    failed = orders.raising(lambda: CommandError("systemctl exited 1: it failed"))
    for name in ("ensure", "remount", "remove"):
        monkeypatch.setattr(mounter, name, calls.watch(getattr(mounter, name), fails=failed))
    away = orders.raising(lambda: juicefs.DownloadError("https://github.com does not answer"))
    monkeypatch.setattr(juicefs, "ensure_program", calls.watch(juicefs.ensure_program, fails=away))
    place = orders.Place(tmp_path, site.mounter)

    def make() -> Machine:
        place.restore()
        return Machine(site, calls, place)

    orders.check(monkeypatch, make)
