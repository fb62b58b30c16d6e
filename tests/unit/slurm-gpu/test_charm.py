"""The charm under Scenario: both roles, each event, each status, and what crosses between them."""

import dataclasses
import json
import pathlib
import typing

import ops
import pytest
import yaml
from conftest import COMPUTE, CONTROLLER, OPTIONS, ROOT, WITH_GPU
from machine_double import MachineDouble
from ops import testing
from slurm_double import Record, SlurmDouble

import actions
import charm
from controller import gres_lines
from gpu import gres_conf
from node import compute, kept, slurmd_options, slurmd_unit
from slurm_ddp.interfaces.slurm_gres import NodeGres
from slurm_ddp.slurm import nodes

ACTIVE = ops.ActiveStatus(
    "gpu:mock_gpu:1 on slurmd-0 (from /proc/driver/nvidia; lines in the controller's gres.conf)"
)
BY_DETECTION = ops.ActiveStatus(
    "gpu:mock_gpu:1 on slurmd-0 (from /proc/driver/nvidia; found by AutoDetect=nvidia)"
)
AWAITS = ops.WaitingStatus("waiting for slurm-gpu on slurmctld to hand out this node's lines")
LIFECYCLE = [
    "install",
    "start",
    "config_changed",
    "upgrade_charm",
    "leader_elected",
    "update_status",
]
CREATED = ["created", "joined", "changed"]


@pytest.fixture
def controller() -> testing.Context[charm.SlurmGpuCharm]:
    return testing.Context(charm.SlurmGpuCharm, charm_root=ROOT, app_name="slurm-gpu-controller")


def node_gres(answer: dict[str, typing.Any] | None = None) -> testing.Relation:
    data = {key: json.dumps(value) for key, value in (answer or {}).items()}
    return testing.Relation(
        "node-gres", remote_app_name="slurm-gpu-controller", remote_app_data=data
    )


def gres(
    *shared: NodeGres | dict[str, str], app: str = "slurm-gpu", local: dict[str, str] | None = None
) -> testing.Relation:
    units = {
        number: one
        if isinstance(one, dict)
        else {key: json.dumps(value) for key, value in one.model_dump().items()}
        for number, one in enumerate(shared)
    }
    return testing.Relation(
        "gres", remote_app_name=app, remote_units_data=units, local_app_data=local or {}
    )


def says(number: int, *, awaits: bool = True) -> NodeGres:
    line = "Name=gpu Type=mock_gpu File=/dev/nvidia0 Flags=nvidia_gpu_env"
    return NodeGres(node=f"slurmd-{number}", gres="gpu:mock_gpu:1", lines=(line,), awaits=awaits)


def shared(out: testing.State, relation: testing.Relation) -> dict[str, typing.Any]:
    """Read this unit's own databag, without what Juju wrote."""
    data = out.get_relation(relation.id).local_unit_data
    return {key: json.loads(value) for key, value in data.items() if key in NodeGres.model_fields}


def run_compute(
    ctx: testing.Context[charm.SlurmGpuCharm],
    event: str,
    relation: testing.Relation,
    **state: typing.Any,
) -> testing.State:
    endpoint, _, kind = event.partition(":")
    target = {"compute": COMPUTE, "node-gres": relation}.get(endpoint)
    happened = getattr(ctx.on, f"relation_{kind}")(target) if target else getattr(ctx.on, event)()
    return ctx.run(happened, testing.State(relations=[COMPUTE, relation], **state))


def applied(mock_gpu: pathlib.Path) -> dict[str, typing.Any]:
    line = f"Name=gpu Type=mock_gpu File={mock_gpu} Flags=nvidia_gpu_env"
    return {"autodetect": "off", "applied": [NodeGres(node="slurmd-0", lines=(line,)).digest]}


@pytest.fixture
def configured(slurm: SlurmDouble) -> SlurmDouble:
    gres_lines.SLURM_CONF.write_text("ClusterName=x\n")
    return slurm


@pytest.mark.parametrize(
    "event",
    [
        *LIFECYCLE,
        *(f"compute:{kind}" for kind in CREATED),
        *(f"node-gres:{kind}" for kind in CREATED),
    ],
)
def test_a_compute_node_reaches_the_same_state_on_every_event(
    ctx: testing.Context[charm.SlurmGpuCharm],
    registered: SlurmDouble,
    mock_gpu: pathlib.Path,
    event: str,
):
    relation = node_gres(applied(mock_gpu))
    out = run_compute(ctx, event, relation)
    assert out.unit_status == ACTIVE
    assert shared(out, relation) == {
        "node": "slurmd-0",
        "gres": "gpu:mock_gpu:1",
        "lines": [f"Name=gpu Type=mock_gpu File={mock_gpu} Flags=nvidia_gpu_env"],
        "awaits": True,
    }
    assert registered.record == Record("gpu:mock_gpu:1")
    assert slurmd_options.PATH.read_text() == WITH_GPU
    registered.log.clear()
    again = run_compute(ctx, event, out.get_relation(relation.id))  # pyright: ignore[reportArgumentType]
    assert set(registered.log) <= {"daemon-reload"}  # a unit that waits has something that wakes it
    assert shared(again, relation) == shared(out, relation)
    assert again.unit_status == ACTIVE


def leave(ctx: testing.Context[charm.SlurmGpuCharm], event: str) -> testing.State:
    happened = {
        "broken": ctx.on.relation_broken(COMPUTE),
        "stop": ctx.on.stop(),
        "remove": ctx.on.remove(),
    }
    return ctx.run(happened[event], testing.State(relations=[COMPUTE] if event != "remove" else []))


@pytest.mark.parametrize("event", ["broken", "stop", "remove"])
def test_any_last_hook_hands_the_machine_back(
    ctx: testing.Context[charm.SlurmGpuCharm],
    registered: SlurmDouble,
    mock_gpu: pathlib.Path,
    event: str,
):
    """Juju 4 deletes a unit after relation-broken: no stop, no remove, and status-set fails."""
    slurmd_unit.PUSHED.write_text("AutoDetect=off\n")
    run_compute(ctx, "start", node_gres(applied(mock_gpu)))
    assert registered.record == Record("gpu:mock_gpu:1")
    out = leave(ctx, event)
    assert registered.record == Record("")
    assert slurmd_options.PATH.read_text() == OPTIONS
    assert out.unit_status == testing.UnknownStatus(), "no status is set"
    registered.log.clear()
    for later in (ctx.on.stop(), ctx.on.remove()):
        assert ctx.run(later, testing.State()).unit_status == testing.UnknownStatus()
    assert set(registered.log) <= {"daemon-reload"}  # a unit that waits has something that wakes it


@pytest.mark.parametrize("event", ["broken", "stop", "remove"])
def test_the_unit_ends_its_holds_first_so_that_upstream_can_delete_the_node(
    ctx: testing.Context[charm.SlurmGpuCharm],
    registered: SlurmDouble,
    mock_gpu: pathlib.Path,
    event: str,
):
    """Upstream's slurmd deletes its disconnected node, and stays Blocked during a reservation."""
    run_compute(ctx, "start", node_gres(applied(mock_gpu)))
    reason = "gpu-health: Xid 79: fell off the bus"
    nodes.drain("slurmd-0", reason)
    kept.hold("gpu-health", "slurmd-0", reason)
    delete = ("/usr/bin/scontrol", "delete", "nodename=slurmd-0")
    assert "are busy" in registered.run(*delete, check=False).stderr
    registered.log.clear()
    leave(ctx, event)
    orders = [order for order in registered.log if "scontrol" in order]
    assert orders[0] == "/usr/bin/scontrol delete reservationname=slurm-gpu-slurmd-0"
    assert "DRAIN" in registered.state(), "nobody looked at the card"
    registered.run(*delete)
    assert registered.record is None


@pytest.mark.parametrize("kind", ["departed", "broken"])
@pytest.mark.parametrize("endpoint", ["node-gres", "gres", "compute", "controller"])
def test_a_unit_that_lost_its_role_before_sets_no_status(
    ctx: testing.Context[charm.SlurmGpuCharm],
    slurm: SlurmDouble,
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
    kind: str,
):
    """Juju may delete the unit during its last hook.

    Subordinates see other principals' relations.
    """
    monkeypatch.setenv("JUJU_PRINCIPAL_UNIT", "slurmd/0" if endpoint != "gres" else "slurmctld/0")
    other = testing.SubordinateRelation(
        endpoint, interface="juju-info", remote_app_name="elsewhere", remote_unit_id=3
    )
    relation = {"node-gres": node_gres(), "gres": gres(says(0))}.get(endpoint, other)
    out = ctx.run(
        getattr(ctx.on, f"relation_{kind}")(relation),
        testing.State(leader=True, relations=[relation]),
    )
    assert out.unit_status == testing.UnknownStatus()


@pytest.mark.parametrize("kind", ["created", "joined", "changed", "departed", "broken"])
@pytest.mark.parametrize("endpoint", ["controller", "compute"])
def test_relations_of_another_machines_principal_are_ignored(
    ctx: testing.Context[charm.SlurmGpuCharm],
    registered: SlurmDouble,
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
    kind: str,
):
    """Juju 4 sends a subordinate such events, and shows the relation to every hook."""
    monkeypatch.setenv("JUJU_PRINCIPAL_UNIT", "slurmd/0")
    relation = node_gres({"autodetect": "nvidia", "applied": []})
    run_compute(ctx, "start", relation)
    registered.log.clear()
    other = testing.SubordinateRelation(endpoint, remote_app_name="elsewhere", remote_unit_id=3)
    state = testing.State(leader=True, relations=[COMPUTE, relation, other])
    out = ctx.run(getattr(ctx.on, f"relation_{kind}")(other), state)
    assert out.unit_status == BY_DETECTION
    assert registered.record == Record("gpu:mock_gpu:1")
    assert set(registered.log) <= {"daemon-reload"}  # a unit that waits has something that wakes it
    assert not gres_conf.PATH.exists()
    assert compute.OWNER.exists()


def test_a_unit_without_a_role(ctx: testing.Context[charm.SlurmGpuCharm], slurm: SlurmDouble):
    out = ctx.run(ctx.on.install(), testing.State())
    assert out.unit_status == ops.BlockedStatus(
        "integrate compute with slurmd:juju-info or controller with slurmctld:juju-info"
    )
    assert slurm.log == []


@pytest.mark.parametrize("event", [*LIFECYCLE, *(f"relation_{kind}" for kind in CREATED)])
def test_the_controller_reaches_the_same_state_on_every_event(
    controller: testing.Context[charm.SlurmGpuCharm], configured: SlurmDouble, event: str
):
    relation = gres(says(0), says(1, awaits=False))
    arguments: list[typing.Any] = [relation] if event.startswith("relation") else []
    state = testing.State(leader=True, relations=[CONTROLLER, relation])
    out = controller.run(getattr(controller.on, event)(*arguments), state)
    assert out.unit_status == ops.ActiveStatus("gres.conf has lines of 2 GPUs on 2 nodes")
    answer = {"autodetect": '"off"', "applied": json.dumps([says(0).digest])}
    assert out.get_relation(relation.id).local_app_data == answer
    text = gres_conf.PATH.read_text()
    assert text.count("NodeName=") == 2
    assert configured.reconfigured == 1
    arguments = [out.get_relation(relation.id)] if arguments else []
    again = controller.run(getattr(controller.on, event)(*arguments), out)
    assert again.unit_status == out.unit_status
    assert again.get_relation(relation.id).local_app_data == answer
    assert (gres_conf.PATH.read_text(), configured.reconfigured) == (text, 1)


def test_only_the_leader_writes(
    controller: testing.Context[charm.SlurmGpuCharm], configured: SlurmDouble
):
    relation = gres(says(0))
    state = testing.State(leader=False, relations=[CONTROLLER, relation])
    out = controller.run(controller.on.relation_changed(relation, remote_unit=0), state)
    assert out.unit_status == ops.ActiveStatus("standby: the leader keeps gres.conf")
    assert not gres_conf.PATH.exists()


def test_the_lines_of_a_node_that_slurm_still_has_stay(
    controller: testing.Context[charm.SlurmGpuCharm], configured: SlurmDouble
):
    """The unit was removed, but not its node: upstream leaves it, or Juju cut the unit short.

    Without the lines slurmd's next start would be refused.
    """
    configured.register = lambda: None  # pyright: ignore[reportAttributeAccessIssue] - another machine's
    configured.record = Record("gpu:mock_gpu:1")
    relation = gres(says(0), says(1))
    state = testing.State(leader=True, relations=[CONTROLLER, relation])
    controller.run(controller.on.relation_changed(relation, remote_unit=0), state)
    text = gres_conf.PATH.read_text()
    reconfigured, configured.maintained = configured.reconfigured, ["slurm-gpu-slurmd-0"]
    controller.run(
        controller.on.relation_departed(relation, remote_unit=0, departing_unit=0), state
    )
    assert configured.maintained == [], (
        "latest/edge's slurmctld deletes the node, which Slurm refuses in a reservation"
    )
    left = gres(says(1))
    gone = testing.State(
        leader=True,
        relations=[
            CONTROLLER,
            dataclasses.replace(left, remote_units_data={1: left.remote_units_data[0]}),
        ],
    )
    for _ in range(2):
        out = controller.run(controller.on.update_status(), gone)
        assert out.unit_status == ops.ActiveStatus("gres.conf has lines of 2 GPUs on 2 nodes")
    assert "# slurm-gpu/0 slurmd-0 " in gres_conf.PATH.read_text()
    rows = [row for row in text.splitlines() if row.startswith("NodeName=")]
    assert [
        row for row in gres_conf.PATH.read_text().splitlines() if row.startswith("NodeName=")
    ] == rows
    assert configured.reconfigured == reconfigured, "slurmctld has nothing new to read"
    controller.run(controller.on.remove(), testing.State(planned_units=0))
    assert "NodeName=slurmd-0 " in gres_conf.PATH.read_text(), "the role leaves it, too"
    controller.run(controller.on.update_status(), gone)
    configured.record = Record(
        "", flags={"DYNAMIC_NORM", "NOT_RESPONDING"}
    )  # registered without GPUs
    out = controller.run(controller.on.update_status(), gone)
    assert "NodeName=slurmd-0" not in gres_conf.PATH.read_text()
    typed = "if slurmd-0, which is silent, was removed: scontrol delete nodename=slurmd-0"
    assert out.unit_status == ops.ActiveStatus(f"gres.conf has lines of 1 GPU on 1 node; {typed}")
    configured.record = None
    controller.run(controller.on.update_status(), gone)
    assert "slurmd-0" not in gres_conf.PATH.read_text()


def test_show_gres_on_the_controller_counts_nodes_and_devices(
    controller: testing.Context[charm.SlurmGpuCharm], configured: SlurmDouble
):
    relation = gres(says(0))
    state = testing.State(leader=True, relations=[CONTROLLER, relation])
    controller.run(controller.on.update_status(), state)
    controller.run(controller.on.action("show-gres"), state)
    assert controller.action_results == {
        "nodes": "1",
        "gpus": "1",
        "live": "true",
        "autodetect": "off",
        "gres-conf": gres_conf.PATH.read_text(),
    }


def test_upgrade_driver_blocks_until_the_reboot_that_loads_it(
    ctx: testing.Context[charm.SlurmGpuCharm], node: MachineDouble
):
    """The operator reboots the machine; a second card found then is registered, too."""
    slurmd_options.PATH.write_text(OPTIONS)
    node.install_driver("535", "535.288.01")
    node.slurm.register()
    state = testing.State(relations=[COMPUTE])
    ctx.run(ctx.on.update_status(), state)
    node.in_use = True
    out = ctx.run(ctx.on.action("upgrade-driver", params={"branch": 580}), state)
    results = ctx.action_results or {}
    assert results["result"] == "reboot"
    assert results["detail"].startswith("reboot this machine: driver 580.173.02 is installed")
    blocked = ops.BlockedStatus("slurmd-0 is drained for gpu-driver: reboot this machine")
    assert out.unit_status == ctx.run(ctx.on.update_status(), state).unit_status == blocked
    assert "DRAIN" in node.slurm.state()
    node.add_card("0000:9d:00.0")
    node.slurm.devices = 2
    node.reboot()
    assert isinstance(ctx.run(ctx.on.start(), state).unit_status, ops.ActiveStatus)
    assert node.slurm.record == Record("gpu:nvidia_h100_80gb_hbm3:2")


@pytest.mark.parametrize("name", actions.ACTIONS)
def test_parameters_are_those_of_charmcraft_yaml(name: str):
    declared = yaml.safe_load((ROOT / "charmcraft.yaml").read_text())["actions"][name]
    params, fields = declared.get("params", {}), actions.ACTIONS[name].parameters.model_fields
    assert {field.alias for field in fields.values()} == set(params)
    for field in fields.values():
        assert field.is_required() == (field.alias in declared.get("required", []))
        assert field.is_required() or field.default == params[str(field.alias)].get("default")
