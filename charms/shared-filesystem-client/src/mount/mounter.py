"""One mount on this machine: made by one systemd unit, verified, and removed without a trace.

What to mount comes as a `mount_plan.Plan`, drawn up by `kinds/`. Nothing here waits for a filesystem.
"""

import contextlib
import dataclasses
import enum
import json
import os
import pathlib
import re
import shutil
import socket
import time

import pydantic

import mount_plan
from scripts import keeper
from slurm_ddp import apt, files, juicefs, mounts, readiness, systemd, watchdog
from slurm_ddp.run import CommandError, CommandTimeout, last_line, run

_SYSTEMCTL = "/usr/bin/systemctl"
_SLURMD = "slurmd.service"
_PYTHON = "/usr/bin/python3"
_SETTLE_S = 60.0  # how long a mount whose servers answer may take
_SETTLE_LOOK_S = 2.0
_PROBE_S = 5.0
_SILENT_PROBE_S = 2.0  # while its servers are silent, all that is asked is whether the mount works nevertheless
_SEEN_S = keeper.INTERVAL_S + 10.0  # what the keeper found this long ago is as good as a look, while they are
_SERVER_S, _SERVER_AGAIN_S = 3.0, 1.0  # for a connection; the second where the keeper has just got none
_TURN_S = 30.0  # how long the keeper may take to finish its pass
_RELOAD_S = 20.0
_STOP_S = 90.0
_MOST_REASON = 300  # characters
_METRICS_PORT = 9567  # JuiceFS's own
_UPLOAD_S = 600.0  # how long a removal waits for what JuiceFS has yet to upload
_SLURMD_DEFAULTS = pathlib.Path("/etc/default/slurmd")


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
    files: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    port: int = 0
    reloads: bool = False  # the program that runs can be exchanged under the mount


def ensure(plan: mount_plan.Plan, *, unit: str) -> mounts.Result:
    """Mount as planned, now and at every boot; return a look at the mount.

    A mount that works and is in use is not taken away from its users: see `pending`.

    Args:
        plan: the mount.
        unit: the Juju unit that wants it.

    Raises:
        juicefs.UnreachableError: the mount is not there and its servers do not answer; it comes when they do.
        mount_plan.MountError: something is in the way.
        CommandError: a package could not be installed, or systemd failed.
    """
    spec = plan.spec
    apt.ensure_packages(plan.packages)
    _check_rivals(spec)
    with keeper.turn(mount_plan.STATE / spec.app, patience=_TURN_S):  # when it is not our turn even then, so be it
        return _ensure(plan, unit)


def _ensure(plan: mount_plan.Plan, unit: str) -> mounts.Result:
    spec = plan.spec
    old = _load(spec.app)
    if old is not None and (old.mountpoint, old.unit) != (spec.mountpoint, plan.unit):
        _take_down(spec.app, old)
        old = None
    state = _State(mountpoint=spec.mountpoint, unit=plan.unit, fstypes=plan.fstypes, sources=()) if old is None else old
    state = state.model_copy(
        update={
            "made_mountpoint": _prepare(plan) or state.made_mountpoint,
            "users": tuple(sorted({unit, *state.users})),
            "sources": tuple(dict.fromkeys([*state.sources, *plan.sources])),
            "files": tuple(dict.fromkeys([*state.files, *(str(file.path) for file in plan.files)])),
            "caches": tuple(dict.fromkeys([*state.caches, *map(str, plan.caches)])),
        }
    )
    _save(spec.app, state)  # before anything is written that it helps to remove
    change = _write(plan)
    if change is _Change.PROGRAM and plan.reloads and state.reloads and _reload(plan):
        change = _Change.NONE
    if change is not _Change.NONE:
        state = state.model_copy(update={"boot": _boot(), "changed_us": time.monotonic_ns() // 1000})
    state = state.model_copy(update={"port": plan.port, "reloads": plan.reloads})
    _save(spec.app, state)
    seen = _just_seen(plan)
    _watch(plan, state)
    silence = _silence(plan, _SERVER_AGAIN_S if seen.down else _SERVER_S)
    if silence and seen.state == mounts.State.HUNG.value:
        look = mounts.Result(mounts.State.HUNG, seen.detail)
    else:
        look = probe(plan, deadline=_SILENT_PROBE_S if silence else _PROBE_S)
    if not look or pending(plan):
        look = _heal(plan, state, look, silence)
    if look and not pending(plan):
        gone = [pathlib.Path(path) for path in state.caches if path not in map(str, plan.caches)]
        for path in gone:
            _remove_cache(path)
        state = state.model_copy(update={"sources": plan.sources, "caches": tuple(map(str, plan.caches))})
        _save(spec.app, state)
        _watch(plan, state)
    return look


def remount(plan: mount_plan.Plan, *, unit: str) -> mounts.Result:
    """Take the mount away, from whoever uses it too, and mount it as planned; return a look at it."""
    state = _load(plan.spec.app)
    if state is not None and state.unit == plan.unit:
        with keeper.turn(mount_plan.STATE / plan.spec.app, patience=_TURN_S):
            _stop(plan.unit, _STOP_S + (_UPLOAD_S if plan.caches else 0.0))
            _clear(state)
    return ensure(plan, unit=unit)


def pending(plan: mount_plan.Plan) -> bool:
    """Tell whether the mount runs with an older unit, environment or program than it should."""
    state = _load(plan.spec.app)
    if state is None or state.boot != _boot() or not systemd.is_active(plan.unit):
        return False
    # A service knows when its process started, a mount unit when it was made
    stamps = ("ExecMainStartTimestampMonotonic", "ActiveEnterTimestampMonotonic")
    shown = [run(_SYSTEMCTL, "show", "-P", stamp, plan.unit).stdout.strip() for stamp in stamps]
    started_us = next((int(text) for text in shown if text.isdecimal() and int(text) > 0), 0)
    return 0 < started_us < state.changed_us


def reason(plan: mount_plan.Plan) -> str:
    """Return why the unit does not mount, in the program's own words: one line, without secrets."""
    if plan.unit.endswith(".mount"):  # after the helper's words come systemd's, that a mount failed
        said = _helper_words(systemd.own_words(plan.unit, secrets=plan.secrets))
        if said:
            return said
    said = systemd.journal(plan.unit, secrets=plan.secrets)
    return juicefs.reason(said) or last_line(said) or "its journal says nothing"


def probe(plan: mount_plan.Plan, *, deadline: float = _PROBE_S) -> mounts.Result:
    """Look at the mount, and write to it if it is for writing. `deadline` is in seconds."""
    return mounts.probe(
        plan.spec.mountpoint,
        fstype=plan.fstypes,
        source=plan.sources,
        writable=not plan.spec.read_only,
        sticky=plan.sticky,
        deadline=deadline,
    )


def is_mounted(plan: mount_plan.Plan) -> bool:
    """Tell whether anything is mounted where the plan says; asks the kernel's table alone, which never waits."""
    return bool(mounts.at(plan.spec.mountpoint))


def _just_seen(plan: mount_plan.Plan) -> keeper.Health:
    """Return what the keeper has just found with the servers of the plan, so that a hook need not wait for it again."""
    folder = mount_plan.STATE / plan.spec.app
    with contextlib.suppress(OSError, ValueError, TypeError):
        seen = keeper.Health.load(folder)
        if keeper.Watch.load(folder).servers == plan.servers and 0 <= time.time() - seen.checked < _SEEN_S:
            return seen
    return keeper.Health()


def remove(app: str, *, unit: str) -> str:
    """Unmount, and leave nothing of the application on this machine, unless another Juju unit wants the mount too.

    Returns what had to stay, as one line; nothing when all is gone.
    """
    state = _load(app)
    kept: list[str] = []
    if state is not None:
        others = tuple(user for user in state.users if user != unit)
        if others:
            with keeper.turn(mount_plan.STATE / app, patience=_TURN_S):
                _save(app, state.model_copy(update={"users": others}))
                _forget(app, unit)
                wake_once_right(app, unit, [])
            return ""
        with keeper.turn(mount_plan.STATE / app, patience=_TURN_S):
            _take_down(app, state)
        kept = [path for path in state.caches if not _remove_cache(pathlib.Path(path))]
    readiness.withdraw(unit)  # which the keeper wrote
    with contextlib.suppress(OSError):
        readiness.DIRECTORY.rmdir()  # unless another unit's file lies there
    for folder in (mount_plan.ETC, mount_plan.LIB, mount_plan.STATE, mount_plan.CACHE):
        if not any(pathlib.Path(path).is_relative_to(folder / app) for path in kept):
            shutil.rmtree(folder / app, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # unless another application's lie there
    return f"blocks that were never uploaded are kept in {' '.join(kept)}" if kept else ""


def fstypes() -> set[str]:
    """Return the types of all that the applications on this machine mount."""
    states = [_load(path.parent.name) for path in mount_plan.STATE.glob("*/mount.json")]
    return {fstype for state in states if state is not None for fstype in state.fstypes}


def health(app: str) -> keeper.Health:
    """Return what the keeper saw last."""
    return keeper.Health.load(mount_plan.STATE / app)


def proven(app: str) -> str | None:
    """Return the mountpoint where the keeper has just seen the application's mount work, in this boot; else None."""
    seen, state = health(app), _load(app)
    is_new = seen.boot == _boot() and 0 <= time.time() - seen.checked < _SEEN_S
    return state.mountpoint if state is not None and is_new and seen.works else None


def wake_once_right(app: str, unit: str, command: list[str]) -> None:
    """Have the keeper run `unit`'s command, once, as soon as it sees the mount work; without one nothing."""
    path = mount_plan.STATE / app / keeper.WAKE.format(unit.replace("/", "-"))
    if command:
        files.ensure_file(path, json.dumps(command) + "\n", mode=0o600)
    else:
        files.ensure_absent(path)


def metrics_port(app: str, wanted: int) -> int:
    """Return the port for an application's metrics: the wanted one, or else the first that no other application has."""
    if wanted:
        return wanted
    own = _load(app)
    if own is not None and own.port:
        return own.port
    taken = {
        state.port for path in mount_plan.STATE.glob("*/mount.json") if (state := _load(path.parent.name)) is not None
    }
    return next(port for port in range(_METRICS_PORT, _METRICS_PORT + 1000) if port not in taken)


class _Change(enum.Enum):
    NONE = 0
    PROGRAM = 1  # nothing but the program
    SETTINGS = 2


def _write(plan: mount_plan.Plan) -> _Change:
    """Write what the unit needs, and the unit; return whether a running mount must be restarted for it."""
    app = plan.spec.app
    for folder in (mount_plan.ETC, mount_plan.STATE, mount_plan.CACHE):
        (folder / app).mkdir(parents=True, exist_ok=True)
        (folder / app).chmod(0o700)
    for cache in plan.caches:
        cache.mkdir(parents=True, exist_ok=True)
        cache.chmod(0o700)  # what is cached is not encrypted, whatever the volume is
    (mount_plan.STATE / app / "tmp").mkdir(exist_ok=True)
    for name, source in watchdog.sources(pathlib.Path(keeper.__file__)).items():  # mounts.py is the units' helper, too
        files.ensure_file(mount_plan.LIB / app / name.replace("__main__", "mount_keeper"), source)
    changed = False
    if plan.environment is not None:
        changed |= files.ensure_file(mount_plan.ETC / app / "environment", plan.environment, mode=0o600)
    for file in plan.files:
        changed |= files.ensure_file(file.path, file.text, mode=file.mode)
    changed |= systemd.ensure_unit(plan.unit, plan.unit_text)
    if _has_unit(_SLURMD):
        systemd.ensure_dropin(_SLURMD, f"10-{app}.conf", mount_plan.render("slurmd-dropin.conf.j2", unit=plan.unit))
    return _Change.SETTINGS if changed else _Change.PROGRAM if plan.program_changed else _Change.NONE


def _watch(plan: mount_plan.Plan, state: _State) -> None:
    """Have the keeper look after the mount from now on."""
    app = plan.spec.app
    watch = keeper.Watch(
        app=app,
        mountpoint=plan.spec.mountpoint,
        unit=plan.unit,
        fstypes=plan.fstypes,
        wanted=plan.sources,
        known=tuple(source for source in state.sources if source not in plan.sources),
        writable=not plan.spec.read_only,
        servers=plan.servers,
        speaks=plan.speaks,
        changed_us=state.changed_us,
        boot=state.boot,
        node=_node() or "",
        drain=plan.spec.drain,
        units=state.users,
        sticky=plan.sticky,
    )
    files.ensure_file(
        mount_plan.STATE / app / keeper.WATCH, json.dumps(dataclasses.asdict(watch), indent=1) + "\n", mode=0o600
    )
    service, timer, starter = _keeper_units(app)
    command = f"{_PYTHON} -B {mount_plan.LIB / app / 'mount_keeper.py'} {mount_plan.STATE / app}"
    words = {"mountpoint": plan.spec.mountpoint, "command": command}
    changed = systemd.ensure_unit(service, mount_plan.render("mount-keeper.service.j2", unit="", **words))
    if systemd.ensure_unit(starter, mount_plan.render("mount-keeper.service.j2", unit=plan.unit, **words)):
        systemd.enable(starter)
    changed |= systemd.ensure_unit(
        timer, mount_plan.render("mount-keeper.timer.j2", mountpoint=plan.spec.mountpoint, interval=keeper.INTERVAL_S)
    )
    if changed or not systemd.is_active(timer):
        systemd.enable_now(timer)


def _keeper_units(app: str) -> tuple[str, str, str]:
    """Return a pass, the timer that starts it, and a pass that begins whenever the mount has come."""
    return f"mount-keeper-{app}.service", f"mount-keeper-{app}.timer", f"mount-keeper-{app}-up.service"


def _forget(app: str, unit: str) -> None:
    """Have the keeper say no more for `unit` whether its mount works."""
    path = mount_plan.STATE / app / keeper.WATCH
    with contextlib.suppress(OSError, ValueError):
        watch = json.loads(path.read_text())
        watch["units"] = [user for user in watch.get("units", ()) if user != unit]
        files.ensure_file(path, json.dumps(watch, indent=1) + "\n", mode=0o600)


def _node() -> str | None:
    """Return this machine's name in Slurm; None where it runs no jobs."""
    if not _has_unit(_SLURMD):
        return None
    with contextlib.suppress(OSError):
        named = re.search(r"(?:^|[\s\"'])-N\s*([A-Za-z0-9_.-]+)", _SLURMD_DEFAULTS.read_text())
        if named:
            return named[1]
    return socket.gethostname().partition(".")[0]


def _prepare(plan: mount_plan.Plan) -> bool:
    """Make the mountpoint a folder that nobody, not even root, can fill while nothing is mounted.

    Returns whether it was made.
    """
    mountpoint = plan.spec.mountpoint
    path = pathlib.Path(mountpoint)
    if mounts.at(mountpoint):
        return False
    made = not path.exists() and not path.is_symlink()
    if made:
        try:
            path.mkdir(parents=True, mode=0o755)
        except OSError as e:
            raise mount_plan.MountError(f"mountpoint {mountpoint} cannot be made: {e.strerror}") from e
    if path.is_symlink() or str(path.resolve()) != mountpoint or not path.is_dir():
        raise mount_plan.MountError(
            f"mountpoint {mountpoint} lies behind a symbolic link, or is no folder: choose another"
        )
    if any(path.iterdir()):
        raise mount_plan.MountError(
            f"mountpoint {mountpoint} holds files, which {plan.source} would hide: move them away"
        )
    run("/usr/bin/chattr", "+i", path, check=False)  # where the filesystem cannot, its mode still keeps users out
    return made


def _heal(
    plan: mount_plan.Plan, state: _State, look: mounts.Result, silence: juicefs.UnreachableError | None
) -> mounts.Result:
    """Start the mount, or start it anew where that can mend it and hurts nobody; return a look at it as it is then.

    Raises:
        juicefs.UnreachableError: `silence`, which says that no server answers.
    """
    mountpoint, waits = plan.spec.mountpoint, pending(plan)
    here = mounts.at(mountpoint)
    answered = health(plan.spec.app).answered if look.state is mounts.State.HUNG else 0.0
    fuse = any(fstype.startswith("fuse") for fstype in plan.fstypes)
    if silence and look.state in (mounts.State.HUNG, mounts.State.SLOW):
        raise silence
    remedy = keeper.remedy(
        look.state,
        ours=all(mount.fstype in state.fstypes and mount.source in state.sources for mount in here),
        in_use=bool(mounts.users(mountpoint)),
        pending=waits,
        fuse=fuse,
        hung_s=time.time() - answered if answered else 0.0,
        servers_answer=True,
    )
    if remedy in (keeper.Remedy.NOTHING, keeper.Remedy.PEEL, keeper.Remedy.ABORT):
        return look  # what is left is the keeper's, which has the time for it
    run(_SYSTEMCTL, "enable", plan.unit)
    if here or systemd.is_active(plan.unit):
        if look.state is not mounts.State.RIGHT:
            _clear(state)
        _stop(plan.unit, _STOP_S)
        _clear(state)
    run(_SYSTEMCTL, "reset-failed", plan.unit, check=False)
    run(_SYSTEMCTL, "start", "--no-block", plan.unit)
    if silence:  # it cannot come now: it will by itself
        raise silence
    _settle(plan)
    return probe(plan)


def _settle(plan: mount_plan.Plan) -> None:
    """Wait until the mount is right, or its unit has failed: a mount unit stays so, a service is started again."""
    end = time.monotonic() + _SETTLE_S
    while (left := end - time.monotonic()) > 0:
        if mounts.wait(
            plan.spec.mountpoint, fstype=plan.fstypes, source=plan.sources, timeout=min(left, _SETTLE_LOOK_S)
        ) or systemd.has_failed(plan.unit):
            return


def _reload(plan: mount_plan.Plan) -> bool:
    """Have the supervisor start the new program under the mount; tell whether it did, which it does not when busy."""
    if not systemd.is_active(plan.unit) or not probe(plan):
        return False
    run(_SYSTEMCTL, "reload", plan.unit, timeout=30, check=False)
    end = time.monotonic() + _RELOAD_S
    while time.monotonic() < end:
        with contextlib.suppress(CommandError, ValueError, AttributeError):
            said = json.loads(run("/usr/bin/cat", f"{plan.spec.mountpoint}/.config", timeout=3).stdout)
            if str(said.get("Version", "")).startswith(plan.version):
                return True
        time.sleep(0.5)
    return False


def _stop(unit: str, limit_s: float) -> None:
    """Stop a unit; leave systemd to it when that takes longer."""
    with contextlib.suppress(CommandTimeout):
        run(_SYSTEMCTL, "stop", unit, timeout=limit_s, check=False)


def _remove_cache(path: pathlib.Path) -> bool:
    """Remove a client's folder, unless blocks lie there that were never uploaded; tell whether it is gone."""
    if any(names for staging in path.glob("*/rawstaging") for _, _, names in os.walk(staging)):
        return False
    shutil.rmtree(path, ignore_errors=True)
    return True


def _silence(plan: mount_plan.Plan, timeout_s: float) -> juicefs.UnreachableError | None:
    """Return what says that no server of a group answers; None when all do that matter."""
    try:
        for group in plan.servers:
            juicefs.check_reachable(group, timeout=timeout_s)
    except juicefs.UnreachableError as e:
        return e
    return None


def _take_down(app: str, state: _State) -> None:
    """Undo everything outside of the application's own folders."""
    service, timer, starter = _keeper_units(app)
    for unit in (timer, starter, service):
        systemd.ensure_no_unit(unit)
    for name in (keeper.WATCH, keeper.HEALTH):
        files.ensure_absent(mount_plan.STATE / app / name)
    files.ensure_absent(watchdog.TEXTFILES / keeper.metrics_name(app))
    if systemd.is_active(state.unit):
        _stop(state.unit, _UPLOAD_S + _STOP_S if state.caches else _STOP_S)
    systemd.ensure_no_unit(state.unit)
    for path in state.files:
        files.ensure_absent(path)
    systemd.ensure_no_dropin(_SLURMD, f"10-{app}.conf")
    files.ensure_absent(mount_plan.ETC / app / "environment")
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


def _helper_words(said: str) -> str:
    """Return what mount(8) and its helper said as one line: what failed, and the hints in lines of their own."""
    lines = (re.sub(r"^mount(\.\w+)?: (mount \S+ at \S+ failed: )?", "", line.strip()) for line in said.splitlines())
    return "; ".join(dict.fromkeys(line for line in lines if line))[:_MOST_REASON]


def _check_rivals(spec: mount_plan.Spec) -> None:
    for path in mount_plan.STATE.glob("*/mount.json"):
        rival = path.parent.name
        state = _load(rival)
        if rival != spec.app and state is not None and _overlap(state.mountpoint, spec.mountpoint):
            raise mount_plan.MountError(f"application {rival} mounts at {state.mountpoint}: choose another mountpoint")


def _overlap(one: str, other: str) -> bool:
    return mount_plan.is_inside(one, other) or mount_plan.is_inside(other, one)


def _boot() -> str:
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _load(app: str) -> _State | None:
    try:
        return _State.model_validate_json((mount_plan.STATE / app / "mount.json").read_text())
    except OSError:
        return None


def _save(app: str, state: _State) -> None:
    files.ensure_file(
        mount_plan.STATE / app / "mount.json", json.dumps(state.model_dump(), indent=1) + "\n", mode=0o600
    )


def _has_unit(name: str) -> bool:
    return run(_SYSTEMCTL, "cat", name, check=False).returncode == 0
