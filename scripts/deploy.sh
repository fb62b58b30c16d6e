#!/bin/sh
# Deploy the bundle on juju's current controller and model, with freshly packed charms.
#   OVERLAYS="gpu nfs" scripts/deploy.sh [ARGUMENT...]
# OVERLAYS: names of files in overlays/, or paths of your own. lxd is added by itself where the model's cloud is LXD, juju4 where
# the model's Juju is 4 or newer.
# Arguments go to `juju deploy`.
set -euf
cd "$(dirname "$0")/.."

fail() {
    echo "deploy: $1" >&2
    exit 1
}

demo="without a Juju, \`make demo\` runs the same bundle on this machine"
command -v juju >/dev/null || fail "the juju client is not installed: sudo snap install juju --channel 3.6/stable; $demo"
if ! model=$(juju show-model --format json 2>/dev/null </dev/null) || [ -z "$model" ]; then
    fail "juju has no current controller and model here: juju bootstrap lxd; juju add-model slurm-ddp; $demo"
fi
field() {
    printf %s "$model" | /usr/bin/python3 -c 'import json, sys; print(*{m.get(sys.argv[1], "unknown") for m in json.load(sys.stdin).values()})' "$1"
}
cloud=$(field type) version=$(field agent-version)
model_version=$version

chosen="" without_arch="" first="" filesystem="" machine="" generation=""
for word in ${OVERLAYS:-}; do
    case $word in
    */* | *.yaml) path=$word ;;
    *) path=overlays/$word.yaml ;;
    esac
    [ -f "$path" ] || fail "OVERLAYS: there is no $path; there are: $(find overlays -maxdepth 1 -name '*.yaml' -exec basename {} .yaml \; | sort | xargs), or give a path"
    case $path in /* | ./*) ;; *) path=./$path ;; esac
    case " $first $chosen " in *" $path "*) fail "OVERLAYS: $word is given twice" ;; esac
    if line=$(grep -n -m 1 '^[^#]*[*]FILL-IN' "$path"); then
        fail "OVERLAYS: $path line ${line%%:*} is to be filled in: copy the file, fill in each *FILL-IN, give the copy's path"
    fi
    for application in cephfs-server-proxy lustre-server-proxy lustre-server nfs-server-proxy; do
        grep -q "^  $application:" "$path" || continue
        kind=${application%-server-proxy}
        [ -z "$filesystem" ] || fail "OVERLAYS: $filesystem and $kind: there is one shared filesystem; choose one"
        filesystem=$kind
    done
    if line=$(grep -n '^ *constraints:' "$path" | grep -v -m 1 arch=); then
        without_arch="$path line ${line%%:*}"
    fi
    kind=$(sed -n -e 's/^ *constraints:.*virt-type=.*/lxd/p' -e 's/^ *constraints:.*\(instance-type\|tags\)=.*/gpu/p' -e 's/^machines:.*/machines/p' "$path" | head -n 1)
    if [ -n "$kind" ]; then
        [ -z "$machine" ] || fail "OVERLAYS: $machine and $kind: both say what machine a compute node is; choose one"
        machine=$kind
    fi
    case $path in */juju4.yaml) version=chosen ;; esac
    # What changes applications that other overlays remove comes before them: Juju would add those again.
    if grep -q '^    charm: .*dist/26.04/' "$path"; then
        generation=2604 first="$first $path"
    elif [ "$kind" = machines ]; then
        first="$first $path"
    else
        chosen="$chosen $path"
    fi
done
chosen="$first$chosen"
case $model_version in
[4-9].*)
    [ -z "$without_arch" ] || fail "OVERLAYS: $without_arch: constraints without arch=amd64, which Juju $model_version adds itself: it could deploy this bundle once only; add arch=amd64"
    ;;
esac
case $version in
[4-9].*)
    [ "$generation$machine" != 2604machines ] || fail "OVERLAYS: 2604 and machines: on Juju $version mysql-proxy takes the place of mysql, and it is for 24.04, which none of the machines has; leave 2604 out, or use Juju 3.6"
    chosen="$chosen ./overlays/juju4.yaml"
    ;;
esac
case $cloud,$machine in
lxd,) chosen="./overlays/lxd.yaml $chosen" ;; # the first, so that others win
lxd,gpu) fail "OVERLAYS: gpu asks for a cloud's machine types, and this model is on LXD; leave it out" ;;
lxd,lxd) ;;
*,machines) set -- --map-machines=existing "$@" ;;
*,lxd) fail "OVERLAYS: lxd is for LXD, and this model's cloud is $cloud; leave it out" ;;
esac

all=""
for path in $chosen; do
    all="$all $path"
    second=./overlays/$generation/${path##*/} # of an overlay with applications or machines of 24.04
    if [ -n "$generation" ] && [ -f "$second" ]; then
        all="$all $second"
    fi
done
for path in $all; do
    set -- "$@" --overlay "$path"
done
scripts/venv.sh deploy scripts/requirements.txt
# shellcheck disable=SC2086  # paths without blanks
build/venvs/deploy/bin/python scripts/channels.py ./bundle.yaml $all
/usr/bin/python3 scripts/lanes.py pack
echo "deploy: juju deploy ./bundle.yaml $*"
juju deploy ./bundle.yaml "$@"
fixed=$(PYTHONPATH=lib build/venvs/deploy/bin/python -c 'from ddp.slurm import advisories; print(advisories.upgrade("0"))')
echo "deploy: Slurm has its security fixes from $fixed on: juju status slurmctld shows the version; see SECURITY.md"
echo "deploy: watch it settle with  watch -c juju status --relations --color"
echo "deploy: then  juju run trainer/leader submit-ddp"
