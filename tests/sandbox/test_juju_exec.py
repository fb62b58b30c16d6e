"""juju-exec of a host: it takes the charms' own words, and a command of the sandbox carries them out."""

import pathlib
import sys
import threading
import time

import pytest
import yaml
from folder_hosts import Bench

from sandbox import model as rules
from sandbox.guest import juju_exec
from slurm_ddp import wake

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())
HOST = "juju-2586ad-0"


def play(monkeypatch: pytest.MonkeyPatch, root: pathlib.Path, *words: str) -> None:
    """Run juju_exec.main with these words, as on the host with this root folder."""
    monkeypatch.setattr(juju_exec, "AGENTS", agents(root))
    monkeypatch.setattr(juju_exec, "REQUESTS", root / "var/lib/sandbox/juju-exec")
    monkeypatch.setattr(sys, "argv", ["juju-exec", *words])


def agents(root: pathlib.Path) -> pathlib.Path:
    return root / "var/lib/juju/agents"


def wake_up(bench: Bench, unit: str) -> None:
    """Run juju-exec as a charm does, until there is a request."""
    root = bench.hosts.get(HOST).root
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(wake, "JUJU_EXEC", root)  # which exists
        words = wake.command(unit, agents(root) / f"unit-{unit.replace('/', '-')}" / "charm")
        play(monkeypatch, root, *words[-2:])
        thread = threading.Thread(target=juju_exec.main, daemon=True)
        thread.start()
        deadline = time.monotonic() + 30
        while not list(juju_exec.REQUESTS.glob("*")):
            assert time.monotonic() < deadline
            assert thread.is_alive()
            time.sleep(0.02)


@pytest.mark.parametrize("case", CASES["words_other_than_the_charms_own_are_refused"])
def test_words_other_than_the_charms_own_are_refused(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: tuple[list[str], int, str],
):
    words, code, message = case
    (agents(tmp_path) / "unit-foo-2").mkdir(parents=True)
    play(monkeypatch, tmp_path, *(word.replace("HERE", str(agents(tmp_path))) for word in words))
    result = juju_exec.main()  # what sys.exit takes: a status, or a text to print and 1
    printed, status = (result, 1) if isinstance(result, str) else (capsys.readouterr().err, result)
    assert (status, printed[: len(message) + 6]) == (code, f"ERROR {message}")
    assert not juju_exec.REQUESTS.exists()


def test_a_reboot_forgets_what_was_asked_for(bench: Bench):
    for is_taken in (False, True):
        wake_up(bench, "agent/0")
        with bench.engine() as engine:
            if is_taken:
                with engine.change() as model:
                    engine.take_requests(model)
                    assert [event.label for event in model.units["agent/0"].events] == [
                        "update-status (juju-exec)"
                    ]
            engine.reboot("server/0")
            engine.settle()
    assert "agent/0 start" in bench.hooks()
    assert "agent/0 update_status" not in bench.hooks()


def test_the_folder_of_a_removed_unit_is_removed(bench: Bench):
    folder = agents(bench.hosts.get(HOST).root) / "unit-agent-0"
    assert folder.is_dir()
    with bench.engine() as engine:
        with engine.change() as model:
            rules.remove_applications(model, ["agent"])
        wake_up(bench, "agent/0")
        engine.settle()
    assert not folder.exists()
    assert "agent/0 update_status" not in bench.hooks()
