#!/bin/sh
# Deploy the bundle on juju's current controller and model, with freshly packed charms.
#   scripts/deploy.sh [--overlay overlays/X.yaml ...]      arguments go to `juju deploy`
set -eu
cd "$(dirname "$0")/.."
if ! command -v juju >/dev/null; then
    echo "deploy: the juju client is not installed: sudo snap install juju --channel 3.6/stable" >&2
    echo "deploy: without a Juju, \`make demo\` runs the same bundle on this machine" >&2
    exit 1
fi
if ! model=$(juju show-model --format json 2>/dev/null </dev/null) || [ -z "$model" ]; then
    echo "deploy: juju has no current controller and model here: juju bootstrap lxd; juju add-model slurm-ddp" >&2
    echo "deploy: without a Juju, \`make demo\` runs the same bundle on this machine" >&2
    exit 1
fi
/usr/bin/python3 scripts/lanes.py pack
echo "deploy: juju deploy ./bundle.yaml $*"
juju deploy ./bundle.yaml "$@"
echo "deploy: watch it settle with  juju status --relations --watch 5s"
echo "deploy: then  juju run trainer/0 submit-ddp"
