"""The keeper on a machine with fake mounts. tests/storage has the tests with real ones."""

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
from keeper_rig import MP, SOURCE, UNIT, Rig

import mount_plan
from mount import watching
from scripts import keeper
from scripts.keeper import Remedy
from slurm_ddp import mounts, readiness, records
from slurm_ddp.slurm import nodes

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())
State = mounts.State


@pytest.fixture
def rig(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_sticky_bit_is_set_where_it_is_ours_to_set(
    rig: Rig, capsys: pytest.CaptureFixture[str], is_ours: bool
):
    rig.watch = dataclasses.replace(rig.watch, sticky=is_ours)
    (rig.folder / keeper.WATCH).write_text(json.dumps(dataclasses.asdict(rig.watch)))
    assert records.read(keeper.Watch, rig.folder / keeper.WATCH) == rig.watch
    rig.mounts.looks[MP] = mounts.Result(State.RIGHT, was_open=0o777 if is_ours else None)
    assert rig.tick().works
    assert rig.mounts.probes[-1]["sticky"] == is_ours
    shown = (
        f"{MP}: the root had mode 0777, so others could replace what is in it: it has 1777 now\n"
    )
    assert capsys.readouterr().out == (shown if is_ours else "")


@pytest.mark.parametrize(("state", "facts", "remedy"), CASES["remedies"])
def test_how_a_mount_is_repaired(state: str, facts: dict[str, typing.Any], remedy: str):
    usual: dict[str, typing.Any] = dict.fromkeys(("in_use", "pending", "fuse"), False)
    usual |= {"ours": True, "hung_s": 0.0, "servers_answer": True}
    assert keeper.remedy(State(state), **usual | facts) is Remedy(remedy)


def test_a_mount_that_works_is_left_alone_and_seldom_written_to(rig: Rig):
    health = rig.tick(12)
    assert (health.state, health.detail, health.heals, health.passes) == ("right", "", 0, 12)
    assert health.since == 1_800_000_010.0
    assert not any(call[0] == nodes.SCONTROL or call[1] != "show" for call in rig.machine.calls)
    written = [probe["writable"] for probe in rig.mounts.probes]
    assert written.count(True) == 2
    assert written[0] is True


@pytest.mark.parametrize("state", [State.STALE, State.STACKED])
def test_a_leftover_is_mounted_again_in_the_same_pass(rig: Rig, state: State):
    rig.tick()
    if state is State.STACKED:
        rig.mount()
    else:
        rig.mounts.looks[MP] = mounts.Result(state, "it does not open")
    health = rig.tick()
    assert health.state == "right"
    assert health.heals == 1
    assert health.healed.startswith("restart: ")
    assert rig.machine.did("kill") == 0
    assert [mount.source for mount in rig.mounts.table] == [SOURCE]


def test_of_stacked_mounts_in_use_the_first_stays(rig: Rig):
    rig.mount()
    rig.mounts.users_of[MP] = [(123, "python3")]
    health = rig.tick()
    assert (health.state, health.healed[:5]) == ("right", "peel:")
    assert rig.machine.did("restart") == 0


@pytest.mark.parametrize(
    "mount", [("tmpfs", "tmpfs"), ("JuiceFS:other", "fuse.juicefs"), (SOURCE, "fuse.sshfs")]
)
def test_a_mount_of_another_type_or_source_is_left_alone(rig: Rig, mount: tuple[str, str]):
    rig.mounts.table.clear()
    rig.mounts.add(MP, *mount)
    health = rig.tick(5)
    assert (health.state, health.heals) == ("wrong", 0)
    assert [(found.source, found.fstype) for found in rig.mounts.table] == [mount]


def test_a_foreign_mount_on_top_ends_a_repair(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rig.mount()
    monkeypatch.setattr(mounts, "detach", lambda _: rig.mounts.add(MP, "tmpfs", "tmpfs"))
    keeper.apply(Remedy.RESTART, dataclasses.replace(rig.watch))
    assert rig.machine.did("restart") == 0
    assert f"{MP} holds tmpfs (tmpfs), which is not ours" in capsys.readouterr().err


def test_a_mount_that_became_read_only_is_mounted_again(rig: Rig):
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
    ("unit", "boot", "changed_us", "started", "expected"),
    CASES["a_mount_from_before_the_change_is_outdated"],
)
def test_a_mount_from_before_the_change_is_outdated(
    rig: Rig, unit: str, boot: str, changed_us: int, started: dict[str, str], expected: bool
):
    rig.machine.active = {UNIT} if unit == "active" else set()
    never = dict.fromkeys(("ExecMainStartTimestampMonotonic", "ActiveEnterTimestampMonotonic"), "0")
    rig.machine.stamps = never | started
    assert keeper.is_outdated(UNIT, boot, changed_us) is expected


def test_a_change_is_applied_when_the_mount_is_idle(rig: Rig):
    rig.watch = dataclasses.replace(rig.watch, changed_us=5_000, boot="this")
    rig.mounts.users_of[MP] = [(123, "python3")]
    assert rig.tick(3).heals == 0
    rig.mounts.users_of.clear()
    assert rig.tick().heals == 1
    question = ("show", "-P", "ExecMainStartTimestampMonotonic", UNIT)
    asked = rig.machine.did(*question)
    assert asked
    assert rig.tick(5).heals == 1
    assert rig.machine.did(*question) <= asked + 1  # settled facts are not queried again


def test_a_service_that_systemd_is_about_to_start_is_left_to_it(rig: Rig):
    rig.tick()
    rig.lose_mount()
    rig.machine.answers["systemctl"] = lambda words, _: "activating\n"
    assert rig.tick(3).heals == 0


def test_a_dead_server_is_waited_for_and_named_since_when(rig: Rig):
    rig.tick()
    rig.down = "10.0.0.5:6379 does not answer (connection refused)"
    rig.mounts.looks[MP] = mounts.Result(State.HUNG, "no answer")
    health = rig.tick(20)
    assert (health.state, health.heals, health.down) == ("hung", 0, rig.down)
    assert health.down_since == 1_800_000_020.0
    assert health.hung == 1_800_000_020.0
    assert [one["deadline"] for one in rig.mounts.probes[1:4]] == [
        5.0,
        2.0,
        2.0,
    ]  # the charm may wait for its turn
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
    assert rig.machine.did("kill", "--signal=SIGKILL", UNIT) == 1


def test_a_machine_too_busy_to_look_often_does_not_make_a_client_hung(rig: Rig):
    rig.tick()
    rig.mounts.looks[MP] = mounts.Result(State.HUNG, "no answer")
    assert rig.tick(2, seconds=60).heals == 0
    assert not any(
        one["writable"] for one in rig.mounts.probes[-1:]
    )  # a plain look has all the time there is
    assert rig.tick(seconds=60).heals == 1


def test_a_client_that_only_writes_slowly_is_left_alone_and_its_node_too(rig: Rig):
    """Under heavy writing, an abort would lose the data in flight."""
    rig.watch = dataclasses.replace(rig.watch, node="node-1", drain=True)
    rig.tick()
    rig.mounts.looks[MP] = mounts.Result(State.SLOW, "a small write did not end")
    health = rig.tick(29)
    assert (health.state, health.slow, health.works) == ("slow", 1_800_000_020.0, True)
    assert (health.drained, health.heals) == (False, 0)
    assert all(
        one["writable"] for one in rig.mounts.probes[2:]
    )  # whether writes end is asked each time
    assert rig.tick().works
    assert not rig.tick().works, "five minutes are over"
    health = rig.tick(8)
    assert (health.works, health.drained, health.heals) == (False, True, 0)
    assert not rig.machine.did("kill") and not rig.machine.did("restart")
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
    rig.lose_mount()
    assert not rig.tick(3).drained
    assert rig.tick().drained
    assert rig.node.startswith(
        "State=IDLE+DRAIN Reason=mount-keeper client: 10.0.0.5:6379 does not answer"
    )
    rig.tick(5)
    assert sum(call[1:2] == ("update",) for call in rig.machine.calls) == 1
    rig.down = ""
    assert rig.tick().drained  # it works since this moment: not a blink
    assert not rig.tick().drained
    assert rig.node == "State=IDLE Reason="


@pytest.mark.parametrize(
    "reason", ["disk is being replaced", "gpu-health: Xid 79", "mount-keeper other: broken"]
)
def test_the_drains_of_others_are_left_alone(rig: Rig, reason: str):
    rig.node = before = f"State=IDLE+DRAIN Reason={reason} [root@2026-11-20T10:00:00]"
    rig.lose_mount(for_good=True)
    assert not rig.tick(8).drained
    rig.machine.broken.clear()
    rig.tick(3)
    assert rig.node == before


@pytest.mark.parametrize(
    "changed", ["State=IDLE Reason=", "State=IDLE+DRAIN Reason=we look into it [alice@2026-11-20]"]
)
def test_an_administrator_who_changes_a_drain_of_ours_is_not_overruled(rig: Rig, changed: str):
    rig.lose_mount(for_good=True)
    assert rig.tick(6).drained
    rig.node = changed
    rig.tick(6)
    assert rig.node == changed
    rig.machine.broken.clear()
    assert not rig.tick(4).drained
    assert rig.node == changed


@pytest.mark.parametrize("change", [{"drain": False}, {"node": ""}])
def test_the_node_is_drained_only_where_that_is_asked_for(rig: Rig, change: dict[str, typing.Any]):
    rig.watch = dataclasses.replace(rig.watch, **change)
    rig.lose_mount(for_good=True)
    assert not rig.tick(8).drained
    assert not any(call[0] == nodes.SCONTROL for call in rig.machine.calls)


def test_a_silent_controller_stops_nothing(rig: Rig, capsys: pytest.CaptureFixture[str]):
    rig.slurm_error = True
    rig.lose_mount(for_good=True)
    assert not rig.tick(8).drained
    assert (
        "node-1 is neither drained nor resumed: scontrol exited 1: no answer within 6 s"
        in capsys.readouterr().err
    )
    rig.slurm_error = False
    assert rig.tick().drained


def test_while_the_charm_is_at_it_the_keeper_keeps_out(
    rig: Rig, capsys: pytest.CaptureFixture[str]
):
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


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"app": 1}', '{"app":"a","mountpoint":"/m","unit":"u"}']
)
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


def test_it_runs_alone_as_the_charm_lays_it_out(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """With the system's Python, its standard library and the modules in its own folder."""
    monkeypatch.setattr(mount_plan, "LIB", tmp_path)
    watching.write_programs("a")
    state = tmp_path / "state"
    state.mkdir()
    watch = keeper.Watch(
        "a", "/proc", "a-unit-that-is-not.service", ("proc",), ("proc",), (), writable=False
    )
    (state / keeper.WATCH).write_text(json.dumps(dataclasses.asdict(watch)))
    argv = [sys.executable, "-S", "-E", "-B", str(tmp_path / "a/mount_keeper.py"), str(state)]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, check=False, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((state / keeper.HEALTH).read_text())["state"] == "right"


def test_a_pass_loads_only_what_it_needs_and_keeps_the_bytecode(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """It runs every ten seconds on every host: compiling and unused modules took half of it."""
    monkeypatch.setattr(mount_plan, "LIB", tmp_path)
    watching.write_programs("a")
    code = "import sys, keeper; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path / "a",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    heavy = {"ssl", "hashlib", "modulefinder", "zipfile", "tempfile"}
    assert not heavy & set(done.stdout.split())
    compiled = {path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")}
    assert {"keeper", "mounts", "records"} <= compiled


def test_after_a_reboot_jobs_may_come_as_soon_as_the_mount_was_written_to(rig: Rig):
    readiness.tell("client/0", ready=True, mountpoint=MP)
    rig.tick()
    (rig.folder / "boot").write_text("next\n")
    assert readiness.missing() == ["client/0 (not checked since this boot)"]
    rig.mounts.probes.clear()
    rig.tick(seconds=1)
    assert [probe["writable"] for probe in rig.mounts.probes] == [
        True
    ]  # however recent the write before the reboot
    assert readiness.missing() == []
    need = json.loads((rig.folder / "needs/client-0.json").read_text())
    assert (need["boot"], need["mountpoint"]) == ("next", MP)


def test_a_mount_that_is_absent_after_a_reboot_keeps_jobs_away(rig: Rig):
    rig.tick()
    (rig.folder / "boot").write_text("next\n")
    rig.lose_mount(for_good=True)
    rig.down = "10.0.0.5:6379 does not answer (connection refused)"
    rig.tick()
    assert readiness.missing() == [f"client/0 ({rig.down})"]
    rig.down = ""
    rig.machine.broken.clear()
    rig.tick()
    assert readiness.missing() == []
    assert (
        rig.machine.did("reset-failed", UNIT) == rig.machine.did("start", "--no-block", UNIT) == 1
    )


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


def test_a_charm_that_waits_is_woken_once_when_its_mount_works(
    rig: Rig, capsys: pytest.CaptureFixture[str]
):
    for unit in ("client-0", "client-1"):
        (rig.folder / f"wake-{unit}.json").write_text(json.dumps(["/bin/wake", unit]))
    rig.mounts.looks[MP] = mounts.Result(State.FAILED, "no space left on device")
    rig.tick(2)
    assert ("/bin/wake", "client-0") not in rig.machine.calls
    rig.mounts.looks.clear()
    rig.tick(3)
    assert [call for call in rig.machine.calls if call[0] == "/bin/wake"] == [
        ("/bin/wake", "client-0"),
        ("/bin/wake", "client-1"),
    ]
    (rig.folder / "wake-client-0.json").write_text("{")
    rig.tick()
    assert "the charm cannot be woken" in capsys.readouterr().err
