"""Upstream's own code from checkouts; without them the lane fails, in one line."""

import importlib
import pathlib
import shutil
import subprocess
import types
from typing import Any

import checkout
import jsonschema.exceptions
import jsonschema.validators
import pytest
from ops import testing

from host import Host
from scripts import lanes


def pytest_configure(config: pytest.Config) -> None:
    """Let upstream's influxdb import python-dateutil, which warns on Python 3.12."""
    config.addinivalue_line(
        "filterwarnings", "ignore:datetime.datetime.utcfromtimestamp:DeprecationWarning"
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """End the session, as failed, when there is nothing to test with."""
    if found := lanes.missing_checkouts():
        pytest.exit(f"upstream: {found}", returncode=1)
    checkout.install()
    # slurmutils has jsonschema check its own schemas before each look at a value: seconds for each hook.
    model: Any = importlib.import_module("slurmutils.core.base")
    model.validate = _validate


def _validate(instance: Any, schema: dict[str, Any]) -> None:
    """Do what jsonschema.validate does, but for the check of the schema."""
    error = jsonschema.exceptions.best_match(
        jsonschema.validators.validator_for(schema)(schema).iter_errors(instance)
    )
    if error is not None:
        raise error


@pytest.fixture
def host(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """The machine for upstream's charms: nothing on it is this machine's."""
    machine = Host(tmp_path)
    _replace_packages(machine, monkeypatch, tmp_path / "var" / "lib" / "slurm")
    monkeypatch.setattr(
        shutil, "chown", lambda path, user, group: None
    )  # the account slurm does not exist here
    systemd: Any = importlib.import_module("charmed_hpc_libs.ops.machine.systemd")
    monkeypatch.setattr(
        systemd, "shutil", types.SimpleNamespace(which=lambda name: f"/usr/bin/{name}")
    )
    monkeypatch.setattr(subprocess, "run", machine.run)
    return machine


def _replace_packages(machine: Host, monkeypatch: pytest.MonkeyPatch, state: pathlib.Path) -> None:
    """Have upstream's managers find their packages installed, and their files in the test's folders."""
    base: Any = importlib.import_module("slurm_ops.core.base")
    libs: Any = importlib.import_module("charmed_hpc_libs.ops")
    if checkout.IS_MAIN:
        packages: Any = importlib.import_module("charmed_hpc_libs.ops.machine.apt").AptOpsManager
        paths = base.SlurmManager
        monkeypatch.setattr(packages, "is_installed", lambda self: True)
        monkeypatch.setattr(base.SlurmManager, "_apply_overrides", lambda self: None)
        monkeypatch.setattr(
            base,
            "EnvManager",
            lambda file: libs.EnvManager(file=machine.default / pathlib.Path(file).name),
        )
    else:
        packages = paths = base._AptManager
        monkeypatch.setattr(
            packages,
            "env_manager_for",
            lambda self, name: libs.EnvManager(file=machine.default / name),
        )
    monkeypatch.setattr(packages, "install", lambda self, **_: None)
    monkeypatch.setattr(packages, "version", lambda self: "25.11.7-1")
    monkeypatch.setattr(paths, "etc_path", machine.etc)
    monkeypatch.setattr(paths, "var_lib_path", state)


@pytest.fixture(scope="module")
def slurmctld_module() -> types.ModuleType:
    """Upstream's slurmctld charm."""
    return checkout.load("slurmctld")


@pytest.fixture
def slurmctld(host: Host, slurmctld_module: types.ModuleType) -> testing.Context[Any]:
    """Upstream's slurmctld charm on the machine."""
    return checkout.context("slurmctld", slurmctld_module.SlurmctldCharm)


@pytest.fixture(scope="module")
def slurmd_module() -> types.ModuleType:
    """Upstream's slurmd charm."""
    return checkout.load("slurmd")


@pytest.fixture
def slurmd(
    host: Host, slurmd_module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> testing.Context[Any]:
    """Upstream's slurmd charm on the machine, without RDMA packages and without a needed reboot."""
    monkeypatch.setattr(slurmd_module.rdma, "install", lambda: None)
    monkeypatch.setattr(slurmd_module, "reboot_if_required", lambda charm, now=False: None)
    return checkout.context("slurmd", slurmd_module.SlurmdCharm)
