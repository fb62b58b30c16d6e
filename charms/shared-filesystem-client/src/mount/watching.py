"""The keeper's side of a mount: its units and programs, its settings, and its results."""

import json
import pathlib
import re
import socket
import time

import mount_plan
from mount import states
from scripts import keeper
from slurm_ddp import files, mounts, packing, readiness, records, systemd

SLURMD = "slurmd.service"
_SLURMD_DEFAULTS = pathlib.Path("/etc/default/slurmd")
_PROGRAM = "import sys\n\nimport keeper\n\nsys.exit(keeper.main())\n"
_SEEN_S = keeper.INTERVAL_S + 10.0  # a result this recent is as good as a probe


def write_programs(app: str) -> None:
    """Write the keeper and the modules that it and the units' helper take.

    Python keeps the bytecode of modules alone, so the program only calls a module.
    """
    child = files.read(mounts.CHILD)
    # First: `mounts` runs it
    files.ensure_file(mount_plan.LIB / app / "slurm_ddp" / mounts.CHILD.name, child)
    for name, source in packing.sources(pathlib.Path(keeper.__file__)).items():
        files.ensure_file(mount_plan.LIB / app / name.replace("__main__", "keeper"), source)
    files.ensure_file(mount_plan.LIB / app / "mount_keeper.py", _PROGRAM)


def watch(plan: mount_plan.Plan, state: states.State) -> states.State:
    """Put the mount under the keeper's care from now on; return the state that it reads."""
    spec = plan.spec
    state = states.save(
        state,
        wanted=plan.sources,
        writable=not spec.read_only,
        servers=plan.servers,
        speaks=plan.speaks,
        node=node_name(),
        drain=spec.drain_on_failure,
        sticky=plan.sticky,
        port=plan.port,
    )
    service, timer, starter = _units(spec.app)
    command = f"/usr/bin/python3 {mount_plan.LIB / spec.app / 'mount_keeper.py'} {mount_plan.STATE / spec.app}"
    common = {"mountpoint": spec.mountpoint, "command": command, "interval": keeper.INTERVAL_S}
    units = {
        service: mount_plan.render("mount-keeper.service.j2", unit="", **common),
        starter: mount_plan.render("mount-keeper.service.j2", unit=plan.unit, **common),
        timer: mount_plan.render("mount-keeper.timer.j2", **common),
    }
    changed = systemd.ensure_units(units)
    if starter in changed:
        systemd.enable(starter)
    if changed & {service, timer} or not systemd.is_active(timer):
        systemd.enable_now(timer)
    return state


def stop(app: str) -> None:
    """Remove the keeper's units and its last result."""
    for unit in reversed(_units(app)):
        systemd.ensure_no_unit(unit)
    files.ensure_absent(mount_plan.STATE / app / keeper.HEALTH)


def wake_once_right(app: str, unit: str, command: list[str]) -> None:
    """Make the keeper run `unit`'s command once the mount works; an empty one cancels that."""
    path = mount_plan.STATE / app / keeper.WAKE.format(unit.replace("/", "-"))
    if command:
        files.ensure_file(path, json.dumps(command) + "\n", mode=0o600)
    else:
        files.ensure_absent(path)


def health(app: str) -> keeper.Health:
    """Read the keeper's last findings."""
    return records.load(keeper.Health(), mount_plan.STATE / app / keeper.HEALTH)


def recent(plan: mount_plan.Plan, state: states.State) -> keeper.Health:
    """Read recent findings of the keeper with the plan's servers, to spare a hook the wait."""
    found = health(plan.spec.app)
    return found if _is_recent(found) and state.servers == plan.servers else keeper.Health()


def proven(app: str) -> str | None:
    """Return the mountpoint if the keeper has just seen the mount work in this boot, or None."""
    found, state = health(app), states.load(app)
    works = found.works and found.boot == readiness.boot_id() and _is_recent(found)
    return state.mountpoint if state is not None and works else None


def _is_recent(found: keeper.Health) -> bool:
    return 0 <= time.time() - found.checked < _SEEN_S


def _units(app: str) -> tuple[str, str, str]:
    """Name a pass, the timer that starts it, and a pass that begins whenever the mount has come."""
    return (
        f"mount-keeper-{app}.service",
        f"mount-keeper-{app}.timer",
        f"mount-keeper-{app}-up.service",
    )


def node_name() -> str:
    """Return this machine's name in Slurm; "" if it runs no jobs."""
    if not systemd.exists(SLURMD):
        return ""
    named = re.search(r"(?:^|[\s\"'])-N\s*([A-Za-z0-9_.-]+)", files.read(_SLURMD_DEFAULTS))
    return named[1] if named else socket.gethostname().partition(".")[0]
