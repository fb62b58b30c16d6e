"""Any wrong input is refused in one line that begins with its name, and nothing changes."""

import itertools
import json
import pathlib
import typing

import ops
import pytest
from conftest import COMPUTE, CONTROLLER, OPTIONS
from machine_double import MachineDouble, MigCard
from ops import testing
from slurm_double import Record

import charm
from node import health_timer, slurmd_options

BUS = "0000:1b:00.0"
GRES = "gpu:nvidia_h100_80gb_hbm3:1"
TEXTS = (
    *json.loads(pathlib.Path(__file__).with_name("hostile.json").read_text()),
    "A" * 10_000,
    "1g.5gb," * 2000,
)


@pytest.fixture(autouse=True)
def machine(
    paths: pathlib.Path, node: MachineDouble, monkeypatch: pytest.MonkeyPatch
) -> MachineDouble:
    """A registered node of Slurm 25.11 with an A100, driver, nvidia-smi and health check."""
    monkeypatch.setattr(health_timer, "check", lambda *_, **__: {"result": "ok"})  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    slurmd_options.PATH.write_text(OPTIONS)
    node.install_driver("535", "535.288.01")
    node.slurm.register()
    node.smi.cards = {BUS: MigCard("NVIDIA A100-SXM4-40GB")}
    (paths / "usr/bin").mkdir(parents=True, exist_ok=True)
    (paths / "usr/bin/nvidia-smi").touch()
    return node


@pytest.fixture
def settled(ctx: testing.Context[charm.SlurmGpuCharm], machine: MachineDouble) -> MachineDouble:
    for _ in range(2):
        out = ctx.run(ctx.on.update_status(), testing.State(relations=[COMPUTE]))
        assert isinstance(out.unit_status, ops.ActiveStatus), out.unit_status
    for log in (machine.log, machine.slurm.log, machine.smi.log):
        log.clear()
    return machine


def tree(root: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def is_one_line_of(name: str, text: str) -> bool:
    return text.startswith(name) and len(text) < 400 and "\n" not in text and text.isprintable()


STRINGS = [
    ("upgrade-driver", {"branch": "580"}, "branch"),
    ("upgrade-driver", {"branch": "580", "version": "580.173.02"}, "version"),
    ("reset-gpu", {"gpu": BUS}, "gpu"),
    ("set-mig", {"gpu": BUS, "profiles": "3g.20gb"}, "gpu"),
    ("set-mig", {"gpu": BUS, "profiles": "3g.20gb"}, "profiles"),
]


def check_refused(
    ctx: testing.Context[charm.SlurmGpuCharm],
    settled: MachineDouble,
    paths: pathlib.Path,
    action: str,
    tries: list[tuple[dict[str, typing.Any], str]],
) -> None:
    """Run an action with each of these parameters: one line that begins so, and no change."""
    before = tree(paths)
    for params, words in tries:
        with pytest.raises(testing.ActionFailed) as caught:
            ctx.run(ctx.on.action(action, params=params), testing.State(relations=[COMPUTE]))
        assert is_one_line_of(words, caught.value.message), (
            str(params)[:200],
            caught.value.message[:400],
        )
    assert (settled.log, settled.slurm.log, settled.smi.log) == ([], [], [])
    assert settled.slurm.record == Record(GRES)
    assert tree(paths) == before
    assert not pathlib.Path("/tmp/owned").exists()


@pytest.mark.parametrize("case", STRINGS, ids=[f"{action} {name}" for action, _, name in STRINGS])
def test_a_hostile_parameter_fails_the_action_in_one_line(
    ctx: testing.Context[charm.SlurmGpuCharm],
    settled: MachineDouble,
    paths: pathlib.Path,
    case: tuple[str, dict[str, typing.Any], str],
):
    action, good, name = case
    check_refused(
        ctx, settled, paths, action, [(good | {name: text}, f"{name}:") for text in TEXTS]
    )


OPTION_TEXTS = {
    "driver": [text for text in TEXTS if text.strip() != "580"],
    "kernel-module": TEXTS,
    "fabric-manager": TEXTS,
    "health-check": TEXTS,
    "health-xids": [text for text in TEXTS if text.strip()],
}


@pytest.mark.parametrize("name", OPTION_TEXTS)
def test_a_hostile_option_blocks_in_one_line(
    ctx: testing.Context[charm.SlurmGpuCharm],
    settled: MachineDouble,
    paths: pathlib.Path,
    name: str,
):
    before = tree(paths)
    for text in OPTION_TEXTS[name]:
        config: dict[str, str | int | float | bool] = {name: text}
        out = ctx.run(ctx.on.config_changed(), testing.State(relations=[COMPUTE], config=config))
        assert isinstance(out.unit_status, ops.BlockedStatus), (text, out.unit_status)
        assert is_one_line_of(f"{name}: ", out.unit_status.message), (
            text[:60],
            out.unit_status.message[:400],
        )
    assert (settled.log, settled.slurm.log, settled.smi.log) == ([], [], [])
    assert settled.slurm.record == Record(GRES)
    assert tree(paths) == before


@pytest.mark.parametrize("name", ["a b", "$(reboot)", "-x", "n" * 300, "\N{SNOWMAN}"])
def test_an_impossible_node_name_blocks_in_one_line(
    ctx: testing.Context[charm.SlurmGpuCharm], settled: MachineDouble, name: str
):
    """An administrator may write anything into slurmd's options; the hooks go on to say so."""
    text = slurmd_options.PATH.read_text()
    slurmd_options.PATH.write_text(text.replace("-N slurmd-0", f"-N '{name}'"))
    relation = testing.Relation("node-gres", remote_app_name="slurm-gpu-controller")
    for event in (ctx.on.update_status(), ctx.on.config_changed()):
        out = ctx.run(event, testing.State(relations=[COMPUTE, relation]))
        assert not isinstance(out.unit_status, ops.ActiveStatus)
        if name != "-x":  # upstream's parser takes it for another option, so that -N lacks a value
            assert is_one_line_of(
                f"{slurmd_options.PATH}: no node can have the name ", out.unit_status.message
            )
    ctx.run(ctx.on.remove(), testing.State(relations=[COMPUTE, relation]))


BROKEN = {
    "registration.json": ("[1]", '{"node": 5}', "\xff"),
    "hold.json": (
        "[]",
        '{"kind": "gpu-mig"}',
        '{"kind": 5, "node": 5, "states": [], "reason": null, "boot_id": ""}',
    ),
    "kept.json": (
        "[]",
        '{"maintenance": {"kind": "gpu-mig"}}',
        '{"reservation": [], "grounds": 5}',
        "\xff",
    ),
    "cards.json": ("5", '{"a": 1}', "\xff"),
    "health.json": ("[]", '{"since": "x"}', '{"resets": [1]}'),
    "mig.json": ("5", '{"x": 5}'),
    "driver-refused.json": ("[]", '{"key": 1}'),
    "stopped-units": ("../../x\n",),
    "held-packages": ("\x00",),
    "held-options": ("SLURMD_OPTIONS=\n",),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_journal_counts_as_absent(
    ctx: testing.Context[charm.SlurmGpuCharm],
    settled: MachineDouble,
    paths: pathlib.Path,
    name: str,
):
    """No unit ends in error: what cannot be read counts as not there."""
    for text, when in itertools.product(BROKEN[name], ("before", "held")):
        path = paths / "var/slurm-gpu" / name
        path.write_bytes(text.encode("latin-1"))
        if when == "held" and name not in {"kept.json", "hold.json"}:
            hold = '{"maintenance": {"kind": "gpu-reset", "node": "slurmd-0"}}'
            (paths / "var/slurm-gpu/kept.json").write_text(hold)
        for event in (
            ctx.on.update_status(),
            ctx.on.start(),
            ctx.on.action("show-gres"),
            ctx.on.action("detect"),
        ):
            ctx.run(event, testing.State(relations=[COMPUTE]))
    ctx.run(ctx.on.remove(), testing.State(relations=[COMPUTE]))
    assert settled.slurm.ended == []


@pytest.mark.parametrize(
    "action", ["detect", "show-gres", "accept-gpus", "health-check", "upgrade-driver"]
)
@pytest.mark.parametrize("roles", [[], [CONTROLLER]])
def test_an_action_without_a_node_changes_nothing(
    ctx: testing.Context[charm.SlurmGpuCharm],
    machine: MachineDouble,
    paths: pathlib.Path,
    *,
    action: str,
    roles: list[testing.SubordinateRelation],
):
    before = tree(paths)
    try:
        ctx.run(ctx.on.action(action), testing.State(relations=roles))
    except testing.ActionFailed as e:
        assert is_one_line_of("", e.message)
    assert (machine.log, machine.slurm.log, machine.smi.log) == ([], [], [])
    assert tree(paths) == before


@pytest.mark.parametrize("event", ["update_status", "config_changed", "start", "remove"])
def test_a_systemd_and_a_dpkg_that_hang_end_no_unit(
    ctx: testing.Context[charm.SlurmGpuCharm],
    machine: MachineDouble,
    paths: pathlib.Path,
    event: str,
):
    """What hangs is reported, and the next hook goes on."""
    config: dict[str, str | int | float | bool] = {"driver": "535"}
    for hanging in (
        {"dpkg-query"},
        {"apt-mark"},
        {"apt-get"},
        {"modinfo"},
        {"nvidia-smi"},
        {"rmmod", "modprobe"},
    ):
        machine.hanging = hanging
        ctx.run(getattr(ctx.on, event)(), testing.State(relations=[COMPUTE], config=config))
    machine.hanging = set()
    out = ctx.run(ctx.on.update_status(), testing.State(relations=[COMPUTE], config=config))
    assert isinstance(out.unit_status, ops.ActiveStatus)
    assert machine.slurm.record == Record(GRES)
