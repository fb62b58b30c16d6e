"""What the tests of the sandbox share: a model without hosts, and one on hosts that are folders."""

import pathlib

import pytest
from folder_hosts import Bench
from world import World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def bench(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)
