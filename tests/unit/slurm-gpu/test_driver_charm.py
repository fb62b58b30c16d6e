"""The charm under Scenario: drivers, resets and MIG layouts as the operator and Juju see them."""

import pathlib
import typing

import ops
import pytest
import yaml
from conftest import OPTIONS
from machine_double import MachineDouble, MigCard
from ops import testing
from slurm_double import Record

import actions
import charm
from driver import upgrade as driver_upgrade
from maintenance import hold as gpu_hold
from maintenance import reset as maintenance_reset
from node import slurmd_options

ROOT = pathlib.Path(charm.__file__).resolve().parents[1]
COMPUTE = testing.SubordinateRelation("compute", interface="juju-info", remote_app_name="slurmd")
BUS = "0000:1b:00.0"
GRES = "gpu:nvidia_h100_80gb_hbm3:1"


@pytest.fixture
def ctx() -> testing.Context[charm.SlurmGpuCharm]:
    return testing.Context(charm.SlurmGpuCharm, charm_root=ROOT)


@pytest.fixture(autouse=True)
def reboots(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the units that asked Juju for a reboot."""
    asked: list[str] = []
    monkeypatch.setattr(ops.Unit, "reboot", lambda unit: asked.append(unit.name))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType, reportUnknownMemberType]
    return asked


@pytest.fixture(autouse=True)
def machine(paths: pathlib.Path, node: MachineDouble, monkeypatch: pytest.MonkeyPatch) -> MachineDouble:
    """A registered node of Slurm 25.11 with an H100 and branch 535 of the driver."""
    now = [0.0]
    monkeypatch.setattr(maintenance_reset.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(maintenance_reset.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
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


def test_a_driver_is_kept_by_default(ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble):
    out = update(ctx)
    assert out.unit_status == ops.ActiveStatus(
        f"{GRES} on slurmd-0 (from /proc/driver/nvidia; found by AutoDetect=nvidia)"
    )
    assert machine.log == []
    assert "nvidia-utils-535-server" in machine.held
    assert machine.slurm.record == Record(GRES)
    update(ctx, **{"hold-driver": False})
    assert machine.held == set()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"driver": "581"}, "driver: input should be 'keep', '535', '550', '570', '575', '580', '590' or '595'"),
        ({"kernel-module": "closed"}, "kernel-module: input should be 'auto', 'open' or 'proprietary'"),
        ({"cuda-toolkit": True}, "cuda-toolkit: true contradicts driver=keep, which installs nothing: set a branch"),
        (
            {"fabric-manager": "on"},
            "fabric-manager: on contradicts driver=keep, which installs nothing: set a branch",
        ),
        (
            {"driver-flavour": "desktop"},
            "driver-flavour: input should be 'server'",
        ),
        ({"fabric-manager": "maybe"}, "fabric-manager: input should be 'auto', 'on' or 'off'"),
        ({"driver": "580"}, "driver 535.288.01 is here, but the option is driver=580: run upgrade-driver"),
    ],
)
def test_options_that_need_the_operator(
    ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble, config: dict[str, typing.Any], words: str
):
    assert update(ctx, **config).unit_status == ops.BlockedStatus(words)
    assert machine.log == []


def test_the_option_brings_a_driver_to_a_bare_machine(
    ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble
):
    machine.installed.clear()
    machine.boot()
    machine._show_library()
    machine.slurm.record = Record("")
    assert "1 NVIDIA GPU has no driver: set driver=580" in update(ctx).unit_status.message
    out = update(ctx, driver="580")
    assert machine.loaded == "580.173.02"
    assert out.unit_status == ops.ActiveStatus(
        f"{GRES} on slurmd-0 (from /proc/driver/nvidia; found by AutoDetect=nvidia)"
    )
    assert machine.slurm.record == Record(GRES)
    installs = list(machine.log)
    update(ctx, driver="580")
    assert machine.log == installs


def test_a_driver_that_is_not_available_is_reported(ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble):
    machine.installed.clear()
    machine.boot()
    machine._show_library()
    update(ctx, driver="550")
    message = update(ctx, driver="550").unit_status.message
    assert message.startswith("driver=550: nvidia-headless-no-dkms-550-server-open")


def test_nouveau_is_driven_out_with_a_reboot(
    ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble, reboots: list[str]
):
    machine.installed.clear()
    machine._load(None)
    machine._show_library()
    machine.add_nouveau()
    assert "nouveau has the GPUs" in update(ctx).unit_status.message
    ctx.run(ctx.on.config_changed(), state(driver="580"))
    assert driver_upgrade.Upgrade.load() is not None
    assert reboots == ["slurm-gpu/0"]
    machine.reboot()
    out = ctx.run(ctx.on.start(), state(driver="580"))
    assert isinstance(out.unit_status, ops.ActiveStatus)
    assert machine.slurm.record == Record(GRES)


def test_upgrade_driver(ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble):
    update(ctx)
    results, out = act(ctx, "upgrade-driver", branch="580")
    assert results == {"result": "done", "driver": "580.173.02"}
    assert isinstance(out.unit_status, ops.ActiveStatus)
    assert machine.slurm.record == Record(GRES)
    assert ctx.action_logs[0] == "driver 580.173.02: asks for its turn"
    assert act(ctx, "upgrade-driver", branch="580")[0] == {"result": "up-to-date", "driver": "580.173.02"}


def test_upgrade_driver_repairs_a_mismatch(ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble):
    """As the status says, without parameters: the packages moved on under the running module."""
    machine.loaded = "535.1"
    machine._load("535.1")
    assert update(ctx).unit_status.message.startswith(
        "driver 535.1 runs with the library of 535.288.01: run upgrade-driver"
    )
    results, out = act(ctx, "upgrade-driver")
    assert results == {"result": "done", "driver": "535.288.01"}
    assert isinstance(out.unit_status, ops.ActiveStatus)


def test_upgrade_driver_waits_and_goes_on(ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble):
    update(ctx)
    machine.slurm.jobs = ["7"]
    results, out = act(ctx, "upgrade-driver", branch="580")
    waits = "driver 580.173.02: waits for 1 job on slurmd-0"
    assert results == {"result": "waiting", "driver": "580.173.02", "detail": waits}
    assert out.unit_status == ops.WaitingStatus(waits)
    assert update(ctx).unit_status == ops.WaitingStatus(waits)
    assert machine.log == []
    machine.slurm.end_jobs()
    assert isinstance(update(ctx).unit_status, ops.ActiveStatus)
    assert machine.loaded == "580.173.02"
    assert machine.slurm.record == Record(GRES)


def test_upgrade_driver_with_a_reboot(
    ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble, reboots: list[str]
):
    """juju-reboot is for hooks only: the action says so, and the next hook asks for it."""
    update(ctx)
    machine.in_use = True
    results, out = act(ctx, "upgrade-driver", branch="580")
    assert results["result"] == "reboot"
    assert out.unit_status == ops.WaitingStatus("driver 580.173.02: reboots with the next event")
    assert "DRAIN" in machine.slurm.state()
    assert reboots == []
    update(ctx)
    assert reboots == ["slurm-gpu/0"]
    upgrade = driver_upgrade.Upgrade.load()
    assert upgrade is not None
    assert upgrade.reboots == 1
    machine.reboot()
    out = ctx.run(ctx.on.start(), state())
    assert isinstance(out.unit_status, ops.ActiveStatus)
    assert machine.slurm.record == Record(GRES)


def test_upgrade_driver_refuses(ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble):
    update(ctx)
    machine.slurm.log.clear()
    cases: list[tuple[dict[str, typing.Any], str]] = [
        ({"branch": "12"}, "branch: input should be '535', '550'"),
        ({"branch": "580", "version": "latest"}, "version: 'latest' is not a driver version such as 580.173.02"),
        ({"branch": "580", "version": "1.2"}, "version: '1.2' is not a driver version"),
        ({"branch": "580", "drain-timeout": -1}, "drain-timeout: input should be greater than or equal to 0"),
        ({"branch": "580", "wait": 9999}, "wait: input should be less than or equal to 3600"),
        ({"cancel": True}, "no upgrade is under way"),
    ]
    for params, words in cases:
        with pytest.raises(testing.ActionFailed) as caught:
            act(ctx, "upgrade-driver", **params)
        assert caught.value.message.startswith(words)
    assert (machine.log, machine.slurm.log) == ([], [])


def test_upgrade_driver_tells_what_failed(
    ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble, monkeypatch: pytest.MonkeyPatch
):
    update(ctx)
    real = machine.module_version
    monkeypatch.setattr(machine, "module_version", lambda kernel: None if machine.log else real(kernel))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(testing.ActionFailed) as caught:
        act(ctx, "upgrade-driver", branch="580")
    assert "no reboot: kernel 6.8.0-134-generic, which boots next, has no nvidia module" in caught.value.message
    assert isinstance(update(ctx).unit_status, ops.BlockedStatus)
    assert "DRAIN" in machine.slurm.state()
    results, _ = act(ctx, "upgrade-driver", cancel=True)
    assert results["result"] == "cancelled"
    assert machine.slurm.record is not None
    assert machine.slurm.record.reason.startswith("slurm-gpu: driver 535.288.01 runs with the library of 580.173.02")


@pytest.mark.parametrize("name", actions.ACTIONS)
def test_parameters_are_those_of_charmcraft_yaml(name: str):
    declared = yaml.safe_load((ROOT / "charmcraft.yaml").read_text())["actions"][name]
    params, fields = declared.get("params", {}), actions.ACTIONS[name].parameters.model_fields
    assert {field.alias for field in fields.values()} == set(params)
    for field in fields.values():
        assert field.is_required() == (field.alias in declared.get("required", []))
        assert field.is_required() or field.default == params[str(field.alias)].get("default")


def test_reset_gpu(ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble, paths: pathlib.Path):
    update(ctx)
    (paths / "usr/bin/nvidia-smi").touch()
    results, out = act(ctx, "reset-gpu", gpu=BUS)
    assert results == {"result": "reset", "gpus": BUS}
    assert machine.slurm.record == Record(GRES)
    assert isinstance(out.unit_status, ops.ActiveStatus)
    with pytest.raises(testing.ActionFailed, match=r"no card at 0000:ff:00\.0"):
        act(ctx, "reset-gpu", gpu="0000:ff:00.0")
    machine.smi.broken = "in use"
    with pytest.raises(testing.ActionFailed, match="could not be reset"):
        act(ctx, "reset-gpu", gpu=BUS)
    assert machine.slurm.record == Record(GRES)


def test_set_mig(ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble, paths: pathlib.Path):
    update(ctx)
    (paths / "usr/bin/nvidia-smi").touch()
    results, _ = act(ctx, "set-mig", gpu=BUS, profiles="3g.20gb x2")
    assert results == {"result": "done", "layout": "3g.20gb, 3g.20gb", "gpus": BUS}
    assert machine.smi.cards[BUS].instances == ["3g.20gb", "3g.20gb"]
    assert gpu_hold.Hold.load() is None
    with pytest.raises(testing.ActionFailed, match=r"profiles: NVIDIA A100-SXM4-40GB has no 3g\.40gb"):
        act(ctx, "set-mig", gpu=BUS, profiles="3g.40gb")


def test_a_node_that_cannot_register_stays_held(
    ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble, paths: pathlib.Path
):
    update(ctx)
    (paths / "usr/bin/nvidia-smi").touch()
    machine.slurm.slurmd_active = False
    machine.slurm.registers = False
    results, _ = act(ctx, "reset-gpu", gpu=BUS)
    assert results["result"] == "reset"


@pytest.mark.parametrize("name", ["upgrade-driver", "reset-gpu", "set-mig"])
def test_the_controller_has_no_cards(ctx: testing.Context[charm.SlurmGpuCharm], name: str):
    relation = testing.SubordinateRelation("controller", interface="juju-info", remote_app_name="slurmctld")
    params = {"upgrade-driver": {}, "reset-gpu": {"gpu": BUS}, "set-mig": {"gpu": BUS, "profiles": "off"}}[name]
    with pytest.raises(testing.ActionFailed, match="run it on a unit that is integrated with slurmd"):
        ctx.run(ctx.on.action(name, params=params), testing.State(relations=[relation]))


def test_a_removed_charm_leaves_the_driver(ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble):
    update(ctx)
    assert machine.held
    ctx.run(ctx.on.remove(), state())
    assert machine.held == set()
    assert machine.loaded == "535.288.01"


@pytest.fixture
def orders(machine: MachineDouble, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what changes the machine or Slurm, in its order; nothing is stopped under a job."""
    ordered: list[str] = []
    real = machine._answer

    def answer(command: str, words: list[str]) -> object:
        if words[0] in {"/usr/sbin/rmmod", "/usr/sbin/modprobe"} or words[1:2] in (["stop"], ["restart"]):
            assert machine.slurm.jobs == [], f"{command} under a job"
            ordered.append(" ".join(pathlib.Path(word).name for word in words))
        return real(command, words)

    monkeypatch.setattr(machine, "_answer", answer)
    machine.log = machine.slurm.log = ordered
    return ordered


def test_an_upgrade_from_the_action_to_the_first_job_behind_the_reboot(
    ctx: testing.Context[charm.SlurmGpuCharm],
    machine: MachineDouble,
    reboots: list[str],
    orders: list[str],
    paths: pathlib.Path,
):
    """All of it in one row: every order to the machine and to Slurm, in its order, and nothing besides.

    A job runs and another waits; the old module cannot be unloaded; behind the reboot there is one card more, so the
    node is registered anew before it is given back.
    """
    slurm = machine.slurm
    update(ctx)
    (paths / "usr/bin").mkdir(parents=True, exist_ok=True)
    (paths / "usr/bin/nvidia-persistenced").touch()
    update(ctx)  # which keeps the cards awake
    assert "nvidia-persistenced.service" in machine.active
    machine.in_use = True
    slurm.jobs, slurm.waiting = ["7"], ["8"]
    orders.clear()
    results, out = act(ctx, "upgrade-driver", branch="580")
    waits = "driver 580.173.02: waits for 1 job on slurmd-0"
    assert (results["result"], out.unit_status) == ("waiting", ops.WaitingStatus(waits))
    drained = "/usr/bin/scontrol update nodename=slurmd-0 state=drain 'reason=gpu-driver: driver 580.173.02'"
    reserved = "reservationname=slurm-gpu-slurmd-0"
    assert orders == [
        drained,
        f"/usr/bin/scontrol update {reserved} endtime=now+3600",  # there is none yet
        f"/usr/bin/scontrol create reservation {reserved} nodes=slurmd-0 users=root starttime=now endtime=now+3600 "
        "flags=maint,ignore_jobs",
    ]
    orders.clear()
    assert update(ctx).unit_status == ops.WaitingStatus(waits)
    assert (orders, slurm.jobs, slurm.waiting) == ([], ["7"], ["8"])

    slurm.end_jobs()
    orders.clear()
    out = update(ctx)
    assert reboots == ["slurm-gpu/0"]
    assert out.unit_status == ops.WaitingStatus("driver 580.173.02: reboots with the next event")
    assert orders[:2] == ["systemctl stop gpu-health.timer", "systemctl stop nvidia-persistenced.service"]
    assert orders[2].startswith("install ")
    assert "nvidia-kernel-common-580-server=580.173.02" in orders[2]
    assert orders[3:] == ["rmmod nvidia_uvm"]
    assert (machine.loaded, machine.library_version()) == ("535.288.01", "580.173.02")
    assert (slurm.jobs, slurm.waiting) == ([], ["8"])
    assert slurm.record == Record(GRES, flags={"DYNAMIC_NORM", "DRAIN"}, reason="gpu-driver: driver 580.173.02")

    orders.clear()
    machine.add_card("0000:9d:00.0")
    slurm.devices = 2
    machine.reboot()
    assert machine.loaded == "580.173.02"
    out = ctx.run(ctx.on.start(), state())
    two = f"{GRES[:-1]}2"
    assert out.unit_status == ops.ActiveStatus(
        f"{two} on slurmd-0 (from /proc/driver/nvidia; found by AutoDetect=nvidia)"
    )
    held = drained.removeprefix("/usr/bin/")
    assert [order.removeprefix("/usr/bin/") for order in orders if order != "daemon-reload"] == [
        "reboot",
        "systemctl restart nvidia-persistenced.service",
        f"scontrol delete {reserved}",  # or Slurm would not delete the node
        "scontrol delete nodename=slurmd-0",
        "systemctl restart slurmd.service",
        "restart slurmd.service",  # which registers drained: the waiting job waits on
        "scontrol update nodename=slurmd-0 state=down 'reason=gpu-driver: driver 580.173.02'",
        held,
        f"scontrol delete {reserved}",
        "scontrol update nodename=slurmd-0 state=resume",
    ]
    assert (slurm.record, slurm.jobs, slurm.ended) == (Record(two), ["8"], [])
    assert driver_upgrade.Upgrade.load() is None
    assert gpu_hold.Hold.load() is None
    orders.clear()
    assert update(ctx).unit_status == out.unit_status
    assert orders == []
