#!/bin/bash
# Slurm Prolog, as root on each node: GPUDirect-TCPXO's plugin and receive path, for jobs of several nodes.
# Lines for slurm.conf, with this file and the epilog at these paths on each node:
# Prolog=/etc/slurm/tcpxo-prolog.sh
# Epilog=/etc/slurm/tcpxo-epilog.sh
# PrologFlags=alloc
# PrologEpilogTimeout=600
# MessageTimeout=600
# BatchStartTimeout=600
set -euo pipefail
nodes=$(/usr/bin/scontrol show hostnames "${SLURM_JOB_NODELIST:-}" | wc -l)
if (( nodes < 2 )) || [[ ! -e /dev/aperture_devices ]]; then exit 0; fi
modprobe import-helper
docker run --rm --volume /var/lib:/var/lib us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo/nccl-plugin-gpudirecttcpx-dev:v1.0.17 install --install-nccl
docker rm --force tcpxo-receiver > /dev/null 2>&1 || true
docker run --detach --rm --name tcpxo-receiver --privileged --network=host --cap-add=NET_ADMIN \
  --gpus all --volume /var/lib/nvidia/lib64:/usr/local/nvidia/lib64 --device /dev/dmabuf_import_helper \
  --env LD_LIBRARY_PATH=/usr/local/nvidia/lib64 us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.23 \
  --num_hops=2 --num_nics=8 --uid= --alsologtostderr
for _ in $(seq 120); do
  if docker logs tcpxo-receiver 2>&1 | grep -q 'Buffer manager initialization complete'; then exit 0; fi
  sleep 1
done
echo "the TCPXO receive path did not come up within 120 s" >&2
exit 1
