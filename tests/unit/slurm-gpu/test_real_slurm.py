"""The registration on a real slurmctld and slurmd, started by these tests: what reservations and a loss of power do.

Slurm is the sandbox's, which `real_slurm` unpacks; needs root and what `scripts/setup.sh demo` installs.
"""

import collections.abc
import contextlib
import os
import pathlib
import random
import shlex
import signal
import socket
import subprocess
import time
import typing

import pytest
import real_slurm

from node import hold as node_hold
from node import node_state, registration, slurmd_options, slurmd_unit
from node.registration import Progress, Stage
from slurm_ddp import run, systemd
from slurm_ddp.slurm import nodes

NAME, GRES = "slurmd-0", "gpu:mock_gpu:1"
LONG_S = 90  # a deadline for what takes a second on a machine with nothing else to do
OPTIONS = f"SLURMD_OPTIONS=--conf 'cpus=2 realmemory=500 features=slurmd' -Z -N {NAME}\n"
CONF = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
GresTypes=gpu
ReturnToService=0
MaxNodeCount=10
NodeSet=dynamic Feature=slurmd
PartitionName=all Nodes=dynamic Default=YES MaxTime=INFINITE State=UP
"""


class PowerCut(BaseException):
    """The hook's process ends here."""


class Mini:
    """A controller, and one node whose slurmd is started as systemd would."""

    def __init__(self, folder: pathlib.Path, tree: pathlib.Path) -> None:
        self.folder = folder
        self.tree = tree
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        self.env |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        self.slurmd: subprocess.Popen[bytes] | None = None
        self.slurmctld = self.start("slurmctld", "-D")

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        out = (self.folder / f"{argv[0]}.out").open("ab")
        with out:
            return subprocess.Popen(real_slurm.inside(self.tree, argv), env=self.env, stdout=out, stderr=out)

    def run(self, *argv: typing.Any, **more: typing.Any) -> run.Completed:
        command = real_slurm.inside(self.tree, [str(word) for word in argv])
        return run.run(*command, **more, env={"SLURM_CONF": self.env["SLURM_CONF"]})

    def scontrol(self, *words: str) -> str:
        return self.run("/usr/bin/scontrol", *words).stdout

    def restart(self, name: str, **_: object) -> None:
        assert name == slurmd_unit.SLURMD
        self.boot()

    def boot(self) -> None:
        """Start slurmd with the environment files of its unit, the drop-in's last."""
        self.stop()
        held = slurmd_unit.DRAINED_ENV
        text = held.read_text() if held.exists() else slurmd_options.PATH.read_text()
        self.slurmd = self.start("slurmd", "-D", *shlex.split(text.partition("=")[2]))

    def stop(self) -> None:
        end(self.slurmd)
        self.slurmd = None

    def is_active(self, _: str) -> bool:
        return self.slurmd is not None and self.slurmd.poll() is None

    def until(self, holds: collections.abc.Callable[[nodes.Node], bool]) -> nodes.Node:
        """Wait until the node is known and this holds of it."""
        deadline = time.monotonic() + LONG_S
        while True:
            with contextlib.suppress(nodes.NodeError):
                node = nodes.show(NAME)
                if node is not None and holds(node):
                    return node
            assert time.monotonic() < deadline, (self.folder / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.2)


def end(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(LONG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, and that the kernel gives nobody by itself before they are used."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.SystemRandom().randrange(15000, 32000)  # below net.ipv4.ip_local_port_range
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.add(port)
    return list(ports)


@pytest.fixture(autouse=True)
def slurm(
    paths: pathlib.Path, slurm_tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> collections.abc.Iterator[Mini]:
    """A node without GPUs in Slurm, on a machine whose gres.conf has one."""
    folder = paths / "mini"
    for name in ("state", NAME):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONF.format(host=host, folder=folder, ports=free_ports(2)))
    (folder / "gres.conf").write_text(f"NodeName={NAME} AutoDetect=off Name=gpu Type=mock_gpu File=/dev/null\n")
    slurmd_options.PATH.write_text(OPTIONS)
    node_state.STATE_DIR.mkdir(parents=True)
    (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    mini = Mini(folder, slurm_tree)
    monkeypatch.setattr(nodes, "run", mini.run)
    for name in ("_REGISTER_S", "_SETTLE_S"):
        monkeypatch.setattr(registration, name, float(LONG_S))
    for name in ("restart", "is_active"):
        monkeypatch.setattr(systemd, name, getattr(mini, name))
    try:
        deadline = time.monotonic() + LONG_S
        while "is UP" not in mini.run("/usr/bin/scontrol", "ping", check=False).stdout:
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.2)
        mini.boot()
        mini.until(lambda node: node.state == "IDLE" and not node.flags - {"DYNAMIC_NORM"})
        yield mini
    finally:
        mini.stop()
        end(mini.slurmctld)


def advance() -> Progress:
    options = slurmd_options.read()
    assert options is not None
    return registration.advance(registration.Target(NAME, GRES, options))


def is_idle_with_gpu(node: nodes.Node) -> bool:
    return nodes.same_gres(node.gres, GRES) and node.state == "IDLE" and not node.flags - {"DYNAMIC_NORM"}


@pytest.mark.parametrize("start", ["now", "now+2hours"])
def test_a_reservation_is_neither_lost_nor_in_the_way_for_good(slurm: Mini, start: str):
    """An active one refuses the deletion; one that is to come would be purged with its last node."""
    slurm.scontrol(
        "create",
        "reservation",
        "reservationname=class",
        f"starttime={start}",
        "duration=60",
        "users=root",
        f"nodes={NAME}",
    )
    detail = "reservation class: wait for its end, or scontrol delete reservationname=class"
    assert advance() == Progress(Stage.RESERVED, detail)
    assert registration.inspect(NAME, GRES) == Progress(Stage.RESERVED, detail)
    assert nodes.reservations(NAME) == {"class": ""}
    assert not nodes.reservations("slurmd-1")
    node = nodes.show(NAME)
    assert node is not None
    assert (node.gres, node.is_drained) == (None, False)
    slurm.scontrol("delete", "reservationname=class")
    slurm.until(lambda node: "RESERVED" not in node.flags)
    assert advance() == Progress(Stage.REGISTERED)
    slurm.until(is_idle_with_gpu)


def test_a_held_node_can_be_deleted_once_another_ended_its_reservation(slurm: Mini, monkeypatch: pytest.MonkeyPatch):
    """As upstream's slurmd deletes its node; the README has the command."""
    monkeypatch.setattr(systemd, "start_later", lambda _: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    reason = "gpu-health: Xid 79"
    nodes.drain(NAME, reason)
    node_hold.begin("gpu-health", NAME, reason)
    slurm.until(lambda node: "MAINTENANCE" in node.flags)
    with pytest.raises(nodes.NodeBusy):
        nodes.delete(NAME)
    slurm.scontrol("delete", f"reservationname={node_hold.reservation(NAME)}")
    slurm.until(lambda node: "MAINTENANCE" not in node.flags)
    real = time.time
    monkeypatch.setattr(node_hold.time, "time", lambda: real() + 60)
    assert [one.reason for one in node_hold.keep()] == [reason]
    assert nodes.reservations(NAME) == {}
    assert slurm.until(lambda node: node.is_drained).reason == reason
    nodes.delete(NAME)
    assert nodes.show(NAME) is None


def test_a_node_that_is_drained_registers_drained_after_a_power_cut(slurm: Mini, monkeypatch: pytest.MonkeyPatch):
    delete = nodes.delete

    def last(name: str) -> None:
        delete(name)
        raise PowerCut

    nodes.drain(NAME, "bad fan")
    with monkeypatch.context() as context:
        context.setattr(nodes, "delete", last)
        with pytest.raises(PowerCut):
            advance()
    assert nodes.show(NAME) is None
    slurm.boot()  # before any hook runs
    node = slurm.until(lambda node: nodes.same_gres(node.gres, GRES))
    assert node.is_drained
    registration.refresh_drained_start()
    assert advance() == Progress(Stage.REGISTERED)
    node = slurm.until(lambda node: node.reason == "bad fan")
    assert node.is_drained
    assert node_state.NodeSnapshot.load() is None and not slurmd_unit.DRAINED_ENV.exists()
    nodes.resume(NAME)
    slurm.until(is_idle_with_gpu)


def test_a_node_in_service_is_registered_and_goes_back_to_it(slurm: Mini):
    assert advance() == Progress(Stage.REGISTERED)
    slurm.until(is_idle_with_gpu)
    assert advance() == Progress(Stage.REGISTERED)
