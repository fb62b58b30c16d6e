"""MIG layouts: valid ones, refusals by name, and cards that end up as asked or as before."""

import json
import pathlib

import pytest
import roles
from machine_double import MachineDouble, MigCard
from slurm_double import Killed, Record, SlurmDouble

from gpu import mig as gpu_mig
from gpu.mig import MigError, parse
from maintenance import hooks, layouts
from node import kept
from slurm_ddp.charm import ActionError, Level, Status
from slurm_ddp.slurm import nodes

BUS = "0000:1b:00.0"
A100 = "NVIDIA A100-SXM4-40GB"
NAME = "slurmd-0"
ACTIVE = Status(Level.ACTIVE, "all well")


@pytest.fixture
def mig(paths: pathlib.Path, node: MachineDouble) -> MachineDouble:
    """A registered node with one A100, whole."""
    node.smi.cards = {BUS: MigCard(A100)}
    gpu_mig.LAYOUTS.parent.mkdir(parents=True, exist_ok=True)
    (paths / "usr/bin").mkdir(parents=True, exist_ok=True)
    (paths / "usr/bin/nvidia-smi").touch()
    node.slurm.record = Record("")
    return node


def set_mig(
    profiles: str, gpu: str = BUS, log: list[str] | None = None, node: str | None = NAME
) -> dict[str, str]:
    report = log.append if log is not None else lambda _: None  # pyright: ignore[reportUnknownLambdaType]
    return layouts.set_layout(gpu, profiles, node, 60, report)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("none", ()),
        ("3g.20gb,3g.20gb", ("3g.20gb", "3g.20gb")),
        (" 3g.20gb , 1g.5gb x2 ", ("3g.20gb", "1g.5gb", "1g.5gb")),
        ("1g.5gb*7", ("1g.5gb",) * 7),
        ("1g.5gbx7", ("1g.5gb",) * 7),
        ("1g.5gb+me", ("1g.5gb+me",)),
    ],
)
def test_a_layout_is_read_with_its_counts(text: str, layout: tuple[str, ...]):
    assert parse(text) == layout


@pytest.mark.parametrize(
    "text",
    ["", "on", "3g.20", "0g.5gb", "3g.20gb x0", "3g.20gb,,", "1g.5gb x9", "1g.5gb x7,1g.5gb x7"],
)
def test_a_text_that_is_no_layout_is_refused(text: str):
    with pytest.raises(MigError, match=r"^profiles: "):
        parse(text)


def test_a_card_is_cut(mig: MachineDouble, paths: pathlib.Path):
    log: list[str] = []
    assert set_mig("1g.5gb,3g.20gb", log=log) == {
        "result": "done",
        "layout": "1g.5gb, 3g.20gb",
        "gpus": BUS,
    }
    assert mig.smi.cards[BUS] == MigCard(
        A100, True, True, ["3g.20gb", "1g.5gb"]
    )  # the largest first
    assert log == [f"{BUS}: 1g.5gb, 3g.20gb"]
    assert json.loads(gpu_mig.LAYOUTS.read_text()) == {BUS: ["1g.5gb", "3g.20gb"]}
    assert (paths / "usr/local/sbin/gpu-mig").stat().st_mode & 0o777 == 0o755
    unit = (paths / "etc/systemd/system/slurm-gpu-mig.service").read_text()
    assert "Before=slurmd.service" in unit
    assert "slurm-gpu-mig.service" in mig.enabled
    assert "DRAIN" in mig.slurm.state()  # until it is registered again
    roles.maintain()
    assert mig.slurm.record == Record("")
    mig.smi.log.clear()
    assert set_mig("3g.20gb,1g.5gb")["result"] in {"unchanged", "done"}
    assert not any("-dgi" in line for line in mig.smi.log)


def test_a_card_that_wants_a_reboot(mig: MachineDouble):
    mig.smi.needs_reset = mig.smi.needs_reboot = True
    detail = f"{BUS} switches MIG on only with a reboot: reboot this machine"
    assert set_mig("3g.20gb x2") == {"result": "reboot", "detail": detail}
    blocked = Status(Level.BLOCKED, "slurmd-0 is drained for gpu-mig: reboot this machine")
    assert hooks.verdict({}, lambda: ACTIVE) == blocked
    mig.slurm.answering = False
    assert not roles.maintain()
    mig.slurm.answering = True
    assert not roles.maintain()
    assert "DRAIN" in mig.slurm.state()
    mig.reboot()
    text = "slurmd-0 is drained for gpu-mig: its state is restored with the next event"
    assert hooks.verdict({}, lambda: ACTIVE) == Status(Level.WAITING, text)
    worse = Status(Level.BLOCKED, "x")
    assert hooks.verdict({}, lambda: worse) is worse
    mig.smi.cards[BUS].enabled = True
    mig.smi.needs_reset = mig.smi.needs_reboot = False
    assert gpu_mig.main() == 0  # the unit
    assert mig.smi.cards[BUS].instances == ["3g.20gb", "3g.20gb"]
    assert roles.maintain()
    assert mig.slurm.record == Record("")
    assert hooks.verdict({}, lambda: ACTIVE) is ACTIVE


@pytest.mark.parametrize("order", ["resume", "drain"])
def test_a_node_that_another_took_back_waits_for_no_reboot(mig: MachineDouble, order: str):
    mig.smi.needs_reset = mig.smi.needs_reboot = True
    set_mig("3g.20gb x2")
    if order == "resume":
        nodes.resume(NAME)
    else:
        nodes.drain(NAME, "bad fan")
    mig.slurm.jobs = ["7"]
    assert roles.maintain()
    assert kept.maintenance() is None
    assert mig.slurm.record is not None
    assert (mig.slurm.jobs, mig.slurm.record.reason) == (
        ["7"],
        "" if order == "resume" else "bad fan",
    )


def test_a_refused_layout_leaves_the_card_as_it_was(mig: MachineDouble):
    set_mig("3g.20gb x2")
    roles.maintain()
    mig.smi.refuses = {"2g.10gb"}
    with pytest.raises(ActionError, match=r"profiles: .*Insufficient Resources"):
        set_mig("4g.20gb,2g.10gb")
    assert mig.smi.cards[BUS].instances == ["3g.20gb", "3g.20gb"]
    assert gpu_mig.load() == {BUS: ("3g.20gb", "3g.20gb")}


def test_all_cards_or_none(mig: MachineDouble, node: MachineDouble):
    other = "0000:9d:00.0"
    node.smi.cards[other] = MigCard(A100)
    assert set_mig("1g.5gb x7", "all")["gpus"] == f"{BUS}, {other}"
    assert [len(card.instances) for card in node.smi.cards.values()] == [7, 7]
    roles.maintain()
    node.smi.cards[other].instances = []
    node.smi.cards[other].enabled = node.smi.cards[other].pending = False
    node.smi.refuses = {"3g.20gb"}
    with pytest.raises(ActionError):
        set_mig("3g.20gb x2", "all")
    assert node.smi.cards[BUS].instances == ["1g.5gb"] * 7
    assert node.smi.cards[other].instances == []


def test_cards_without_mig_are_refused(mig: MachineDouble):
    mig.smi.cards[BUS] = MigCard("NVIDIA L40S", None, None)
    with pytest.raises(ActionError, match=rf"gpu: NVIDIA L40S at {BUS} has no MIG"):
        set_mig("3g.20gb")
    with pytest.raises(MigError, match="has no MIG"):
        gpu_mig.apply(gpu_mig.cards()[0], ("3g.20gb",))
    assert not gpu_mig.apply(gpu_mig.cards()[0], ())


def test_an_interruption_at_every_command_is_finished(mig: MachineDouble, slurm: SlurmDouble):
    for lives in range(100):
        mig.smi.cards = {BUS: MigCard(A100, True, True, ["3g.20gb", "3g.20gb"])}
        gpu_mig.LAYOUTS.unlink(missing_ok=True)
        slurm.record, slurm.log, slurm.jobs, slurm.ended = Record(""), [], [], []
        slurm.lives = lives
        try:
            set_mig("4g.20gb,1g.5gb x3")
            died = False
        except Killed:
            died = True
        slurm.lives = None
        for _ in range(3):
            roles.maintain()
        assert slurm.record == Record("")
        now = sorted(mig.smi.cards[BUS].instances)
        wanted = gpu_mig.load().get(BUS)
        assert now == (sorted(wanted) if wanted else ["3g.20gb", "3g.20gb"]), lives
        if not died:
            assert now == ["1g.5gb"] * 3 + ["4g.20gb"]
            assert lives > 8
            break
    else:
        pytest.fail("it never got through")


# The program.


def test_at_boot_every_layout_is_made(mig: MachineDouble, capsys: pytest.CaptureFixture[str]):
    assert gpu_mig.main() == 0  # there is none
    gpu_mig.LAYOUTS.write_text(
        json.dumps({BUS: ["3g.20gb", "3g.20gb"], "0000:ee:00.0": ["1g.5gb"]})
    )
    assert gpu_mig.main() == 1
    assert "no card at 0000:ee:00.0" in capsys.readouterr().err
    assert mig.smi.cards[BUS].instances == [
        "3g.20gb",
        "3g.20gb",
    ]  # a removed one does not hold up the others
    mig.smi.log.clear()
    gpu_mig.main()
    assert mig.smi.log == []  # as it should be


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "5",
        "null",
        '{"0000:1b:00.0": 5}',
        '{"0000:1b:00.0": [5]}',
        '{"0000:1b:00.0": ["no profile"]}',
    ],
)
def test_an_unreadable_file_of_layouts_is_an_error(
    mig: MachineDouble, text: str, capsys: pytest.CaptureFixture[str]
):
    gpu_mig.LAYOUTS.write_text(text)
    assert gpu_mig.main() == 1
    assert capsys.readouterr().err.startswith("gpu-mig: ")
    assert mig.smi.log == []
