"""The charm under Scenario: drivers, resets and MIG layouts as the operator and Juju see them."""

import pathlib
import typing

import ops
import pytest
import yaml
from conftest import COMPUTE, OPTIONS, ROOT
from machine_double import MachineDouble, MigCard
from ops import testing
from slurm_double import Record

import actions
import charm
from maintenance import hold as gpu_hold
from node import slurmd_options

BUS = "0000:1b:00.0"
GRES = "gpu:nvidia_h100_80gb_hbm3:1"


@pytest.fixture(autouse=True)
def machine(paths: pathlib.Path, node: MachineDouble, monkeypatch: pytest.MonkeyPatch) -> MachineDouble:
    """A registered node of Slurm 25.11 with an H100 and branch 535 of the driver."""
    slurmd_options.PATH.write_text(OPTIONS)
    node.install_driver("535", "535.288.01")
    node.slurm.register()
    node.smi.cards = {BUS: MigCard("NVIDIA A100-SXM4-40GB")}
    return node


def state(**config: typing.Any) -> testing.State:
    return testing.State(relations=[COMPUTE], config=config)


def act(
    ctx: testing.Context[charm.SlurmGpuCharm], name: str, config: dict[str, typing.Any] | None = None, **params: object
) -> tuple[dict[str, typing.Any], testing.State]:
    out = ctx.run(ctx.on.action(name, params={"wait": 60} | params), state(**config or {}))
    return ctx.action_results or {}, out


def update(ctx: testing.Context[charm.SlurmGpuCharm], **config: typing.Any) -> testing.State:
    return ctx.run(ctx.on.update_status(), state(**config))


def test_upgrade_driver_with_a_reboot(ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble):
    """The machine is left to the operator to reboot; a second card that is found then is registered, too."""
    update(ctx)
    machine.in_use = True
    results, out = act(ctx, "upgrade-driver", branch="580")
    assert results["result"] == "reboot"
    assert results["detail"].startswith("reboot this machine: driver 580.173.02 is installed")
    blocked = ops.BlockedStatus("slurmd-0 is drained for gpu-driver: reboot this machine")
    assert out.unit_status == update(ctx).unit_status == blocked
    assert "DRAIN" in machine.slurm.state()
    machine.add_card("0000:9d:00.0")
    machine.slurm.devices = 2
    machine.reboot()
    out = ctx.run(ctx.on.start(), state())
    assert isinstance(out.unit_status, ops.ActiveStatus)
    assert machine.slurm.record == Record(f"{GRES[:-1]}2")


@pytest.mark.parametrize("name", actions.ACTIONS)
def test_parameters_are_those_of_charmcraft_yaml(name: str):
    declared = yaml.safe_load((ROOT / "charmcraft.yaml").read_text())["actions"][name]
    params, fields = declared.get("params", {}), actions.ACTIONS[name].parameters.model_fields
    assert {field.alias for field in fields.values()} == set(params)
    for field in fields.values():
        assert field.is_required() == (field.alias in declared.get("required", []))
        assert field.is_required() or field.default == params[str(field.alias)].get("default")


def test_set_mig(ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble, paths: pathlib.Path):
    update(ctx)
    results, _ = act(ctx, "set-mig", gpu=BUS, profiles="3g.20gb x2")
    assert results == {"result": "done", "layout": "3g.20gb, 3g.20gb", "gpus": BUS}
    assert machine.smi.cards[BUS].instances == ["3g.20gb", "3g.20gb"]
    assert gpu_hold.Hold.load() is None
    machine.smi.refuses = {"3g.40gb"}
    with pytest.raises(testing.ActionFailed, match=r"profiles: .*3g\.40gb"):
        act(ctx, "set-mig", gpu=BUS, profiles="3g.40gb")
    assert machine.smi.cards[BUS].instances == ["3g.20gb", "3g.20gb"]
    assert gpu_hold.Hold.load() is None
