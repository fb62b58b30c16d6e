"""Another driver for a node: every step, every interruption, and one node at a time."""

import collections.abc
import contextlib
import dataclasses
import itertools
import json
import pathlib
import re
import threading
import typing

import pytest
from conftest import OPTIONS
from machine_double import MachineDouble
from slurm_double import Killed, Record, SlurmDouble

from driver import install as driver_install
from driver import plan as driver_plan
from driver import upgrade as driver_upgrade
from driver.plan import Spec
from driver.state import DriverError
from driver.upgrade import Pending, Upgrade
from maintenance import hold as gpu_hold
from node import hold as node_hold
from node import node_state, registration, slurmd_options
from slurm_ddp.run import CommandError
from slurm_ddp.slurm import nodes

NAME = "slurmd-0"
REASON = "gpu-driver: driver 580.173.02"
SPEC = Spec(branch="580")
DONE = registration.Progress(registration.Stage.REGISTERED)


@pytest.fixture(autouse=True)
def upgradable(paths: pathlib.Path, node: MachineDouble, monkeypatch: pytest.MonkeyPatch) -> MachineDouble:
    """A registered node with an H100 and branch 535, in service."""
    monkeypatch.setattr(driver_upgrade.time, "time", lambda: clock[0])
    clock[0] = 1000.0
    slurmd_options.PATH.write_text(OPTIONS)
    node.slurm.register()
    node.install_driver("535", "535.288.01")
    return node


clock = [1000.0]


def begin(**more: object) -> Upgrade | None:
    return driver_upgrade.begin(NAME, SPEC.model_copy(update=more))


def run_all(node: MachineDouble, *, rounds: int = 12) -> list[Pending]:
    """Run hooks until nothing is left to do, rebooting where that is asked for."""
    turns: list[Pending] = []
    for _ in range(rounds):
        turns.append(driver_upgrade.advance())
        if turns[-1] is Pending.REBOOT:
            driver_upgrade.count_reboot()
            node.reboot()
        elif turns[-1] is Pending.REGISTER:
            assert driver_upgrade.complete(DONE)
        elif turns[-1] is Pending.NONE:
            return turns
    return turns


def test_nothing_under_way_is_nothing_to_do():
    assert driver_upgrade.advance() is Pending.NONE
    assert not driver_upgrade.complete(DONE)


def test_a_free_node(node: MachineDouble, slurm: SlurmDouble):
    begin()
    assert run_all(node) == [Pending.REGISTER, Pending.NONE]
    assert node.loaded == "580.173.02"
    assert slurm.record == Record("")
    assert [line.partition(" ")[0] for line in node.log] == ["install"]
    assert "nvidia-utils-580-server" in node.held
    assert Upgrade.load() is None
    assert gpu_hold.Hold.load() is None
    assert begin() is None  # there is nothing to do any more


def test_a_driver_in_use_is_changed_by_a_reboot(node: MachineDouble, slurm: SlurmDouble):
    node.in_use = True
    begin()
    assert run_all(node) == [Pending.REBOOT, Pending.REGISTER, Pending.NONE]
    assert node.loaded == "580.173.02"
    assert slurm.record == Record("")


def test_jobs_are_waited_for(node: MachineDouble, slurm: SlurmDouble):
    slurm.jobs = ["7", "8"]
    slurm.waiting = ["9"]
    begin()
    assert driver_upgrade.advance() is Pending.WAIT
    assert driver_upgrade.advance() is Pending.WAIT
    upgrade = Upgrade.load()
    assert upgrade is not None
    assert upgrade.text == "driver 580.173.02: waits for 2 jobs on slurmd-0"
    assert slurm.record is not None
    assert (slurm.record.flags, slurm.record.reason) == ({"DRAIN", "DYNAMIC_NORM"}, REASON)
    assert node.log == []
    slurm.end_jobs()
    assert slurm.waiting == ["9"]
    run_all(node)
    assert slurm.jobs == ["9"]  # as soon as the node is back
    assert slurm.ended == []
    assert node.loaded == "580.173.02"


def test_jobs_that_do_not_end_get_their_node_back(node: MachineDouble, slurm: SlurmDouble):
    slurm.jobs = ["7"]
    driver_upgrade.begin(NAME, SPEC, patience_s=3600)
    assert driver_upgrade.advance() is Pending.WAIT
    clock[0] += 3599
    assert driver_upgrade.advance() is Pending.WAIT
    assert "DRAIN" in slurm.state()
    clock[0] += 2
    assert driver_upgrade.advance() is Pending.WAIT
    upgrade = Upgrade.load()
    assert upgrade is not None
    assert (
        "1 job still ran on slurmd-0 after 1 h, so the node was released; then run upgrade-driver again" in upgrade.text
    )
    assert slurm.state() == "MIXED+DYNAMIC_NORM"
    assert slurm.ended == []
    assert node.log == []
    slurm.end_jobs()
    begin()
    run_all(node)
    assert node.loaded == "580.173.02"


@pytest.mark.parametrize(
    ("found", "after"),
    [
        (Record("", "IDLE", {"DYNAMIC_NORM"}), Record("", "IDLE", {"DYNAMIC_NORM"})),
        (
            Record("", "IDLE", {"DYNAMIC_NORM", "DRAIN"}, "disk is full"),
            Record("", "IDLE", {"DYNAMIC_NORM", "DRAIN"}, "disk is full"),
        ),
        (
            Record("", "IDLE", {"DYNAMIC_NORM", "DRAIN"}, "gpu-health: Xid 79"),
            Record("", "IDLE", {"DYNAMIC_NORM", "DRAIN"}, "gpu-health: Xid 79"),
        ),
        (Record("", "DOWN", {"DYNAMIC_NORM"}, "new node"), Record("", "DOWN", {"DYNAMIC_NORM"}, "new node")),
        (Record("", "IDLE", {"DYNAMIC_NORM", "FAIL"}, "fan"), Record("", "IDLE", {"DYNAMIC_NORM", "FAIL"}, "fan")),
        (  # a hold whose journal is lost
            Record("", "IDLE", {"DYNAMIC_NORM", "DRAIN"}, "gpu-driver: driver 1"),
            Record("", "IDLE", {"DYNAMIC_NORM"}),
        ),
    ],
)
def test_the_state_that_was_found_comes_back(node: MachineDouble, slurm: SlurmDouble, found: Record, after: Record):
    slurm.record = found
    begin()
    run_all(node)
    assert slurm.record == after


def test_a_node_that_slurm_does_not_know(node: MachineDouble, slurm: SlurmDouble):
    slurm.record = None
    begin()
    assert run_all(node) == [Pending.REGISTER, Pending.NONE]
    assert slurm.log == [line for line in slurm.log if "scontrol" not in line]


def test_a_machine_without_slurmd(node: MachineDouble, slurm: SlurmDouble):
    slurm.answering = False
    driver_upgrade.begin(None, SPEC)
    assert driver_upgrade.advance() is Pending.REGISTER
    assert driver_upgrade.complete(None)
    assert node.loaded == "580.173.02"


def test_a_silent_controller_is_waited_for(node: MachineDouble, slurm: SlurmDouble):
    slurm.answering = False
    begin()
    assert driver_upgrade.advance() is Pending.WAIT
    upgrade = Upgrade.load()
    assert upgrade is not None
    assert "waits for slurmctld" in upgrade.text
    assert node.log == []
    slurm.answering = True
    run_all(node)
    assert slurm.record == Record("")


@pytest.mark.parametrize("reboots", [False, True])
def test_an_upgrade_survives_a_kill_after_every_command(
    paths: pathlib.Path, node: MachineDouble, slurm: SlurmDouble, monkeypatch: pytest.MonkeyPatch, *, reboots: bool
):
    """The hook dies before the n-th command, for every n; the next hooks finish, and no job ever suffers."""
    node.add_packages("libnvidia-cfg1-535-server", version="535.288.01")
    ended: set[int] = set()
    for lives in range(200):
        slurm.record, slurm.log, node.log = Record("", "IDLE", {"DYNAMIC_NORM"}), [], []
        node.installed, node.held, node.in_use = {}, set(), reboots
        node.install_driver("535", "535.288.01")
        node.add_packages("libnvidia-cfg1-535-server", version="535.288.01")
        slurm.jobs, slurm.waiting, slurm.lives = ["7"], ["8"], None
        begin()
        slurm.lives = lives
        died = False
        for hook in range(14):
            try:
                turn = driver_upgrade.advance()
            except Killed:
                died = True
                continue
            if turn is Pending.NONE:
                break
            if turn is Pending.WAIT and hook >= 1:
                assert slurm.ended == []
                slurm.jobs = []  # it ended by itself
            if turn is Pending.REBOOT:
                assert "8" not in slurm.jobs
                driver_upgrade.count_reboot()
                node.reboot()
                node.in_use = False
            if turn is Pending.REGISTER:
                try:
                    driver_upgrade.complete(DONE)
                except Killed:
                    died = True
        slurm.lives = None
        assert driver_upgrade.advance() is Pending.NONE, (lives, Upgrade.load())
        assert node.loaded == node.library_version() == "580.173.02"
        node_hold.keep()  # as the service does within seconds: a hook may have died before it ended the reservation
        assert slurm.record == Record("")
        assert slurm.jobs == ["8"]
        assert slurm.maintained == []
        assert slurm.ended == []
        assert len([line for line in node.log if line.startswith("install")]) == 1
        assert not node.broken
        ended.add(lives)
        if not died:
            break
        slurm.jobs = []
    assert len(ended) > 25  # so many commands were the last one


def test_a_reboot_that_never_happens(node: MachineDouble):
    node.in_use = True
    begin()
    for _ in range(3):
        assert driver_upgrade.advance() is Pending.REBOOT
        driver_upgrade.count_reboot()
    assert driver_upgrade.advance() is Pending.WAIT
    upgrade = Upgrade.load()
    assert upgrade is not None
    assert "does not reboot: reboot it by hand" in upgrade.text
    begin()
    assert driver_upgrade.advance() is Pending.REBOOT


def test_no_reboot_into_a_kernel_without_the_driver(
    node: MachineDouble, slurm: SlurmDouble, monkeypatch: pytest.MonkeyPatch
):
    begin()
    real = node.module_version
    monkeypatch.setattr(node, "module_version", lambda kernel: None if node.log else real(kernel))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    assert run_all(node)[-1] is Pending.WAIT
    upgrade = Upgrade.load()
    assert upgrade is not None
    assert upgrade.failed.startswith("no reboot: kernel 6.8.0-134-generic")
    assert slurm.record is not None
    assert slurm.record.reason.startswith("gpu-driver: failed: no reboot: kernel")
    assert "DRAIN" in slurm.record.flags  # it stays out of service
    monkeypatch.setattr(node, "module_version", real)
    begin()  # once more
    run_all(node)
    assert slurm.record == Record("")


def test_a_kernel_that_comes_right_before_the_reboot(node: MachineDouble, slurm: SlurmDouble):
    node.in_use = True
    begin()
    assert driver_upgrade.advance() is Pending.REBOOT
    node.add_kernel("6.8.0-139-generic")
    assert driver_upgrade.advance() is Pending.WAIT
    upgrade = Upgrade.load()
    assert upgrade is not None
    assert upgrade.failed.startswith("no reboot: kernel 6.8.0-139-generic, which boots next, has no nvidia module")
    assert "DRAIN" in slurm.state()
    begin()  # as the status says: it gets its modules
    assert run_all(node) == [Pending.REBOOT, Pending.REGISTER, Pending.NONE]
    assert (node.kernel, node.loaded) == ("6.8.0-139-generic", "580.173.02")
    assert slurm.record == Record("")


def test_a_new_kernel_meanwhile_gets_its_modules_too(node: MachineDouble, slurm: SlurmDouble):
    slurm.jobs = ["7"]
    begin()
    driver_upgrade.advance()
    node.add_kernel("6.8.0-139-generic")
    slurm.end_jobs()
    run_all(node)
    assert "linux-modules-nvidia-580-server-open-6.8.0-139-generic" in node.installed


def test_a_version_that_left_the_archive_meanwhile(node: MachineDouble, slurm: SlurmDouble):
    slurm.jobs = ["7"]
    begin()
    driver_upgrade.advance()
    for name, rows in list(node.offers.items()):
        if "580" in name:
            moved = tuple(
                (v.replace("580.173.02", "580.180.01"), d.replace("580.173.02", "580.180.01")) for v, d in rows
            )
            node.offers[name.replace("580.173.02", "580.180.01")] = moved
            if "580.173.02" in name:
                del node.offers[name]
    slurm.end_jobs()
    run_all(node)
    assert node.loaded == "580.180.01"
    assert slurm.record == Record("")


def test_cards_that_do_not_answer_keep_the_node_out(paths: pathlib.Path, node: MachineDouble, slurm: SlurmDouble):
    node.add_card("0000:9d:00.0")
    (paths / "sys/bus/pci/devices/0000:9d:00.0/config").write_text("lost")
    begin()
    assert driver_upgrade.advance() is Pending.WAIT  # it may settle
    clock[0] += 700
    assert driver_upgrade.advance() is Pending.WAIT
    upgrade = Upgrade.load()
    assert upgrade is not None
    assert "GPU 0000:9d:00.0 fell off the bus" in upgrade.failed
    assert "DRAIN" in slurm.state()
    again = begin()  # loads it anew, and reboots if that does not help
    assert again is not None
    assert (again.step, again.failed) == ("load", "")
    assert driver_upgrade.advance() is Pending.WAIT
    clock[0] += 700
    assert driver_upgrade.advance() is Pending.WAIT
    assert driver_upgrade.cancel() == "driver 580.173.02 is cancelled"
    assert slurm.record == Record("")


def test_a_fabric_manager_comes_with_it(node: MachineDouble):
    node.add_card("0000:01:00.0", 0x22A3, kind="0x068000")
    begin()
    run_all(node)
    assert node.fabric_version() == "580.173.02"
    assert "nvidia-fabricmanager.service" in node.active


def test_registration_is_waited_for(node: MachineDouble, slurm: SlurmDouble):
    begin()
    assert driver_upgrade.advance() is Pending.REGISTER
    assert not driver_upgrade.complete(registration.Progress(registration.Stage.AWAITS_LINES))
    upgrade = Upgrade.load()
    assert upgrade is not None
    assert upgrade.text == "driver 580.173.02: is loaded; waits until slurmd-0 is registered (awaits-lines)"
    assert "DRAIN" in slurm.state()
    assert driver_upgrade.advance() is Pending.REGISTER
    assert driver_upgrade.complete(DONE)
    assert slurm.record == Record("")


def test_an_administrator_who_resumes_the_node_is_believed(node: MachineDouble, slurm: SlurmDouble):
    slurm.jobs = ["7"]
    begin()
    driver_upgrade.advance()
    nodes.resume(NAME)
    assert driver_upgrade.advance() is Pending.WAIT
    upgrade = Upgrade.load()
    assert upgrade is not None
    assert "another changed the state of slurmd-0" in upgrade.text
    assert node.log == []
    assert slurm.state() == "MIXED+DYNAMIC_NORM"


# Who may begin, and with what.


def test_refusals_change_nothing(node: MachineDouble, slurm: SlurmDouble, paths: pathlib.Path):
    for wanted in (Spec(branch="550"), Spec(branch="580", version="580.1")):
        with pytest.raises(DriverError):
            driver_upgrade.begin(NAME, wanted)
    node.also_removes = ["slurmd"]
    with pytest.raises(DriverError, match="would remove slurmd"):
        begin()
    assert slurm.log == []
    assert Upgrade.load() is None
    assert slurm.record == Record("")
    assert not (node_state.STATE_DIR / "hold.json").exists()


def test_no_card_no_driver(paths: pathlib.Path, node: MachineDouble):
    (paths / "sys/bus/pci/devices/0000:1b:00.0/vendor").write_text("0x8086\n")
    with pytest.raises(DriverError, match="no NVIDIA GPU"):
        begin()


def test_beginning_again_goes_on(node: MachineDouble, slurm: SlurmDouble):
    slurm.jobs = ["7"]
    first = begin()
    driver_upgrade.advance()
    again = begin()
    assert first is not None
    assert again is not None
    assert (again.plan, again.step) == (first.plan, "drain")
    other = begin(version="580.65.06")  # still waiting: another version may be had
    assert other is not None
    assert other.plan.version == "580.65.06"


def test_another_version_must_wait_for_what_is_under_way(node: MachineDouble):
    node.in_use = True
    begin()
    assert driver_upgrade.advance() is Pending.REBOOT
    with pytest.raises(DriverError, match=r"driver 580\.173\.02 is under way: wait for it, or run with cancel=true"):
        begin(version="580.65.06")
    with pytest.raises(DriverError, match="cannot be cancelled now"):
        driver_upgrade.cancel()


def test_cancel(node: MachineDouble, slurm: SlurmDouble):
    with pytest.raises(DriverError, match="no upgrade is under way"):
        driver_upgrade.cancel()
    slurm.jobs = ["7"]
    begin()
    driver_upgrade.advance()
    driver_upgrade.cancel()
    assert slurm.state() == "MIXED+DYNAMIC_NORM"
    assert Upgrade.load() is None


@pytest.mark.parametrize("how", ["cancel", "remove"])
def test_what_an_upgrade_stopped_runs_again_when_it_is_given_up(
    paths: pathlib.Path, node: MachineDouble, slurm: SlurmDouble, monkeypatch: pytest.MonkeyPatch, how: str
):
    programs = ("nvidia-persistenced", "nv-fabricmanager")
    (paths / "usr/bin").mkdir(parents=True, exist_ok=True)
    node.add_packages("nvidia-fabricmanager-535", version="535.288.01")
    for program in programs:
        (paths / "usr/bin" / program).touch()
    runs = {f"{name}.service" for name in ("nvidia-persistenced", "nvidia-fabricmanager", "snap.dcgm.dcgm-exporter")}
    node.active |= runs

    def fails(*_: object, **__: object) -> None:
        raise DriverError("no space left on device")

    begin()
    monkeypatch.setattr(driver_install, "install", fails)
    assert driver_upgrade.advance() is Pending.WAIT
    assert not node.active & runs
    if how == "cancel":
        driver_upgrade.cancel()
        assert slurm.record == Record("")
    else:
        driver_upgrade.release()
    assert node.active >= runs
    assert not driver_install.STOPPED.exists()


def test_a_journal_that_cannot_be_read_counts_as_none(node: MachineDouble):
    begin()
    path = node_state.STATE_DIR / "upgrade.json"
    for text in ("", "{", "[]", '{"step": "dance"}', json.dumps({**json.loads(path.read_text()), "extra": 1})):
        path.write_text(text)
        assert driver_upgrade.advance() is Pending.NONE


def test_a_journal_of_an_earlier_charm_is_read(node: MachineDouble, slurm: SlurmDouble):
    """It had the packages as pairs, and two fields that follow from them."""
    begin()
    path = node_state.STATE_DIR / "upgrade.json"
    record = json.loads(path.read_text())
    del record["spec"]["flavour"]
    record["plan"] |= {"packages": list(record["plan"]["packages"].items()), "module": "open", "dkms": False}
    path.write_text(json.dumps(record))
    hold = {"kind": "gpu-driver", "node": NAME, "states": ["drain"], "reason": "bad fan", "boot_id": ""}
    (node_state.STATE_DIR / "hold.json").write_text(json.dumps(hold))
    assert gpu_hold.Hold.load() == gpu_hold.Hold(NAME, ("drain",), "bad fan", gpu_hold.DRIVER)
    assert run_all(node) == [Pending.REGISTER, Pending.NONE]
    assert node.loaded == "580.173.02"
    assert slurm.record == Record("", flags={"DYNAMIC_NORM", "DRAIN"}, reason="bad fan")


# The option.


def test_the_option_installs_on_a_bare_machine(node: MachineDouble, slurm: SlurmDouble):
    node.installed.clear()
    node.boot()
    node._show_library()
    assert driver_upgrade.ensure_wanted(NAME, Spec(branch="580"))
    run_all(node)
    assert node.loaded == "580.173.02"
    assert not driver_upgrade.ensure_wanted(NAME, Spec(branch="580"))


def test_the_option_never_changes_a_driver_that_is_there(node: MachineDouble):
    assert not driver_upgrade.ensure_wanted(NAME, Spec(branch="580"))
    assert (
        driver_upgrade.note(Spec(branch="580"))
        == "driver 535.288.01 is here, but the option is driver=580: run upgrade-driver"
    )
    assert driver_upgrade.note(Spec(branch="535")) is None
    assert driver_upgrade.note(Spec()) is None
    assert node.log == []


def test_the_option_keep_installs_nothing(node: MachineDouble):
    node.installed.clear()
    node.boot()
    node._show_library()
    assert not driver_upgrade.ensure_wanted(NAME, Spec())
    assert node.log == []


def test_a_refusal_is_kept_for_an_hour(node: MachineDouble, monkeypatch: pytest.MonkeyPatch):
    node.installed.clear()
    node.boot()
    node._show_library()
    assert not driver_upgrade.ensure_wanted(NAME, Spec(branch="550"))
    assert re.match(r"driver=550: .* not in this machine's archives", driver_upgrade.note(Spec(branch="550")) or "")
    asked: list[Spec] = []
    monkeypatch.setattr(driver_upgrade, "begin", lambda _, wanted, **__: asked.append(wanted))
    assert not driver_upgrade.ensure_wanted(NAME, Spec(branch="550"))
    assert asked == []
    driver_upgrade.ensure_wanted(NAME, Spec(branch="580"))
    clock[0] += 3601
    driver_upgrade.ensure_wanted(NAME, Spec(branch="550"))
    assert [one.branch for one in asked] == ["580", "550"]


def test_a_kernel_without_driver_is_noted(node: MachineDouble):
    node.add_kernel("6.8.0-139-generic")
    assert "kernel 6.8.0-139-generic, which boots next" in (driver_upgrade.note(Spec()) or "")


def test_a_driver_that_works_is_held_and_kept_awake(paths: pathlib.Path, node: MachineDouble):
    driver_upgrade.ensure_settings(Spec())
    assert "nvidia-utils-535-server" in node.held
    assert "nvidia-persistenced.service" not in node.active
    (paths / "usr/bin/nvidia-persistenced").touch()
    driver_upgrade.ensure_settings(Spec())
    assert "nvidia-persistenced.service" in node.active
    node.active.clear()
    driver_upgrade.ensure_settings(Spec(hold=False))
    assert node.active == set()  # nothing changed
    assert node.held == set()
    driver_upgrade.ensure_settings(Spec())
    driver_upgrade.release()
    assert node.held == set()


def test_packages_that_cannot_be_held_now_are_held_later(node: MachineDouble, monkeypatch: pytest.MonkeyPatch):
    """On a fresh machine unattended-upgrades may have dpkg's lock."""

    def locked(_: object) -> bool:
        raise CommandError("apt-mark exited 100: dpkg frontend lock was locked by another process")

    with monkeypatch.context() as context:
        context.setattr(driver_install.apt, "ensure_held", locked)
        driver_upgrade.ensure_settings(Spec())
    assert node.held == set()
    driver_upgrade.ensure_settings(Spec())
    assert "nvidia-utils-535-server" in node.held
    with monkeypatch.context() as context:
        context.setattr(driver_install.apt, "ensure_not_held", locked)
        driver_upgrade.ensure_settings(Spec(hold=False))
        driver_upgrade.release()
    assert "nvidia-utils-535-server" in node.held
    driver_upgrade.release()
    assert node.held == set()


def test_a_setting_that_fails_fails_the_step(node: MachineDouble, monkeypatch: pytest.MonkeyPatch):
    def locked(_: object) -> bool:
        raise CommandError("apt-mark exited 100: dpkg frontend lock was locked by another process")

    monkeypatch.setattr(driver_install.apt, "ensure_held", locked)
    begin()
    driver_upgrade.advance()
    upgrade = Upgrade.load()
    assert upgrade is not None
    assert upgrade.step == "install"
    assert "dpkg frontend lock" in upgrade.failed


def test_a_drain_that_another_orders_meanwhile_outlives_a_failure(
    node: MachineDouble, slurm: SlurmDouble, monkeypatch: pytest.MonkeyPatch
):
    def fails(**_: object) -> None:
        nodes.drain(NAME, "bad fan")
        raise DriverError("no space left")

    begin()
    monkeypatch.setattr(driver_install, "ensure_settings", fails)
    driver_upgrade.advance()
    assert slurm.record is not None
    assert slurm.record.reason.startswith("gpu-driver: failed: no space left")
    driver_upgrade.cancel()
    assert slurm.record == Record("", flags={"DYNAMIC_NORM", "DRAIN"}, reason="bad fan")


# One node at a time.


class Cluster:
    """Several nodes of one controller; each upgrades by itself, in any order that a test chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: pathlib.Path, count: int) -> None:
        self.nodes = {
            f"slurmd-{i}": nodes.Node(f"slurmd-{i}", "IDLE", frozenset(), None, None, None, {}) for i in range(count)
        }
        self.root = root
        self.monkeypatch = monkeypatch
        self.asked = 0
        monkeypatch.setattr(nodes, "show", self.nodes.get)
        monkeypatch.setattr(nodes, "show_all", self._all)
        monkeypatch.setattr(nodes, "drain", lambda name, reason: self._set(name, {"DRAIN"}, reason))
        monkeypatch.setattr(nodes, "resume", lambda name: self._set(name, set(), None))

    def on(self, name: str) -> None:
        """Go on with this node's hook."""
        self.monkeypatch.setattr(node_state, "STATE_DIR", self.root / name)

    def ask(self, name: str) -> str | None:
        self.on(name)
        return gpu_hold.take_turn(gpu_hold.DRIVER, name, "driver 1")

    def done(self, name: str) -> None:
        self.on(name)
        gpu_hold.release()

    def drained(self) -> list[str]:
        return sorted(name for name, node in self.nodes.items() if node.is_drained)

    def _all(self) -> list[nodes.Node]:
        self.asked += 1
        return [self.nodes[name] for name in sorted(self.nodes)]

    def _set(self, name: str, flags: set[str], reason: str | None) -> None:
        self.nodes[name] = dataclasses.replace(self.nodes[name], flags=frozenset(flags), reason=reason)


def test_one_node_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    cluster = Cluster(monkeypatch, tmp_path, 4)
    done: list[str] = []
    while len(done) < 4:
        mine = [name for name in cluster.nodes if name not in done and cluster.ask(name) is None]
        assert len(mine) == 1
        assert cluster.drained() == mine
        done += mine
        cluster.done(mine[0])
    assert cluster.drained() == []


@pytest.mark.parametrize("earlier_first", [False, True])
def test_two_that_ask_at_once_do_not_both_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, *, earlier_first: bool
):
    """Ways in which the orders of two nodes to the controller can mix: whichever, one at most may go on."""
    names = ("slurmd-0", "slurmd-1") if earlier_first else ("slurmd-1", "slurmd-0")
    outcomes: set[frozenset[str]] = set()
    for order in itertools.product(names, repeat=9):
        cluster = Cluster(monkeypatch, tmp_path / "-".join(name[-1] for name in order), 2)
        race = Race(cluster, order)
        inside = race.run()
        assert len(inside) <= 1, order
        outcomes.add(frozenset(inside))
    assert {frozenset({"slurmd-0"}), frozenset({"slurmd-1"})} <= outcomes


class Race:
    """Nodes that ask for their turn at the same time, one order to the controller at a time."""

    def __init__(self, cluster: Cluster, order: tuple[str, ...]) -> None:
        self.cluster = cluster
        self.order = order
        self.inside: set[str] = set()
        self._over = False
        self._go = {name: threading.Semaphore(0) for name in cluster.nodes}
        self._back = threading.Semaphore(0)
        for call in ("show", "show_all", "drain", "resume"):
            cluster.monkeypatch.setattr(nodes, call, self._stepping(getattr(nodes, call)))

    def run(self) -> set[str]:
        threads = [threading.Thread(target=self._node, name=name) for name in self.cluster.nodes]
        for thread in threads:
            thread.start()
            self._back.acquire()
        for name in self.order:
            self.cluster.on(name)
            self._go[name].release()
            self._back.acquire()
        self._over = True
        for thread in threads:
            self._go[thread.name].release()
            thread.join()
        return self.inside

    def _node(self) -> None:
        name = threading.current_thread().name
        with contextlib.suppress(Killed):
            self._pause()
            while True:
                if gpu_hold.take_turn(gpu_hold.DRIVER, name, "driver 1") is None:
                    self.inside.add(name)
                    while True:
                        self._pause()

    def _pause(self) -> None:
        self._back.release()
        self._go[threading.current_thread().name].acquire()
        if self._over:
            raise Killed

    def _stepping(self, call: collections.abc.Callable[..., typing.Any]) -> collections.abc.Callable[..., typing.Any]:
        def step(*arguments: typing.Any) -> typing.Any:
            self._pause()
            return call(*arguments)

        return step


def test_a_node_that_failed_stops_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    cluster = Cluster(monkeypatch, tmp_path, 2)
    cluster._set("slurmd-1", {"DRAIN"}, "gpu-driver: failed: no reboot")
    assert cluster.ask("slurmd-0") == "slurmd-1"
    assert cluster.drained() == ["slurmd-1"]


def test_a_node_waits_without_being_drained(node: MachineDouble, slurm: SlurmDouble, monkeypatch: pytest.MonkeyPatch):
    other = nodes.Node("slurmd-1", "IDLE", frozenset({"DRAIN"}), None, "gpu-driver: driver 1", None, {})
    monkeypatch.setattr(nodes, "show_all", lambda: [other])
    begin()
    assert driver_upgrade.advance() is Pending.WAIT
    upgrade = Upgrade.load()
    assert upgrade is not None
    assert upgrade.text == "driver 580.173.02: waits for its turn: slurmd-1 changes its driver"
    assert slurm.log == []
    monkeypatch.setattr(nodes, "show_all", lambda: [])
    run_all(node)
    assert node.loaded == "580.173.02"


def test_another_hold_is_in_the_way(node: MachineDouble):
    gpu_hold.take(gpu_hold.RESET, NAME, "0000:1b:00.0")
    begin()
    assert driver_upgrade.advance() is Pending.WAIT
    upgrade = Upgrade.load()
    assert upgrade is not None
    assert "slurmd-0 is held for gpu-reset already" in upgrade.failed


def test_the_spec_is_kept_whole(node: MachineDouble):
    begin(cuda=True, persistence=False)
    upgrade = Upgrade.load()
    assert upgrade is not None
    assert upgrade.spec == Spec(branch="580", cuda=True, persistence=False)
    assert isinstance(upgrade.plan, driver_plan.Plan)
