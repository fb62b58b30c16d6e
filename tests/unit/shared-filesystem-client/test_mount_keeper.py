"""The keeper on a machine whose mounts are pretended. What it does to real ones is seen in tests/storage."""

import dataclasses
import json
import pathlib
import socket
import subprocess
import sys
import threading
import time
import typing

import pytest
import yaml
from machine_mounts import MachineMounts

from scripts import keeper
from scripts.keeper import Remedy
from slurm_ddp import mounts, readiness, records, watchdog
from slurm_ddp.run import CommandError, Completed
from slurm_ddp.slurm import nodes

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())
MP, UNIT, SOURCE = "/mnt/shared", "juicefs-client.service", "JuiceFS:shared"
State = mounts.State


class Rig:
    """A node with a mount, systemd and Slurm."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.mounts = MachineMounts()
        self.mounts.install_in(mounts, monkeypatch)
        monkeypatch.setattr(mounts, "detach", self._detach)
        monkeypatch.setattr(keeper, "run", self._run)
        monkeypatch.setattr(watchdog, "run", self._run)
        monkeypatch.setattr(keeper, "FUSE", folder / "fuse")
        monkeypatch.setattr(keeper, "AGENTS", folder / "agents")
        monkeypatch.setattr(readiness, "DIRECTORY", folder / "needs")
        monkeypatch.setattr(readiness, "BOOT_ID", folder / "boot")
        (folder / "boot").write_text("this\n")
        monkeypatch.setattr(keeper, "unreachable", self._unreachable)
        monkeypatch.setattr(time, "time", lambda: self.now)
        self.now = 1_800_000_000.0
        self.down = ""
        self.comes_back = True
        self.unit_state = "active"
        self.started = {"ExecMainStartTimestampMonotonic": "100"}  # by property, in microseconds
        self.node = "State=IDLE Reason="
        self.calls: list[tuple[str, ...]] = []
        self.slurm_error = False
        self.wake_error = False
        servers, slurm = {"servers": ((("10.0.0.5", 6379),),), "speaks": "redis"}, {"node": "node-1", "drain": True}
        known: dict[str, typing.Any] = {"known": ("JuiceFS:old",), "units": ("client/0",)} | servers | slurm
        self.watch = keeper.Watch("client", MP, UNIT, ("fuse.juicefs",), (SOURCE,), **known)
        self.mount()

    def mount(self, source: str = SOURCE, **options: typing.Any) -> None:
        self.mounts.add(MP, source, "fuse.juicefs", **options)

    def tick(self, passes: int = 1, seconds: float = 10.0) -> keeper.Health:
        """Let the timer fire."""
        health = records.load(keeper.Health(), self.folder / keeper.HEALTH)
        for _ in range(passes):
            self.now += seconds
            health = keeper.keep(self.watch, records.load(keeper.Health(), self.folder / keeper.HEALTH), self.folder)
        return health

    def did(self, *words: str) -> int:
        return sum(call[1 : 1 + len(words)] == words for call in self.calls)

    def _detach(self, mountpoint: str) -> None:
        for index in reversed(range(len(self.mounts.table))):
            if self.mounts.table[index].mountpoint == mountpoint:
                del self.mounts.table[index]
                break
        if not self.mounts.at(mountpoint) or len(self.mounts.at(mountpoint)) == 1:
            self.mounts.looks.pop(mountpoint, None)

    def _unreachable(self, servers: typing.Any, speaks: str) -> str:
        assert (servers, speaks) == (self.watch.servers, self.watch.speaks)
        return self.down

    def _run(self, *argv: str, timeout: float, check: bool = True) -> Completed:
        return Completed(0, self._print(*argv, timeout=timeout, check=check), "")

    def _print(self, *argv: str, timeout: float, check: bool) -> str:
        assert 0 < timeout <= 30
        self.calls.append(argv)
        if argv[0] == keeper.SYSTEMCTL:
            return self._systemctl(*argv[1:], check=check)
        if argv[0] == "wake":
            if self.wake_error:
                raise CommandError("systemd-run exited 1")
            return ""
        assert argv[0] == nodes.SCONTROL
        if self.slurm_error:
            raise CommandError("scontrol: no answer within 6 s")
        if argv[1] == "show":
            assert argv[2:4] == ("node", "node-1")
            return f"NodeName=node-1 {self.node}\n"
        settings = dict(word.split("=", 1) for word in argv[2:])
        assert settings["nodename"] == "node-1"
        if settings["state"] == "drain":
            self.node = f"State=IDLE+DRAIN Reason={settings['reason']} [root@2026-11-20T10:00:00]"
        else:
            self.node = "State=IDLE Reason="
        return ""

    def _systemctl(self, verb: str, *words: str, check: bool) -> str:
        assert words[-1] == UNIT
        assert type(check) is bool
        match verb:
            case "is-active":
                assert not check, "its exit status is the state"
                return self.unit_state + "\n"
            case "show":
                assert not check
                assert words[0] == "-P"
                return self.started.get(words[1], "0") + "\n"
            case "restart" | "start":
                assert check
                assert "--no-block" in words
                assert not self.mounts.at(MP)
                if self.comes_back:
                    self.mount()
                    self.started = {"ExecMainStartTimestampMonotonic": "10000"}
                return ""
            case "kill" | "reset-failed":
                assert not check, "it fails where there is nothing to do"
                return ""
            case _:
                raise AssertionError(verb)


@pytest.fixture
def rig(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_sticky_bit_is_set_where_it_is_ours_to_set(rig: Rig, capsys: pytest.CaptureFixture[str], is_ours: bool):
    rig.watch = dataclasses.replace(rig.watch, sticky=is_ours)
    (rig.folder / keeper.WATCH).write_text(json.dumps(dataclasses.asdict(rig.watch)))
    assert records.read(keeper.Watch, rig.folder / keeper.WATCH) == rig.watch
    rig.mounts.looks[MP] = mounts.Result(State.RIGHT, was_open=0o777 if is_ours else None)
    assert rig.tick().works
    assert rig.mounts.probes[-1]["sticky"] == is_ours
    shown = f"{MP}: the root had mode 0777, so others could replace what is in it: it has 1777 now\n"
    assert capsys.readouterr().out == (shown if is_ours else "")


@pytest.mark.parametrize(("state", "facts", "remedy"), CASES["remedies"])
def test_how_a_mount_is_repaired(state: str, facts: dict[str, typing.Any], remedy: str):
    usual: dict[str, typing.Any] = {
        "ours": True,
        "in_use": False,
        "pending": False,
        "fuse": False,
        "hung_s": 0.0,
        "servers_answer": True,
    }
    assert keeper.remedy(State(state), **usual | facts) is Remedy(remedy)


def test_a_mount_that_works_is_left_alone_and_seldom_written_to(rig: Rig):
    health = rig.tick(12)
    assert (health.state, health.detail, health.heals, health.passes) == ("right", "", 0, 12)
    assert health.since == 1_800_000_010.0
    assert not any(call[0] == nodes.SCONTROL or call[1] != "show" for call in rig.calls)
    written = [probe["writable"] for probe in rig.mounts.probes]
    assert written.count(True) == 2
    assert written[0] is True


@pytest.mark.parametrize("state", [State.STALE, State.STACKED])
def test_a_leftover_is_mounted_anew_in_the_same_pass(rig: Rig, state: State):
    rig.tick()
    if state is State.STACKED:
        rig.mount()
    else:
        rig.mounts.looks[MP] = mounts.Result(state, "it does not open")
    health = rig.tick()
    assert health.state == "right"
    assert health.heals == 1
    assert health.healed.startswith("restart: ")
    assert [mount.source for mount in rig.mounts.table] == [SOURCE]


def test_of_stacked_mounts_in_use_the_first_stays(rig: Rig):
    rig.mount()
    rig.mounts.users_of[MP] = [(123, "python3")]
    health = rig.tick()
    assert (health.state, health.healed[:5]) == ("right", "peel:")
    assert rig.did("restart") == 0


def test_a_foreign_mount_is_left_alone(rig: Rig):
    rig.mounts.table.clear()
    rig.mounts.add(MP, "tmpfs", "tmpfs")
    health = rig.tick(5)
    assert (health.state, health.heals) == ("wrong", 0)
    assert [mount.source for mount in rig.mounts.table] == ["tmpfs"]


@pytest.mark.parametrize("mount", [("JuiceFS:other", "fuse.juicefs"), (SOURCE, "fuse.sshfs")])
def test_a_mount_with_the_type_or_source_alone_is_foreign(rig: Rig, mount: tuple[str, str]):
    rig.mounts.table.clear()
    rig.mounts.add(MP, *mount)
    assert rig.tick(5).heals == 0
    assert rig.mounts.at(MP)


def test_a_foreign_mount_on_top_ends_a_repair(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rig.mount()
    monkeypatch.setattr(mounts, "detach", lambda _: rig.mounts.add(MP, "tmpfs", "tmpfs"))
    keeper.apply(Remedy.RESTART, dataclasses.replace(rig.watch))
    assert rig.did("restart") == 0
    assert f"{MP} holds tmpfs (tmpfs), which is not ours" in capsys.readouterr().err


def test_a_mount_that_became_read_only_is_mounted_anew(rig: Rig):
    rig.mounts.table.clear()
    rig.mount(read_only=True)
    rig.mounts.users_of[MP] = [(123, "python3")]
    health = rig.tick(7)
    assert (health.state, health.detail, health.heals) == ("wrong", f"{MP} is mounted read-only", 0)
    rig.watch = dataclasses.replace(rig.watch, writable=False)
    assert rig.tick().works
    rig.watch = dataclasses.replace(rig.watch, writable=True)
    assert rig.tick().state == "wrong", "whether this pass writes or not"
    rig.mounts.users_of.clear()
    health = rig.tick()
    assert (health.state, health.heals, health.healed_at) == ("right", 1, rig.now)
    assert rig.tick().healed_at == rig.now - 10


@pytest.mark.parametrize(
    ("unit", "boot", "changed_us", "started", "expected"), CASES["a_mount_from_before_the_change_is_outdated"]
)
def test_a_mount_from_before_the_change_is_outdated(
    rig: Rig, unit: str, boot: str, changed_us: int, started: dict[str, str], expected: bool
):
    rig.unit_state, rig.started = unit, started
    assert keeper.is_outdated(UNIT, boot, changed_us) is expected


def test_a_change_is_applied_when_the_mount_is_idle(rig: Rig):
    rig.watch = dataclasses.replace(rig.watch, changed_us=5_000, boot="this")
    rig.mounts.users_of[MP] = [(123, "python3")]
    assert rig.tick(3).heals == 0
    rig.mounts.users_of.clear()
    assert rig.tick().heals == 1
    asked = rig.did("show")
    assert rig.tick(5).heals == 1
    assert rig.did("show") <= asked + 1  # what is settled is not asked again


def test_a_service_that_systemd_is_about_to_start_is_left_to_it(rig: Rig):
    rig.tick()
    rig.mounts.table.clear()
    rig.unit_state = "activating"
    assert rig.tick(3).heals == 0


def test_a_dead_server_is_waited_for_and_named_since_when(rig: Rig):
    rig.tick()
    rig.down = "10.0.0.5:6379 does not answer (connection refused)"
    rig.mounts.looks[MP] = mounts.Result(State.HUNG, "no answer")
    health = rig.tick(20)
    assert (health.state, health.heals, health.down) == ("hung", 0, rig.down)
    assert health.down_since == 1_800_000_020.0
    assert health.hung == 1_800_000_020.0
    assert [one["deadline"] for one in rig.mounts.probes[1:4]] == [5.0, 2.0, 2.0]  # the charm may wait for its turn
    rig.down = ""
    rig.mounts.looks.clear()
    health = rig.tick()
    assert (health.state, health.down, health.down_since, health.hung) == ("right", "", 0.0, 0.0)


def test_a_client_that_hangs_although_its_servers_answer_is_killed(rig: Rig):
    rig.tick()
    rig.mounts.looks[MP] = mounts.Result(State.HUNG, "no answer")
    abort = rig.folder / "fuse" / "1" / "abort"  # the device of the pretended mounts is 0:1
    abort.parent.mkdir(parents=True)
    abort.write_text("")
    assert rig.tick(2).heals == 0
    health = rig.tick()
    assert (health.state, health.heals) == ("right", 1)
    assert (health.hung, health.hangs, health.answered) == (0.0, 0, 0.0)
    assert abort.read_text() == "1"
    assert rig.did("kill", "--signal=SIGKILL", UNIT) == 1


def test_a_machine_too_busy_to_look_often_does_not_make_a_client_hung(rig: Rig):
    rig.tick()
    rig.mounts.looks[MP] = mounts.Result(State.HUNG, "no answer")
    assert rig.tick(2, seconds=60).heals == 0
    assert not any(one["writable"] for one in rig.mounts.probes[-1:])  # a plain look has all the time there is
    assert rig.tick(seconds=60).heals == 1


def test_a_client_that_only_writes_slowly_is_left_alone_and_its_node_too(rig: Rig):
    """Under heavy writing: an abort would lose what it has in hand."""
    rig.watch = dataclasses.replace(rig.watch, node="node-1", drain=True)
    rig.tick()
    rig.mounts.looks[MP] = mounts.Result(State.SLOW, "a small write did not end")
    health = rig.tick(29)
    assert (health.state, health.slow, health.works) == ("slow", 1_800_000_020.0, True)
    assert (health.drained, health.heals) == (False, 0)
    assert all(one["writable"] for one in rig.mounts.probes[2:])  # whether writes end is asked each time
    assert rig.tick().works
    assert not rig.tick().works, "five minutes are over"
    health = rig.tick(8)
    assert (health.works, health.drained, health.heals) == (False, True, 0)
    assert not rig.did("kill") and not rig.did("restart")
    rig.mounts.looks.clear()
    health = rig.tick(3)
    assert (health.state, health.slow, health.works, health.drained) == ("right", 0.0, True, False)


def test_a_client_has_time_to_come_back_once_its_server_answers_again(rig: Rig):
    """Who waited for the server loses nothing: to abort the client at once would fail them all."""
    rig.tick()
    rig.mounts.looks[MP] = mounts.Result(State.HUNG, "no answer")
    rig.down = "10.0.0.5:6379 does not answer (connection refused)"
    assert rig.tick(20).answered == 0.0
    rig.down = ""
    health = rig.tick(6)
    assert (health.state, health.heals, health.answered) == ("hung", 0, rig.now - 10)
    assert rig.tick().heals == 1  # it had its minute


def test_the_node_is_drained_after_half_a_minute_and_resumed_by_itself(rig: Rig):
    rig.tick()
    rig.down = "10.0.0.5:6379 does not answer (connection refused)"
    rig.mounts.table.clear()
    assert not rig.tick(3).drained
    assert rig.tick().drained
    assert rig.node.startswith("State=IDLE+DRAIN Reason=mount-keeper client: 10.0.0.5:6379 does not answer")
    rig.tick(5)
    assert sum(call[1:2] == ("update",) for call in rig.calls) == 1
    rig.down, rig.mounts.table = "", []
    assert rig.tick().drained  # it works since this moment: not a blink
    assert not rig.tick().drained
    assert rig.node == "State=IDLE Reason="


@pytest.mark.parametrize("reason", ["disk is being replaced", "gpu-health: Xid 79", "mount-keeper other: broken"])
def test_the_drains_of_others_are_left_alone(rig: Rig, reason: str):
    rig.node = before = f"State=IDLE+DRAIN Reason={reason} [root@2026-11-20T10:00:00]"
    rig.comes_back = False
    rig.mounts.table.clear()
    assert not rig.tick(8).drained
    rig.comes_back = True
    rig.tick(3)
    assert rig.node == before


def test_who_resumes_a_node_by_hand_is_not_overruled(rig: Rig):
    rig.comes_back = False
    rig.mounts.table.clear()
    assert rig.tick(6).drained
    rig.node = "State=IDLE Reason="
    rig.tick(6)
    assert rig.node == "State=IDLE Reason="


def test_a_drain_of_ours_that_an_administrator_took_over_stays(rig: Rig):
    rig.comes_back = False
    rig.mounts.table.clear()
    assert rig.tick(6).drained
    rig.node = "State=IDLE+DRAIN Reason=we look into it [alice@2026-11-20T10:00:00]"
    rig.comes_back = True
    assert not rig.tick(4).drained
    assert "we look into it" in rig.node


@pytest.mark.parametrize("change", [{"drain": False}, {"node": ""}])
def test_the_node_is_drained_only_where_that_is_asked_for(rig: Rig, change: dict[str, typing.Any]):
    rig.watch = dataclasses.replace(rig.watch, **change)
    rig.comes_back = False
    rig.mounts.table.clear()
    assert not rig.tick(8).drained
    assert not any(call[0] == nodes.SCONTROL for call in rig.calls)


def test_a_silent_controller_stops_nothing(rig: Rig, capsys: pytest.CaptureFixture[str]):
    rig.slurm_error = True
    rig.comes_back = False
    rig.mounts.table.clear()
    assert not rig.tick(8).drained
    assert "node-1 is neither drained nor resumed: scontrol: no answer within 6 s" in capsys.readouterr().err
    rig.slurm_error = False
    assert rig.tick().drained


def test_while_the_charm_is_at_it_the_keeper_keeps_out(rig: Rig, capsys: pytest.CaptureFixture[str]):
    (rig.folder / keeper.WATCH).write_text(json.dumps(dataclasses.asdict(rig.watch)))
    with keeper.turn(rig.folder) as mine:
        assert mine
        begin = time.monotonic()
        assert keeper.main([str(rig.folder)]) == 0
        assert time.monotonic() - begin < 0.5, "a pass of the timer does not wait for its turn"
        assert not (rig.folder / keeper.HEALTH).exists()
    assert keeper.main([str(rig.folder)]) == 0
    assert capsys.readouterr().out == ""
    assert records.load(keeper.Health(), rig.folder / keeper.HEALTH).state == "right"


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"app": 1}', '{"app":"a","mountpoint":"/m","unit":"u"}'])
def test_without_a_watch_there_is_nothing_to_do(
    tmp_path: pathlib.Path, text: str | None, capsys: pytest.CaptureFixture[str]
):
    if text is not None:
        (tmp_path / keeper.WATCH).write_text(text)
    assert keeper.main([str(tmp_path)]) == 1
    assert "nothing to watch" in capsys.readouterr().err


def test_of_a_group_of_servers_one_must_answer():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        alive = ("127.0.0.1", listener.getsockname()[1])
        with socket.create_server(("127.0.0.1", 0)) as other:
            dead = ("127.0.0.1", other.getsockname()[1])
        assert not keeper.unreachable([[dead, alive]])
        shown = keeper.unreachable([[alive], [dead]])
    assert shown == f"127.0.0.1:{dead[1]} does not answer (connection refused)"


@pytest.mark.parametrize("speaks", [*keeper.GREETINGS, keeper.TLS])
@pytest.mark.parametrize("answer", [None, b"-NOAUTH Authentication required.\r\n"])
def test_a_server_that_takes_connections_must_say_something(speaks: str, answer: bytes | None):
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                held.append(listener.accept()[0])
                if answer is not None:
                    held[-1].sendall(answer)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        port = listener.getsockname()[1]
        shown = keeper.unreachable([[("127.0.0.1", port)]], speaks, timeout=2 if answer else 0.3)
        assert shown == ("" if answer else f"127.0.0.1:{port} takes connections and is silent")
        assert not keeper.unreachable([[("127.0.0.1", port)]])
        server.join()
        for connection in held:
            connection.close()


def test_it_runs_alone_as_the_charm_lays_it_out(tmp_path: pathlib.Path):
    """With the system's Python, its standard library and the modules in the folder beside it."""
    for name, source in watchdog.sources(pathlib.Path(keeper.__file__)).items():
        path = tmp_path / name.replace("__main__", "mount_keeper")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source)
    state = tmp_path / "state"
    state.mkdir()
    watch = keeper.Watch("a", "/proc", "a-unit-that-is-not.service", ("proc",), ("proc",), (), writable=False)
    (state / keeper.WATCH).write_text(json.dumps(dataclasses.asdict(watch)))
    argv = [sys.executable, "-S", "-E", "-B", str(tmp_path / "mount_keeper.py"), str(state)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    assert json.loads((state / keeper.HEALTH).read_text())["state"] == "right"


def need(rig: Rig) -> dict[str, str]:
    return json.loads((rig.folder / "needs/client-0.json").read_text())


def test_after_a_reboot_jobs_may_come_as_soon_as_the_mount_was_written_to(rig: Rig):
    readiness.tell("client/0", ready=True, mountpoint=MP)
    rig.tick()
    (rig.folder / "boot").write_text("next\n")
    assert readiness.missing() == ["client/0 (not checked since this boot)"]
    rig.mounts.probes.clear()
    rig.tick(seconds=1)
    assert [probe["writable"] for probe in rig.mounts.probes] == [True]  # however recent the write before the reboot
    assert readiness.missing() == []
    assert (need(rig)["boot"], need(rig)["mountpoint"]) == ("next", MP)


def test_a_mount_that_is_absent_after_a_reboot_keeps_jobs_away(rig: Rig):
    rig.tick()
    (rig.folder / "boot").write_text("next\n")
    rig.mounts.table.clear()
    rig.comes_back = False
    rig.down = "10.0.0.5:6379 does not answer (connection refused)"
    rig.tick()
    assert readiness.missing() == [f"client/0 ({rig.down})"]
    rig.down = ""
    rig.comes_back = True
    rig.tick()
    assert readiness.missing() == []


def test_a_unit_that_juju_removed_without_a_last_hook_keeps_no_job_away(rig: Rig):
    rig.watch = dataclasses.replace(rig.watch, units=("client/0", "client/1"))
    for unit in rig.watch.units:
        readiness.tell(unit, ready=False, detail="waiting for redis")
    (rig.folder / "agents/unit-client-1").mkdir(parents=True)
    rig.mounts.looks[MP] = mounts.Result(State.FAILED, "no")
    rig.tick()
    assert readiness.missing() == ["client/1 (waiting for redis)"]


def test_a_drain_of_ours_outlives_a_reboot(rig: Rig):
    rig.tick()
    rig.mounts.looks[MP] = mounts.Result(State.FAILED, "no space left on device")
    assert rig.tick(4).drained
    (rig.folder / "boot").write_text("next\n")
    rig.mounts.looks.clear()
    assert not rig.tick(2).drained
    assert "DRAIN" not in rig.node


def test_a_charm_that_waits_is_woken_once_when_its_mount_works(rig: Rig, capsys: pytest.CaptureFixture[str]):
    for unit in ("client-0", "client-1"):
        (rig.folder / f"wake-{unit}.json").write_text(json.dumps(["wake", unit]))
    rig.mounts.looks[MP] = mounts.Result(State.FAILED, "no space left on device")
    rig.tick(2)
    assert ("wake", "client-0") not in rig.calls
    rig.mounts.looks.clear()
    rig.tick(3)
    assert [call for call in rig.calls if call[0] == "wake"] == [("wake", "client-0"), ("wake", "client-1")]
    (rig.folder / "wake-client-0.json").write_text("{")
    rig.tick()
    assert "the charm cannot be woken" in capsys.readouterr().err
