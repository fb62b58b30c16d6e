#!/bin/sh
# Run a command that sees a folder at MERGED, where syncs cost nothing: unsynced.sh FOLDER SCRATCH MERGED COMMAND...
#
# dpkg syncs its database for each package, which takes most of an installation on a busy disk. SCRATCH is an empty folder
# on FOLDER's filesystem. For `volatile` see Linux, Documentation/filesystems/overlayfs.rst; older kernels do without.
set -eu
folder=$1 scratch=$2 merged=$3
shift 3
mkdir -p "$scratch/lower" "$scratch/work"
mount -t overlay overlay -o "lowerdir=$scratch/lower,upperdir=$folder,workdir=$scratch/work,volatile" "$merged" ||
    mount --bind "$folder" "$merged"
exec "$@"
