"""Two hosts of two providers, joined by userspace WireGuard: trained, killed, resumed to the bit.

Needs root, iproute2, wireguard-go and wireguard-tools; docs/ways/several-clouds.md has the same
commands.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import conftest
import pytest
import ranks

TOOLS = ("ip", "tc", "wg", "wireguard-go")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, TOOLS)),
        reason=f"needs root and {', '.join(TOOLS)}",
    ),
]
TRAINING = (
    "--layers 2 --heads 2 --width 32 --seq-len 32 --batch 4 --warmup 4 --precision fp32 --eval-rows 16 "
    "--log-every 1 --deterministic --sync-every 3 --sites 2 --steps 20 --epoch-steps 10"
).split()


def command(*argv: str, text: str | None = None) -> str:
    done = subprocess.run(argv, input=text, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@dataclasses.dataclass(frozen=True)
class Host:
    """A provider's host: a network namespace with its own address, and one in the overlay."""

    name: str
    number: int

    @property
    def public(self) -> str:
        return f"10.215.0.{self.number}"

    @property
    def private(self) -> str:
        return f"10.214.0.{self.number}"

    @property
    def device(self) -> str:
        return f"wg-{self.name}"

    def run(self, *argv: str) -> str:
        return command("ip", "netns", "exec", self.name, *argv)


HOSTS = (Host("ddp-a", 1), Host("ddp-b", 2))


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> collections.abc.Iterator[None]:
    """Both hosts, 100 Mbit/s between them, and WireGuard with an MTU of 1280 over that."""
    folder = tmp_path_factory.mktemp("wireguard")
    with contextlib.ExitStack() as stack:
        for host in HOSTS:
            command("ip", "netns", "add", host.name)
            stack.callback(command, "ip", "netns", "delete", host.name)
        first, second = (host.name for host in HOSTS)
        other = ("peer", "name", "public", "netns", second)
        command("ip", "link", "add", "public", "netns", first, "type", "veth", *other)
        for host in HOSTS:
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "address", "add", f"{host.public}/24", "dev", "public")
            host.run("ip", "link", "set", "public", "up")
            limit = "rate 100mbit burst 64k latency 400ms".split()
            host.run("tc", "qdisc", "add", "dev", "public", "root", "tbf", *limit)
        keys = [command("wg", "genkey") for _ in HOSTS]
        for host, key in zip(HOSTS, keys, strict=True):
            stack.enter_context(tunnel(host, key, folder))
        for host, peer, key in zip(HOSTS, HOSTS[::-1], keys[::-1], strict=True):
            about = ["allowed-ips", f"{peer.private}/32", "endpoint", f"{peer.public}:51820"]
            host.run("wg", "set", host.device, "peer", command("wg", "pubkey", text=key), *about)
        yield


@contextlib.contextmanager
def tunnel(host: Host, key: str, folder: pathlib.Path) -> collections.abc.Iterator[None]:
    """Run WireGuard on a host."""
    path = folder / host.name
    path.write_text(key)
    inside = ("ip", "netns", "exec", host.name)
    with subprocess.Popen([*inside, "wireguard-go", "-f", host.device]) as process:
        try:
            ready = f"until ip link show dev {host.device}; do sleep 0.1; done"
            command("timeout", "20", *inside, "sh", "-c", ready)
            host.run("wg", "set", host.device, "private-key", str(path), "listen-port", "51820")
            host.run("ip", "address", "add", f"{host.private}/24", "dev", host.device)
            host.run("ip", "link", "set", host.device, "mtu", "1280", "up")
            yield
        finally:
            process.terminate()


def train(data: pathlib.Path, run_dir: pathlib.Path, *, module: str, **env: str) -> ranks.Result:
    """Train with a rank on each host, which meet over WireGuard."""
    meeting = {"MASTER_ADDR": HOSTS[0].private, "MASTER_PORT": str(ranks.free_port())}
    meeting |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    words = ["train", "--data", str(data), "--run-dir", str(run_dir), *TRAINING]
    started: list[subprocess.Popen[str]] = []
    for rank, host in enumerate(HOSTS):
        own = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": host.device, "PYTHONUNBUFFERED": "1"}
        argv = ["ip", "netns", "exec", host.name, sys.executable, "-m", module, *words]
        started.append(
            subprocess.Popen(
                argv,
                env={**os.environ, **meeting, **own, **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=200)[0] for process in started]
    return ranks.Result([process.returncode for process in started], "".join(outputs))


def test_over_wireguard_a_training_is_killed_and_resumed_bit_for_bit(
    overlay: None, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    undisturbed = train(dataset, whole, module="ddptrain")
    assert undisturbed.codes == [0, 0], undisturbed.output

    killed = train(dataset, broken, module="accident_step", DO="kill", AT="14")
    assert killed.returncode != 0
    resumed = train(dataset, broken, module="ddptrain")

    assert resumed.codes == [0, 0], resumed.output
    again = next(line for line in resumed.marked("CKPT") if "resumed" in line)
    assert (again["step"], again["exact"]) == ("10", "yes")
    assert conftest.losses(broken) == conftest.losses(whole)
    assert json.loads((broken / "summary.json").read_text())["state"] == "done"
    for host in HOSTS:
        received, sent = host.run("wg", "show", host.device, "transfer").split()[-2:]
        assert min(int(received), int(sent)) > 100_000  # the training went through the tunnel
