"""juju-exec of a host: it takes the charms' own words, and a command of the sandbox carries them out."""

import os
import pathlib
import subprocess
import sys
import time

import click.testing
import pytest
from folder_hosts import Bench

from sandbox import cli, juju_exec
from sandbox import model as rules
from sandbox.guest import juju_exec as guest
from sandbox.store import Store
from slurm_ddp import wake

HERE = pathlib.Path(__file__).resolve().parents[2]
CODE = """
import pathlib, sys
from sandbox.guest import juju_exec
juju_exec.AGENTS, juju_exec.REQUESTS = map(pathlib.Path, sys.argv[1:3])
sys.argv[1:3] = []
sys.exit(juju_exec.main())
"""


def start(root: pathlib.Path, *words: str) -> subprocess.Popen[str]:
    """Start juju-exec on the host whose root is this folder."""
    agents, requests = (root / path.relative_to("/") for path in (guest.AGENTS, guest.REQUESTS))
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(HERE)}
    argv = [sys.executable, "-c", CODE, str(agents), str(requests), *words]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=env)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit status and what was printed."""
    _, printed = process.communicate(timeout=60)
    return process.returncode, printed.strip()


@pytest.fixture(autouse=True)
def _on_juju(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake, "JUJU_EXEC", HERE)  # which exists


def wake_up(bench: Bench, unit: str) -> subprocess.Popen[str]:
    """Start juju-exec as a charm does, and wait until the host has the request."""
    root = bench.hosts.get("juju-2586ad-0").root
    before = juju_exec.pending(root)
    words = wake.command(unit, juju_exec.agent(root, unit) / "charm")[-2:]
    process = start(root, *words)
    deadline = time.monotonic() + 30
    while juju_exec.pending(root) == before:
        assert time.monotonic() < deadline
        assert process.poll() is None, end(process)
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "the sandbox plays juju-exec UNIT "),
        (["foo/2"], 2, "the sandbox plays "),
        (["foo/2", "hostname", "-f"], 2, "the sandbox plays "),
        (["foo/2", "JUJU_DISPATCH_PATH=hooks/start HERE/unit-foo-2/charm/dispatch"], 2, "the sandbox plays "),
        (["foo/2", "JUJU_DISPATCH_PATH=hooks/update-status HERE/unit-foo-3/charm/dispatch"], 2, "the sandbox plays "),
        (
            ["foo/3", "JUJU_DISPATCH_PATH=hooks/update-status HERE/unit-foo-3/charm/dispatch"],
            1,
            'unit "foo/3" not found',
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_words_other_than_the_charms_own_are_refused(tmp_path: pathlib.Path, words: list[str], code: int, message: str):
    agents = tmp_path / guest.AGENTS.relative_to("/")
    (agents / "unit-foo-2").mkdir(parents=True)
    got, printed = end(start(tmp_path, *(word.replace("HERE", str(agents)) for word in words)))
    assert (got, printed[: len(message) + 6]) == (code, f"ERROR {message}")
    assert juju_exec.pending(tmp_path) == {}


def test_the_hook_runs_while_a_command_works_and_juju_exec_ends_with_it(bench: Bench):
    first, second = wake_up(bench, "agent/0"), wake_up(bench, "agent/0")
    assert bench.hooks() == []
    with bench.engine() as engine:
        engine.settle()
        assert [event.label for unit in engine.model.units.values() for event in unit.events] == []
        assert engine.model.units["agent/0"].agent.name == "idle"
    assert [end(process) for process in (first, second)] == [(0, "")] * 2
    assert bench.hooks() == ["agent/0 update_status"] * 2, "Juju runs each"
    assert "\n".join(bench.store.log_lines()).count("agent/0 DEBUG ran update-status (juju-exec) in ") == 2


def test_wait_for_gives_a_unit_what_it_asks_for_until_it_is_active(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "Store", lambda name: Store(name, bench.store.directory.parent))

    def wait_for(*words: str) -> click.testing.Result:
        return click.testing.CliRunner().invoke(cli.cli, ["--model", "t", "wait-for", *words])

    with bench.engine() as engine, engine.change() as model:
        model.units["agent/0"].status.name = "waiting"
    late = wait_for("unit", "agent/0", "--timeout", "1s")
    assert (late.exit_code, late.stderr) == (1, "ERROR timed out waiting for 'agent/0' to reach goal state\n")
    assert bench.hooks() == []
    process = wake_up(bench, "agent/0")
    assert wait_for("unit", "agent/0").exit_code == 0
    assert end(process) == (0, "")
    assert bench.hooks() == ["agent/0 update_status"]
    assert wait_for("unit", "agent/0").exit_code == 0, "at once"
    none = wait_for("unit", "agent/7")
    assert (none.exit_code, none.stderr[:32]) == (1, "ERROR unit 'agent/7' not found (")


def test_a_hook_that_fails_is_juju_execs_failure_and_not_the_units(bench: Bench):
    (bench.room / "fail-agent-0-update_status").write_text("")
    process = wake_up(bench, "agent/0")
    with bench.engine() as engine:
        engine.settle()
        assert engine.errors() == []
        assert engine.model.units["agent/0"].agent.name == "idle"
    code, printed = end(process)
    assert (code, printed.count("\nRuntimeError: as asked")) == (1, 1)
    assert bench.hooks() == ["agent/0 update_status"], "it is not tried again"


def test_a_reboot_forgets_what_was_asked_for(bench: Bench):
    process = wake_up(bench, "agent/0")
    with bench.engine() as engine:
        with engine.change() as model:
            engine._take_commands(model)
            assert [event.label for event in model.units["agent/0"].events] == ["update-status (juju-exec)"]
        engine.reboot("server/0")
        engine.update_status = False
        engine.settle()
    assert end(process) == (0, "")  # a host would have killed it
    assert "agent/0 start" in bench.hooks()
    assert "agent/0 update_status" not in bench.hooks()


def test_what_a_removed_unit_asked_for_ends_and_its_folder_is_removed(bench: Bench):
    folder = juju_exec.agent(bench.hosts.get("juju-2586ad-0").root, "agent/0")
    assert folder.is_dir()
    with bench.engine() as engine:
        with engine.change() as model:
            rules.remove_applications(model, ["agent"])
        process = wake_up(bench, "agent/0")
        engine.settle()
        engine.settle()
    assert end(process) == (1, 'ERROR unit "agent/0" not found on this machine')
    assert not folder.exists()
    assert "agent/0 update_status" not in bench.hooks()
