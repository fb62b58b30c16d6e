"""Set-up and lanes: the lanes of `make test` and `make test-long`, their order and their output."""

import configparser
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import rules

from scripts import lanes

CHARMS = sorted(path.parent.name for path in (rules.ROOT / "charms").glob("*/charmcraft.yaml"))


def expanded(text: str) -> list[str]:
    """Return the names in a list of tox environments, whose last braces hold alternatives."""
    pattern = re.compile(r"([\w{},-]*-)\{([\w,-]*)\}")
    text = pattern.sub(lambda found: " ".join(found[1] + word for word in found[2].split(",")), text)
    return re.sub(r",\s", " ", text).split()


def test_make_test_runs_every_lane_that_tox_lists():
    tox = configparser.ConfigParser()
    tox.read(rules.ROOT / "tox.ini")
    named = expanded(tox["tox"]["env_list"])
    assert sorted(lanes.ALL) == sorted(named)
    assert {f"unit-{charm}" for charm in CHARMS} < set(named)


def test_the_long_sets_are_all_functional_tests_the_pages_the_kernel_mutants_and_orders_of_each_charm():
    orders = {f"orders-{charm}" for charm in CHARMS}
    others = {"functional-jobs-all", "functional-nodes-all", "docs-walk", "kernel", "mutants"}
    assert set(lanes.chosen(["long"])) == others | orders
    workflow = (rules.ROOT / ".github" / "workflows" / "nightly.yaml").read_text()
    assert "make test-long" in workflow
    assert "@$(LANES) long\n" in (rules.ROOT / "Makefile").read_text()


def test_ci_runs_the_command_that_the_readme_names():
    assert (rules.ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec make test </dev/null"
    assert "\nmake test " in (rules.ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], list(lanes.ALL)),
        (["lint", "functional"], [*lanes.FUNCTIONAL, "lint"]),
        (["lib", "unit", "lib"], ["lib", *(lane for lane in lanes.UNIT if lane != "lib")]),
    ],
    ids=str,
)
def test_words_stand_for_lanes_those_that_wait_come_first_and_those_that_run_alone_last(
    words: list[str], expected: list[str]
):
    assert lanes.chosen(words) == expected


FAKE_TOX = """\
#!/bin/sh
echo "collecting"
case $3 in
good) echo "SKIPPED [1] t.py:3: no server here"; echo "===== 3 passed, 1 skipped in 0.10s =====" ;;
bad) echo "the reason"; echo "===== 1 failed in 0.20s ====="; exit 1 ;;
bench) echo "5 tests collected"; echo "===== 5 passed in 0.30s =====" ;;
slow) sleep 1.2; echo "===== 1 passed in 1.20s =====" ;;
*) sleep 1.2; echo "===== $(nice) passed in 1.20s =====" ;;
esac
"""


@pytest.fixture
def screen(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> lanes.Screen:
    tox = tmp_path / "tox"
    tox.write_text(FAKE_TOX)
    tox.chmod(0o755)
    monkeypatch.setattr(lanes, "TOX", tox)
    monkeypatch.setattr(lanes, "LOGS", tmp_path / "logs")
    return lanes.Screen()


def run(screen: lanes.Screen, *names: str) -> list[lanes.Lane]:
    made = [lanes.Lane(name, [], is_live=name in lanes.ALONE) for name in names]
    lanes.run(made, screen)
    return made


def test_a_lane_that_passes_shows_its_skips_and_one_that_fails_everything(
    screen: lanes.Screen, capsys: pytest.CaptureFixture[str]
):
    (good,) = run(screen, "good")
    assert (good.returncode, good.closing) == (0, "===== 3 passed, 1 skipped in 0.10s =====")
    assert re.fullmatch(r"good: passed in \d s\n  SKIPPED \[1\] t.py:3: no server here\n", capsys.readouterr().out)
    (bad,) = run(screen, "bad")
    assert bad.returncode == 1
    shown = capsys.readouterr().out
    assert "collecting\nthe reason\n===== 1 failed in 0.20s =====\n" in shown
    assert re.search(r"bad: FAILED \(exit 1, build/logs/bad.log\) in \d s\n$", shown)


def test_a_lane_that_runs_alone_waits_for_the_others_and_is_shown_as_it_comes(
    screen: lanes.Screen, capsys: pytest.CaptureFixture[str]
):
    slow, alone = run(screen, "slow", "bench")
    assert alone.started >= slow.started + 1
    assert capsys.readouterr().out.splitlines()[-4:-1] == ["bench: started", "collecting", "5 tests collected"]


def test_an_interrupted_run_interrupts_its_lanes_and_waits_for_them(tmp_path: pathlib.Path):
    """Lanes have sessions of their own: without this their tests would go on, and leave hosts and mounts behind."""
    (tmp_path / "tox").write_text(
        "#!/usr/bin/python3\nimport pathlib, sys, time\nif 'list' in sys.argv:\n    print('slow'); sys.exit()\n"
        "try:\n    print('started', flush=True); time.sleep(60)\n"
        f"except KeyboardInterrupt:\n    time.sleep(0.5); pathlib.Path({str(tmp_path)!r}, 'clean').touch()\n"
    )
    (tmp_path / "tox").chmod(0o755)
    program = f"""
import pathlib, sys
sys.path.insert(0, {str(rules.ROOT)!r})
from scripts import lanes
lanes.TOX, lanes.LOGS = pathlib.Path({str(tmp_path / "tox")!r}), pathlib.Path({str(tmp_path / "logs")!r})
lanes.prepare = lambda names: 0
sys.exit(lanes.main(["slow"]))
"""
    running = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    with running.stdout as printed:
        for line in printed:
            if line == "started\n":
                running.terminate()
                break
        assert printed.read().endswith("interrupted\n")
    assert running.wait(20) == 130
    assert (tmp_path / "clean").exists()


def setup(*arguments: str, path: pathlib.Path | None = None) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", str(rules.ROOT / "scripts" / "setup.sh"), *arguments]
    env = {"PATH": str(path) if path else "/usr/sbin:/usr/bin:/sbin:/bin"}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=env)


@pytest.fixture
def bare(tmp_path: pathlib.Path) -> pathlib.Path:
    """A PATH of a machine on which dpkg knows zstd alone, and apt-get prints its arguments."""
    for name, body in {"dpkg-query": "echo 'installed zstd'", "apt-get": 'echo "asked: $*"', "id": "echo 0"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    for tool in ("cat", "cut", "env", "grep", "head", "rm", "sed", "sort", "tee", "chmod", "tr"):
        (tmp_path / tool).symlink_to(shutil.which(tool, path="/usr/bin:/bin") or tool)
    return tmp_path


def test_setup_lists_the_missing_packages_with_their_reasons(bare: pathlib.Path):
    done = setup("--dry-run", "pack", "demo", path=bare)
    assert done.returncode == 0
    assert done.stdout.startswith("setup: installing what is missing:\n  ca-certificates: downloads over HTTPS\n")
    assert "  python3-apt: Charmcraft asks it about packages\n" in done.stdout
    assert "zstd" not in done.stdout
    assert "asked" not in done.stdout
