#!/bin/sh
# Deploy the bundle on juju's current controller and model, with freshly packed charms.
#   OVERLAYS="gpu nfs" scripts/deploy.sh [ARGUMENT...]
# OVERLAYS: names of files in overlays/, or paths of your own. lxd is added by itself where the model's cloud is LXD.
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
cloud=$(printf %s "$model" | /usr/bin/python3 -c 'import json, sys; print(*{m.get("type", "unknown") for m in json.load(sys.stdin).values()})')

chosen="" filesystem="" machine=""
for word in ${OVERLAYS:-}; do
    case $word in
    */* | *.yaml) path=$word ;;
    *) path=overlays/$word.yaml ;;
    esac
    [ -f "$path" ] || fail "OVERLAYS: there is no $path; there are: $(find overlays -name '*.yaml' -exec basename {} .yaml \; | sort | xargs), or give a path"
    case $path in /* | ./*) ;; *) path=./$path ;; esac
    case " $chosen " in *" $path "*) fail "OVERLAYS: $word is given twice" ;; esac
    if line=$(grep -n -m 1 '^[^#]*[*]FILL-IN' "$path"); then
        fail "OVERLAYS: $path line ${line%%:*} is to be filled in: copy the file, fill in each *FILL-IN, give the copy's path"
    fi
    for kind in cephfs lustre nfs; do
        grep -q "^  $kind-server-proxy:" "$path" || continue
        [ -z "$filesystem" ] || fail "OVERLAYS: $filesystem and $kind: there is one shared filesystem; choose one"
        filesystem=$kind
    done
    kind=$(sed -n -e 's/^ *constraints:.*virt-type=.*/lxd/p' -e 's/^ *constraints:.*\(instance-type\|tags\)=.*/gpu/p' "$path" | head -n 1)
    if [ -n "$kind" ]; then
        [ -z "$machine" ] || fail "OVERLAYS: $machine and $kind: both say what machine a compute node is; choose one"
        machine=$kind
    fi
    chosen="$chosen $path"
done
case $cloud,$machine in
lxd,) chosen="./overlays/lxd.yaml $chosen" ;; # the first, so that others win
lxd,gpu) fail "OVERLAYS: gpu asks for a cloud's machine types, and this model is on LXD; leave it out" ;;
lxd,lxd) ;;
*,lxd) fail "OVERLAYS: lxd is for LXD, and this model's cloud is $cloud; leave it out" ;;
esac

for path in $chosen; do
    set -- "$@" --overlay "$path"
done
/usr/bin/python3 scripts/lanes.py pack
echo "deploy: juju deploy ./bundle.yaml $*"
juju deploy ./bundle.yaml "$@"
echo "deploy: watch it settle with  juju status --relations --watch 5s"
echo "deploy: then  juju run trainer/0 submit-ddp"
