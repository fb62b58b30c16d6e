"""An environment for a job's own script, unpacked on this node, and its commands' variables.

Prints the lines that srun takes from a task prolog: `export NAME=value` sets a variable,
`print TEXT` goes to the task's output. The script bin/activate takes the same lines.
"""

import os
import sys

from ddp.node import exit_codes, network, slurm_calls, spec, unpacking


def main(spec_path: str, env: dict[str, str] | None = None) -> int:
    """Unpack the environment on this node and print its variables; return the exit code."""
    env = dict(os.environ) if env is None else env
    wanted = spec.load(spec.Environment, spec_path)
    host = env.get("SLURMD_NODENAME") or os.uname().nodename
    try:
        python, _ = unpacking.use(wanted, host)
        variables = {"PATH": _path(python, env), **_network(host, env)}
    except exit_codes.FatalError as e:
        print(f"print ddp: {e}")
        return 1
    for name, value in variables.items():
        print(f"export {name}={value}")
    sys.stdout.flush()
    return 0


def _path(python: str, env: dict[str, str]) -> str:
    """Return PATH with the environment's programs first."""
    programs = os.path.dirname(python)
    others = [folder for folder in env.get("PATH", os.defpath).split(":") if folder != programs]
    return ":".join([programs, *others])


def _network(host: str, env: dict[str, str]) -> dict[str, str]:
    """Return the variables that let torchrun's agents and the ranks find each other.

    Names of nodes need not resolve: torchrun's agents get addresses. A task gets its own address;
    the job's script, which runs on the first node, gets that node's. Raises FatalError.
    """
    nodelist = env.get("SLURM_JOB_NODELIST", "")
    hosts = slurm_calls.hostnames(nodelist) if nodelist else []
    if host not in hosts:
        return {}
    own = "127.0.0.1"
    found: dict[str, str] = {}
    if len(hosts) > 1:
        own = network.head_address(host, hosts, slurm_calls.show_nodes(nodelist, hosts))
        interface = network.addresses().get(own, "")
        found["GLOO_SOCKET_IFNAME"] = env.get("GLOO_SOCKET_IFNAME") or interface
        found["NCCL_SOCKET_IFNAME"] = env.get("NCCL_SOCKET_IFNAME") or f"={interface}"
    if "SLURM_STEP_ID" in env:
        found["PET_LOCAL_ADDR"] = own  # torchrun's --local-addr
        return found
    found["MASTER_ADDR"] = own
    if port := network.find_port():
        found["MASTER_PORT"] = str(port)
    return found
