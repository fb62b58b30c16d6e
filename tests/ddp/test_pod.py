"""The pods of a run as the manifests start them: real processes that meet, with a small torchrun of the test's own."""

import collections.abc
import dataclasses
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time
import typing

import pytest
import yaml

from ddp import kubernetes
from slurm_ddp import files

# Starts the ranks of a node and ends them all when one fails or a signal comes, as torchrun does.
TORCHRUN = """
import os, signal, subprocess, sys
flags, words = {}, sys.argv[1:]
while words[0].startswith("--") and words[0] != "--module":
    name, _, value = words.pop(0).partition("=")
    flags[name] = value
nodes, each, node = (int(flags[name]) for name in ("--nnodes", "--nproc-per-node", "--node-rank"))
assert flags["--rdzv-backend"] == "static" and flags["--max-restarts"] == "0"
words = ["-m", *words[1:]] if words[0] == "--module" else words
os.makedirs(flags["--log-dir"], exist_ok=True)
ranks = []
for local in range(each):
    env = os.environ | {"RANK": str(node * each + local), "LOCAL_RANK": str(local), "WORLD_SIZE": str(nodes * each)}
    env |= {"MASTER_ADDR": flags["--master-addr"], "MASTER_PORT": flags["--master-port"]}
    ranks.append(subprocess.Popen([sys.executable, *words], env=env))
def end(*_):
    for rank in ranks:
        rank.terminate()
signal.signal(signal.SIGTERM, end)
codes = []
while ranks:
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    for rank in [rank for rank in ranks if rank.poll() is not None]:
        ranks.remove(rank)
        codes.append(rank.returncode)
        if rank.returncode:
            end()
sys.exit(any(codes))
"""

# What the ranks do: the first word of the arguments.
PROGRAM = """
import json, os, pathlib, sys, time
run, rank, attempt = pathlib.Path(os.environ["RUN_DIR"]), os.environ["RANK"], os.environ["RUN_ATTEMPT_ID"]
(run / f"here-{rank}").write_text(json.dumps([attempt, sys.argv[1:], os.getcwd(), dict(os.environ)]))
def leave(outcome, code=0, **more):
    if rank == "0":
        (run / "control" / f"{attempt}.outcome").write_text(json.dumps({"outcome": outcome, **more}))
    sys.exit(code)
what = sys.argv[1]
if what == "fail" and rank == sys.argv[2]:
    sys.exit(3)
while what == "mistake" and rank != "0" and not (run / "control" / f"{attempt}.outcome").exists():
    time.sleep(0.05)
if what == "mistake":
    leave("failed", 1, retry=False)
if what == "once" and (run / "second").exists():
    leave("done")
while what in ("stop", "once", "fail"):
    if pathlib.Path(os.environ["STOP_FILE"]).exists():
        leave("preempted")
    time.sleep(0.05)
"""


@dataclasses.dataclass
class Kubelet:
    """Starts the container of a Job's pod as the kubelet does, but for its image: variables, words, files, name."""

    folder: pathlib.Path
    port: int
    pods: list[subprocess.Popen[str]] = dataclasses.field(default_factory=list[subprocess.Popen[str]])

    def start(self, run: kubernetes.Run, index: int, number: int = 0, **more: str) -> subprocess.Popen[str]:
        """Start a pod; `number` tells an index's pods apart."""
        _, program, job = yaml.safe_load_all(kubernetes.render(run))
        spec = job["spec"]["template"]["spec"]["containers"][0]
        for name, text in program["data"].items():
            fast = text.replace("_LOST_S = 10.0", "_LOST_S = 4.0").replace("_FAILED_S = 30.0", "_FAILED_S = 2.0")
            assert fast.count("S = 4.0") == fast.count("S = 2.0") == 1
            files.ensure_file(self.folder / name, fast)  # a pod that has just been started may be reading it
        fields = {
            "metadata.labels['batch.kubernetes.io/controller-uid']": "8f0c",
            "metadata.name": f"{job['metadata']['name']}-{index}-x{number}",
            "status.podIP": "127.0.0.1",
        }
        env = {"PATH": os.environ["PATH"], "JOB_COMPLETION_INDEX": str(index), "PYTHONPATH": str(self.folder / "image")}
        for one in spec["env"]:
            env[one["name"]] = (
                expand(one["value"]) if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            )
        assert env["MASTER_PORT"] == "29500"
        env["DDP_TEST_POD"] = f"{self.folder}/{len(self.pods)}"
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), **more}  # the Service's part
        command = [expand(word).replace("/etc/ddp/", f"{self.folder}/") for word in (*spec["command"], *spec["args"])]
        pod = subprocess.Popen(
            [sys.executable, *command[1:]],
            env=env,
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.pods.append(pod)
        return pod

    def kill(self, pod: subprocess.Popen[str]) -> None:
        """End a container at once, with all that runs in it."""
        pod.kill()
        pod.wait()
        mine = f"DDP_TEST_POD={self.folder}/{self.pods.index(pod)}".encode()
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            try:
                if mine in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except OSError:
                continue  # another account's, or it has ended

    def all(self, run: kubernetes.Run, number: int = 0) -> list[subprocess.Popen[str]]:
        return [self.start(run, index, number) for index in range(run.nodes)]


def expand(text: str) -> str:
    return re.sub(r"\$\$|\$\([^)]*\)", lambda found: "$" if found[0] == "$$" else "expanded", text)


@pytest.fixture
def kubelet(tmp_path: pathlib.Path) -> collections.abc.Iterator[Kubelet]:
    package = tmp_path / "image" / "torch" / "distributed"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "run.py").write_text(TORCHRUN)
    (tmp_path / "work" / "code").mkdir(parents=True)
    (tmp_path / "work" / "code" / "train.py").write_text(PROGRAM)
    found = Kubelet(tmp_path, free_ports())
    yield found
    for pod in found.pods:
        found.kill(pod)
        print(pod.communicate()[0])  # shown where the test failed


def free_ports() -> int:
    """Return the first of two ports, below those that the kernel gives by itself."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        try:
            with socket.socket() as first, socket.socket() as second:
                first.bind(("", port))
                second.bind(("", port + 1))
                return port
        except OSError:
            continue


def run(kubelet: Kubelet, *words: str, **given: typing.Any) -> kubernetes.Run:
    work = kubelet.folder / "work"
    given = {"nodes": 2, "ranks_per_node": 2, "max_restarts": 1} | given
    return kubernetes.Run(
        name="night", image="torch", command=("train.py", *words), memory_mb=1024, workspace=str(work), claim="shared",
        run_dir=str(work / "runs" / "night"), folder=str(work / "code"), **given,
    )  # fmt: skip


def ends(pods: list[subprocess.Popen[str]], limit_s: float = 60) -> list[int]:
    """Return the exit codes; what the pods printed is shown when a test fails."""
    for pod in pods:
        print(pod.communicate(timeout=limit_s)[0])
    return [pod.returncode for pod in pods]


def ranks(kubelet: Kubelet) -> list[typing.Any]:
    """Read each rank's record, in order."""
    found = {
        path.name: yaml.safe_load(path.read_text()) for path in (kubelet.folder / "work/runs/night").glob("here-*")
    }
    return [found[name] for name in sorted(found)]


def until(condition: collections.abc.Callable[[], object], limit_s: float = 30) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, "it never appeared"
        time.sleep(0.05)


def test_the_pods_run_the_program_with_its_words_and_variables(kubelet: Kubelet):
    words = ("plain", "$(HOME)", "$$", "a b", "1e-3", "é", "")
    pods = kubelet.all(run(kubelet, *words, env={"GREETING": "$(HOME) $HOME"}))
    assert ends(pods) == [0, 0]
    found = ranks(kubelet)
    assert [env["RANK"] for *_, env in found] == ["0", "1", "2", "3"]
    for attempt, argv, folder, env in found:
        assert (attempt, tuple(argv), folder) == ("night-0-x0", words, str(kubelet.folder / "work/code"))
        assert env["GREETING"] == "$(HOME) $HOME"
        assert env["WORLD_SIZE"] == "4"
        assert env["STOP_FILE"].endswith("/control/night-0-x0.stop")
    assert {path.name for path in (kubelet.folder / "work/runs/night/logs/night-0-x0").iterdir()} == {
        "node-0",
        "node-1",
    }


def test_a_pod_that_comes_again_after_the_end_has_nothing_to_do(kubelet: Kubelet):
    plan = run(kubelet, "plain")
    assert ends(kubelet.all(plan)) == [0, 0]
    assert ends([kubelet.start(plan, 1, 1)]) == [0]


def test_one_node_alone(kubelet: Kubelet):
    plan = run(kubelet, "plain", nodes=1)
    assert ends([kubelet.start(plan, 0, MASTER_ADDR="does-not-resolve.invalid")]) == [0]
    assert len(ranks(kubelet)) == 2


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_fails_ends_all_pods_and_counts(kubelet: Kubelet, rank: int):
    began = time.monotonic()
    assert ends(kubelet.all(run(kubelet, "fail", str(rank)))) == [1, 1]
    assert time.monotonic() - began < 30  # the other ranks wait for ever


def test_a_mistake_is_not_tried_again(kubelet: Kubelet):
    assert ends(kubelet.all(run(kubelet, "mistake"))) == [78, 78]


@pytest.mark.parametrize("index", [0, 1])
def test_an_evicted_pod_makes_all_ranks_save(kubelet: Kubelet, index: int):
    pods = kubelet.all(run(kubelet, "stop"))
    until(lambda: len(ranks(kubelet)) == 4)
    pods[index].send_signal(signal.SIGTERM)
    assert ends(pods) == [75, 75]


def test_a_lost_pod_ends_the_attempt_and_the_next_one_goes_on(kubelet: Kubelet):
    plan = run(kubelet, "once")
    old = kubelet.all(plan)
    until(lambda: len(ranks(kubelet)) == 4)
    kubelet.kill(old[1])  # with its node
    early = kubelet.start(plan, 1, 1)  # before the others have noticed
    assert ends([old[0]]) == [75]  # does not count
    (kubelet.folder / "work/runs/night/second").touch()
    assert ends([kubelet.start(plan, 0, 1), early]) == [0, 0]
    assert {attempt for attempt, *_ in ranks(kubelet)} == {"night-0-x1"}


def test_a_lost_pod_0_ends_the_attempt(kubelet: Kubelet):
    pods = kubelet.all(run(kubelet, "once", nodes=3, ranks_per_node=1))
    until(lambda: len(ranks(kubelet)) == 3)
    kubelet.kill(pods[0])
    assert ends(pods[1:]) == [75, 75]


def test_pods_that_never_join_are_named(kubelet: Kubelet):
    plan = run(kubelet, "plain", nodes=3)
    pods = [kubelet.start(plan, index, DDP_JOIN_S=limit) for index, limit in ((0, "4"), (2, "12"))]
    texts = [pod.communicate(timeout=30)[0] for pod in pods]
    assert "waiting for pods with index 1; see: kubectl get pods" in texts[0]
    assert f"waiting for 127.0.0.1:{kubelet.port + 1}" in texts[1]
    assert [pod.returncode for pod in pods] == [1, 1]


def test_strangers_do_not_take_part(kubelet: Kubelet):
    plan = run(kubelet, "plain")
    head = kubelet.start(plan, 0)
    strangers: list[socket.socket] = []

    def connected() -> bool:
        try:
            strangers.append(socket.create_connection(("127.0.0.1", kubelet.port + 1), timeout=5))
        except OSError:
            return False
        return True

    until(connected)
    strangers[0].sendall(b"hello another-job 1\n" + b"\xff" * 100 + b"\n")
    until(connected)
    assert head.poll() is None
    assert ends([head, kubelet.start(plan, 1)]) == [0, 0]
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("index", [0, 1])
def test_a_pod_that_waits_leaves_when_it_is_asked_to(kubelet: Kubelet, index: int):
    pod = kubelet.start(run(kubelet, "plain"), index)
    until((kubelet.folder / "work/runs/night/control").exists)
    pod.send_signal(signal.SIGTERM)
    assert ends([pod]) == [75]


def test_a_workspace_that_is_not_there_is_a_mistake(kubelet: Kubelet):
    plan = run(kubelet, "plain", nodes=1)
    (kubelet.folder / "work/code/train.py").unlink()
    (kubelet.folder / "work/code").rmdir()
    pod = kubelet.start(plan, 0)
    text = pod.communicate(timeout=30)[0]
    assert pod.returncode == 78
    assert "work/code: No such file or directory; does the claim hold the workspace" in text
