#!/bin/sh
# Finish the guest's system, inside it. DOWNLOADS and MASKED are words of image.yaml, SLURM is a version, SUITE its suite.
set -eu
install="apt-get -y --no-install-recommends"
debs=/var/cache/apt/archives
export DEBIAN_FRONTEND=noninteractive

update-ca-certificates
useradd --create-home --uid 1000 --shell /bin/bash --groups sudo ubuntu
# shellcheck disable=SC2086  # words
systemctl mask $MASKED
systemctl enable systemd-networkd.service sandbox-cgroups.service sandbox-gpus.service
systemctl disable systemd-networkd-wait-online.service
systemctl set-default multi-user.target
# Generators, which look for a machine's disks and consoles, run at each boot and daemon-reload: an eighth of a deployment.
mkdir -p /etc/systemd/system-generators
for path in /usr/lib/systemd/system-generators/*; do
  ln -s /dev/null "/etc/systemd/system-generators/${path##*/}"
done
rm -f /etc/apt/apt.conf.d/70debconf  # which asks the packages' questions before they are unpacked: nobody answers
rm -f /etc/machine-id /var/lib/dbus/machine-id /etc/hostname
touch /etc/machine-id

# The C library that Slurm needs wants a newer base-files; its os-release stays aside, for the guest is a Debian 12.
dpkg-divert --local --no-rename --divert "/usr/lib/os-release.$SUITE" --add /usr/lib/os-release
apt-cache policy slurmctld | grep -q "Candidate: $SLURM" || { echo "E: no Slurm $SLURM in $SUITE"; exit 1; }

# Of what charms install, libraries and what only stand-ins' packages depend on are installed here, once for all hosts;
# the rest is downloaded.
names='^(lib|gcc-|ocl-|perl|galera|mariadb-(client|server-core)|slurm-wlm-(basic|mysql)|munge|gawk|lsof|socat|ucf|sensible)'
# shellcheck disable=SC2086  # words
shared=$($install -s install $DOWNLOADS | awk -v names="$names" '$1 == "Inst" && $2 ~ names && $2 !~ /^libjs-/ { print $2 }')
$install dist-upgrade
# shellcheck disable=SC2086
$install install $shared
systemctl disable munge.service
apt-get clean
# shellcheck disable=SC2086
$install --download-only install $DOWNLOADS

# apt takes a second of processor time to read two whole suites, in each of its runs, so the guest has an index of the
# downloaded packages alone; `apt-get update` brings the others.
cd "$debs"
apt-ftparchive packages . >Packages
rm -rf /var/lib/apt/lists/*
echo "deb [trusted=yes] file:$debs ./" >/etc/apt/sources.list.d/fetched.list
apt-get -o Dir::Etc::sourcelist=/etc/apt/sources.list.d/fetched.list -o Dir::Etc::sourceparts=- update
