"""Make, verify and remove one mount by a systemd unit, without ever waiting for a filesystem."""

import collections.abc
import contextlib
import json
import pathlib
import re
import shutil
import time

import accounts
import logins
import mount_plan
from mount import states, watching
from scripts import keeper
from slurm_ddp import apt, files, juicefs, mounts, processes, readiness, systemd
from slurm_ddp.commands import CommandError, CommandTimeout, last_line, run

_SETTLE_S = 60.0  # how long a mount whose servers answer may take
_SETTLE_LOOK_S = 2.0
_PROBE_S = 5.0
# While its servers are silent, all that is asked is whether the mount works nevertheless
_SILENT_PROBE_S = 2.0
# For a connection; the second if the keeper has just failed to get one
_SERVER_S, _SERVER_AGAIN_S = 3.0, 1.0
# How long the keeper may take to finish its pass; after that a hook goes on nevertheless
_TURN_S = 30.0
_RELOAD_S = 20.0
_SYSTEMCTL_S = 60.0
_STOP_S = 90.0
_MOST_REASON = 300  # characters


def ensure(plan: mount_plan.Plan) -> mounts.Result:
    """Mount as planned, now and at every boot; return a probe of the mount.

    A mount that works and is in use stays mounted: see `pending`. Raises `juicefs.UnreachableError`
    if a required server does not answer, `mount_plan.MountError` if something is in the way, and
    `CommandError`.
    """
    spec = plan.spec
    apt.ensure_packages(plan.packages)
    _check_rivals(spec)
    with keeper.turn(mount_plan.STATE / spec.app, patience=_TURN_S):
        state = _write(plan)
        seen = watching.recent(plan, state)
        state = watching.watch(plan, state)
        timeout = _SERVER_AGAIN_S if seen.down else _SERVER_S
        silence = keeper.unreachable(plan.servers, timeout=timeout)
        found = mounts.Result(mounts.State.HUNG, seen.detail)
        if not silence or seen.state != mounts.State.HUNG.value:
            found = probe(plan, deadline=_SILENT_PROBE_S if silence else _PROBE_S)
        if not found or pending(plan):
            found = _repair(plan, state, found, silence)
        if found and not pending(plan):
            _forget_former(plan, state)
        return found


def _check_rivals(spec: mount_plan.Spec) -> None:
    """Raise `mount_plan.MountError` if another application mounts above or below."""
    for app, rival in states.load_all().items():
        if app == spec.app:
            continue
        is_below = mount_plan.is_inside(rival.mountpoint, spec.mountpoint)
        if is_below or mount_plan.is_inside(spec.mountpoint, rival.mountpoint):
            raise mount_plan.MountError(
                f"application {app} mounts at {rival.mountpoint}: choose another mountpoint"
            )


def _forget_former(plan: mount_plan.Plan, state: states.State) -> None:
    """Remove caches of before a change, and the sources that were right then."""
    caches = tuple(map(str, plan.caches))
    for path in set(state.caches) - set(caches):
        shutil.rmtree(path, ignore_errors=True)
    states.save(state, known=plan.sources, caches=caches)


def remount(plan: mount_plan.Plan) -> mounts.Result:
    """Unmount, even if processes use the mount, and mount it as planned; return a probe of it."""
    state = states.load(plan.spec.app)
    if state is not None and state.unit == plan.unit:
        with keeper.turn(mount_plan.STATE / plan.spec.app, patience=_TURN_S):
            _stop(plan.unit)
            _clear(state)
    return ensure(plan)


def pending(plan: mount_plan.Plan) -> bool:
    """Report whether the mount runs with an older unit, environment or program than it should."""
    state = states.load(plan.spec.app)
    return state is not None and keeper.is_outdated(
        plan.unit, state.boot, state.changed_us, timeout=_SYSTEMCTL_S
    )


def reason(plan: mount_plan.Plan) -> str:
    """Explain why the unit does not mount, in the program's words: one line, without secrets."""
    # After the helper's output comes systemd's, that a mount failed
    if plan.unit.endswith(".mount"):
        # What failed, and hints
        lines = systemd.output(plan.unit, secrets=plan.secrets).splitlines()
        texts = (
            re.sub(r"^mount(\.\w+)?: (mount \S+ at \S+ failed: )?", "", line.strip())
            for line in lines
        )
        if text := "; ".join(dict.fromkeys(filter(None, texts))):
            return text[:_MOST_REASON]
    log = systemd.journal(plan.unit, secrets=plan.secrets)
    return juicefs.reason(log) or last_line(log) or "its journal is empty"


def probe(plan: mount_plan.Plan, *, deadline: float = _PROBE_S) -> mounts.Result:
    """Probe the mount, with a write if it is for writing. `deadline` is in seconds."""
    return mounts.probe(
        plan.spec.mountpoint,
        fstype=plan.fstypes,
        source=plan.sources,
        writable=not plan.spec.read_only,
        sticky=plan.sticky,
        deadline=deadline,
    )


def remove(app: str, *, unit: str) -> None:
    """Unmount and remove all of the application, unless another unit wants the mount."""
    state = states.load(app)
    if state is not None:
        others = tuple(user for user in state.units if user != unit)
        with keeper.turn(mount_plan.STATE / app, patience=_TURN_S):
            if others:
                states.save(state, units=others)
                watching.wake_once_right(app, unit, [])
                return
            _take_down(state)
        for path in state.caches:
            shutil.rmtree(path, ignore_errors=True)
    accounts.remove(app)
    logins.remove(app)
    readiness.withdraw(unit)  # which the keeper wrote
    with contextlib.suppress(OSError):
        readiness.DIRECTORY.rmdir()  # unless another unit's file lies there
    for folder in (mount_plan.ETC, mount_plan.LIB, mount_plan.STATE, mount_plan.CACHE):
        shutil.rmtree(folder / app, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # unless another application's lie there


def _write(plan: mount_plan.Plan) -> states.State:
    """Write the mount's files; return its state, with the time when a running one got outdated."""
    state = states.load(plan.spec.app)
    if state is not None and (state.mountpoint, state.unit) != (plan.spec.mountpoint, plan.unit):
        _take_down(state)
        state = None
    state = state or states.State(plan.spec.app, plan.spec.mountpoint, plan.unit, plan.fstypes)
    state = states.save(  # before anything is written that it helps to remove
        state,
        made_mountpoint=_prepare(plan) or state.made_mountpoint,
        units=tuple(sorted({plan.spec.wanted_by, *state.units})),
        known=_united(state.known, plan.sources),
        files=_united(state.files, plan.files),
        caches=_united(state.caches, plan.caches),
    )
    changed = _write_files(plan)
    if plan.program_changed and not changed:
        changed = not _reload(plan)
    if not changed:
        return state
    return states.save(state, boot=readiness.boot_id(), changed_us=time.monotonic_ns() // 1000)


def _united(
    old: tuple[str, ...], new: collections.abc.Iterable[str | pathlib.Path]
) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*old, *map(str, new)]))


def _write_files(plan: mount_plan.Plan) -> bool:
    """Write the unit with its files; return whether a running mount must be restarted for it."""
    app = plan.spec.app
    for folder in (
        mount_plan.ETC / app,
        mount_plan.STATE / app,
        mount_plan.CACHE / app,
        *plan.caches,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # the cache is not encrypted, even if the volume is
    (mount_plan.STATE / app / "tmp").mkdir(exist_ok=True)
    watching.write_programs(app)
    changed = False
    for path, text in plan.files.items():
        changed |= files.ensure_file(path, text, mode=0o600)
    units = {plan.unit: plan.unit_text}
    if systemd.exists(watching.SLURMD):
        units[f"{watching.SLURMD}.d/10-{app}.conf"] = mount_plan.render(
            "slurmd-dropin.conf.j2", unit=plan.unit
        )
    changed |= plan.unit in systemd.ensure_units(units)
    return changed


def _prepare(plan: mount_plan.Plan) -> bool:
    """Make a mountpoint that not even root can fill while unmounted; return whether it is new."""
    mountpoint, path = plan.spec.mountpoint, pathlib.Path(plan.spec.mountpoint)
    if mounts.at(mountpoint):
        return False
    made = not path.exists() and not path.is_symlink()
    if made:
        try:
            path.mkdir(parents=True, mode=0o755)
        except OSError as e:
            text = f"mountpoint {mountpoint} cannot be made: {e.strerror}"
            raise mount_plan.MountError(text) from e
    if path.is_symlink() or str(path.resolve()) != mountpoint or not path.is_dir():
        raise mount_plan.MountError(
            f"mountpoint {mountpoint} is a file or behind a symbolic link: choose another"
        )
    if any(path.iterdir()):
        raise mount_plan.MountError(
            f"mountpoint {mountpoint} holds files, which a mount would hide: move them away"
        )
    # Even if the filesystem cannot do this, the mode still keeps users out
    run("/usr/bin/chattr", "+i", path, check=False)
    return made


def _repair(
    plan: mount_plan.Plan, state: states.State, found: mounts.Result, silence: str
) -> mounts.Result:
    """Start the mount, or restart it if that helps and hurts no process; return a probe of it."""
    mountpoint = plan.spec.mountpoint
    here = mounts.at(mountpoint)
    if silence and found.state in (mounts.State.HUNG, mounts.State.SLOW):
        raise juicefs.UnreachableError(silence)
    hung_s = 0.0
    if found.state is mounts.State.HUNG:
        answered = watching.health(plan.spec.app).answered
        hung_s = time.time() - answered if answered else 0.0
    remedy = keeper.remedy(
        found.state,
        ours=all(map(state.is_known, here)),
        in_use=bool(processes.users(mountpoint)),
        pending=pending(plan),
        fuse=keeper.is_fuse(plan.fstypes),
        hung_s=hung_s,
        servers_answer=True,
    )
    if remedy not in (keeper.Remedy.START, keeper.Remedy.RESTART):
        return found  # the keeper does the rest, since it has the time
    systemd.enable(plan.unit)
    if here or systemd.is_active(plan.unit):
        if found.state is not mounts.State.RIGHT:
            _clear(state)
        _stop(plan.unit)
        _clear(state)
    systemd.reset_failed(plan.unit)
    systemd.start_later(plan.unit)
    if silence:  # it cannot come now: it will by itself
        raise juicefs.UnreachableError(silence)
    _settle(plan)
    return probe(plan)


def _settle(plan: mount_plan.Plan) -> None:
    """Wait until the mount is right, or its unit has failed."""
    end = time.monotonic() + _SETTLE_S
    while (left := end - time.monotonic()) > 0:
        is_right = mounts.wait(
            plan.spec.mountpoint,
            fstype=plan.fstypes,
            source=plan.sources,
            timeout=min(left, _SETTLE_LOOK_S),
        )
        # A mount unit stays failed, a service is started again
        if is_right or systemd.state(plan.unit) == "failed":
            return


def _reload(plan: mount_plan.Plan) -> bool:
    """Make the supervisor start the new program; return whether it did (a busy one does not)."""
    if not systemd.is_active(plan.unit) or not probe(plan):
        return False
    run("/usr/bin/systemctl", "reload", plan.unit, timeout=30, check=False)
    end = time.monotonic() + _RELOAD_S
    while time.monotonic() < end:
        with contextlib.suppress(CommandError, ValueError, AttributeError):
            shown = json.loads(
                run("/usr/bin/cat", f"{plan.spec.mountpoint}/.config", timeout=3).stdout
            )
            if str(shown.get("Version", "")).startswith(plan.version):
                return True
        time.sleep(0.5)
    return False


def _stop(unit: str) -> None:
    """Stop a unit; leave systemd to it when that takes longer."""
    with contextlib.suppress(CommandTimeout):
        systemd.stop(unit, timeout=_STOP_S)


def _take_down(state: states.State) -> None:
    """Undo everything outside of the application's own folders."""
    watching.stop(state.app)
    if systemd.is_active(state.unit):
        _stop(state.unit)
    systemd.ensure_no_unit(state.unit)
    for path in state.files:
        files.ensure_absent(path)
    systemd.ensure_no_dropin(watching.SLURMD, f"10-{state.app}.conf")
    _clear(state)
    path = pathlib.Path(state.mountpoint)
    if not mounts.at(state.mountpoint) and path.is_dir():
        run("/usr/bin/chattr", "-i", path, check=False)
        if state.made_mountpoint:
            with contextlib.suppress(OSError):
                path.rmdir()


def _clear(state: states.State) -> None:
    for mount in reversed(mounts.at(state.mountpoint)):
        if state.is_known(mount):
            with contextlib.suppress(mounts.MountError):  # one that is not ours lies on top
                mounts.clear(state.mountpoint, fstype=mount.fstype, source=mount.source)
