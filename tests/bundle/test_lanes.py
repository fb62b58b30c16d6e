"""Set-up and lanes: the lanes of `make test` and `make test-long`, their order and their output."""

import configparser
import os
import pathlib
import re
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


def test_the_long_sets_are_all_functional_tests_what_is_marked_long_the_pages_the_kernel_mutants_and_orders():
    orders = {f"orders-{charm}" for charm in CHARMS}
    others = {"functional-jobs-all", "functional-nodes-all", "docs-walk", "kernel", "mutants", "tracking"}
    others |= {"ddp-long", "payload-long", "pack"}
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
        (["lint", "functional", "bench"], ["bench", *lanes.FUNCTIONAL, "lint"]),
        (["lib", "unit", "lib"], ["lib", *(lane for lane in lanes.UNIT if lane != "lib")]),
    ],
    ids=str,
)
def test_words_stand_for_lanes_those_that_run_alone_come_first_then_those_that_wait(
    words: list[str], expected: list[str]
):
    assert lanes.chosen(words) == expected


def test_lanes_that_wait_run_beside_the_others_and_those_that_measure_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    tox = str(lanes.TOX)
    assert lanes.commands(["lib"], ["-k", "x"]) == [[[tox, "run", "-e", "lib", "--", "-k", "x"]]]
    parallel = [tox, "run-parallel", "--parallel-no-spinner", "-p"]
    both = [[*parallel, "all", "-e", "functional-jobs"], ["nice", "-n", "10", *parallel, "2", "-e", "lib,ddp"]]
    assert lanes.commands(["functional-jobs", "lib", "ddp", "bench"], []) == [[[tox, "run", "-e", "bench"]], both]


@pytest.mark.parametrize(("codes", "expected"), [([[0, 0]], 0), ([[0, 3], [0]], 3), ([[0], [4]], 4)])
def test_a_lane_that_fails_fails_the_run(codes: list[list[int]], expected: int):
    assert lanes.run([[["sh", "-c", f"exit {code}"] for code in step] for step in codes]) == expected


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
lanes.TOX = pathlib.Path({str(tmp_path / "tox")!r})
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


@pytest.mark.parametrize("there", [0, 1, 3])
def test_upstream_names_its_missing_checkouts_before_it_installs_anything(
    there: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    names = ["slurm-charms", "filesystem-charms", "opentelemetry-collector-operator"]
    for name in names[:there]:
        (tmp_path / name / ".git").mkdir(parents=True)
    monkeypatch.setenv("SLURM_DDP_UPSTREAM", str(tmp_path) if there else "")
    monkeypatch.setattr(lanes, "prepare", lambda _: pytest.fail("installs"))
    monkeypatch.setenv("PATH", str(tmp_path))  # without a Python
    assert lanes.main(["upstream"]) == 1
    text = capsys.readouterr().err
    assert [f"git -C {name} checkout " in text for name in names] == [number >= there for number in range(3)]
    assert text.count("\n") == 1
    assert ("Python 3.12 is missing" in text) == (there == 3)
