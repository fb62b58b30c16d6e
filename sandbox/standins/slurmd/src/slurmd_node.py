"""The compute node: the distribution's slurmd as a dynamic, configless node."""

import contextlib
import re

from common import munge, scontrol

import slurmd_options
from slurm_ddp import apt, systemd
from slurm_ddp.run import CommandError, run

SERVICE = "slurmd.service"
PACKAGES = ("slurmd", "slurm-client", munge.PACKAGE)

_MEM_SPEC_LIMIT_MB = 1024
_DETECTED = ("cpus", "boards", "socketsperboard", "corespersocket", "threadspercore", "realmemory")
# 22.05's unit starts slurmd only where a slurm.conf lies, which a configless node has not; later ones start it as soon
# as it is installed, where it would wait for a controller that nobody named.
_DROPIN = f"""\
[Unit]
ConditionPathExists=

[Service]
ExecCondition=/usr/bin/grep -q -e --conf-server {slurmd_options.PATH}
Restart=on-failure
RestartSec=5
"""


def install(name: str, app: str) -> None:
    """Install slurmd and write the options of node `name`; it starts when the controller is known."""
    systemd.ensure_dropin(SERVICE, "10-charmed-hpc.conf", _DROPIN)
    apt.ensure_packages(PACKAGES)
    options = slurmd_options.load()
    if "--conf" not in options:
        systemd.stop(SERVICE)
        run("/usr/bin/systemctl", "disable", SERVICE, check=False)
        slurmd_options.save({"--conf": detect(app), "-Z": True, "-N": name})


def detect(app: str) -> str:
    """Return the value of `--conf` for this machine.

    Upstream asks NVML for the GPUs and leaves `gres` out where there is no driver, which is always so when it installs.
    The place stays visible as a second blank.
    """
    line = run("/usr/sbin/slurmd", "-C").stdout.splitlines()[0]
    found = {key.lower(): value for key, value in re.findall(r"(\w+)=(\S+)", line)}
    gres = ""
    words = [*(f"{key}={found[key]}" for key in _DETECTED if key in found), gres]
    return " ".join([*words, f"memspeclimit={_MEM_SPEC_LIMIT_MB}", f"features={app}"])


def join_cluster(name: str, key: str, controllers: tuple[str, ...], state: str, reason: str) -> None:
    """Start slurmd as a node of the cluster; a node that the controller does not know yet gets `state`.

    Raises:
        scontrol.SlurmError: the controller does not answer, or the node does not register.
    """
    munge.ensure_key(key)
    if not is_running():
        _fetch_configuration(name, ",".join(controllers))
    known = scontrol.node_state(name) is not None
    slurmd_options.save(slurmd_options.load() | {"--conf-server": ",".join(controllers)})
    run("/usr/bin/systemctl", "enable", SERVICE)
    systemd.restart(SERVICE)
    if not known:
        scontrol.wait_for_node(name)
        scontrol.update_node(name, state, reason or ("New node." if state == "down" else ""))


def _fetch_configuration(name: str, controllers: str) -> None:
    """Make scontrol work on a host where no slurmd runs: a slurmd that only prints its GPUs fetches what it needs."""
    try:
        run("/usr/sbin/slurmd", "-G", "-Z", "-N", name, "--conf-server", controllers, timeout=90)
    except CommandError as e:
        raise scontrol.SlurmError(f"no configuration from {controllers}: {e}") from e


def leave_cluster(name: str) -> None:
    """Delete the node, stop slurmd and forget the controller."""
    if is_running():
        with contextlib.suppress(scontrol.SlurmError):  # jobs, or no controller any more: upstream goes on as well
            scontrol.delete_node(name)
    systemd.stop(SERVICE)
    run("/usr/bin/systemctl", "disable", SERVICE, check=False)
    options = slurmd_options.load()
    if options.pop("--conf-server", None) is not None:
        slurmd_options.save(options)


def configure(name: str, app: str, parameters: dict[str, str], *, reset: bool) -> str:
    """Change `--conf` and register the node anew, in the base state it had; return the new `--conf`.

    Raises:
        scontrol.SlurmError: the node has jobs, or does not come back.
    """
    options = slurmd_options.load()
    conf = detect(app) if reset else str(options["--conf"])
    if parameters:
        conf = slurmd_options.join_node(slurmd_options.parse_node(conf) | parameters)
    state = scontrol.node_state(name) if is_running() else None
    if state is not None:
        scontrol.delete_node(name)  # while slurmd runs: a client on this host gets its configuration from it
    slurmd_options.save(options | {"--conf": conf})
    if state is not None:
        systemd.restart(SERVICE)
        scontrol.wait_for_node(name)
        if _base(state) != _base(scontrol.node_state(name) or ""):
            scontrol.update_node(name, _base(state), "set-node-config" if _base(state) == "down" else "")
    return conf


def _base(state: str) -> str:
    """Return a state without its flags, as upstream keeps it: a drain is lost."""
    return re.split(r"[+*~#]", state)[0].lower()


def is_running() -> bool:
    """Tell whether slurmd runs."""
    return systemd.is_active(SERVICE)


def version() -> str:
    """Return slurmd's version."""
    return run("/usr/sbin/slurmd", "-V").stdout.split()[-1]


def restart() -> None:
    """Restart slurmd; steps of running jobs go on (KillMode=process)."""
    systemd.restart(SERVICE)
