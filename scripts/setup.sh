#!/bin/sh
# Install the system packages that slurm-ddp's commands need, on Debian 12 and Ubuntu 24.04 (their kin work too).
#
#   scripts/setup.sh [--dry-run] [test] [demo] [pack] [storage] [guest]     without a group: all of them
#
#   test   lint, unit, payload and bundle tests
#   demo   the sandbox: one systemd container per unit, with real Slurm and JuiceFS in them
#   pack   Charmcraft
#   storage   databases that tests of the storage charms start
#   guest  a machine of its own for NFS and CephFS, whose clients are in the kernel
#
# Needs root, or sudo. Prints what it installs and why; does nothing, in a moment, if everything is installed.
set -eu

packages() {  # GROUP -> lines of "package: why"
    case $1 in
    test) cat <<'EOF'
python3-venv: every tool runs in a virtual environment under build/
ca-certificates: downloads over HTTPS
git: versions and clean copies of the tree
shellcheck: checks the shell scripts
zstd: compresses the training environment, as on the cluster
redis-server: tests of the JuiceFS metadata server start one of their own
openssh-server: tests of the JuiceFS object store start one of their own
fuse3: tests mount JuiceFS
slurmctld: tests ask a Slurm of two nodes on this host
slurmd: tests ask a Slurm of two nodes on this host, and what slurmd makes of a gres.conf
slurm-client: tests start tasks with srun
prometheus: tests run promtool on alerts, and the queries of dashboards on a server of their own
EOF
        ;;
    demo) cat <<'EOF'
python3-venv: the sandbox runs in a virtual environment under build/
ca-certificates: downloads over HTTPS
mmdebstrap: makes the root filesystem that all sandbox hosts share
debian-archive-keyring: mmdebstrap verifies Debian's packages with it, on Ubuntu too
systemd-container: runs each host (systemd-nspawn, machinectl)
dbus: systemd's tools talk to the hosts through it
iproute2: the bridge between the hosts
iptables: lets the hosts reach the network through this machine
fuse3: JuiceFS is a FUSE filesystem
rsync: copies trees
zstd: compresses the training environment
EOF
        ;;
    pack) cat <<'EOF'
python3-venv: Charmcraft runs in a virtual environment under build/
ca-certificates: downloads over HTTPS
python3-apt: Charmcraft asks it about packages
python3-pip: Charmcraft installs a charm's requirements with it
python3-dev: Charmcraft's python plugin asks for it
git: Charmcraft asks it about the source
rsync: stages a charm
EOF
        ;;
    storage) cat <<'EOF'
mariadb-server: tests of JuiceFS on MySQL start one of their own
postgresql: tests of JuiceFS on PostgreSQL start one of their own
openssl: makes the certificates that those tests trust
EOF
        ;;
    guest) cat <<'EOF'
qemu-system-x86: tests of NFS and CephFS boot a machine with Debian's kernel
mmdebstrap: makes that machine's disk
debian-archive-keyring: mmdebstrap verifies Debian's packages with it, on Ubuntu too
systemd-container: installs packages on that disk
e2fsprogs: writes that disk
EOF
        ;;
    *) echo "setup: unknown group \`$1\`; there are test, demo, pack, storage and guest" >&2; exit 2 ;;
    esac
}

dry_run=
groups=
for argument in "$@"; do
    case $argument in
    --dry-run) dry_run=1 ;;
    -h | --help) sed -n '2,/^set -eu/s/^# \{0,1\}//p' "$0" | sed '$d'; exit 0 ;;
    -*) echo "setup: unknown option \`$argument\`; there are --dry-run and --help" >&2; exit 2 ;;
    *) groups="$groups $argument" ;;
    esac
done
wanted=$(for group in ${groups:-test demo pack storage guest}; do packages "$group" || exit 2; done)

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    echo "setup: this needs a Debian or Ubuntu machine; on others, install the equivalents of:" >&2
    echo "$wanted" | sort -u | sed 's/^/  /' >&2
    exit 1
fi

names=$(echo "$wanted" | cut -d: -f1 | sort -u)
# shellcheck disable=SC2086  # a list of names
installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' $names 2>/dev/null | sed -n 's/^installed //p' || true)
missing=$(for name in $names; do echo "$installed" | grep -qx "$name" || echo "$name"; done)
[ -n "$missing" ] || exit 0

as_root=
if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "setup: needs root to install: $(echo "$missing" | tr '\n' ' ')" >&2
        echo "setup: run  scripts/setup.sh  as root once, then repeat your command" >&2
        exit 1
    fi
    as_root=sudo
    [ -t 0 ] || as_root="sudo -n"
fi

echo "setup: installing what is missing${as_root:+ (with sudo)}:"
for name in $missing; do
    echo "$wanted" | grep "^$name: " | head -n 1 | sed 's/^/  /'
done
[ -z "$dry_run" ] || exit 0

apt() {
    # shellcheck disable=SC2086
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=600 -o Dpkg::Use-Pty=0 "$@"
}

policy=/usr/sbin/policy-rc.d  # keeps Debian from starting servers on this machine: the tests start their own
made_policy=
cleanup() { [ -z "$made_policy" ] || $as_root rm -f "$policy"; }
trap cleanup EXIT
trap 'exit 130' INT TERM
if [ ! -e "$policy" ]; then
    made_policy=1
    # shellcheck disable=SC2016  # for policy-rc.d to expand
    printf '#!/bin/sh\ncase $1 in redis* | ssh* | prometheus* | munge* | slurm* | mariadb* | mysql* | postgresql*) exit 101 ;; esac\n' | $as_root tee "$policy" >/dev/null
    $as_root chmod 755 "$policy"
fi

# shellcheck disable=SC2086
apt install --no-install-recommends $missing || {
    echo "setup: refreshing the package lists first"
    apt update
    apt install --no-install-recommends $missing
}
echo "setup: done"
