"""One mount on this machine: made by one systemd unit, verified, and removed without a trace.

What to mount comes as a `Plan`, which juicefs_mount.py or nfs_mount.py draws up. Nothing here waits for a filesystem.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
import time

import jinja2
import pydantic

from slurm_ddp import apt, files, juicefs, mounts, systemd
from slurm_ddp.run import last_line, run

ETC = pathlib.Path("/etc/slurm-ddp")
LIB = pathlib.Path("/usr/local/lib/slurm-ddp")
STATE = pathlib.Path("/var/lib/slurm-ddp")
CACHE = pathlib.Path("/var/cache/slurm-ddp")
_TEMPLATES = pathlib.Path(__file__).parent / "templates"
_SYSTEMCTL = "/usr/bin/systemctl"
_SLURMD = "slurmd.service"
_PYTHON = "/usr/bin/python3"
_SETTLE_S = 60.0  # how long a mount whose servers answer may take
_PROBE_S = 5.0
# Folders of the system itself: nothing may be mounted over the first, nor anywhere inside the second
_SYSTEM = {"/", "/home", "/media", "/mnt", "/opt", "/srv", "/tmp", "/var"}  # noqa: S108 - compared, not used
_SYSTEM_TREES = tuple(
    "/bin /boot /dev /etc /lib /lib32 /lib64 /proc /root /run /sbin /sys /usr /var/cache /var/lib /var/log".split()
)


class MounterError(Exception):
    """The mount cannot be made, and a person must act. `str()` is one line that says how."""


@dataclasses.dataclass(frozen=True)
class Wish:
    """What was asked for, whatever the filesystem is."""

    app: str  # names the files and units
    mountpoint: str
    read_only: bool = False
    noexec: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """A mount, ready to be made."""

    wish: Wish
    unit: str
    unit_text: str
    fstypes: tuple[str, ...]  # as mountinfo shows them
    source: str
    servers: tuple[tuple[tuple[str, int], ...], ...]  # of each group one must answer
    packages: tuple[str, ...] = ()
    environment: str | None = dataclasses.field(default=None, repr=False)  # an EnvironmentFile; holds secrets
    secrets: tuple[str, ...] = dataclasses.field(default=(), repr=False)  # values that must never be shown
    program_changed: bool = False


class _State(pydantic.BaseModel, frozen=True):
    """What the application left here: enough to remove it, and to tell whether a running mount is up to date."""

    mountpoint: str
    unit: str
    fstypes: tuple[str, ...]
    sources: tuple[str, ...]  # what may be mounted there: more than one while a change waits
    made_mountpoint: bool = False
    boot: str = ""
    changed_us: int = 0  # on the monotonic clock of that boot: when unit, environment or program last changed
    users: tuple[str, ...] = ()  # the Juju units that want it: one for each principal on the machine


def check_mountpoint(path: str) -> None:
    """Raise `ValueError` unless something may be mounted at `path`."""
    if not re.fullmatch(r"(/[A-Za-z0-9._+@-]+)+", path) or any(part in (".", "..") for part in path.split("/")):
        raise ValueError("an absolute path of letters, digits and ._+@- is needed, like /mnt/shared")
    if path in _SYSTEM - {"/home", "/opt", "/srv"} or any(_inside(path, tree) for tree in _SYSTEM_TREES):
        raise ValueError(f"{path} belongs to the system: mount elsewhere, like /mnt/shared")


def ensure(plan: Plan, *, unit: str) -> mounts.Result:
    """Mount as planned, now and at every boot; return a look at the mount.

    A mount that works and is in use is not taken away from its users: see `pending`.

    Args:
        plan: the mount.
        unit: the Juju unit that wants it.

    Raises:
        juicefs.UnreachableError: the mount is not there and its servers do not answer; it comes when they do.
        MounterError: something is in the way.
        CommandError: a package could not be installed, or systemd failed.
    """
    wish = plan.wish
    apt.ensure_packages(plan.packages)
    _check_rivals(wish)
    old = _load(wish.app)
    if old is not None and (old.mountpoint, old.unit) != (wish.mountpoint, plan.unit):
        _take_down(wish.app, old)
        old = None
    state = _State(mountpoint=wish.mountpoint, unit=plan.unit, fstypes=plan.fstypes, sources=()) if old is None else old
    state = state.model_copy(
        update={
            "made_mountpoint": _prepare(plan) or state.made_mountpoint,
            "users": tuple(sorted({unit, *state.users})),
            "sources": tuple(dict.fromkeys([*state.sources, plan.source])),
        }
    )
    _save(wish.app, state)  # before anything is written that it helps to remove
    if _write(plan):
        state = state.model_copy(update={"boot": _boot(), "changed_us": time.monotonic_ns() // 1000})
        _save(wish.app, state)
    look = probe(plan)
    if not look or pending(plan):
        look = _heal(plan, state, look)
    if look and not pending(plan):
        _save(wish.app, state.model_copy(update={"sources": (plan.source,)}))
    return look


def pending(plan: Plan) -> bool:
    """Tell whether the mount runs with an older unit, environment or program than it should."""
    state = _load(plan.wish.app)
    if state is None or state.boot != _boot() or not systemd.is_active(plan.unit):
        return False
    # A service knows when its process started, a mount unit when it was made
    stamps = ("ExecMainStartTimestampMonotonic", "ActiveEnterTimestampMonotonic")
    shown = [run(_SYSTEMCTL, "show", "-P", stamp, plan.unit).stdout.strip() for stamp in stamps]
    started_us = next((int(text) for text in shown if text.isdecimal() and int(text) > 0), 0)
    return 0 < started_us < state.changed_us


def reason(plan: Plan) -> str:
    """Return why the unit does not mount, in the program's own words: one line, without secrets."""
    lines = ("-n", "40", "-o", "cat", "--no-pager")
    said = run("/usr/bin/journalctl", "-u", plan.unit, *lines, check=False, secrets=plan.secrets).stdout
    return juicefs.reason(said) or last_line(said) or "its journal says nothing"


def probe(plan: Plan) -> mounts.Result:
    """Look at the mount, and write to it if it is for writing."""
    return mounts.probe(
        plan.wish.mountpoint,
        fstype=plan.fstypes,
        source=plan.source,
        writable=not plan.wish.read_only,
        deadline=_PROBE_S,
    )


def remove(app: str, *, unit: str) -> None:
    """Unmount, and leave nothing of the application on this machine, unless another Juju unit wants the mount too."""
    state = _load(app)
    if state is not None:
        others = tuple(user for user in state.users if user != unit)
        if others:
            _save(app, state.model_copy(update={"users": others}))
            return
        _take_down(app, state)
    for folder in (ETC, LIB, STATE, CACHE):
        shutil.rmtree(folder / app, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # unless another application's lie there


def helper(app: str) -> str:
    """Return the command line of the helper that units run, without its arguments."""
    return f"{_PYTHON} -B {LIB / app / 'mounts.py'}"


def render(template: str, **values: object) -> str:
    """Return a rendered template of this charm."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - unit files, not HTML
    )
    return environment.get_template(template).render(**values)


def quoted(argument: str) -> str:
    """Return an argument as ExecStart= takes it: quoted, with no specifier and no variable (systemd.service(5))."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[A-Za-z0-9%$@:/._=,+?&-]+", argument) else f'"{escaped}"'


def environment_file(variables: dict[str, str]) -> str:
    """Return the text of an EnvironmentFile (systemd.exec(5)).

    Raises:
        ValueError: a value has a line break or NUL in it; the message names the variable.
    """
    lines: list[str] = []
    for name, value in sorted(variables.items()):
        if any(character in value for character in "\0\r\n"):
            raise ValueError(f"{name} has a line break in it")
        escaped = re.sub(r'(["\\$`])', r"\\\1", value)
        lines.append(f'{name}="{escaped}"\n')
    return "".join(lines)


def _write(plan: Plan) -> bool:
    """Write what the unit needs, and the unit; return whether a running mount must be restarted for it."""
    app = plan.wish.app
    for folder in (ETC, STATE, CACHE):
        (folder / app).mkdir(parents=True, exist_ok=True)
        (folder / app).chmod(0o700)
    (STATE / app / "tmp").mkdir(exist_ok=True)
    files.ensure_file(LIB / app / "mounts.py", pathlib.Path(mounts.__file__).read_bytes())
    changed = plan.program_changed
    if plan.environment is not None:
        changed |= files.ensure_file(ETC / app / "environment", plan.environment, mode=0o600)
    changed |= systemd.ensure_unit(plan.unit, plan.unit_text)
    if _has_unit(_SLURMD):
        systemd.ensure_dropin(_SLURMD, f"10-{app}.conf", render("slurmd-dropin.conf.j2", unit=plan.unit))
    return changed


def _prepare(plan: Plan) -> bool:
    """Make the mountpoint a folder that nobody, not even root, can fill while nothing is mounted.

    Returns whether it was made.
    """
    mountpoint = plan.wish.mountpoint
    path = pathlib.Path(mountpoint)
    if mounts.at(mountpoint):
        return False
    made = not path.exists() and not path.is_symlink()
    if made:
        try:
            path.mkdir(parents=True, mode=0o755)
        except OSError as e:
            raise MounterError(f"mountpoint {mountpoint} cannot be made: {e.strerror}") from e
    if path.is_symlink() or str(path.resolve()) != mountpoint or not path.is_dir():
        raise MounterError(f"mountpoint {mountpoint} is no folder, or lies behind a symbolic link: choose another")
    if any(path.iterdir()):
        raise MounterError(f"mountpoint {mountpoint} holds files, which {plan.source} would hide: move them away")
    run("/usr/bin/chattr", "+i", path, check=False)  # where the filesystem cannot, its mode still keeps users out
    return made


def _heal(plan: Plan, state: _State, look: mounts.Result) -> mounts.Result:
    """Start the mount, or start it anew where that can mend it and hurts nobody; return a look at it as it is then."""
    mountpoint = plan.wish.mountpoint
    here = mounts.at(mountpoint)
    ours = all(mount.fstype in state.fstypes and mount.source in state.sources for mount in here)
    if look.state is mounts.State.HUNG:
        _check_servers(plan)
        return look
    if not ours or (look.state in (mounts.State.RIGHT, mounts.State.WRONG) and mounts.users(mountpoint)):
        return look
    run(_SYSTEMCTL, "enable", plan.unit)
    if here or systemd.is_active(plan.unit):
        run(_SYSTEMCTL, "stop", plan.unit, timeout=90, check=False)
        _clear(state)
    run(_SYSTEMCTL, "start", "--no-block", plan.unit)
    _check_servers(plan)  # while they are silent it cannot come: it will by itself
    mounts.wait(mountpoint, fstype=plan.fstypes, source=plan.source, timeout=_SETTLE_S)
    return probe(plan)


def _check_servers(plan: Plan) -> None:
    for group in plan.servers:
        juicefs.check_reachable(group)


def _take_down(app: str, state: _State) -> None:
    """Undo everything outside of the application's own folders."""
    systemd.ensure_no_unit(state.unit)
    systemd.ensure_no_dropin(_SLURMD, f"10-{app}.conf")
    files.ensure_absent(ETC / app / "environment")
    _clear(state)
    path = pathlib.Path(state.mountpoint)
    if not mounts.at(state.mountpoint) and path.is_dir():
        run("/usr/bin/chattr", "-i", path, check=False)
        if state.made_mountpoint:
            with contextlib.suppress(OSError):
                path.rmdir()


def _clear(state: _State) -> None:
    for mount in reversed(mounts.at(state.mountpoint)):
        if mount.fstype in state.fstypes and mount.source in state.sources:
            with contextlib.suppress(mounts.MountError):  # somebody else's lies on top
                mounts.clear(state.mountpoint, fstype=mount.fstype, source=mount.source)


def _check_rivals(wish: Wish) -> None:
    for path in STATE.glob("*/mount.json"):
        rival = path.parent.name
        state = _load(rival)
        if rival != wish.app and state is not None and _overlap(state.mountpoint, wish.mountpoint):
            raise MounterError(f"application {rival} mounts at {state.mountpoint}: choose another mountpoint")


def _overlap(one: str, other: str) -> bool:
    return _inside(one, other) or _inside(other, one)


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _boot() -> str:
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _load(app: str) -> _State | None:
    try:
        return _State.model_validate_json((STATE / app / "mount.json").read_text())
    except OSError:
        return None


def _save(app: str, state: _State) -> None:
    files.ensure_file(STATE / app / "mount.json", json.dumps(state.model_dump(), indent=1) + "\n", mode=0o600)


def _has_unit(name: str) -> bool:
    return run(_SYSTEMCTL, "cat", name, check=False).returncode == 0
