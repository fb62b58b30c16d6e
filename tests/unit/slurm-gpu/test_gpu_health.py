"""gpu-health on samples of nvidia-smi and the kernel's log, with stand-ins for the programs."""

import collections.abc
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
import typing

import pytest
from health_scene import BUS, Scene, hold
from machines import add_pci
from smi_samples import HEALTHY, answer, gpu

from gpu import smi, xids
from node import health as gpu_health
from node import kept
from node.health import DRAIN, WARN
from slurm_ddp import commands, packing, watchdog
from slurm_ddp.commands import CommandTimeout, Completed

OURS = "gpu-health: Xid 79: fell off the bus: reboot 0000:01:00.0"


def test_a_machine_without_gpus_asks_nobody(scene: Scene, paths: pathlib.Path):
    (paths / f"sys/bus/pci/devices/{BUS}/vendor").write_text("0x8086\n")
    scene.node(gres="(null)")
    scene.smi("", 9)
    assert scene.check() == 0


def xid(code: int, at: float) -> str:
    return f"{at} vm kernel: NVRM: Xid (PCI:0000:01:00): {code}, pid=1, name=x\n"


def answered(capsys: pytest.CaptureFixture[str]) -> dict[str, typing.Any]:
    return json.loads(capsys.readouterr().out)


def test_a_drain_is_recorded_and_ends_after_two_passes(scene: Scene):
    assert scene.check() == 0
    fine = gpu_health.State.load()
    assert (fine.passes, fine.drained, fine.reason) == (1, False, "")
    scene.log(xid(79, time.time() + 60) * 2)
    assert scene.check() == 1
    state = gpu_health.State.load()
    assert (state.since, state.passes, state.drained, state.reason) == (fine.since, 0, True, OURS)
    assert scene.commands == [f"update nodename=n0 state=drain reason={OURS}"]
    assert (hold(), scene.woken) == (("n0", OURS), [kept.WATCH])
    scene.node("IDLE+DRAIN", OURS)
    assert scene.check() == 1  # the same line again: jobs stay away, nothing is reported twice
    scene.log("")  # another boot
    assert scene.check() == 0
    assert (len(scene.commands), hold() is None) == (1, False), "one pass is not enough"
    assert gpu_health.State.load().since == fine.since, "the Xids count until the node is resumed"
    assert scene.check() == 0
    assert (scene.commands[1:], hold()) == (["update nodename=n0 state=resume"], None)
    assert gpu_health.State.load().drained is False
    scene.node()
    assert scene.check() == 0
    assert len(scene.commands) == 2


def test_a_pass_that_fails_begins_the_count_again(scene: Scene):
    scene.node("IDLE+DRAIN", OURS)
    assert scene.check() == 0
    scene.smi("", 15)
    assert scene.check() == 1
    scene.smi(answer(HEALTHY))
    assert scene.check() == 0
    assert scene.commands == []
    assert scene.check() == 0
    assert scene.commands == ["update nodename=n0 state=resume"]


@pytest.mark.parametrize("state", ["IDLE+DRAIN", "MIXED+DRAIN+DYNAMIC_NORM", "DOWN+DRAIN"])
@pytest.mark.parametrize(
    "reason", ["replaced by ops", "slurm-gpu: registering GPUs", "not gpu-health: really"]
)
def test_the_drain_of_another_is_left_alone(scene: Scene, state: str, reason: str):
    scene.node(state, reason)
    scene.log(xid(79, time.time() + 60))
    assert scene.check() == 1
    left = gpu_health.State.load()
    assert (left.since, left.drained, left.reason) == (0.0, False, OURS), "the fault counts on"
    scene.log("")
    assert [scene.check() for _ in range(3)] == [0, 0, 0]
    assert scene.commands == []


def test_a_drain_that_went_with_the_nodes_record_is_ordered_again(scene: Scene):
    """As upstream's set-node-config does: the record is deleted, and slurmd registers again."""
    scene.log(xid(79, time.time() - 1))
    assert scene.check() == 1
    scene.node("IDLE", began="2026-11-20T18:10:00")
    assert scene.check() == 1
    assert scene.commands == [scene.commands[0]] * 2
    scene.node("IDLE+DRAIN", OURS, began="2026-11-20T18:10:00")
    assert scene.check() == 1
    scene.node("IDLE", began="2026-11-20T18:10:00")  # now by an administrator
    assert scene.check() == 0
    assert (len(scene.commands), hold()) == (2, None)


def test_xids_of_a_card_from_before_its_reset_are_done_with(scene: Scene):
    scene.log(xid(79, time.time()))
    assert scene.check() == 1
    found = scene.commands[0].partition("reason=")[2]
    state = gpu_health.State.load()
    dataclasses.replace(state, resets={"0000:9d:00.0": time.time() + 60}).save()  # another card
    scene.node("IDLE+DRAIN", OURS)
    assert scene.check() == 1
    card = found.split()[-1]
    dataclasses.replace(gpu_health.State.load(), resets={card: time.time() + 1}).save()
    assert [scene.check() for _ in range(2)] == [0, 0]
    assert scene.commands[1:] == ["update nodename=n0 state=resume"]
    assert list(gpu_health.State.load().resets) == [card]
    scene.log(xid(79, time.time() + 60))
    assert scene.check() == 1


def test_xids_from_before_the_last_pass_are_done_with(scene: Scene):
    scene.check()
    scene.log(xid(79, time.time() - 60) + xid(48, time.time() + 60))
    assert scene.check() == 1
    assert "Xid 48" in scene.commands[0]
    assert "Xid 79" not in scene.commands[0]


@pytest.mark.parametrize(
    ("cards", "on_bus", "gres", "text"),
    [
        (1, 2, "gpu:h100:1", "the driver has 1 of 2 GPUs without 0000:02:00.0"),
        (1, 1, "gpu:h100:2", "the driver has 1 of the 2 GPUs in Slurm"),
        (1, 1, "gpu:h100:1(S:0),gpu:t4:1,shard:9", "the driver has 1 of the 2 GPUs in Slurm"),
        (2, 2, "gpu:h100:2", None),
        (2, 2, "gpu", None),
        (1, 1, "(null)", None),
    ],
)
def test_counts(scene: Scene, cards: int, on_bus: int, gres: str, text: str | None):
    if on_bus == 2:
        add_pci(scene.root, "0000:02:00.0")
    scene.smi(answer(*[HEALTHY] * cards))
    scene.node(gres=gres)
    assert scene.check() == (1 if text else 0)
    assert scene.commands == (
        [f"update nodename=n0 state=drain reason=gpu-health: {text}"] if text else []
    )


def test_mig_instances_count_as_slurm_counts_them(scene: Scene):
    card = gpu(0, HEALTHY).replace(
        "</gpu>",
        "<mig_devices><mig_device><index>0</index></mig_device><mig_device/></mig_devices></gpu>",
    )
    scene.smi(answer(attached=1).replace("</nvidia_smi_log>", f"{card}</nvidia_smi_log>"))
    scene.node(gres="gpu:nvidia_h100_3g.40gb:2")
    assert scene.check() == 0
    scene.node(gres="gpu:nvidia_h100_3g.40gb:3")
    assert scene.check() == 1


@pytest.mark.parametrize(
    ("code", "level"), [(code, level) for code, (level, _) in smi.EXITS.items()]
)
def test_every_exit_of_nvidia_smi(scene: Scene, code: int, level: str):
    scene.smi(answer(HEALTHY), code)
    assert scene.check() == {DRAIN: 1, WARN: 2}[level]
    assert bool(scene.commands) == (level == DRAIN)


@pytest.mark.parametrize("slow", [True, False], ids=["nvidia-smi hangs", "nvidia-smi is slow"])
def test_a_check_ends_within_slurms_minute(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, slow: bool
):
    """Everything hangs that can: each takes its limit, and then two seconds to be killed."""
    now = [0.0]
    real, xml = gpu_health.run, (scene.root / "xml").read_text()

    def run(*argv: object, timeout: float, check: bool = True) -> Completed:
        program = str(argv[0]).rpartition("/")[2]
        if program == "scontrol" and argv[1] == "show":
            now[0] += timeout
            return real(*map(str, argv))
        now[0] += timeout
        if program == "nvidia-smi" and not slow:
            return Completed(0, xml, "")
        now[0] += commands._REAP_S
        raise CommandTimeout(f"{program}: no answer within {timeout:g} s")

    monkeypatch.setattr(gpu_health.time, "monotonic", lambda: now[0])
    for module in (gpu_health, xids, watchdog):
        monkeypatch.setattr(module, "run", run)
    scene.node("IDLE+DRAIN", OURS)
    gpu_health.State(passes=1, drained=True).save()
    kept.end_all()
    assert scene.check() == (1 if slow else 2)
    assert 30 < now[0] < 59


@pytest.mark.parametrize(
    ("name", "pending", "is_stuck"),
    [("nvidia-smi", 1 << 8, True), ("nvidia-smi", 1 << 14, False), ("dcgm", 1 << 8, False)],
)
def test_no_query_is_started_beside_one_that_was_killed_and_does_not_die(
    scene: Scene, paths: pathlib.Path, name: str, pending: int, is_stuck: bool
):
    """A hanging driver keeps its callers; one more for each check would fill the process table."""
    path = paths / "proc/4711/status"
    path.parent.mkdir(parents=True)
    path.write_text(f"Name:\t{name}\nState:\tD (disk sleep)\nPid:\t4711\nSigPnd:\t{pending:016x}\n")
    scene.program("nvidia-smi", f"cat {scene.root}/xml; touch {scene.root}/asked")
    assert scene.check() == (1 if is_stuck else 0)
    assert (scene.root / "asked").exists() != is_stuck


@pytest.mark.parametrize(("order", "key"), [("show", "slurm"), ("update", "did")])
def test_a_refusal_by_slurm_is_reported(
    scene: Scene, capsys: pytest.CaptureFixture[str], order: str, key: str
):
    text = (
        f'[ "$1" = {order} ] || exec cat {scene.root}/record; echo "slurm_x error: no" >&2; exit 1'
    )
    scene.program("scontrol", text)
    scene.smi("", 9)
    assert scene.check() == 1
    assert answered(capsys)[key] == "scontrol exited 1: slurm_x error: no"
    assert gpu_health.State.load().drained is False


def test_a_drains_reason_fits_into_slurm(scene: Scene):
    scene.smi(answer(*[HEALTHY | {"gpu_recovery_action": "Reset"}] * 16))
    assert scene.check() == 1
    reason = scene.commands[0].partition("reason=")[2]
    assert len(reason) == 200
    assert reason.startswith(
        "gpu-health: recovery action Reset 0000:01:00.0; recovery action Reset 0000:02:00.0"
    )


def test_the_program_runs_alone(scene: Scene, paths: pathlib.Path):
    program = pathlib.Path(gpu_health.__file__)
    (paths / "gpu-health").write_bytes(packing.pack(program))
    assert packing.pack(program) == (paths / "gpu-health").read_bytes(), "the same bytes again"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(paths / "gpu-health")],
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout)["result"] in {"ok", "warn", "drain"}


def test_xids_to_drain_for_and_to_ignore_by_option(scene: Scene):
    scene.log(xid(109, time.time()) + xid(74, time.time()) + xid(13, time.time()))
    assert scene.check("--xids", "-109 -74") == 0
    assert scene.commands == []
    scene.log(xid(109, time.time() + 1) + xid(13, time.time() + 1))
    assert scene.check("--xids=+109,+13") == 1
    assert "Xid 109: context switch timed out" in scene.commands[0]
    assert "Xid 13: to drain for by option" in scene.commands[0]


def test_what_the_service_took_for_an_administrators_order_is_one(scene: Scene):
    scene.log(xid(79, time.time()))
    scene.check()
    kept.end_all()
    scene.node("IDLE", began="2026-11-20T19:00:00")  # and slurmd was restarted since
    assert scene.check() == 0


def two_cards(scene: Scene, printed: str) -> None:
    add_pci(scene.root, "0000:02:00.0")
    scene.smi(printed)


@pytest.mark.parametrize(
    ("spoil", "finding"),
    [
        (
            lambda scene: scene.smi("x" * 130, 77),
            [DRAIN, "query", f"nvidia-smi exited 77: {'x' * 120}"],
        ),
        (
            lambda scene: scene.program("nvidia-smi", f"echo out; echo {'y' * 130} >&2; exit 77"),
            [DRAIN, "query", f"nvidia-smi exited 77: {'y' * 120}"],
        ),
        (
            lambda scene: scene.node(gres="gpu:2"),
            [DRAIN, "count", "the driver has 1 of the 2 GPUs in Slurm"],
        ),
        (
            lambda scene: two_cards(scene, answer(HEALTHY, HEALTHY, attached=1)),
            [DRAIN, "count", "the driver has 1 of 2 GPUs without 0000:02:00.0"],
        ),
        (
            lambda scene: (scene.root / "bin/journalctl").unlink(),
            [WARN, "log", "journalctl: No such file or directory"],
        ),
        (
            lambda scene: scene.program("journalctl", "echo 'Failed to compile' >&2; exit 1"),
            [WARN, "log", "journalctl exited 1: Failed to compile"],
        ),
        (
            lambda scene: scene.log(xid(119, time.time() + 60)),
            [DRAIN, "xid", "Xid 119: GSP does not respond: reset it", BUS],
        ),
    ],
)
def test_each_finding_names_its_check(
    scene: Scene,
    capsys: pytest.CaptureFixture[str],
    spoil: collections.abc.Callable[[Scene], object],
    finding: list[str],
):
    spoil(scene)
    gpu_health.main(["--node", "n0"])
    level, check, text, *card = finding
    found = answered(capsys)
    assert found["findings"] == [
        {"level": level, "check": check, "text": text, "gpu": card[0] if card else ""}
    ]
    assert (found["result"], found["did"]) == (level, "")


def test_a_drain_without_its_record_is_recorded_again(scene: Scene):
    reason = f"{OURS} and more"
    scene.node("IDLE+DRAIN", reason)
    scene.log(xid(79, time.time() + 60))
    assert scene.check() == 1
    assert hold() == ("n0", reason)
    assert gpu_health.State.load().drained is True
    assert len(scene.woken) == 1
    assert scene.check() == 1
    assert len(scene.woken) == 1, "it is there"
    kept.end_all()
    scene.log("")
    assert scene.check() == 0
    assert hold() is None, "only a fault asks for one"


def test_only_a_check_that_acts_ends_the_record_of_a_drain(scene: Scene):
    scene.log(xid(79, time.time() + 1))
    assert scene.check() == 1
    scene.log("")
    scene.node("IDLE")
    assert gpu_health.main(["--node", "n0"]) == 0
    assert hold() is not None
    assert (len(scene.woken), len(scene.commands)) == (1, 1)
    assert scene.check() == 0
    assert hold() is None
    assert len(scene.woken) == 2
    assert gpu_health.State.load().drained is False
