"""Python on the login host: functions as jobs, and a message when a run ends."""

import json
import typing

import pytest

from functional.conftest import Cluster, Json, eventually
from functional.test_people import LOGIN, ONE, Person, person

pytestmark = [pytest.mark.trains, pytest.mark.timeout(1500)]
# The functions of a module next to the program, which the nodes have in the copy of the project
TUNING = """
import os
import torch, torch.distributed as dist

def train(lr, shift=0):
    dist.init_process_group("gloo")
    total = torch.tensor([lr * (dist.get_rank() + 1) + shift])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return dist.is_initialized(), round(total.item(), 3), os.environ["SLURMD_NODENAME"], os.getuid()

def breaks():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise KeyError("no such column")
    dist.barrier()
"""
SUBMITS = """
import json, traceback
from ddptrain import submit
ONE = dict(nodes=1, gpus_per_node=0, cpus_per_task=1, memory="1G")
TWO = dict(ONE, nodes=2)

def squares(x):  # of the program itself, as a notebook's cell
    import socket
    print("squaring", x, flush=True)
    return x * x

job = submit(by_name("train"), 0.5, **TWO)
jobs = submit.map(squares, [3, 4], parallel=2, **ONE)
failing = submit(by_name("breaks"), **TWO)
found = {"run": job.run, "results": job.results(timeout=600), "squares": jobs.results(timeout=600)}
found["log"] = jobs[0].log()
error = failing.exception(timeout=600)
found["error"] = "".join(traceback.format_exception(error))
found["again"] = submit.job(job.run).result()
cancelled = submit(squares, 5, dependency=f"afterok:{job.job_id}", sbatch="--begin=now+1hour", **ONE)
cancelled.cancel()
try:
    cancelled.result(timeout=120)
except Exception as e:
    found["cancelled"] = f"{type(e).__name__}: {e}"
print(json.dumps(found))
"""
# The login host's Python lacks torch: the ranks import the modules that need it
BY_NAME = """
def by_name(name):
    def call(*args, **kwargs):
        import importlib
        return getattr(importlib.import_module("tuning"), name)(*args, **kwargs)
    call.__name__ = name
    return call
"""
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        open("/tmp/posted", "a").write(f"{self.path} {text}\\n")
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("", 8099), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def carol(cluster: Cluster) -> typing.Iterator[Person]:
    cluster.action("install-environment", timeout=1500)
    with person(cluster, "carol", "2003") as one:
        yield one


@pytest.fixture(scope="module")
def found(carol: Person) -> Json:
    """The results of a program that submits functions from the login host."""
    carol.does("mkdir -p exp")
    carol.writes("exp/tuning.py", TUNING)
    carol.writes("exp/launch.py", BY_NAME + SUBMITS)
    return json.loads(carol.does("cd exp && python3 launch.py").splitlines()[-1])


def test_a_function_trains_on_two_nodes_and_its_results_come_back(found: Json, carol: Person):
    results = found["results"]
    assert [one[:2] for one in results] == [[False, 1.5], [False, 1.5]]
    assert {one[2] for one in results} == {"slurmd-0", "slurmd-1"}
    assert {one[3] for one in results} == {2003}
    assert found["again"] == results[0]
    assert found["run"].startswith("train-")
    kept = carol.does(f"stat -c %a {carol.folder}/runs/{found['run']}/function.pkl")
    assert kept == "600"


def test_a_map_has_its_results_in_order(found: Json):
    assert found["squares"] == [9, 16]
    assert "squaring 3" in found["log"]


def test_the_rank_that_failed_first_is_raised_with_its_traceback(found: Json):
    assert "rank 1 of 2 on slurmd-" in found["error"]
    assert "in breaks" in found["error"]
    assert found["error"].rstrip().endswith("KeyError: 'no such column'")


def test_a_cancelled_job_says_so(found: Json):
    assert found["cancelled"].startswith("UncompletedJobError: ")
    assert "CANCELLED" in found["cancelled"]


def test_a_run_that_ends_posts_to_the_url_of_a_private_file(carol: Person):
    cluster = carol.cluster
    carol.writes("server.py", SERVER)
    address = cluster.on(LOGIN, "hostname", "-I").split()[0]
    cluster.on(LOGIN, "systemd-run", "--unit=posted", "python3", f"/home/{carol.name}/server.py")
    try:
        carol.does(f"(umask 077; echo http://{address}:8099/hooks/SECRET > .notify)")
        carol.does("mkdir -p exp && echo 'raise ValueError(\"boom\")' > exp/bad.py")
        carol.tries(f"cd exp && ddp submit --wait --run hooked --notify ~/.notify {ONE} bad.py")

        def posted() -> str:
            answer = cluster.exec(LOGIN, "cat", "/tmp/posted")
            assert answer.code == 0
            return answer.out

        path, _, text = eventually(posted).partition(" ")
        assert path == "/hooks/SECRET"
        assert json.loads(text)["text"].startswith("hooked: failed (job ")
        assert "ValueError: boom" in text
        run = f"{carol.folder}/runs/hooked"
        assert carol.does(f"grep -rl SECRET {run} {carol.folder}/.secrets || true") == ""
        assert "[NOTIFY] sent" in carol.does("ddp log hooked")
    finally:
        cluster.exec(LOGIN, "systemctl", "stop", "posted")
        cluster.exec(LOGIN, "rm", "-f", "/tmp/posted")
