"""The network between a job's nodes: addresses, routes, variables of each fabric's libraries."""

import array
import errno
import fcntl
import os
import random
import re
import socket
import struct
import subprocess
import time

from ddp.node import exit_codes, spec, spool

_SIOCGIFCONF = 0x8912  # netdevice(7)
_IFREQ = 40  # bytes of a struct ifreq on 64 bits
_MOST_ADDRESSES = 1024
PORTS = range(20000, 30000)  # below the ephemeral ports of outgoing connections
_TRIES = 3  # ports
_PROBE_PORT = 9  # connecting UDP sends nothing, it picks the route


def choose(job: spec.JobSpec, num_nodes: int) -> spec.Fabric:
    """Choose the fabric that the job names, or the first whose devices are on this node."""
    is_automatic = job.fabric == "auto" and num_nodes > 1
    for fabric in job.fabrics:
        if fabric.name == job.fabric or (is_automatic and _is_here(fabric)):
            return fabric
    return spec.Fabric(job.fabric)


def _is_here(fabric: spec.Fabric) -> bool:
    return bool(fabric.found_by) and all(map(os.path.exists, fabric.found_by))


def addresses() -> dict[str, str]:
    """Return the IPv4 addresses of this node, secondary ones too, with the interface of each."""
    data = array.array("B", bytes(_IFREQ * _MOST_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(
            probe, _SIOCGIFCONF, struct.pack("iP", len(data), data.buffer_info()[0])
        )
    num_bytes = int(struct.unpack("iP", answer)[0])
    found: dict[str, str] = {}
    for at in range(0, num_bytes, _IFREQ):
        entry = data[at : at + _IFREQ].tobytes()
        name = entry[:16].split(b"\0")[0].decode()
        address = socket.inet_ntoa(entry[20:24])
        found[address] = name.split(":")[0]  # a secondary address may have a label: eth0:1
    return found


def interface_address(name: str) -> str:
    """Return the first IPv4 address of an interface. Raises OSError if it has none."""
    for address, interface in addresses().items():
        if interface == name:
            return address
    raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


def head_address(here: str, hosts: list[str], shown: str) -> str:
    """Return this node's address on the way to another node of the job. Raises FatalError.

    `shown` is the output of `scontrol -o show node`.
    """
    peer = next(name for name in hosts if name != here)  # this node need not be the first by name
    return source_address(node_address(peer, shown), peer)


def node_address(node: str, shown: str) -> str:
    """Return the IPv4 address that Slurm has for a node. Raises FatalError.

    A node's name is a label that need not resolve anywhere: its address is NodeAddr, which
    slurmctld took from its registration. `shown` is the output of `scontrol -o show node`.
    """
    known: dict[str, str] = dict(
        re.findall(r"^NodeName=(\S+) .*?\bNodeAddr=(\S+)", shown, re.MULTILINE)
    )
    given = known.get(node)
    if given is None:
        raise exit_codes.FatalError(f"Slurm gave no address of {node}")
    about = f"the address of {node} in Slurm (NodeAddr) is {given}"
    change = f"as an administrator: scontrol update nodename={node} nodeaddr=ADDRESS"
    try:
        address = str(socket.getaddrinfo(given, None, socket.AF_INET)[0][4][0])
    except OSError as e:
        why = f"which is not an IPv4 address and does not resolve ({e.strerror})"
        raise exit_codes.FatalError(f"{about}, {why}; {change}") from e
    if address.startswith("127."):
        raise exit_codes.FatalError(f"{about}, a loopback address; {change}")
    return address


def source_address(address: str, name: str) -> str:
    """Return this host's address on the way to another. Raises FatalError, which names both."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _PROBE_PORT))
        except OSError as e:
            hint = f"see: ip route get {address}"
            raise exit_codes.FatalError(
                f"no route to {address} ({name}): {e.strerror}; {hint}"
            ) from e
        return str(probe.getsockname()[0])


def is_free(port: int) -> bool:
    """Return whether a port of this node is free."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def find_port(without: int = 0) -> int | None:
    """Choose a random free port for torchrun's store, which accepts every connection."""
    for port in random.SystemRandom().sample(PORTS, _TRIES):
        if port != without and is_free(port):
            return port
        spool.write(f"[ENV] port {port} is taken, trying another")
    return None


def find_way(head: str, head_node: str, interface: str) -> tuple[str, str]:
    """Return this node's address and interface on the way to the head; `interface` is preferred."""
    mine = source_address(head, head_node)
    known = addresses()
    if interface in known.values() and known.get(mine) != interface:
        return interface_address(interface), interface
    return mine, known.get(mine, "")


def check_head(head: str, port: int, head_node: str) -> None:
    """Check that the head's port can be reached. Raises FatalError.

    A launcher would wait for minutes and name no host.
    """
    reason = ""
    for _ in range(4):
        try:
            socket.create_connection((head, port), timeout=5).close()
        except ConnectionRefusedError:  # it does not listen yet
            return
        except OSError as e:
            reason = e.strerror or str(e)
            time.sleep(1)
        else:
            return
    why = f"cannot reach {head}:{port} ({head_node}): {reason}"
    hint = "let TCP through between the nodes (firewall, security group)"
    raise exit_codes.FatalError(f"{why}; {hint}")


def use(fabric: spec.Fabric, job: spec.JobSpec, env: dict[str, str], num_nodes: int) -> None:
    """Set the variables of the fabric's libraries; the user's own stay. Raises FatalError."""
    if num_nodes < 2:  # NCCL needs none of them
        return
    _check_needs(fabric, job)
    own = ["CUDA_VISIBLE_DEVICES", *dict(job.variables)]
    kept = {name: env[name] for name in own if name in env}

    for name, value in fabric.variables:
        env.setdefault(name, value)
    if fabric.library_path:
        old = env.get("LD_LIBRARY_PATH")
        env["LD_LIBRARY_PATH"] = f"{fabric.library_path}:{old}" if old else fabric.library_path
    if fabric.profile:
        _source(fabric, env)
    env.update(kept)


def _check_needs(fabric: spec.Fabric, job: spec.JobSpec) -> None:
    """Check that the files of the fabric's libraries are here. Raises FatalError."""
    for path in fabric.needs:
        if not os.path.exists(path):
            where = "on this node or not in the container" if job.container else "on this node"
            why = f"fabric={fabric.name} needs {path}, which is not {where}"
            raise exit_codes.FatalError(f"{why}; {fabric.hint}")


def _source(fabric: spec.Fabric, env: dict[str, str]) -> None:
    """Set the variables of the vendor's profile in `env`, then ours that follow it."""
    sourced = _read_profile(fabric, env)
    env.clear()
    env.update(sourced)
    env.pop("CUDA_VISIBLE_DEVICES", None)  # the profile names all of a node's GPUs
    env.update(fabric.afterwards)


def _read_profile(fabric: spec.Fabric, env: dict[str, str]) -> dict[str, str]:
    """Return the variables after the vendor's profile, a file for bash; its output is printed."""
    script = 'exec 3>&1 1>&2; NCCL_LIB_DIR=$1; . "$2"; env -0 >&3'
    argv = ["/bin/bash", "-p", "-c", script, "bash", fabric.library_path, fabric.profile]
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, check=False)
    variables: dict[str, str] = {}
    for entry in done.stdout.decode(errors="surrogateescape").split("\0"):
        name, _, value = entry.partition("=")
        if name not in ("", "_", "SHLVL", "PWD", "OLDPWD"):
            variables[name] = value
    return variables
