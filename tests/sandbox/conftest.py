"""Fixtures of the sandbox's tests: a model without hosts, and one on hosts that are folders."""

import pathlib
import sys

import pytest
from folder_hosts import Bench
from world import World

STANDINS = pathlib.Path(__file__).resolve().parents[2] / "sandbox" / "standins"
sys.path[:0] = [str(STANDINS / folder) for folder in ("slurmctld/src", "slurmd/src", "")]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def bench(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


@pytest.fixture
def juju4(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The bench on Juju 4."""
    return Bench(tmp_path, monkeypatch, juju="4")
