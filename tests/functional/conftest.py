"""The bundle in the sandbox, deployed once for all tests here and taken down at the end.

`SLURM_DDP_TEST_MODEL` names another model than `test`; `SLURM_DDP_TEST_KEEP=1` uses an existing
model and keeps it. `SLURM_DDP_TEST_BASE=26.04` deploys it with overlays/2604.yaml, so that the stand-ins
play upstream's main.
"""

import collections.abc
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import time
import typing

import pytest

from sandbox.hosts import Hosts
from sandbox.store import Store

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MODEL = os.environ.get("SLURM_DDP_TEST_MODEL", "test")
KEEP = os.environ.get("SLURM_DDP_TEST_KEEP") == "1"
IS_2604 = os.environ.get("SLURM_DDP_TEST_BASE") == "26.04"
OVERLAYS = ("--overlay", str(REPOSITORY / "overlays" / "2604.yaml")) if IS_2604 else ()
DEPLOY = ("deploy", str(REPOSITORY / "bundle.yaml"), *OVERLAYS)
PATIENCE_S = 150  # a deadline for what takes seconds on a machine with nothing else to do
Json = dict[str, typing.Any]
T = typing.TypeVar("T")


def eventually(check: collections.abc.Callable[[], T]) -> T:
    """Repeat `check` until its asserts hold; return its result, or fail after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(1)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What ./sandboxctl did."""

    code: int
    out: str
    err: str

    def json(self) -> Json:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line that starts with ERROR."""
        lines = [line for line in self.err.splitlines() if line.startswith("ERROR ")]
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("ERROR ")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The deployed bundle, spoken to as a user does: through ./sandboxctl."""

    model: str = MODEL
    juju: str = "3.6"

    def ctl(self, *arguments: str, timeout: float = 600) -> Answer:
        done = subprocess.run(
            [REPOSITORY / "sandboxctl", "--model", self.model, "--juju", self.juju, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Answer(done.returncode, done.stdout, done.stderr)

    def ok(self, *arguments: str, timeout: float = 600) -> str:
        answer = self.ctl(*arguments, timeout=timeout)
        assert answer.code == 0, f"{arguments}: {answer.err[-3000:]}"
        return answer.out

    def exec(self, unit: str, *command: str, timeout: float = 120) -> Answer:
        """Run a command on a unit's host like `./sandboxctl exec`, without a new Python."""
        host = Hosts(self.model).get(Store(self.model).load().host_of(unit))
        done = host.run(command, timeout=timeout, check=False)
        # Lines of a run begin with its task, and may hold a traceback of torch's own when its store ends before an agent.
        assert not re.search(r"^Traceback", done.stderr, re.MULTILINE), done.stderr
        return Answer(done.returncode, done.stdout, done.stderr)

    def on(self, unit: str, *command: str) -> str:
        """Run a command on a unit's host; return its standard output."""
        answer = self.exec(unit, *command)
        assert answer.code == 0, f"{unit}: {command}: {answer.code} {answer.err[-3000:]}"
        return answer.out.strip()

    def action(self, *arguments: str, timeout: float = 600) -> Json:
        """Run an action of trainer/0 that succeeds; return its results."""
        answer = self.ctl("run", "trainer/0", *arguments, "--format", "json", timeout=timeout)
        assert answer.code == 0, answer.err[-3000:]
        return answer.json()["trainer/0"]["results"]

    def set_node_config(self, unit: str, *parameters: str) -> None:
        """Run slurmd's action until it succeeds, as its operator does.

        It restarts slurmd and sets the node's state at once, which slurmctld refuses until slurmd
        has registered.
        """
        deadline = time.monotonic() + PATIENCE_S
        while (answer := self.ctl("run", unit, "set-node-config", *parameters)).code != 0:
            assert "Invalid node name specified" in answer.err, answer.err[-3000:]
            assert time.monotonic() < deadline, answer.err[-3000:]

    def secrets(self) -> dict[str, str]:
        """Return every value of every secret of the model, by owner and key."""
        model = json.loads(pathlib.Path(f"/var/lib/slurm-ddp/{self.model}/model.json").read_text())
        return {
            f"{secret['owner']} {key}": value
            for secret in model["secrets"].values()
            for content in secret["contents"].values()
            for key, value in content.items()
            if key not in ("keyid", "access-key", "meta-user")  # those are names
        }

    def beside(self, host: str, app: str) -> str:
        """Return the unit of a subordinate application on the host of this principal."""
        status = json.loads(self.ok("status", "--format", "json"))
        units = {
            name: unit
            for one in status["applications"].values()
            for name, unit in one.get("units", {}).items()
        }
        return next(name for name in units[host]["subordinates"] if name.startswith(f"{app}/"))

    def units(self) -> dict[str, Json]:
        """Return every unit's status by name, subordinates included."""
        found: dict[str, Json] = {}
        status = json.loads(self.ok("status", "--format", "json"))
        for app in status["applications"].values():
            for name, unit in app.get("units", {}).items():
                found |= {name: unit} | unit.get("subordinates", {})
        return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the test that takes the cluster down last, in any file."""
    items.sort(key=lambda item: item.name == "test_destroy_leaves_nothing_behind")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> typing.Iterator[None]:
    """Show nodes' states and Slurm's reasons with a failure: later tests may share it."""
    outcome: typing.Any = yield
    report = outcome.get_result()
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(cluster, Cluster):
        answer = cluster.ctl(
            "exec", "--unit", "slurmctld/0", "--", "sinfo", "-hN", "-o", "%N %T %E %H", timeout=60
        )
        report.sections.append(("nodes in Slurm", answer.out or answer.err))
        report.sections.append(("status", cluster.ctl("status", timeout=60).out))


@pytest.fixture(scope="session", autouse=True)
def _root() -> None:
    if os.geteuid() != 0:
        pytest.fail("the functional tests boot systemd hosts: run them as root", pytrace=False)


def footprint(bridge: str, subnet: str) -> dict[str, set[str]]:
    """Return the traces of a running model on this machine, by kind; `subnet` is like 10.77.3."""

    def lines(*argv: str, check: bool = True) -> set[str]:
        return set(
            subprocess.run(argv, capture_output=True, text=True, check=check).stdout.splitlines()
        )

    def ours(name: str) -> bool:
        return f"/slurm-ddp/{MODEL}/" in name or bridge in name or subnet in name

    commands = {
        path.parent.name: path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
        if path.exists()
    }
    return {
        "mounts": {
            line
            for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
            if ours(line)
        },
        "interfaces": {
            line.split()[0]
            for line in lines("ip", "-br", "link", "show", "master", bridge, check=False)
        }
        | {line.split()[0] for line in lines("ip", "-br", "link") if ours(line)},
        "rules": {line for line in lines("iptables-save") if ours(line)},
        "processes": {f"{pid} {command}" for pid, command in commands.items() if ours(command)},
        "files": {str(path) for path in pathlib.Path("/var/lib/slurm-ddp").glob(f"{MODEL}/**/*")},
    }


@pytest.fixture(scope="session")
def cluster() -> typing.Iterator[Cluster]:
    """Deploy bundle.yaml."""
    with deployed(Cluster(), lambda one: one.ctl(*DEPLOY, timeout=1200)) as one:
        yield one


@contextlib.contextmanager
def deployed(
    one: Cluster, deploy: collections.abc.Callable[[Cluster], Answer]
) -> collections.abc.Generator[Cluster]:
    """Deploy a cluster in place of one of that name, and take it down at the end."""
    if KEEP and one.ctl("status").code == 0:
        yield one
        return
    one.ctl("destroy", "--no-prompt")
    answer = deploy(one)
    if answer.code != 0:
        log = one.ctl("debug-log").out[-8000:]
        one.ctl("destroy", "--no-prompt")
        pytest.fail(f"the bundle does not deploy:\n{answer.err[-4000:]}\n{log}", pytrace=False)
    yield one
    if not KEEP:
        one.ctl("destroy", "--no-prompt")


@pytest.fixture(scope="module")
def drills(cluster: Cluster) -> Cluster:
    """The cluster with the scripts of the training jobs and an environment on it."""
    from functional import training_jobs  # which imports this module

    training_jobs.write_scripts(cluster)
    cluster.action("install-environment", timeout=1500)
    return cluster
