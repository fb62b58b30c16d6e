"""Two nodes at two providers, joined by WireGuard in user space: a training is killed, and goes on bit for bit.

docs/ways/several-clouds.md, without an account anywhere: wireguard-go carries the packets as tailscaled does, by 1280
bytes, and the kernel limits the rate.
"""

import collections.abc
import contextlib
import dataclasses
import json
import pathlib
import re
import subprocess
import time
import uuid

import pytest

from functional.conftest import Cluster, eventually
from functional.training_jobs import PATIENCE_S, log_of, until, until_state
from sandbox.hosts import Hosts
from sandbox.store import Store

pytestmark = [pytest.mark.trains, pytest.mark.long, pytest.mark.timeout(3000)]
NODES = ("slurmd-0", "slurmd-1")
RATE = "rate 100mbit burst 64kb latency 400ms"
TRAINING = (
    "--sync-every 5 --steps 100 --epoch-steps 20 --layers 2 --heads 2 --width 128 --seq-len 128"
    " --batch 4 --eval-rows 16 --precision fp32 --deterministic --log-every 1 --warmup 5"
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """A host of the sandbox, with the device of its tunnel."""

    unit: str
    namespace: str  # the file of its network namespace
    device: str
    public: str
    private: str

    def run(self, *argv: str, text: str = "") -> str:
        """Run a command of this machine in the host's network."""
        inside = ("nsenter", f"--net={self.namespace}", *argv)
        done = subprocess.run(
            inside, check=True, capture_output=True, text=True, input=text, timeout=60
        )
        return done.stdout.strip()


def machines(cluster: Cluster) -> list[Machine]:
    """Return the controller's host and the nodes', which the tunnels join."""
    found: list[Machine] = []
    state = Store(cluster.model).load()
    for number, unit in enumerate(("slurmctld/0", "slurmd/0", "slurmd/1"), 1):
        host = Hosts(cluster.model).get(state.host_of(unit))
        leader = host._machine.leader(host.root)
        public = cluster.on(unit, "hostname", "-I").split()[0]
        device = f"wg-{cluster.model}{number}"
        private = f"10.215.0.{number}"
        found.append(Machine(unit, f"/proc/{leader}/ns/net", device, public, private))
    return found


@contextlib.contextmanager
def tunnel(one: Machine, key: str, folder: pathlib.Path) -> collections.abc.Iterator[None]:
    """Run WireGuard in a host's network."""
    path = folder / one.device
    path.write_text(key)
    inside = ("nsenter", f"--net={one.namespace}")
    with subprocess.Popen([*inside, "wireguard-go", "-f", one.device]) as process:
        try:
            ready = f"until ip link show dev {one.device}; do sleep 0.1; done"
            subprocess.run(
                [*inside, "timeout", "60", "sh", "-c", ready], check=True, capture_output=True
            )
            one.run("wg", "set", one.device, "private-key", str(path), "listen-port", "51820")
            one.run("ip", "address", "add", f"{one.private}/24", "dev", one.device)
            one.run("ip", "link", "set", one.device, "mtu", "1280", "up")
            one.run("tc", "qdisc", "add", "dev", one.device, "root", "tbf", *RATE.split())
            yield
        finally:
            process.terminate()


@pytest.fixture
def overlay(drills: Cluster, tmp_path: pathlib.Path) -> collections.abc.Iterator[list[Machine]]:
    """Join the hosts, and give Slurm the nodes' addresses in the tunnels."""
    joined = machines(drills)
    keys = [joined[0].run("wg", "genkey") for _ in joined]
    with contextlib.ExitStack() as stack:
        for one, key in zip(joined, keys, strict=True):
            stack.enter_context(tunnel(one, key, tmp_path))
        for one in joined:
            for other, key in zip(joined, keys, strict=True):
                if other != one:
                    about = ["allowed-ips", f"{other.private}/32"]
                    about += ["endpoint", f"{other.public}:51820"]
                    public_key = one.run("wg", "pubkey", text=key)
                    one.run("wg", "set", one.device, "peer", public_key, *about)
        for node, one in zip(NODES, joined[1:], strict=True):
            stack.callback(move, drills, node, one.public)
            move(drills, node, one.private)
        yield joined


def move(cluster: Cluster, node: str, address: str) -> None:
    """Give Slurm another address of a node, and wait until it answers there."""
    change = ("update", f"nodename={node}", f"nodeaddr={address}")
    cluster.on("slurmctld/0", "scontrol", *change)

    def answers() -> None:
        shown = cluster.on("slurmctld/0", "scontrol", "show", "node", node, "-o")
        assert f"NodeAddr={address} " in shown
        assert re.search(r" State=IDLE[^* ]* ", shown), shown

    eventually(answers)


def train(cluster: Cluster, run: str, *more: str) -> dict[str, str]:
    """Submit a training over both nodes."""
    words = (f"run={run}", "workload=gpt", "nodes=2", "gpus-per-node=0", "cpus-per-task=1")
    return cluster.action(
        "submit-ddp", *words, "memory=2G", "fabric=overlay", f"args={TRAINING}", *more, timeout=1200
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
    overlay: list[Machine], drills: Cluster
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
    assert f"iface={overlay[1].device}" in output
    assert " sites=2 " in output
    assert losses(drills, broken) == losses(drills, whole)
    summary = json.loads(drills.on("sackd/0", "cat", f"{broken['run-dir']}/summary.json"))
    assert {rank["host"]: rank["site"] for rank in summary["ranks"]} == {
        "slurmd-0": 0,
        "slurmd-1": 1,
    }
    shown = drills.action("show-run", f"run={name}-broken")
    assert shown["sites"] == "site 0: slurmd-0; site 1: slurmd-1"
    assert shown["exchanges"].endswith(" MB a step")
    for one in overlay[1:]:
        received, sent = one.run("wg", "show", one.device, "transfer").split()[-2:]
        assert min(int(received), int(sent)) > 100_000
