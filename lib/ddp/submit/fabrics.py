"""The networks between GPU nodes, as data: what NCCL and gloo need on each, and where that is written.

`auto` takes the first one whose `found_by` is all there on a node, and otherwise only names the interface: NCCL finds
InfiniBand and RoCE adapters by itself. What a user sets with `env` goes before everything here.
"""

import dataclasses

TCPXO_PLUGIN = "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo/nccl-plugin-gpudirecttcpx-dev:v1.0.17"
TCPXO_RECEIVER = "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.23"
_TCPXO_NICS = "enp6s0,enp7s0,enp13s0,enp14s0,enp134s0,enp135s0,enp141s0,enp142s0"


@dataclasses.dataclass(frozen=True)
class Fabric:
    """One kind of network. Variables are set on jobs of several nodes only: within a node NCCL needs none."""

    name: str
    summary: str
    source: str  # where the figures come from
    variables: tuple[tuple[str, str], ...] = ()
    interface: str = ""  # of its own, with addresses that the nodes' names need not lead to
    found_by: tuple[str, ...] = ()  # paths that prove it on a node
    needs: tuple[str, ...] = ()  # paths without which it cannot work
    hint: str = ""  # what to do where one is missing
    library_path: str = ""
    profile: str = ""  # a file that the vendor wants sourced
    afterwards: tuple[tuple[str, str], ...] = ()  # variables that go before the profile's
    mounts: tuple[str, ...] = ()  # paths of the host that a container needs


FABRICS = (
    Fabric(
        "tcpxo",
        "GPUDirect-TCPXO: Google Cloud A3 Mega",
        "cloud.google.com/cluster-toolkit/docs/machine-learning/a3-mega-enable-gpudirect-tcpxo; Cluster Toolkit 1.39",
        found_by=("/var/lib/tcpxo/lib64/nccl-env-profile.sh",),
        needs=("/var/lib/tcpxo/lib64/nccl-env-profile.sh", "/dev/aperture_devices"),
        hint="the partition's prolog must start the receive path; submit-ddp fabric=tcpxo dry-run=true returns one",
        library_path="/var/lib/tcpxo/lib64",
        profile="/var/lib/tcpxo/lib64/nccl-env-profile.sh",
        afterwards=(
            ("NCCL_FASTRAK_CTRL_DEV", "enp0s12"),
            ("NCCL_FASTRAK_IFNAME", _TCPXO_NICS),
            ("NCCL_SOCKET_IFNAME", "enp0s12"),
            ("NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY", "/dev/aperture_devices"),
        ),
        mounts=("/var/lib/tcpxo/lib64", "/dev/aperture_devices", "/var/tmp"),  # noqa: S108 - the plugin's sockets
    ),
    Fabric(
        "gib",
        "gIB over RoCE: Google Cloud A3 Ultra, A4",
        "cloud.google.com/ai-hypercomputer/docs/nccl/overview; Cluster Toolkit 1.39",
        found_by=("/usr/local/gib/scripts/set_nccl_env.sh",),
        needs=("/usr/local/gib/scripts/set_nccl_env.sh",),
        hint="the machines' image must bring gIB, see the Cluster Toolkit's A3 Ultra and A4 blueprints",
        library_path="/usr/local/gib/lib64",
        profile="/usr/local/gib/scripts/set_nccl_env.sh",
        afterwards=(("NCCL_NET", "gIB"), ("NCCL_SOCKET_IFNAME", "enp0s19,enp192s20")),
        mounts=("/usr/local/gib",),
    ),
    Fabric(
        "efa",
        "Elastic Fabric Adapter: AWS p4d to p6",
        "github.com/aws-samples/awsome-distributed-training, 1.architectures/efa-cheatsheet.md",
        variables=(
            ("FI_PROVIDER", "efa"),
            ("FI_EFA_USE_HUGE_PAGE", "0"),  # huge pages are not shared by a fork, which then runs out of memory
            ("NCCL_TUNER_PLUGIN", "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-ofi-tuner.so"),
        ),
        found_by=("/opt/amazon/efa", "/opt/amazon/ofi-nccl", "/sys/class/infiniband"),
        needs=("/opt/amazon/efa", "/opt/amazon/ofi-nccl"),
        hint="install the EFA installer of AWS with its NCCL plugin on the nodes",
        library_path="/opt/amazon/efa/lib:/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
        mounts=("/opt/amazon",),
    ),
    Fabric(
        "infiniband",
        "InfiniBand adapters of NVIDIA (mlx5)",
        "docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
        variables=(("NCCL_IB_HCA", "mlx5"), ("NCCL_IB_DISABLE", "0")),
        needs=("/sys/class/infiniband",),
        hint="load the adapters' driver (mlx5_ib), or use fabric=tcp",
        mounts=("/dev/infiniband",),
    ),
    Fabric(
        "roce",
        "RDMA over Converged Ethernet, version 2",
        "docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, NCCL_IB_GID_INDEX",
        variables=(("NCCL_IB_HCA", "mlx5"), ("NCCL_IB_DISABLE", "0"), ("NCCL_IB_GID_INDEX", "3")),
        needs=("/sys/class/infiniband",),
        hint="load the adapters' driver (mlx5_ib), or use fabric=tcp",
        mounts=("/dev/infiniband",),
    ),
    Fabric(
        "tcp",
        "sockets over any network, without RDMA",
        "docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, NCCL_IB_DISABLE",
        variables=(("NCCL_IB_DISABLE", "1"),),
    ),
    Fabric(
        "tailscale",
        "sockets over a Tailscale network, between sites",
        "tailscale.com/kb/1023 (interface tailscale0, MTU 1280)",
        variables=(("NCCL_IB_DISABLE", "1"), ("NCCL_NSOCKS_PERTHREAD", "4"), ("NCCL_SOCKET_NTHREADS", "2")),
        interface="tailscale0",
    ),
)
NAMES = ("auto", *sorted(fabric.name for fabric in FABRICS))


def root_scripts(name: str) -> dict[str, str]:
    """List Slurm's Prolog and Epilog that this fabric needs root to run on the nodes; empty for most."""
    return {"prolog": _TCPXO_PROLOG, "epilog": _TCPXO_EPILOG} if name == "tcpxo" else {}


# Facts: Cluster Toolkit 1.39, a3-megagpu-8g: receive path only where a job has several nodes; slurm.conf needs the
# timeouts, since the images may have to be fetched.
TCPXO_SLURM_CONF = (
    "Prolog=/etc/slurm/tcpxo-prolog.sh", "Epilog=/etc/slurm/tcpxo-epilog.sh", "PrologFlags=alloc",
    "PrologEpilogTimeout=600", "MessageTimeout=600", "BatchStartTimeout=600",
)  # fmt: skip
_TCPXO_PROLOG = f"""#!/bin/bash
# Slurm Prolog, as root on each node: GPUDirect-TCPXO's plugin and receive path, for jobs of several nodes.
# Lines for slurm-conf-parameters of slurmctld, this file and the other being at these paths on each node:
{"".join(f"# {line}{chr(10)}" for line in TCPXO_SLURM_CONF).rstrip()}
set -euo pipefail
nodes=$(/usr/bin/scontrol show hostnames "${{SLURM_JOB_NODELIST:-}}" | wc -l)
if (( nodes < 2 )) || [[ ! -e /dev/aperture_devices ]]; then exit 0; fi
modprobe import-helper
docker run --rm --volume /var/lib:/var/lib {TCPXO_PLUGIN} install --install-nccl
docker rm --force tcpxo-receiver > /dev/null 2>&1 || true
docker run --detach --rm --name tcpxo-receiver --privileged --network=host --cap-add=NET_ADMIN \\
  --gpus all --volume /var/lib/nvidia/lib64:/usr/local/nvidia/lib64 --device /dev/dmabuf_import_helper \\
  --env LD_LIBRARY_PATH=/usr/local/nvidia/lib64 {TCPXO_RECEIVER} \\
  --num_hops=2 --num_nics=8 --uid= --alsologtostderr
for _ in $(seq 120); do
  if docker logs tcpxo-receiver 2>&1 | grep -q 'Buffer manager initialization complete'; then exit 0; fi
  sleep 1
done
echo "the TCPXO receive path did not come up within 120 s" >&2
exit 1
"""
_TCPXO_EPILOG = """#!/bin/bash
# Slurm Epilog, as root on each node: ends the receive path that the Prolog started.
docker rm --force tcpxo-receiver > /dev/null 2>&1
exit 0
"""
