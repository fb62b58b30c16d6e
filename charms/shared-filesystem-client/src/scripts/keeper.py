#!/usr/bin/env python3
"""mount-keeper: check once whether a mount works, and repair it, within a minute even if it hangs.

    mount-keeper STATE_FOLDER [--patience SECONDS]

A systemd timer runs it every ten seconds, with Python's standard library and its copies of modules
of slurm_ddp. The charm writes `watch.json` to the folder, and reads the result of each pass from
`health.json` there. If the option asks for it, the node is drained in Slurm while the mount is
broken, with a reason that begins with `mount-keeper APP: `, and a node with such a reason is
resumed once the mount works again. Other drains are left alone. A pass also keeps the machine's
readiness files (slurm_ddp/readiness.py) true, so that jobs start after a reboot no matter in which
order hooks run.
"""

import argparse
import collections.abc
import contextlib
import dataclasses
import enum
import fcntl
import functools
import json
import pathlib
import socket
import sys
import time

from slurm_ddp import mounts, processes, readiness, records, watchdog
from slurm_ddp.commands import CommandError, run
from slurm_ddp.mounts import State

SYSTEMCTL = "/usr/bin/systemctl"
FUSE = pathlib.Path("/sys/fs/fuse/connections")
# With a folder for each unit of the machine, which Juju removes with the unit
AGENTS = pathlib.Path("/var/lib/juju/agents")

# In the state folder
WATCH, HEALTH, WAKE, LOCK = "watch.json", "health.json", "wake-{}.json", "lock"
INTERVAL_S = 10  # of the timer
REASON = "mount-keeper "
_DRAIN_AFTER_S = 30.0  # do not cost a job if the client recovers by itself this fast
_WRITE_EVERY_S = 60.0  # a pass only reads, but for one a minute: a thousand nodes share the server
_PROBE_S, _SILENT_PROBE_S, _SETTLE_S = 5.0, 2.0, 8.0
_SERVER_S = 2.0
_SYSTEMCTL_S = 10.0
_STARTING = ("activating", "reloading")
# Bytes to send to a server, since a stopped process still accepts connections. Any reply will do,
# even a request for a password. Sources: redis.io "Redis serialization protocol" (inline commands),
# PostgreSQL 16 "Message Formats" (SSLRequest), MySQL "Protocol::Handshake" (the server speaks
# first)
GREETINGS = {"redis": b"PING\r\n", "postgres": bytes.fromhex("0000000804d2162f"), "mysql": b""}
TLS = "tls"
# A client whose servers answer (again) and that answers nothing itself is hung for good after this
HUNG_FUSE_S, HUNG_KERNEL_S = 20.0, 60.0
_HANGS = 3  # looks, even if each takes longer than the interval on a busy machine
# How long a mount that answers counts as working while a small write does not end: under heavy
# writing, or with a slow object store, a minute is not unusual. Then the node is drained if the
# option asks for it; nothing is aborted
SLOW_S = 300.0
# After an outage JuiceFS asks its engine again only by and by: 25 s and more were measured after
# one of a minute
_COMES_BACK_S = 40.0


class Remedy(enum.Enum):
    """How a mount is repaired."""

    NOTHING = "nothing"  # it works; or waiting is right; or it is not ours
    START = "start"
    RESTART = "restart"  # stop the unit, detach what lies there, start the unit
    PEEL = "peel"  # detach all mounts but the first: open files stay open
    ABORT = "abort"  # as RESTART, for a client that must be killed first


@dataclasses.dataclass(frozen=True)
class Watch:
    """The charm's settings for the keeper, and its files to remove; `watch.json`."""

    app: str
    mountpoint: str
    unit: str
    fstypes: tuple[str, ...]
    wanted: tuple[str, ...] = ()  # sources, as mountinfo may show the right one
    known: tuple[str, ...] = ()  # those that were ours before, too, while a change waits
    writable: bool = True
    servers: tuple[tuple[tuple[str, int], ...], ...] = ()  # of each group one must answer
    speaks: str = ""  # the protocol of the first group, one of GREETINGS or TLS; without one a connection is an answer
    changed_us: int = (
        0  # on the monotonic clock of `boot`: since then a running mount is out of date
    )
    boot: str = ""
    node: str = ""  # in Slurm
    drain: bool = False
    # The Juju units that want the mount: one for each principal on the machine
    units: tuple[str, ...] = ()
    sticky: bool = False  # whether the root's sticky bit is ours to set, where others can write it
    made_mountpoint: bool = False
    files: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    port: int = 0  # of the client's metrics

    def is_known(self, mount: mounts.Mount) -> bool:
        """Report whether a mount is the application's, with its current or an earlier source."""
        return mount.fstype in self.fstypes and mount.source in (*self.wanted, *self.known)


@dataclasses.dataclass(frozen=True)
class Health:
    """The result of the passes; `health.json`."""

    state: str = ""  # a mounts.State
    detail: str = ""
    since: float = 0.0  # when the mount began to work, or ceased to
    checked: float = 0.0
    took: float = 0.0  # the first look of the pass, in seconds
    wrote: float = 0.0  # the last pass that wrote
    slow: float = 0.0  # since when it answers while writes do not end; 0 when they do
    hung: float = 0.0  # since when it does not answer; 0 when it does
    hangs: int = 0  # looks in a row that had no answer
    answered: float = 0.0  # from when on it counts that its servers answer although it does not; 0 when they do not
    down: str = ""  # the server that does not answer, and why
    down_since: float = 0.0
    passes: int = 0  # in a row with a working mount
    drained: bool = False  # by us
    heals: int = 0
    healed: str = ""  # the last repair, and why
    healed_at: float = 0.0
    settled_us: int = 0  # the change that the mount is known to run with
    boot: str = ""  # of these passes

    @property
    def works(self) -> bool:
        """Report whether the mount is right, or briefly slow while its servers answer."""
        is_slow = self.slow and not self.down and self.checked - self.slow < SLOW_S
        return self.state == State.RIGHT.value or bool(is_slow)

    @property
    def problem(self) -> str:
        """Describe the problem in one line."""
        return self.down or self.detail


def main(arguments: collections.abc.Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if the mount could not be checked, otherwise 0."""
    parser = argparse.ArgumentParser(
        prog="mount-keeper", description="Check a mount, and repair it."
    )
    parser.add_argument("folder", type=pathlib.Path, help="the folder with watch.json")
    parser.add_argument(
        "--patience", type=float, default=0.0, help="seconds to wait for another pass to end"
    )
    options = parser.parse_args(arguments)
    with turn(options.folder, patience=options.patience) as is_mine:
        if not is_mine:
            return 0  # the charm is at work
        try:
            watch = records.read(Watch, options.folder / WATCH)
        except (OSError, ValueError) as e:
            _log(f"mount-keeper: nothing to watch in {options.folder}: {e}", error=True)
            return 1
        keep(watch, records.load(Health(), options.folder / HEALTH), options.folder)
    return 0


@contextlib.contextmanager
def turn(folder: pathlib.Path, *, patience: float = 0.0) -> collections.abc.Generator[bool]:
    """Let one process act at a time; yield whether it is our turn within `patience` seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    yield False
                    return
                time.sleep(0.1)
        yield True


def keep(watch: Watch, old: Health, folder: pathlib.Path) -> Health:
    """Check the mount, repair it, check again, and report; return the result."""
    now = time.time()
    old = _of_this_boot(old)
    seen = _look(watch, old, now)
    look = seen.look
    chosen = _choose(watch, seen, now)
    healed = ""
    if _is_ours_to_do(chosen, watch):
        healed = f"{chosen.value}: {look.detail or 'a change was due'}"
        look = _repair(chosen, watch, healed)

    health = _result(watch, old, seen, now, look=look, healed=healed)
    if old.state and health.works != old.works:
        _log(f"{watch.mountpoint}: {'works' if health.works else health.problem}")
    report_ready(watch, health)
    health = drain_or_resume(watch, health, now)
    watchdog.write(folder / HEALTH, records.text(health))
    if health.works:
        wake_units(folder)
    return health


@dataclasses.dataclass(frozen=True)
class _Seen:
    """The findings of a pass before any repair; the times are as in `Health`."""

    look: mounts.Result
    took: float
    wrote: bool
    down: str
    hangs: int
    hung: float
    answered: float
    pending: bool  # whether the mount runs with older settings than it should


def _of_this_boot(old: Health) -> Health:
    """Forget results of before a reboot, whose times mean nothing any more."""
    boot = readiness.boot_id()
    if old.boot == boot:
        return old
    return Health(
        boot=boot,
        drained=old.drained,
        heals=old.heals,
        healed=old.healed,
        healed_at=old.healed_at,
    )


def _look(watch: Watch, old: Health, now: float) -> _Seen:
    """Probe the mount; if it does not answer, ask its servers."""
    writes = watch.writable and _is_write_due(old, now)
    # First ask a server that was silent: if it still is, the next in line must not wait long
    down = unreachable(watch.servers, watch.speaks) if old.down else ""
    deadline = _SILENT_PROBE_S if down else _PROBE_S
    look, took = _probe(watch, old, writes=writes, deadline=deadline)
    if look:
        down = ""
    elif not down:
        down = unreachable(watch.servers, watch.speaks)

    is_hung = look.state is State.HUNG
    answers_count_from = now + _COMES_BACK_S if old.down else now
    is_changed = watch.changed_us != old.settled_us
    return _Seen(
        look,
        took,
        writes,
        down,
        hangs=old.hangs + 1 if is_hung else 0,
        hung=_since(old.hung, now, is_hung),
        answered=_since(old.answered, answers_count_from, is_hung and not down),
        pending=is_changed and is_outdated(watch.unit, watch.boot, watch.changed_us),
    )


def _probe(
    watch: Watch, old: Health, *, writes: bool, deadline: float
) -> tuple[mounts.Result, float]:
    """Probe the mount; return the result and the seconds that the first probe took.

    A mount that hung before is first only read, with all the time there is, then written to.
    """
    was_hung = old.state == State.HUNG.value
    began = time.monotonic()
    look = probe(watch, write=writes and not was_hung, deadline=deadline)
    took = time.monotonic() - began
    if look and writes and was_hung:
        look = probe(watch, write=True)
    return look, took


def _is_write_due(old: Health, now: float) -> bool:
    return now - old.wrote >= _WRITE_EVERY_S or old.state != State.RIGHT.value


def _choose(watch: Watch, seen: _Seen, now: float) -> Remedy:
    """Choose a remedy."""
    asks_users = seen.pending or seen.look.state in (State.WRONG, State.STACKED, State.HUNG)
    hung_s = 0.0
    if seen.answered and seen.hangs >= _HANGS:
        hung_s = now - seen.answered
    return remedy(
        seen.look.state,
        ours=all(map(watch.is_known, mounts.at(watch.mountpoint))),
        in_use=asks_users and bool(processes.users(watch.mountpoint)),
        pending=seen.pending,
        fuse=is_fuse(watch.fstypes),
        hung_s=hung_s,
        servers_answer=not seen.down,
    )


def _is_ours_to_do(chosen: Remedy, watch: Watch) -> bool:
    """Whether to act now: what systemd is about to start anyway is left to it, unless it hangs."""
    if chosen is Remedy.NOTHING:
        return False
    return chosen is Remedy.ABORT or _state(watch.unit) not in _STARTING


def _repair(chosen: Remedy, watch: Watch, why: str) -> mounts.Result:
    """Apply the remedy, wait for the mount, and look at it."""
    _log(f"{watch.mountpoint}: {why}")
    apply(chosen, watch)
    mounts.wait(watch.mountpoint, fstype=watch.fstypes, source=watch.wanted, timeout=_SETTLE_S)
    return probe(watch, write=False)  # the last look of `wait` may have had a short deadline


def _result(
    watch: Watch, old: Health, seen: _Seen, now: float, *, look: mounts.Result, healed: str
) -> Health:
    """Compose the result of the pass; `look` is the last probe, `healed` the repair."""
    is_hung = look.state is State.HUNG
    is_settled = look and not seen.pending
    health = dataclasses.replace(
        old,
        state=look.state.value,
        detail=look.detail,
        checked=now,
        took=seen.took,
        wrote=now if seen.wrote else old.wrote,
        slow=_since(old.slow, now, look.state is State.SLOW),
        hung=seen.hung if is_hung else 0.0,
        hangs=seen.hangs if is_hung else 0,
        answered=seen.answered if is_hung else 0.0,
        down=seen.down,
        down_since=_since(old.down_since, now, bool(seen.down)),
        settled_us=watch.changed_us if is_settled else old.settled_us,
    )
    if healed:
        health = dataclasses.replace(health, heals=old.heals + 1, healed=healed, healed_at=now)
    has_changed = not old.since or health.works != old.works
    return dataclasses.replace(
        health,
        since=now if has_changed else old.since,
        passes=old.passes + 1 if health.works else 0,
    )


def _since(old: float, now: float, holds: bool) -> float:
    """Date something that holds: as before, or from now on; 0 when it does not."""
    return (old or now) if holds else 0.0


def probe(watch: Watch, *, write: bool, deadline: float = _PROBE_S) -> mounts.Result:
    """Probe the mount. `deadline` is in seconds."""
    look = mounts.probe(
        watch.mountpoint,
        fstype=watch.fstypes,
        source=watch.wanted,
        writable=write,
        sticky=watch.sticky,
        deadline=deadline,
    )
    if look.was_open is not None:
        _log(f"{watch.mountpoint}: {made_sticky(look.was_open)}")
    here = mounts.at(watch.mountpoint)
    if look and watch.writable and here and here[-1].read_only:
        return mounts.Result(State.WRONG, f"{watch.mountpoint} is mounted read-only")
    return look


def made_sticky(mode: int) -> str:
    """Describe that a root with this mode got the sticky bit."""
    return f"the root had mode {mode:04o}, so others could replace what is in it: it has {mode | 0o1000:04o} now"


def remedy(
    state: State,
    *,
    ours: bool,  # all that lies at the mountpoint is the application's
    in_use: bool,  # a process has something open there
    pending: bool,  # the mount runs with older settings than it should
    fuse: bool,  # a program on this machine serves it
    hung_s: float,  # for how long it has not answered although its servers did
    servers_answer: bool,  # as far as that can be asked
) -> Remedy:
    """Decide how a mount in this state is repaired, by the keeper and in the charm's hooks."""
    match state if ours else None:
        case State.RIGHT if pending and not in_use:
            return Remedy.RESTART
        case State.ABSENT if servers_answer:
            return Remedy.START
        case State.STALE:
            return Remedy.RESTART  # of no use to anybody, open files included
        case State.STACKED:
            return Remedy.PEEL if in_use else Remedy.RESTART
        case State.WRONG if not in_use:
            return Remedy.RESTART
        # While the server is away, waiting is right: waiting programs go on when it is back, and
        # lose nothing
        case State.HUNG if servers_answer:
            return _remedy_for_hung(fuse=fuse, in_use=in_use, hung_s=hung_s)
        case _:
            return Remedy.NOTHING


def _remedy_for_hung(*, fuse: bool, in_use: bool, hung_s: float) -> Remedy:
    """Choose a remedy for a hung mount whose servers answer: users of the kernel's keep waiting."""
    if fuse:
        return Remedy.ABORT if hung_s >= HUNG_FUSE_S else Remedy.NOTHING
    if hung_s >= HUNG_KERNEL_S and not in_use:
        return Remedy.RESTART
    return Remedy.NOTHING


def apply(chosen: Remedy, watch: Watch) -> None:
    """Repair the mount. What fails is logged, and the next look finds it."""
    try:
        if chosen is Remedy.PEEL:
            for _ in mounts.at(watch.mountpoint)[1:]:
                detach_top(watch)
            return
        if chosen is Remedy.START:
            _systemctl("reset-failed", watch.unit, check=False)
            _systemctl("start", "--no-block", watch.unit)
            return
        if chosen is Remedy.ABORT:
            abort(watch)
        while mounts.at(watch.mountpoint):
            detach_top(watch)
        _systemctl("restart", "--no-block", watch.unit)
    except (OSError, mounts.MountError, CommandError) as e:
        _log(f"{watch.mountpoint}: {e}", error=True)


def abort(watch: Watch) -> None:
    """End what hangs: make the kernel answer all requests with an error, and kill the client."""
    for mount in mounts.at(watch.mountpoint):
        with contextlib.suppress(OSError):  # without the control filesystem, the kill suffices
            (FUSE / mount.device.partition(":")[2] / "abort").write_text("1")
    _systemctl("kill", "--signal=SIGKILL", watch.unit, check=False)


def detach_top(watch: Watch) -> None:
    """Detach the topmost mount.

    Raises `mounts.MountError` if not ours, or refused by the kernel.
    """
    top = mounts.at(watch.mountpoint)[-1]
    if not watch.is_known(top):
        raise mounts.MountError(
            f"{watch.mountpoint} holds {top.source} ({top.fstype}), which is not ours"
        )
    mounts.detach(watch.mountpoint)


def is_outdated(unit: str, boot: str, changed_us: int, *, timeout: float = _SYSTEMCTL_S) -> bool:
    """Report whether a unit started before its settings changed, by that boot's monotonic clock."""
    if not changed_us or boot != readiness.boot_id():
        return False
    # A service knows when its process started, a mount unit when it was made
    for stamp in ("ExecMainStartTimestampMonotonic", "ActiveEnterTimestampMonotonic"):
        started = _systemctl("show", "-P", stamp, unit, check=False, timeout=timeout)
        if started.isdecimal() and int(started) > 0:
            return int(started) < changed_us and _state(unit, timeout=timeout) == "active"
    return False


def is_fuse(fstypes: collections.abc.Iterable[str]) -> bool:
    """Report whether a program here serves the filesystem and is to blame if all servers answer."""
    # Of CephFS only the monitors can be asked: a client that waits for its metadata server must not
    # be killed
    return any(fstype.startswith("fuse") and fstype != "fuse.ceph-fuse" for fstype in fstypes)


def unreachable(
    servers: collections.abc.Iterable[collections.abc.Sequence[tuple[str, int]]],
    speaks: str = "",
    *,
    timeout: float = _SERVER_S,
) -> str:
    """Return a silent server and why, if a whole group is silent; greet the first in `speaks`."""
    for number, group in enumerate(servers):
        replies = functools.partial(_replies, "" if number else speaks)
        if group and (problem := mounts.unreachable(group, timeout=timeout, replies=replies)):
            return problem
    return ""


def _replies(protocol: str, connection: socket.socket) -> bool:
    """Wait for a server's first reply in the protocol."""
    try:
        if protocol == TLS:
            import ssl  # noqa: PLC0415  # no other pass should wait for it

            context = ssl.create_default_context()
            context.check_hostname = False  # nothing is sent to it, or believed
            context.verify_mode = ssl.CERT_NONE
            with contextlib.suppress(ssl.SSLError):
                context.wrap_socket(connection).close()
        elif protocol in GREETINGS:
            connection.sendall(GREETINGS[protocol])
            connection.recv(1)
    except TimeoutError:
        return False
    return True


def report_ready(watch: Watch, health: Health) -> None:
    """Write to each unit's readiness file, if it changes, whether its mount works in this boot."""
    for unit in watch.units:
        agent = AGENTS / f"unit-{unit.replace('/', '-')}"
        if AGENTS.is_dir() and not agent.is_dir():  # removed, without a last hook
            readiness.withdraw(unit)
            continue
        before = records.load(readiness.Need(boot="unknown"), readiness.path(unit))
        if not health.works and not before.boot:
            continue  # the charm's own text is more precise
        readiness.tell(unit, ready=health.works, mountpoint=watch.mountpoint, detail=health.problem)


def wake_units(folder: pathlib.Path) -> None:
    """Run what each unit left for when its mount works, so that its status is renewed."""
    for path in sorted(folder.glob(WAKE.format("*"))):
        try:
            run(*json.loads(path.read_text()), timeout=_SYSTEMCTL_S)
            path.unlink()  # after a failure the file stays for the next pass
        except (OSError, ValueError, TypeError, CommandError) as e:
            _log(f"the charm cannot be woken: {e}", error=True)


def drain_or_resume(watch: Watch, health: Health, now: float) -> Health:
    """Drain or resume the node if the option asks for it and it is due."""
    prefix = f"{REASON}{watch.app}: "
    broken = not health.works and now - health.since >= _DRAIN_AFTER_S
    drains = watch.drain and broken and not health.drained
    resumes = health.works and health.drained and health.passes >= watchdog.PASSES_TO_RESUME
    if not watch.node or not (drains or resumes):
        return health
    try:
        node = watchdog.show_node(watch.node)
        if drains and node.is_drained:
            return health
        if drains:
            reason = watchdog.drain_reason(prefix, [health.problem])
            watchdog.drain(watch.node, reason)
            _log(f"drained {watch.node}: {reason}")
        elif watchdog.is_drained_by(prefix, node):
            watchdog.resume(watch.node)
            _log(f"resumed {watch.node}")
    except CommandError as e:
        _log(f"{watch.node} is neither drained nor resumed: {e}", error=True)
        return health
    return dataclasses.replace(health, drained=drains)


def _state(unit: str, *, timeout: float = _SYSTEMCTL_S) -> str:
    return _systemctl("is-active", unit, check=False, timeout=timeout)


def _systemctl(*arguments: str, check: bool = True, timeout: float = _SYSTEMCTL_S) -> str:
    return run(SYSTEMCTL, *arguments, timeout=timeout, check=check).stdout.strip()


def _log(text: str, *, error: bool = False) -> None:
    print(text, file=sys.stderr if error else sys.stdout, flush=True)


if __name__ == "__main__":
    sys.exit(main())
