"""Separation of accounts beyond folders: deleted files, ports, and a job's ports."""

import collections.abc
import contextlib
import subprocess
import time
import typing

import pytest

from functional.conftest import Cluster, Json, eventually
from functional.storage_faults import MP, PROXY
from functional.test_people import LOGIN, SMALL, Person, person
from functional.training_jobs import until
from sandbox.hosts import Hosts
from sandbox.store import Store

pytestmark = pytest.mark.timeout(1500)

NODES = ("slurmd/0", "slurmd/1")
CLIENT = "shared-filesystem-client"
# Until its input ends
LISTENS = """
import os, socket, sys, threading
def serve(server):
    while True:
        server.accept()[0].close()
servers = [socket.create_server(("", 0)), socket.create_server(("::", 0), family=socket.AF_INET6)]
print(*(server.getsockname()[1] for server in servers), flush=True)
for server in servers:
    threading.Thread(target=serve, args=(server,), daemon=True).start()
sys.stdin.read()
os._exit(0)
"""
CONNECTS = """
import socket, sys
for place in sys.argv[1:]:
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as e:
        print("refused" if isinstance(e, ConnectionRefusedError) else e)
    else:
        print("connected")
"""
# Holds as many idle connections as it may, and says how many it began
IDLE = """
import resource, socket, sys, time
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held, began, until = [], 0, time.monotonic() + float(sys.argv[2])
host, _, port = sys.argv[1].rpartition(":")
while time.monotonic() < until and began < int(sys.argv[3]):
    try:
        held.append(socket.create_connection((host, int(port)), timeout=5))
        began += 1
    except OSError:
        time.sleep(0.05)
print(began, flush=True)
time.sleep(max(0.0, until - time.monotonic()))
"""
# Steps of a training on two nodes, which need each other, until its run has a file `end`
TRAINS = """
import os, pathlib, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    print("ranks have met", flush=True)
ended = pathlib.Path(os.environ["RUN_DIR"], "end")
while True:
    flag = torch.tensor([float(ended.exists())])
    dist.all_reduce(flag)
    if flag:
        break
    time.sleep(0.05)
print("rank", dist.get_rank(), "ends", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def alice(cluster: Cluster) -> typing.Iterator[Person]:
    with person(cluster, "alice", "2001") as one:
        yield one


@pytest.fixture(scope="module")
def bob(cluster: Cluster) -> typing.Iterator[Person]:
    with person(cluster, "bob", "2002") as one:
        yield one


def address_of(cluster: Cluster, unit: str) -> str:
    return cluster.on(unit, "hostname", "--all-ip-addresses").split()[0]


@contextlib.contextmanager
def separated(cluster: Cluster) -> collections.abc.Generator[None]:
    """Close the ports between accounts, as an operator does."""
    network = f"{address_of(cluster, LOGIN).rpartition('.')[0]}.0/24"
    cluster.ok("config", CLIENT, f"separate-accounts={network}")
    try:
        yield
    finally:
        cluster.ok("config", CLIENT, "separate-accounts=")


def attempts(cluster: Cluster, unit: str, account: str, places: list[str]) -> list[str]:
    """Connect to places from a unit's host under an account; return what came of each."""
    argv = ["runuser", "-u", account, "--", "python3", "-c", CONNECTS, *places]
    answer = cluster.exec(unit, *argv, timeout=60 + 12 * len(places))
    assert answer.code == 0, answer.err
    return answer.out.split("\n")[:-1]


@contextlib.contextmanager
def listening(one: Person, unit: str) -> collections.abc.Generator[tuple[str, str]]:
    """Serve two ports of a unit's host under an account: of IPv4 and of IPv6."""
    host = Hosts(one.cluster.model).get(Store(one.cluster.model).load().host_of(unit))
    argv = ["runuser", "-u", one.name, "--", "python3", "-c", LISTENS]
    with host.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        first, second = process.stdout.readline().decode().split()
        try:
            yield first, second
        finally:
            process.stdin.close()


def test_no_account_reads_files_that_another_deleted(cluster: Cluster, alice: Person, bob: Person):
    """A file that all may read, in a folder that only its owner enters, on each host."""
    alice.does("ddp list")
    private = f"{alice.folder}/private"

    def deleted() -> list[str]:
        """Delete a file of alice's; return where root finds it afterwards."""
        alice.does(
            f"umask 022; mkdir -p -m 700 {private}; echo mine >{private}/letter; rm {private}/letter"
        )
        found = cluster.exec(LOGIN, "sh", "-c", f"ls -d {MP}/.trash/*/*-letter")
        return found.out.split()

    assert deleted() == [], "nothing is kept by default"
    cluster.ok("config", PROXY, "trash-days=1")
    try:

        def kept() -> str:
            found = deleted()
            assert found
            return found[0]

        path = eventually(kept)  # a client reads the setting every minute
        for unit in (LOGIN, *NODES):
            assert cluster.on(unit, "cat", path) == "mine", "root reads it"
            for name in ("alice", "bob"):
                script = f"cat {path} || ls {MP}/.trash/ || cd {MP}/.trash/*/ || ls -a {MP} | grep -q trash"
                seen = cluster.exec(unit, "runuser", "-u", name, "--", "sh", "-c", script)
                assert (seen.code != 0, seen.out) == (True, ""), seen
    finally:
        cluster.ok("config", PROXY, "trash-days=0")


@pytest.mark.long
def test_no_account_reaches_anothers_ports_where_an_operator_separates_them(
    cluster: Cluster, alice: Person, bob: Person
):
    node, login = address_of(cluster, "slurmd/0"), address_of(cluster, LOGIN)
    with listening(alice, "slurmd/0") as (here, here6), listening(alice, LOGIN) as (there, _):
        away = [f"{node}:{here}", f"{login}:{there}"]
        local = [*away[:1], f"127.0.0.1:{here}", f"::1:{here6}"]
        slurmd = f"{node}:6818"
        assert attempts(cluster, "slurmd/1", "bob", away) == ["connected"] * 2, (
            "nothing is closed by default"
        )
        with separated(cluster):
            for unit in ("slurmd/1", LOGIN):
                for account, what in (
                    ("alice", "connected"),
                    ("root", "connected"),
                    ("bob", "refused"),
                ):
                    assert attempts(cluster, unit, account, away) == [what] * 2, (unit, account)
            for account, what in (
                ("alice", "connected"),
                ("root", "connected"),
                ("bob", "refused"),
            ):
                assert attempts(cluster, "slurmd/0", account, local) == [what] * 3, account
            assert attempts(cluster, LOGIN, "bob", [slurmd]) == ["connected"], (
                "a service is everybody's"
            )
            cluster.on(
                "slurmd/0", "nft", "flush", "ruleset"
            )  # as a reload of an administrator's own rules does
            cluster.ok("update-status", cluster.beside("slurmd/0", CLIENT))
            assert attempts(cluster, "slurmd/1", "bob", away) == ["refused"] * 2
        assert attempts(cluster, "slurmd/1", "bob", away) == ["connected"] * 2
    for unit in (LOGIN, *NODES):
        assert "slurm_ddp" not in cluster.on(unit, "nft", "list", "tables")


def ports(cluster: Cluster, unit: str, uid: str) -> list[str]:
    """List an account's listening ADDRESS:PORTs on a unit's host (proc(5), net/tcp)."""
    found: list[str] = []
    for line in cluster.on(unit, "cat", "/proc/net/tcp").splitlines()[1:]:
        words = line.split()
        if (words[3], words[7]) != ("0A", uid):
            continue
        address, _, port = words[1].partition(":")
        numbers = [int(address[at : at + 2], 16) for at in (6, 4, 2, 0)]
        host = ".".join(map(str, numbers)) if any(numbers) else address_of(cluster, unit)
        found.append(f"{host}:{int(port, 16)}")
    return found


@contextlib.contextmanager
def training(one: Person, run: str) -> collections.abc.Generator[Json]:
    """Train on both nodes; yield the job once its ranks have met."""
    one.writes("trains.py", TRAINS)
    job = one.json(f"ddp submit --json --run {run} {SMALL} trains.py")
    try:
        until(one.cluster, job, "ranks have met")
        yield job
    finally:
        one.cluster.exec(LOGIN, "scancel", str(job["job-id"]))


def completed(one: Person, job: Json) -> bool:
    """End a training, and return whether it completed at the first attempt."""
    one.does(f"touch {job['run-dir']}/end")
    done = eventually(lambda: _ended(one, job))
    log = one.does(f"cat {job['log']}")
    return done == "COMPLETED" and "[FAILED]" not in log and "[RESTART]" not in log


def _ended(one: Person, job: Json) -> str:
    state = str(one.json(f"ddp show {job['run']} --json")["state"])
    assert state not in ("PENDING", "RUNNING", "COMPLETING"), state
    return state


@pytest.mark.trains
@pytest.mark.long
def test_a_training_runs_where_accounts_are_separated_and_no_other_reaches_its_ports(
    cluster: Cluster, alice: Person, bob: Person
):
    """torchrun's store obeys every client: another account could end a job through it."""
    cluster.action("install-environment", timeout=1500)
    with separated(cluster), training(alice, "apart") as job:
        for unit in NODES:
            places = ports(cluster, unit, alice.uid)
            assert all(not place.startswith("127.") for place in places), places
            for source in (LOGIN, *NODES):
                assert set(attempts(cluster, source, "bob", places)) == {"refused"}, (
                    source,
                    places,
                )
        assert completed(alice, job)


@pytest.mark.trains
@pytest.mark.long
def test_thousands_of_idle_connections_of_another_hurt_no_training(
    cluster: Cluster, alice: Person, bob: Person
):
    cluster.action("install-environment", timeout=1500)
    host = Hosts(cluster.model).get(Store(cluster.model).load().host_of(LOGIN))
    count = ["sh", "-c", "ps -L -u alice | wc -l"]
    with training(alice, "crowded") as job:
        head = cluster.on(LOGIN, "scontrol", "show", "job", "--oneliner", str(job["job-id"]))
        unit = NODES["BatchHost=slurmd-1 " in head]
        before = int(cluster.on(unit, *count))
        crowds = [
            host.popen(
                ["runuser", "-u", "bob", "--", "python3", "-c", IDLE, place, "30", "5000"],
                stdout=subprocess.PIPE,
            )
            for place in ports(cluster, unit, alice.uid)
        ]
        time.sleep(15)
        during = int(cluster.on(unit, *count))
        began = [int(crowd.communicate(timeout=300)[0] or b"0") for crowd in crowds]
        assert max(began) > 1000, began
        assert during < before + 20, (
            f"{before} threads of alice's were {during} meanwhile ({began})"
        )
        assert completed(alice, job)
