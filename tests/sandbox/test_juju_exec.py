"""juju-exec of a host: it takes the charms' own words, and a command of the sandbox carries them out."""

import os
import pathlib
import subprocess
import sys
import time

import pytest
import yaml
from folder_hosts import Bench

from sandbox import model as rules
from sandbox.guest import juju_exec as guest
from slurm_ddp import wake

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

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


def agent(root: pathlib.Path, unit: str) -> pathlib.Path:
    """Return the folder of a unit's agent."""
    return root / guest.AGENTS.relative_to("/") / f"unit-{unit.replace('/', '-')}"


@pytest.fixture(autouse=True)
def _on_juju(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake, "JUJU_EXEC", HERE)  # which exists


def wake_up(bench: Bench, unit: str) -> None:
    """Run juju-exec as a charm does."""
    root = bench.hosts.get("juju-2586ad-0").root
    process = start(root, *wake.command(unit, agent(root, unit) / "charm")[-2:])
    requests = root / guest.REQUESTS.relative_to("/")
    deadline = time.monotonic() + 30
    while not list(requests.glob(f"*.{unit.replace('/', '-')}")):
        assert time.monotonic() < deadline
        assert process.poll() is None, end(process)
        time.sleep(0.02)
    process.kill()
    end(process)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    CASES["words_other_than_the_charms_own_are_refused"],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_words_other_than_the_charms_own_are_refused(tmp_path: pathlib.Path, words: list[str], code: int, message: str):
    agents = tmp_path / guest.AGENTS.relative_to("/")
    (agents / "unit-foo-2").mkdir(parents=True)
    got, printed = end(start(tmp_path, *(word.replace("HERE", str(agents)) for word in words)))
    assert (got, printed[: len(message) + 6]) == (code, f"ERROR {message}")
    assert guest.take_requests(tmp_path) == []


def test_a_reboot_forgets_what_was_asked_for(bench: Bench):
    for is_taken in (False, True):
        wake_up(bench, "agent/0")
        with bench.engine() as engine:
            if is_taken:
                with engine.change() as model:
                    engine._take_requests(model)
                    assert [event.label for event in model.units["agent/0"].events] == ["update-status (juju-exec)"]
            engine.reboot("server/0")
            engine.update_status = False
            engine.settle()
    assert "agent/0 start" in bench.hooks()
    assert "agent/0 update_status" not in bench.hooks()


def test_the_folder_of_a_removed_unit_is_removed(bench: Bench):
    folder = agent(bench.hosts.get("juju-2586ad-0").root, "agent/0")
    assert folder.is_dir()
    with bench.engine() as engine:
        with engine.change() as model:
            rules.remove_applications(model, ["agent"])
        wake_up(bench, "agent/0")
        engine.settle()
    assert not folder.exists()
    assert "agent/0 update_status" not in bench.hooks()
