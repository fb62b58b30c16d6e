"""A node with a mount, systemd and Slurm, for the keeper to look after."""

import pathlib
import time
import typing

import pytest
from machine_mounts import MachineMounts

from machine import Machine
from scripts import keeper
from slurm_ddp import mounts, readiness, records, watchdog
from slurm_ddp.commands import Completed

MP, UNIT, SOURCE = "/mnt/shared", "juicefs-client.service", "JuiceFS:shared"


class Rig:
    """The node, and the keeper's passes on it."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.mounts = MachineMounts()
        self.mounts.install_in(mounts, monkeypatch)
        self.machine = Machine(
            units={UNIT}, active={UNIT}, stamps={"ExecMainStartTimestampMonotonic": "100"}
        )
        self.machine.take_over(monkeypatch, [keeper, watchdog], folder / "units")
        self.machine.on_start = self._started
        self.machine.answers |= {"scontrol": self._scontrol, "wake": lambda words, _: ""}
        monkeypatch.setattr(mounts, "detach", self._detach)
        monkeypatch.setattr(keeper, "FUSE", folder / "fuse")
        monkeypatch.setattr(keeper, "AGENTS", folder / "agents")
        monkeypatch.setattr(readiness, "DIRECTORY", folder / "needs")
        monkeypatch.setattr(readiness, "BOOT_ID", folder / "boot")
        (folder / "boot").write_text("this\n")
        monkeypatch.setattr(keeper, "unreachable", self._unreachable)
        monkeypatch.setattr(time, "time", lambda: self.now)
        self.now = 1_800_000_000.0
        self.down = ""
        self.node = "State=IDLE Reason="
        self.slurm_error = False
        servers, slurm = (
            {"servers": ((("10.0.0.5", 6379),),), "speaks": "redis"},
            {"node": "node-1", "drain": True},
        )
        known: dict[str, typing.Any] = (
            {"known": ("JuiceFS:old",), "units": ("client/0",)} | servers | slurm
        )
        self.watch = keeper.Watch("client", MP, UNIT, ("fuse.juicefs",), (SOURCE,), **known)
        self.mount()

    def mount(self, source: str = SOURCE, **options: typing.Any) -> None:
        self.mounts.add(MP, source, "fuse.juicefs", **options)

    def lose_mount(self, *, for_good: bool = False) -> None:
        """End the client, which comes back when it is started, unless `for_good`."""
        self.mounts.table.clear()
        self.machine.active.discard(UNIT)
        self.machine.broken = {UNIT} if for_good else set()

    def tick(self, passes: int = 1, seconds: float = 10.0) -> keeper.Health:
        """Let the timer fire."""
        health = records.load(keeper.Health(), self.folder / keeper.HEALTH)
        for _ in range(passes):
            self.now += seconds
            health = keeper.keep(
                self.watch, records.load(keeper.Health(), self.folder / keeper.HEALTH), self.folder
            )
        return health

    def _started(self, unit: str) -> None:
        assert not self.mounts.at(MP)
        assert "--no-block" in self.machine.calls[-1]
        self.mount()
        self.machine.stamps = {"ExecMainStartTimestampMonotonic": "10000"}

    def _detach(self, mountpoint: str) -> None:
        self.mounts.table.remove(self.mounts.at(mountpoint)[-1])
        if len(self.mounts.at(mountpoint)) <= 1:
            self.mounts.looks.pop(mountpoint, None)

    def _unreachable(self, servers: typing.Any, speaks: str) -> str:
        assert (servers, speaks) == (self.watch.servers, self.watch.speaks)
        return self.down

    def _scontrol(self, words: tuple[str, ...], _: str | None) -> str | Completed:
        if self.slurm_error:
            return Completed(1, "", "no answer within 6 s")
        if words[0] == "show":
            assert words[1:3] == ("node", "node-1")
            return f"NodeName=node-1 {self.node}\n"
        settings = dict(word.split("=", 1) for word in words[1:])
        assert settings["nodename"] == "node-1"
        if settings["state"] == "drain":
            self.node = f"State=IDLE+DRAIN Reason={settings['reason']} [root@2026-11-20T10:00:00]"
        else:
            self.node = "State=IDLE Reason="
        return ""
