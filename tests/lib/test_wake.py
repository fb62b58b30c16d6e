"""Waking a unit, with systemd's rules for names."""

import dataclasses
import fnmatch
import logging
import pathlib

import pytest

from slurm_ddp import wake
from slurm_ddp.commands import CommandError, Completed

CHARM = pathlib.Path("/var/lib/juju/agents/unit-client-0/charm")
HOOK = f"JUJU_DISPATCH_PATH=hooks/update-status {CHARM}/dispatch"


@dataclasses.dataclass
class Systemd:
    """Timers by name, each with its state; systemd-run refuses the name of one that waits or whose service runs."""

    timers: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    ran: list[tuple[str, ...]] = dataclasses.field(default_factory=list[tuple[str, ...]])
    down: bool = False

    def run(self, *argv: str) -> Completed:
        if self.down:
            raise CommandError("systemctl exited 1: Failed to connect to bus")
        if argv[0] == "/usr/bin/systemctl":
            assert argv[1:5] == ("list-units", "--plain", "--no-legend", "--state=waiting")
            (pattern,) = argv[5:]
            waiting = [name for name, state in self.timers.items() if state == "waiting"]
            found = [name for name in waiting if fnmatch.fnmatchcase(name, pattern)]
            return Completed(0, "".join(f"{name} loaded active waiting\n" for name in found), "")
        assert argv[:1] == ("/usr/bin/systemd-run",)
        (name,) = [
            word.removeprefix("--unit=") + ".timer" for word in argv if word.startswith("--unit=")
        ]
        if name in self.timers:
            raise CommandError(
                f"systemd-run exited 1: Unit {name} was already loaded or has a fragment file."
            )
        self.timers[name] = "waiting"
        self.ran.append(argv)
        return Completed(0, "", "")

    def elapse(self) -> None:
        """Let the timers' services run; they do until the hook has ended."""
        self.timers = dict.fromkeys(self.timers, "running")


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Systemd:
    """Return systemd of a machine with Juju."""
    systemd = Systemd()
    monkeypatch.setattr(wake, "run", systemd.run)
    monkeypatch.setattr(wake, "JUJU_EXEC", tmp_path / "juju-exec")
    (tmp_path / "juju-exec").touch()
    return systemd


def test_a_unit_is_woken_by_jujus_own_command(systemd: Systemd):
    wake.later("client/0", CHARM, 60)
    (argv,) = systemd.ran
    assert argv[-3:] == (str(wake.JUJU_EXEC), "client/0", HOOK)
    assert {"--on-active=60", "--timer-property=AccuracySec=1s", "--collect", "--no-block"} <= set(
        argv
    )
    options = ["--quiet", "--collect", "--no-block"]
    argv = ["/usr/bin/systemd-run", *options, str(wake.JUJU_EXEC), "client/0", HOOK]
    assert wake.command("client/0", CHARM) == argv


def test_a_hook_that_was_woken_asks_for_the_next_and_no_two_wait(systemd: Systemd):
    for looks in (1, 2, 3):
        wake.later("client/0", CHARM, 20)
        wake.later("client/0", CHARM, 20)
        assert len(systemd.ran) == looks
        systemd.elapse()
    wake.later("client/1", CHARM, 20)
    wake.later("client/0", CHARM, 20)
    assert [argv[-2] for argv in systemd.ran] == ["client/0"] * 3 + ["client/1", "client/0"]


def test_a_wake_that_fails_is_logged(systemd: Systemd, caplog: pytest.LogCaptureFixture):
    systemd.down = True
    with caplog.at_level(logging.WARNING):
        wake.later("client/0", CHARM, 20)
    assert caplog.messages == [
        "client/0 is not woken before Juju's next event: systemctl exited 1: Failed to connect to bus"
    ]


def test_without_juju_nothing_is_run(systemd: Systemd):
    wake.JUJU_EXEC.unlink()
    wake.later("client/0", CHARM, 60)
    assert systemd.ran == []
    assert wake.command("client/0", CHARM) == []
