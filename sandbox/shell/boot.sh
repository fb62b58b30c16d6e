#!/bin/sh
# Run a command in a time namespace whose boot is now: boot.sh COMMAND...
#
# slurmctld learns of a node's reboot from its time since boot, /proc/uptime and sysinfo(2). systemd-nspawn itself keeps
# this computer's; what it starts has the other, time_namespaces(7). Where that is not allowed (a container without
# CAP_SYS_TIME) machines share this computer's, and look as if they had never been rebooted.
offset=--boottime=-$(cut -d. -f1 /proc/uptime)
/usr/bin/unshare --time "$offset" /bin/true 2>/dev/null || exec "$@"
exec /usr/bin/unshare --time "$offset" "$@"
