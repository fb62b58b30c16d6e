#!/usr/bin/env python3
"""mount-keeper: does a mount work, and if not, what mends it? One pass, which ends within a minute whatever hangs.

    mount-keeper STATE_FOLDER [--json]

A systemd timer runs it every ten seconds, with Python's standard library and three modules of slurm_ddp beside it only.
The charm leaves `watch.json` in the folder; what a pass found lies in `health.json` there, which the charm reads. Where
the charm asked for it, the node is drained in Slurm while the mount is broken, with a reason that begins with
`mount-keeper APP: `, and a node with such a reason is resumed once the mount works again. Other drains are left alone.

A pass also keeps the machine's readiness files (slurm_ddp/readiness.py) true: after a reboot jobs may come as soon as
the mount was written to and read, whichever hook runs when.

What mends a mount is decided by `remedy`, here and in the charm's hooks.
"""

import argparse
import collections.abc
import contextlib
import dataclasses
import enum
import fcntl
import json
import os
import pathlib
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import typing

from slurm_ddp import mounts, readiness

SYSTEMCTL = "/usr/bin/systemctl"
SCONTROL = "/usr/bin/scontrol"
FUSE = pathlib.Path("/sys/fs/fuse/connections")
TEXTFILES = pathlib.Path("/var/lib/prometheus/node-exporter")  # where Debian's and Ubuntu's node exporter reads
BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
AGENTS = pathlib.Path("/var/lib/juju/agents")  # a folder for each unit of the machine, which Juju removes with the unit

WATCH, HEALTH, WAKE, LOCK = "watch.json", "health.json", "wake-{}.json", "lock"  # in the state folder
INTERVAL_S = 10  # of the timer
REASON = "mount-keeper "
_MOST_REASON = 200
_DRAIN_AFTER_S = 30.0  # a client that comes back by itself within this costs nobody a job
_PASSES_TO_RESUME = 2
_WRITE_EVERY_S = 60.0  # a pass only reads, but for one a minute: a thousand nodes share the server
_PROBE_S, _SILENT_PROBE_S, _SETTLE_S = 5.0, 2.0, 8.0
_SERVER_S = 2.0
# What a server is asked, since a stopped process still gets connections. Whatever it says will do, also that it wants a
# password first. Sources: redis.io "Redis serialization protocol" (inline commands), PostgreSQL 16 "Message Formats"
# (SSLRequest), MySQL "Protocol::Handshake" (the server speaks first)
GREETINGS = {"redis": b"PING\r\n", "postgres": bytes.fromhex("0000000804d2162f"), "mysql": b""}
TLS = "tls"
_SYSTEMCTL_S, _SCONTROL_S = 10.0, 6.0
_REAP_S = 1.0  # how long a killed program may take to die
# A client whose servers answer (again) and that answers nothing itself is hung for good after this
HUNG_FUSE_S, HUNG_KERNEL_S = 20.0, 60.0
_HANGS = 3  # looks, also where a busy machine takes longer than the timer's interval for one
# So long a mount that answers counts as working while a small write does not end: under heavy writing, or with a slow
# object store, a minute is nothing unusual. After it the node is drained where that is asked for; nothing is aborted
SLOW_S = 300.0
# After an outage JuiceFS asks its engine again only by and by: 25 s and more were measured after one of a minute
_COMES_BACK_S = 40.0


class Remedy(enum.Enum):
    """What mends a mount."""

    NOTHING = "nothing"  # it works; or waiting is right; or it is not ours
    START = "start"
    RESTART = "restart"  # stop the unit, detach what lies there, start the unit
    PEEL = "peel"  # detach all mounts but the first: whoever has files open keeps them
    ABORT = "abort"  # as RESTART, for a client that must be killed first


@dataclasses.dataclass(frozen=True)
class Watch:
    """What the charm wants; `watch.json`."""

    app: str
    mountpoint: str
    unit: str
    fstypes: tuple[str, ...]
    wanted: tuple[str, ...]  # sources, as mountinfo may show the right one
    known: tuple[str, ...]  # those that were ours before, too
    writable: bool
    servers: tuple[tuple[tuple[str, int], ...], ...] = ()  # of each group one must answer
    speaks: str = ""  # the protocol of the first group, one of GREETINGS or TLS; without one a connection is an answer
    changed_us: int = 0  # on the monotonic clock of `boot`: since then a running mount is out of date
    boot: str = ""
    node: str = ""  # in Slurm
    drain: bool = False
    units: tuple[str, ...] = ()  # the Juju units that want the mount
    sticky: bool = False  # whether the root's sticky bit is ours to set, where others can write it

    @classmethod
    def load(cls, folder: pathlib.Path) -> "Watch":
        """Return it. Raises `OSError` or `ValueError` where there is none."""
        raw = json.loads((folder / WATCH).read_text())
        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(raw, dict) or not {"app", "mountpoint", "unit"} <= set(typing.cast("dict[str, object]", raw)):
            raise ValueError("watch.json holds something else")
        values = {name: value for name, value in typing.cast("dict[str, typing.Any]", raw).items() if name in fields}
        for name in ("fstypes", "wanted", "known", "units"):
            values[name] = tuple(values.get(name, ()))
        values["servers"] = tuple(tuple((str(h), int(p)) for h, p in group) for group in values.get("servers", ()))
        return cls(**values)

    @property
    def is_fuse(self) -> bool:
        """Tell whether a program on this machine serves it."""
        return any(fstype.startswith("fuse") for fstype in self.fstypes)


@dataclasses.dataclass(frozen=True)
class Health:
    """What the passes found; `health.json`."""

    state: str = ""  # a mounts.State
    detail: str = ""
    since: float = 0.0  # when the mount began to be right, or ceased to be
    checked: float = 0.0
    wrote: float = 0.0  # the last pass that wrote
    slow: float = 0.0  # since when it answers while writes do not end; 0 when they do
    hung: float = 0.0  # since when it does not answer; 0 when it does
    hangs: int = 0  # looks in a row that had no answer
    answered: float = 0.0  # from when on it counts that its servers answer although it does not; 0 when they do not
    down: str = ""  # the server that does not answer, and why
    down_since: float = 0.0
    passes: int = 0  # in a row in which the mount was right
    drained: bool = False  # by us
    heals: int = 0
    healed: str = ""  # what was done last, and when
    healed_at: float = 0.0
    settled_us: int = 0  # the change that the mount is known to run with
    boot: str = ""  # in which the passes were

    @classmethod
    def load(cls, folder: pathlib.Path) -> "Health":
        """Return it, or a blank one where there is none that can be read."""
        try:
            raw = json.loads((folder / HEALTH).read_text())
            fields = {field.name for field in dataclasses.fields(cls)}
            return cls(**{name: value for name, value in raw.items() if name in fields})
        except (OSError, ValueError, TypeError, AttributeError):
            return cls()

    @property
    def works(self) -> bool:
        """Tell whether the mount is right, or only slow, that not for long, and no server silent."""
        is_slow = self.slow and not self.down and self.checked - self.slow < SLOW_S
        return self.state == mounts.State.RIGHT.value or bool(is_slow)

    def save(self, folder: pathlib.Path) -> None:
        """Keep it for the next pass, and for the charm."""
        _write(folder / HEALTH, json.dumps(dataclasses.asdict(self)) + "\n", 0o600)


def main(arguments: collections.abc.Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 whatever the mount is like, 1 when it could not be looked at."""
    parser = argparse.ArgumentParser(prog="mount-keeper", description="Look at a mount, and mend it.")
    parser.add_argument("folder", type=pathlib.Path, help="where watch.json lies")
    parser.add_argument("--json", action="store_true", help="print what was found")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for another pass to end")
    options = parser.parse_args(arguments)
    with turn(options.folder, patience=options.patience) as is_mine:
        if not is_mine:
            return 0  # the charm is at it
        try:
            watch = Watch.load(options.folder)
        except (OSError, ValueError, TypeError) as e:
            print(f"mount-keeper: nothing to watch in {options.folder}: {e}", file=sys.stderr)
            return 1
        health = keep(watch, Health.load(options.folder), options.folder)
    if options.json:
        print(json.dumps(dataclasses.asdict(health)))
    return 0


@contextlib.contextmanager
def turn(folder: pathlib.Path, *, patience: float = 0.0) -> collections.abc.Generator[bool]:
    """Let one at a time look and act; tell whether it is our turn now, after `patience` seconds at most."""
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
    """Look, mend, look again, tell; return what was found."""
    now, boot = time.time(), BOOT_ID.read_text().strip()
    if old.boot != boot:  # what was found before a reboot says nothing of the mount, and its times nothing at all
        old = Health(boot=boot, drained=old.drained, heals=old.heals, healed=old.healed, healed_at=old.healed_at)
    writes = watch.writable and (now - old.wrote >= _WRITE_EVERY_S or old.state != mounts.State.RIGHT.value)
    was_hung = old.state == mounts.State.HUNG.value  # then a plain look has all the time there is
    # A server that was silent is asked first: while it still is, whoever waits for our turn is not to wait long
    down = unreachable(watch.servers, watch.speaks) if old.down else ""
    look = probe(watch, write=writes and not was_hung, deadline=_SILENT_PROBE_S if down else _PROBE_S)
    if look and writes and was_hung:
        look = probe(watch, write=True)
    hangs = old.hangs + 1 if look.state is mounts.State.HUNG else 0
    hung = (old.hung or now) if look.state is mounts.State.HUNG else 0.0
    down = "" if look else down or unreachable(watch.servers, watch.speaks)
    answered = (old.answered or now + (_COMES_BACK_S if old.down else 0.0)) if hung and not down else 0.0
    pending = watch.changed_us != old.settled_us and is_pending(watch)
    asks_users = pending or look.state in (mounts.State.WRONG, mounts.State.STACKED, mounts.State.HUNG)
    chosen = remedy(
        look.state,
        ours=is_ours(watch),
        in_use=asks_users and bool(mounts.users(watch.mountpoint)),
        pending=pending,
        fuse=watch.is_fuse,
        hung_s=now - answered if answered and hangs >= _HANGS else 0.0,
        servers_answer=not down,
    )
    heals, healed, healed_at = old.heals, old.healed, old.healed_at
    if chosen is not Remedy.NOTHING and not (chosen is not Remedy.ABORT and _is_coming(watch.unit)):
        healed, healed_at, heals = f"{chosen.value}: {look.detail or 'a change was due'}", now, heals + 1
        print(f"{watch.mountpoint}: {healed}", flush=True)
        apply(chosen, watch)
        mounts.wait(watch.mountpoint, fstype=watch.fstypes, source=watch.wanted, timeout=_SETTLE_S)
        look = probe(watch, write=False)  # the last look of `wait` may have had a short deadline
    health = Health(
        state=look.state.value,
        detail=look.detail,
        checked=now,
        wrote=now if writes else old.wrote,
        slow=(old.slow or now) if look.state is mounts.State.SLOW else 0.0,
        hung=hung if look.state is mounts.State.HUNG else 0.0,
        hangs=hangs if look.state is mounts.State.HUNG else 0,
        answered=answered if look.state is mounts.State.HUNG else 0.0,
        down=down,
        down_since=(old.down_since or now) if down else 0.0,
        drained=old.drained,
        heals=heals,
        healed=healed,
        healed_at=healed_at,
        settled_us=watch.changed_us if look and not pending else old.settled_us,
        boot=boot,
    )
    health = dataclasses.replace(
        health,
        since=old.since if old.since and health.works == old.works else now,
        passes=old.passes + 1 if health.works else 0,
    )
    if old.state and health.works != old.works:
        print(f"{watch.mountpoint}: {'works' if health.works else down or look.detail}", flush=True)
    tell_jobs(watch, health)
    health = tell_slurm(watch, health, now)
    health.save(folder)
    if health.works:
        wake(folder)
    write_metrics(watch, health)
    return health


def probe(watch: Watch, *, write: bool, deadline: float = _PROBE_S) -> mounts.Result:
    """Look at the mount. `deadline` is in seconds."""
    look = mounts.probe(
        watch.mountpoint,
        fstype=watch.fstypes,
        source=watch.wanted,
        writable=write,
        sticky=watch.sticky,
        deadline=deadline,
    )
    if look.was_open is not None:
        print(f"{watch.mountpoint}: {made_sticky(look.was_open)}", flush=True)
    here = mounts.at(watch.mountpoint)
    if look and watch.writable and here and here[-1].read_only:
        return mounts.Result(mounts.State.WRONG, f"{watch.mountpoint} is mounted read-only")
    return look


def made_sticky(mode: int) -> str:
    """Return in words that a root with this mode got the sticky bit."""
    return f"the root had mode {mode:04o}, so others could replace what is in it: it has {mode | 0o1000:04o} now"


def remedy(
    state: mounts.State,
    *,
    ours: bool,
    in_use: bool,
    pending: bool,
    fuse: bool,
    hung_s: float,
    servers_answer: bool,
) -> Remedy:
    """Return what mends a mount in this state.

    Args:
        state: what a look found.
        ours: all that lies at the mountpoint is the application's.
        in_use: a process has something open there.
        pending: the mount runs with older settings than it should.
        fuse: a program on this machine serves it.
        hung_s: for how many seconds it has not answered although its servers did.
        servers_answer: as far as that can be asked.
    """
    if not ours:
        return Remedy.NOTHING
    match state:
        case mounts.State.RIGHT:
            return Remedy.RESTART if pending and not in_use else Remedy.NOTHING
        case mounts.State.ABSENT:
            return Remedy.START if servers_answer else Remedy.NOTHING
        case mounts.State.STALE:
            return Remedy.RESTART  # of no use to anybody, open files included
        case mounts.State.STACKED:
            return Remedy.PEEL if in_use else Remedy.RESTART
        case mounts.State.WRONG:
            return Remedy.NOTHING if in_use else Remedy.RESTART
        case mounts.State.HUNG:
            # While the server is away, waiting is right: whoever waits goes on when it is back, and loses nothing
            if not servers_answer:
                return Remedy.NOTHING
            if fuse:
                return Remedy.ABORT if hung_s >= HUNG_FUSE_S else Remedy.NOTHING
            return Remedy.RESTART if hung_s >= HUNG_KERNEL_S and not in_use else Remedy.NOTHING
        case mounts.State.FAILED | mounts.State.SLOW:
            return Remedy.NOTHING


def apply(chosen: Remedy, watch: Watch) -> None:
    """Do it. What fails is said, and seen at the next look."""
    try:
        if chosen is Remedy.PEEL:
            for _ in mounts.at(watch.mountpoint)[1:]:
                detach_top(watch)
            return
        if chosen is Remedy.ABORT:
            abort(watch)
        if chosen is not Remedy.START:
            while mounts.at(watch.mountpoint):
                detach_top(watch)
            _systemctl("restart", "--no-block", watch.unit)
            return
        _systemctl("reset-failed", watch.unit, check=False)
        _systemctl("start", "--no-block", watch.unit)
    except (OSError, mounts.MountError, CommandError) as e:
        print(f"{watch.mountpoint}: {e}", file=sys.stderr, flush=True)


def abort(watch: Watch) -> None:
    """End what hangs: let the kernel answer all requests with an error, and kill the client."""
    for mount in mounts.at(watch.mountpoint):
        path = FUSE / mount.device.partition(":")[2] / "abort"
        with contextlib.suppress(OSError):  # where the control filesystem is not there, the kill does it
            path.write_text("1")
    _systemctl("kill", "--signal=SIGKILL", watch.unit, check=False)


def detach_top(watch: Watch) -> None:
    """Detach the topmost mount, which must be ours."""
    top = mounts.at(watch.mountpoint)[-1]
    if not _is_known(watch, top):
        raise mounts.MountError(f"{watch.mountpoint} holds {top.source} ({top.fstype}), which is not ours")
    mounts.detach(watch.mountpoint)


def is_ours(watch: Watch) -> bool:
    """Tell whether nothing but the application's lies at the mountpoint."""
    return all(_is_known(watch, mount) for mount in mounts.at(watch.mountpoint))


def is_pending(watch: Watch) -> bool:
    """Tell whether the mount runs with older settings than it should."""
    if not watch.changed_us or watch.boot != BOOT_ID.read_text().strip():
        return False
    # A service knows when its process started, a mount unit when it was made
    for stamp in ("ExecMainStartTimestampMonotonic", "ActiveEnterTimestampMonotonic"):
        said = _systemctl("show", "-P", stamp, watch.unit, check=False).strip()
        if said.isdecimal() and int(said) > 0:
            return int(said) < watch.changed_us and _systemctl("is-active", watch.unit, check=False).strip() == "active"
    return False


def unreachable(servers: collections.abc.Iterable[collections.abc.Sequence[tuple[str, int]]], speaks: str = "") -> str:
    """Return which server does not answer, and why, where none of a group does; nothing otherwise.

    The first group is asked in the protocol `speaks`, if that is given.
    """
    for number, group in enumerate(servers):
        problem = ""
        for host, port in group:
            shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            problem = ""
            try:
                with socket.create_connection((host, port), timeout=_SERVER_S) as connection:
                    problem = "" if number or _says(connection, speaks) else f"{shown} takes connections and is silent"
            except OSError as e:
                problem = f"{shown} does not answer ({str(e.strerror or e).lower()})"
            if not problem:
                break
        if problem:
            return problem
    return ""


def _says(connection: socket.socket, protocol: str) -> bool:
    """Tell whether a server says anything in time."""
    try:
        if protocol == TLS:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is told it, or believed
            with contextlib.suppress(ssl.SSLError):
                context.wrap_socket(connection).close()
        elif protocol in GREETINGS:
            connection.sendall(GREETINGS[protocol])
            connection.recv(1)
    except TimeoutError:
        return False
    return True


def tell_jobs(watch: Watch, health: Health) -> None:
    """Write into the readiness file of each unit whether its mount works in this boot; only what changes is written."""
    for unit in watch.units:
        name = unit.replace("/", "-")
        if AGENTS.is_dir() and not (AGENTS / f"unit-{name}").is_dir():  # removed, without a last hook
            readiness.withdraw(unit)
            continue
        known = readiness.Need(boot="unknown")
        with contextlib.suppress(OSError, ValueError):
            known = readiness.Need.parse((readiness.DIRECTORY / f"{name}.json").read_text())
        if health.works or known.boot:  # else the charm's own words are better
            detail = health.down or health.detail
            readiness.tell(unit, ready=health.works, mountpoint=watch.mountpoint, detail=detail)


def wake(folder: pathlib.Path) -> None:
    """Run what a unit left for when its mount works: its status says something else."""
    for path in sorted(folder.glob(WAKE.format("*"))):
        try:
            command = json.loads(path.read_text())
            _run(*command, timeout=_SYSTEMCTL_S)  # where it fails, the file stays for the next look
            path.unlink()
        except (OSError, ValueError, TypeError, CommandError) as e:
            print(f"the charm cannot be woken: {e}", file=sys.stderr, flush=True)


def tell_slurm(watch: Watch, health: Health, now: float) -> Health:
    """Drain or resume the node where that is asked for and due."""
    if not watch.node:
        return health
    prefix = f"{REASON}{watch.app}: "
    try:
        if watch.drain and not health.works and not health.drained and now - health.since >= _DRAIN_AFTER_S:
            drained, _ = _node(watch.node)
            if not drained:
                said = health.down or health.detail
                reason = f"{prefix}{said}"[:_MOST_REASON]
                _run(
                    SCONTROL, "update", f"nodename={watch.node}", "state=drain", f"reason={reason}", timeout=_SCONTROL_S
                )
                print(f"drained {watch.node}: {reason}", flush=True)
                return dataclasses.replace(health, drained=True)
        elif health.works and health.drained and health.passes >= _PASSES_TO_RESUME:
            drained, reason = _node(watch.node)
            if drained and reason.startswith(prefix):
                _run(SCONTROL, "update", f"nodename={watch.node}", "state=resume", timeout=_SCONTROL_S)
                print(f"resumed {watch.node}", flush=True)
            return dataclasses.replace(health, drained=False)
    except CommandError as e:
        print(f"Slurm cannot be told: {e}", file=sys.stderr, flush=True)
    return health


def write_metrics(watch: Watch, health: Health) -> None:
    """Tell Prometheus, where a node exporter reads text files."""
    if not TEXTFILES.is_dir():
        return
    labels = f'{{app="{watch.app}",mountpoint="{watch.mountpoint}"}}'
    rows = [
        "# HELP shared_filesystem_mount_ok Whether the mount works.",
        "# TYPE shared_filesystem_mount_ok gauge",
        f"shared_filesystem_mount_ok{labels} {int(health.works)}",
        "# HELP shared_filesystem_mount_checked_seconds When that was found out, in seconds since 1970.",
        "# TYPE shared_filesystem_mount_checked_seconds gauge",
        f"shared_filesystem_mount_checked_seconds{labels} {health.checked:.0f}",
        "# HELP shared_filesystem_mount_heals_total How often the mount was mended.",
        "# TYPE shared_filesystem_mount_heals_total counter",
        f"shared_filesystem_mount_heals_total{labels} {health.heals}",
    ]
    with contextlib.suppress(OSError):
        _write(TEXTFILES / metrics_name(watch.app), "\n".join(rows) + "\n", 0o644)


def metrics_name(app: str) -> str:
    """Return the name of an application's file for Prometheus."""
    return f"shared_filesystem_{app}.prom"


class CommandError(Exception):
    """A program failed or hung. `str()` is one line."""


def _is_known(watch: Watch, mount: mounts.Mount) -> bool:
    return mount.fstype in watch.fstypes and mount.source in (*watch.wanted, *watch.known)


def _is_coming(unit: str) -> bool:
    """Tell whether systemd is about to start it anyway."""
    return _systemctl("is-active", unit, check=False).strip() in ("activating", "reloading")


def _node(name: str) -> tuple[bool, str]:
    said = _run(SCONTROL, "show", "node", name, "-o", timeout=_SCONTROL_S)
    state = re.search(r" State=(\S+)", said)
    reason = re.search(r" Reason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?\s*$", said, re.MULTILINE)
    return "DRAIN" in (state[1].split("+") if state else ()), reason[1] if reason else ""


def _systemctl(*arguments: str, check: bool = True) -> str:
    return _run(SYSTEMCTL, *arguments, timeout=_SYSTEMCTL_S, check=check)


def _run(*argv: str, timeout: float, check: bool = True) -> str:
    """Run a program, and give up on it after `timeout` seconds even where it cannot be killed."""
    name = pathlib.Path(argv[0]).name
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as e:
        raise CommandError(f"{name}: {e.strerror or e}") from e
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as e:
        os.killpg(process.pid, signal.SIGKILL)
        for stream in (process.stdout, process.stderr):
            typing.cast("typing.IO[str]", stream).close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_REAP_S)
        raise CommandError(f"{name} does not answer within {timeout:g} s") from e
    if check and process.returncode != 0:
        said = (stderr.strip() or stdout.strip()).splitlines()
        raise CommandError(f"{name} {argv[1]}: {said[-1][:160] if said else 'failed without a word'}")
    return stdout


def _write(path: pathlib.Path, text: str, mode: int) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.chmod(mode)
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
