"""Two nodes at two providers, joined by userspace WireGuard: a killed training resumes bit for bit.

docs/ways/several-clouds.md, without any provider's account: wireguard-go carries the packets as
tailscaled does, with 1280 bytes, and the kernel limits the rate.
"""

import collections.abc
import contextlib
import dataclasses
import json
import pathlib
import subprocess
import time
import uuid

import pytest

from functional.conftest import Cluster
from functional.training_jobs import PATIENCE_S, log_of, until, until_state
from sandbox.hosts import Hosts
from sandbox.store import Store

pytestmark = [pytest.mark.trains, pytest.mark.long, pytest.mark.timeout(3000)]
DEVICE = "wg-site"
RATE = "rate 100mbit burst 64kb latency 400ms"
# Slurm has other addresses of these nodes: so the interface is named
OVERLAY = ("fabric=overlay", f"env=GLOO_SOCKET_IFNAME={DEVICE}")
TRAINING = (
    "--sync-every 5 --steps 100 --epoch-steps 20 --layers 2 --heads 2 --width 128 --seq-len 128"
    " --batch 4 --eval-rows 16 --precision fp32 --deterministic --log-every 1 --warmup 5"
)


@dataclasses.dataclass(frozen=True)
class Tunnel:
    """WireGuard in the network of a host, as a process of this machine."""

    pid: int
    public: str
    private: str

    def run(self, *argv: str, text: str = "") -> str:
        """Run a command of this machine in the host's network."""
        inside = ("nsenter", f"--target={self.pid}", "--net", "--mount", *argv)
        done = subprocess.run(
            inside, check=True, capture_output=True, text=True, input=text, timeout=60
        )
        return done.stdout.strip()


@contextlib.contextmanager
def tunnel(cluster: Cluster, unit: str, private: str) -> collections.abc.Generator[Tunnel]:
    """Run WireGuard in a host's network; its socket is in a private folder."""
    host = Hosts(cluster.model).get(Store(cluster.model).load().host_of(unit))
    leader = host._machine.leader(host.root)
    public = cluster.on(unit, "hostname", "-I").split()[0]
    own = "mkdir -p /var/run/wireguard && mount -t tmpfs tmpfs /var/run/wireguard"
    begin = f"{own} && exec wireguard-go -f {DEVICE}"
    inside = ("nsenter", f"--net=/proc/{leader}/ns/net", "unshare", "--mount", "sh", "-c", begin)
    with subprocess.Popen(inside) as process:
        try:
            one = Tunnel(process.pid, public, private)
            ready = f"until ip link show dev {DEVICE} && wg show {DEVICE}; do sleep 0.1; done"
            time.sleep(1.0)  # until it has a mount namespace
            one.run("timeout", "50", "sh", "-c", ready)
            one.run("ip", "address", "add", f"{private}/24", "dev", DEVICE)
            one.run("ip", "link", "set", DEVICE, "mtu", "1280", "up")
            one.run("tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *RATE.split())
            yield one
        finally:
            process.terminate()


@pytest.fixture
def tunnels(drills: Cluster, tmp_path: pathlib.Path) -> collections.abc.Iterator[list[Tunnel]]:
    """Join the two nodes."""
    with contextlib.ExitStack() as stack:
        found: list[Tunnel] = []
        for number, unit in enumerate(("slurmd/0", "slurmd/1"), 1):
            one = stack.enter_context(tunnel(drills, unit, f"10.215.0.{number}"))
            found.append(one)
        keys = [one.run("wg", "genkey") for one in found]
        for one, other, key, others in zip(found, found[::-1], keys, keys[::-1], strict=True):
            path = tmp_path / one.private
            path.write_text(key)
            one.run("wg", "set", DEVICE, "private-key", str(path), "listen-port", "51820")
            about = ["allowed-ips", f"{other.private}/32", "endpoint", f"{other.public}:51820"]
            one.run("wg", "set", DEVICE, "peer", one.run("wg", "pubkey", text=others), *about)
        yield found


def train(cluster: Cluster, run: str, *more: str) -> dict[str, str]:
    """Submit a training over both nodes."""
    words = (f"run={run}", "workload=gpt", "nodes=2", "gpus-per-node=0", "cpus-per-task=1")
    return cluster.action(
        "submit-ddp", *words, "memory=2G", *OVERLAY, f"args={TRAINING}", *more, timeout=1200
    )


def losses(cluster: Cluster, job: dict[str, str]) -> dict[int, float]:
    text = cluster.on("sackd/0", "cat", f"{job['run-dir']}/metrics.jsonl")
    records = [json.loads(line) for line in text.splitlines()]
    return {one["step"]: one["loss"] for one in records if one["kind"] == "step"}


def kill_a_rank(cluster: Cluster, job: dict[str, str]) -> None:
    """Kill the second node's rank once the run has a checkpoint."""
    deadline = time.monotonic() + PATIENCE_S
    while "saved=epoch-0001" not in log_of(cluster, job):
        assert time.monotonic() < deadline, log_of(cluster, job)
        time.sleep(0.1)
    cluster.on("slurmd/1", "pkill", "-KILL", "-f", "--", "-m ddptrain train")


def test_over_wireguard_it_trains_is_killed_and_goes_on_bit_for_bit(
    tunnels: list[Tunnel], drills: Cluster
):
    name = f"wan-{uuid.uuid4().hex[:6]}"
    whole = train(drills, f"{name}-whole", "wait=true")
    assert whole["state"] == "COMPLETED"
    broken = train(drills, f"{name}-broken", "max-restarts=1")
    kill_a_rank(drills, broken)
    until_state(drills, broken, "COMPLETED")
    until(drills, broken, "[DONE]")

    output = log_of(drills, broken)
    assert "resumed=" in output
    assert " exact=yes" in output
    assert f"iface={DEVICE}" in output
    assert " sites=2 " in output
    assert losses(drills, broken) == losses(drills, whole)
    summary = json.loads(drills.on("sackd/0", "cat", f"{broken['run-dir']}/summary.json"))
    hosts = [rank["host"] for rank in summary["ranks"]]
    assert sorted(hosts) == ["slurmd-0", "slurmd-1"]
    assert [rank["site"] for rank in summary["ranks"]] == [0, 1]
    shown = drills.action("show-run", f"run={name}-broken")
    assert shown["sites"] == f"site 0: {hosts[0]}; site 1: {hosts[1]}"
    assert shown["exchanges"].endswith(" MB a step")
    for one in tunnels:
        received, sent = one.run("wg", "show", DEVICE, "transfer").split()[-2:]
        assert min(int(received), int(sent)) > 100_000
