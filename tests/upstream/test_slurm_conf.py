"""This project's Slurm settings pass upstream's charms: their configuration, and their files."""

import dataclasses
import pathlib
import types
from typing import Any

import checkout
import pydantic
import pytest
import slurm_charms
from documents import SOURCES, named, settings
from ops import testing
from slurmctld_state import PEER, STATE

from host import Host

DEFAULTS = {
    "cgroup-parameters": "",
    "cluster-name": "",
    "default-partition": "",
    "email-from-name": "",
    "slurm-conf-parameters": "",
}
REFUSED = ("PreemptMode=REQUEUE", "SchedulerParameters=requeue_delay=10", "Foo=1", "prolog")


def configure(module: types.ModuleType, **options: str) -> Any:
    """Return upstream's configuration of slurmctld."""
    values = {name.replace("-", "_"): value for name, value in (DEFAULTS | options).items()}
    return of_options(module)(**values)


def of_options(module: types.ModuleType) -> type[Any]:
    """Return the class that holds a charm's options."""
    return module.ConfigData if checkout.IS_MAIN else module.ConfigManager


@pytest.mark.parametrize("source", SOURCES, ids=named)
def test_upstream_takes_what_our_texts_set(
    source: pathlib.Path, slurmctld_module: types.ModuleType, slurmd_module: types.ModuleType
):
    for option, value in settings(source.read_text()):
        if option == "partition-config":
            of_options(slurmd_module)(
                default_node_state="idle",
                default_node_reason="",
                partition_name="slurmd",
                partition_config=value,
            )
        else:
            name = "slurm-conf-parameters" if option == "code" else option
            configure(slurmctld_module, **{name: value})


@pytest.mark.parametrize("text", REFUSED)
def test_what_our_rules_refuse_upstream_refuses(text: str, slurmctld_module: types.ModuleType):
    assert list(slurm_charms.slurm_conf_problems(text))
    with pytest.raises(pydantic.ValidationError):
        configure(slurmctld_module, **{"slurm-conf-parameters": text})


def test_a_refused_option_is_reported_and_on_24_04_leaves_the_charm_without_observers(
    slurmctld: testing.Context[Any], host: Host
):
    state = dataclasses.replace(
        STATE, relations={PEER}, config={"slurm-conf-parameters": REFUSED[0]}
    )
    event = slurmctld.on.config_changed() if checkout.IS_MAIN else slurmctld.on.start()
    out = slurmctld.run(event, state)
    assert out.unit_status == testing.BlockedStatus(
        "Configuration option(s) 'slurm-conf-parameters' failed validation. See `juju debug-log` for details"
    )
    assert not host.active
    assert not list(host.etc.iterdir())


def test_lines_arrive_in_the_overrides_one_by_one(slurmctld: testing.Context[Any], host: Host):
    text = "HealthCheckProgram=/usr/local/sbin/gpu-health\nHealthCheckInterval=300\n"
    state = dataclasses.replace(STATE, relations={PEER}, config={"slurm-conf-parameters": text})
    slurmctld.run(slurmctld.on.config_changed(), state)
    lines = (host.etc / "slurm.conf.overrides").read_text().lower().splitlines()
    assert {"healthcheckprogram=/usr/local/sbin/gpu-health", "healthcheckinterval=300"} <= set(
        lines
    )


def test_what_daemons_claim_of_shared_machines_is_upstream_s():
    """Which of the charms write the same file, or open the same port, on one machine (tests/bundle/slurm_charms.py)."""
    slurm_ops: Any = __import__("slurm_ops")
    files = {
        "slurmctld": slurm_ops.SlurmctldManager().config.path,
        "slurmrestd": slurm_ops.SlurmrestdManager().config.path,
        "slurmdbd": slurm_ops.SlurmdbdManager().config.path,
    }
    for name, path in files.items():
        assert str(path) in slurm_charms.CLAIMS[name]
    ports = {"slurmctld": 6817, "slurmd": 6818, "sackd": 6818, "slurmdbd": 6819, "slurmrestd": 6820}
    for name, port in ports.items():
        constants = (checkout.charm_folder(name) / "src" / "constants.py").read_text()
        assert f"{name.upper()}_PORT = {port}\n" in constants
        assert f"port {port}" in slurm_charms.CLAIMS[name]
