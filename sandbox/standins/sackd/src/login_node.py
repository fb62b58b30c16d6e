"""The login host: Slurm's commands, and what sackd does for them.

Slurm has sackd since 23.11; it keeps the configuration that the controller serves in /run/slurm/conf, where every
command finds it. Where the distribution has it, it runs. 22.05 has no sackd, but its slurmd can fetch the configuration
and leave (`-G`). The service of the same name written here does that at start, on reload and twice a minute; files are
replaced atomically.
"""

import pathlib

from common import munge

from slurm_ddp import apt, files, systemd
from slurm_ddp.run import run

SERVICE = "sackd.service"

_DEFAULTS = pathlib.Path("/etc/default/sackd")
_PROGRAM = pathlib.Path("/usr/local/sbin/sackd")
_UNIT = f"""\
[Unit]
Description=Slurm auth and cred kiosk daemon (played by the slurm-ddp sandbox)
After=network-online.target munge.service
Wants=network-online.target

[Service]
Type=notify
NotifyAccess=all
EnvironmentFile=-{_DEFAULTS}
ExecStart={_PROGRAM} $SACKD_OPTIONS
ExecReload=/bin/kill -HUP $MAINPID
RuntimeDirectory=slurm
Restart=on-failure
RestartSec=2
TimeoutStartSec=90

[Install]
WantedBy=multi-user.target
"""
# The packaged sackd starts as soon as it is installed, where it would wait for a controller that nobody named.
_DROPIN = f"[Service]\nExecCondition=/usr/bin/grep -q -e --conf-server {_DEFAULTS}\n"
# slurmd writes into /run/slurm and its spool directory while it fetches; both are private to that one process, so that
# a command that runs at the same time always finds a whole configuration.
_SCRIPT = """\
#!/bin/sh
# Keeps /run/slurm/conf as the controller serves it. Arguments: --conf-server HOST:PORT[,...]
trap 'reload=1' HUP
stage=/run/slurm/.stage
fetch() {
    rm -rf "$stage" && mkdir -p "$stage" /run/slurm/conf || return 1
    unshare --mount --propagation private -- /bin/sh -c '
        mkdir -p /var/lib/slurm/sackd && stage=$1 && shift
        mount --bind "$stage" /var/lib/slurm/sackd || exit 1
        mount -t tmpfs tmpfs /var/lib/slurm/slurmd && mount -t tmpfs tmpfs /run/slurm || exit 1
        /usr/sbin/slurmd -G -Z -N "$(hostname)" "$@" > /dev/null || exit 1
        cp -L /run/slurm/conf/* /var/lib/slurm/sackd/' sackd "$stage" "$@" || return 1
    [ -s "$stage/slurm.conf" ] || return 1
    for file in "$stage"/*; do
        name=${file##*/}
        cmp -s "$file" "/run/slurm/conf/$name" && continue
        cp "$file" "/run/slurm/conf/.$name" && mv "/run/slurm/conf/.$name" "/run/slurm/conf/$name"
    done
    for file in /run/slurm/conf/*; do
        [ -e "$stage/${file##*/}" ] || rm -f "$file"
    done
}
ready=
while :; do
    reload=
    if fetch "$@"; then
        [ -n "$ready" ] || systemd-notify --ready
        ready=1
    elif [ -z "$ready" ]; then
        sleep 1
        continue
    fi
    sleep 30 &
    wait $!
done
"""


def install() -> None:
    """Install Slurm's commands and sackd, or what plays it where the distribution has none."""
    systemd.ensure_dropin(SERVICE, "10-charmed-hpc.conf", _DROPIN)
    if run("/usr/bin/apt-cache", "show", "sackd", check=False).returncode == 0:
        apt.ensure_packages(("slurm-client", "sackd", munge.PACKAGE))
        return
    apt.ensure_packages(("slurm-client", "slurmd", munge.PACKAGE))
    run("/usr/bin/systemctl", "mask", "--now", "slurmd.service")  # needed for its binary only
    files.ensure_file(_PROGRAM, _SCRIPT, mode=0o755)
    systemd.ensure_unit(SERVICE, _UNIT)


def join_cluster(key: str, controllers: tuple[str, ...]) -> None:
    """Make Slurm's commands on this host speak to the cluster."""
    changed = munge.ensure_key(key)
    changed |= files.ensure_file(_DEFAULTS, f"SACKD_OPTIONS=--conf-server {','.join(controllers)}\n")
    if changed or not is_running():
        run("/usr/bin/systemctl", "enable", SERVICE)
        systemd.restart(SERVICE)


def leave_cluster() -> None:
    """Forget the controller."""
    systemd.stop(SERVICE)
    run("/usr/bin/systemctl", "disable", SERVICE, check=False)
    files.ensure_absent(_DEFAULTS)


def is_running() -> bool:
    """Tell whether the configuration is there and kept up to date."""
    return systemd.is_active(SERVICE)


def version() -> str:
    """Return Slurm's version; its commands tell theirs only where they find a configuration."""
    return run("/usr/bin/dpkg-query", "--show", "--showformat=${Version}", "slurm-client").stdout.partition("-")[0]
