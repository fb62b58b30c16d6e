#!/bin/sh
# Keep a machine running where no systemd does: supervise.sh RECORD CGROUPS COMMAND...
#
# The record lets a later command tell whether the process with the pid is still this one. Before each boot the machine's
# cgroups are emptied of what the one before left, such as those of slurmd's jobs.
record=$1 cgroups=$2
shift 2
start=$(cut -d' ' -f22 /proc/$$/stat)
echo "$$ $start $(cat /proc/sys/kernel/random/boot_id)" >"$record.new" && mv "$record.new" "$record" || exit 1
while :; do
    for group in $cgroups; do find "$group" -mindepth 1 -type d -delete; done 2>/dev/null
    (
        for group in $cgroups; do echo 0 >"$group/cgroup.procs"; done
        exec "$@"
    )
    status=$?
    [ $status = 133 ] || exit $status # systemd-nspawn(1), "Exit status": the machine rebooted
done
