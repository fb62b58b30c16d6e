"""Drivers: diagnosis, the packages for a machine, and installation on a node without jobs."""

import dataclasses
import itertools
import pathlib
import typing
import unittest.mock

import pytest
import roles
from conftest import OPTIONS
from machine_double import MachineDouble
from slurm_double import Killed, Record, SlurmDouble

from driver import install, plan, state
from driver.plan import Spec, narrowed, resolve, spec
from driver.state import PROBLEMS, DriverError, Facts, Module, diagnose
from maintenance import reset, services, upgrade
from node import kept, registration, slurmd_options
from pci import Card
from slurm_ddp.charm import ActionError
from slurm_ddp.commands import CommandError

KERNEL, NEXT = "6.8.0-134-generic", "6.8.0-139-generic"
CARD = Card("0000:1b:00.0", 0x2330)
SIGNED = Module("580.173.02", "Canonical Ltd. Kernel")
NOBLE = Facts(release="ubuntu 24.04", kernel=KERNEL, next_kernel=KERNEL, cards=(CARD,))
WORKS = dataclasses.replace(
    NOBLE, loaded="580.173.02", library="580.173.02", module=SIGNED, next_module=SIGNED
)
BARE = dataclasses.replace(WORKS, loaded=None, library=None, module=None, next_module=None)
SMI_535 = "nvidia-utils-535-server"
NODE = "slurmd-0"


def but(facts: Facts, **changes: typing.Any) -> Facts:
    return dataclasses.replace(facts, **changes)


@pytest.mark.parametrize(
    ("facts", "problem", "words"),
    [
        (WORKS, None, ""),
        (but(WORKS, library=None), None, ""),  # the kernel's word is enough
        (
            but(WORKS, unfinished="nvidia-x"),
            "unfinished",
            "the installation of nvidia-x was interrupted",
        ),
        (
            but(WORKS, library="580.65.06"),
            "mismatch",
            "runs with the library of 580.65.06: run upgrade-driver",
        ),
        (but(WORKS, switches=4), "no-fabric", "need fabric manager 580.173.02 and have None"),
        (
            but(WORKS, switches=4, fabric="580.65.06"),
            "no-fabric",
            "and have 580.65.06, so CUDA fails with error 802",
        ),
        (
            but(WORKS, switches=4, fabric="580.173.02", fabric_state="failed"),
            "fabric-down",
            "manager is failed",
        ),
        (
            but(WORKS, switches=4, fabric="580.173.02"),
            "fabric-down",
            "not running: systemctl enable --now",
        ),
        (but(WORKS, switches=4, fabric="580.173.02", fabric_state="activating"), None, ""),
        (BARE, "no-driver", "1 NVIDIA GPU has no driver: set driver=580"),
        (
            but(WORKS, loaded=None, nouveau=True),
            "nouveau",
            "nouveau has the GPUs instead of the installed driver",
        ),
        (
            but(WORKS, loaded=None, module=None),
            "no-module",
            f"kernel {KERNEL} has no nvidia module: run upgrade-driver",
        ),
        (
            but(WORKS, loaded=None, secure_boot=True, module=Module("580")),
            "secure-boot",
            "Secure Boot refuses",
        ),
        (
            but(WORKS, loaded=None, secure_boot=True),
            "not-loaded",
            "driver 580.173.02 is installed and not loaded",
        ),
        (
            but(BARE, cards=(Card("0000:1b:00.0", 0x2330, "vfio-pci"),)),
            None,
            "",
        ),  # given to a virtual machine
        (
            but(WORKS, next_kernel=NEXT, next_module=None),
            "next-kernel",
            f"kernel {NEXT}, which boots next, has no",
        ),
        (but(WORKS, next_kernel=NEXT, next_module=None, module=None), None, ""),  # a container
    ],
)
def test_each_problem_has_its_words(facts: Facts, problem: str | None, words: str):
    assert diagnose(facts) == problem
    if problem is not None:
        assert words in PROBLEMS[problem].format(f=facts)
        assert (state.explain(facts) is None) == (problem == "next-kernel")


def test_facts_are_read_from_the_machine(paths: pathlib.Path, node: MachineDouble):
    node.install_driver("580", "580.173.02")
    node.add_card("0000:9d:00.0")
    node.add_card("0000:01:00.0", 0x22A3, kind="0x068000")
    (paths / "sys" / state._SECURE_BOOT).parent.mkdir(parents=True)
    (paths / "sys" / state._SECURE_BOOT).write_bytes(b"\6\0\0\0\1")
    node.add_kernel("6.8.0-99-generic")
    node.broken = True
    found = state.look()
    assert (found.release, found.kernel, found.next_kernel) == ("ubuntu 24.04", KERNEL, KERNEL)
    assert (len(found.cards), found.switches, found.secure_boot) == (2, 1, True)
    assert (found.loaded, found.library, found.module) == (
        "580.173.02",
        "580.173.02",
        Module("580.173.02", node.signer),
    )
    assert SMI_535.replace("535", "580") in found.unfinished
    node.hanging = {"modinfo"}
    assert state.look().module is None


def test_ubuntu_gets_signed_modules_of_exactly_the_version(node: MachineDouble):
    found = resolve(NOBLE, Spec(driver="580"))
    assert (found.version, found.fabric) == ("580.173.02", False)
    assert found.packages[f"linux-modules-nvidia-580-server-open-{KERNEL}"] == "6.8.0-134.134+1"
    for name in ("nvidia-headless-no-dkms-580-server-open", SMI_535.replace("535", "580")):
        assert found.packages[name] == "580.173.02-0ubuntu0.24.04.1"
    assert found.packages["nvidia-firmware-580-server-580.173.02"]  # a dependency
    assert not any(name.startswith("nvidia-dkms") or "fabric" in name for name in found.packages)
    both = resolve(but(NOBLE, next_kernel=NEXT), Spec(driver="580")).packages
    assert {f"linux-modules-nvidia-580-server-open-{kernel}" for kernel in (KERNEL, NEXT)} <= set(
        both
    )


@pytest.mark.parametrize(
    ("switches", "option", "fabric"), [(4, "auto", True), (4, "never", False), (0, "always", True)]
)
def test_nvswitches_bring_the_fabric_manager_of_the_same_version(
    node: MachineDouble,
    switches: int,
    option: typing.Literal["auto", "always", "never"],
    fabric: bool,
):
    found = resolve(but(NOBLE, switches=switches), Spec(driver="580", fabric_manager=option))
    assert found.fabric == fabric == ("nvidia-fabricmanager-580" in found.packages)
    assert found.packages.get("libnvidia-nscq-580", "580.173.02-") in {
        "580.173.02-0ubuntu0.24.04.1",
        "580.173.02-",
    }


def test_modules_without_a_signature_are_built_here(node: MachineDouble):
    found = resolve(
        NOBLE, Spec(driver="580", version="580.65.06")
    )  # the archive has signed ones of the newest only
    assert found.version == "580.65.06"
    assert found.packages["nvidia-dkms-580-server-open"] == "580.65.06-0ubuntu0.24.04.1"
    assert found.packages[f"linux-headers-{KERNEL}"]
    hwe = but(NOBLE, kernel="6.17.0-29-generic", next_kernel="6.17.0-29-generic")
    assert "nvidia-dkms-580-server-open" in resolve(hwe, Spec(driver="580")).packages
    name = f"linux-modules-nvidia-580-server-{KERNEL}"  # an older driver's: apt alone would pair it with this one
    node.offers[name] = (("6.8.0-134.134", "nvidia-kernel-common-580-server (>= 580.65.06)"),)
    with pytest.raises(DriverError, match="no signed modules for kernel"):
        resolve(but(NOBLE, secure_boot=True), Spec(driver="580", kernel_module="proprietary"))


@pytest.mark.parametrize(
    ("facts", "wanted", "words"),
    [
        (
            but(NOBLE, release="fedora 42"),
            Spec(driver="580"),
            "driver: use keep: fedora 42 is not Ubuntu, from whose",
        ),
        (
            but(NOBLE, runfile=True),
            Spec(driver="580"),
            "driver: NVIDIA's own installer put one here: run nvidia-un",
        ),
        (NOBLE, Spec(driver="590"), "only leads on to branch 595 now: set driver=595"),
        (
            NOBLE,
            Spec(driver="550"),
            "driver: use 535, 570, 580, 590, 595 or keep: 550 is not offered for these GPUs",
        ),
        (
            but(NOBLE, switches=4),
            Spec(driver="570"),
            "no 570.211.01 as a whole: .*fabricmanager-570 is 570.195.03",
        ),
        (
            but(NOBLE, secure_boot=True),
            Spec(driver="580", version="580.65.06"),
            f"for kernel {KERNEL}, and Secure Boot",
        ),
        (
            but(NOBLE, kernel="6.9-x", next_kernel="6.9-x"),
            Spec(driver="580"),
            "no linux-headers-6.9-x can build modules",
        ),
    ],
)
def test_a_driver_that_is_not_available_is_refused_by_name(
    node: MachineDouble, facts: Facts, wanted: Spec, words: str
):
    with pytest.raises(DriverError, match=words) as caught:
        resolve(facts, wanted)
    assert "\n" not in str(caught.value)


def test_nothing_but_the_other_driver_is_removed(node: MachineDouble):
    node.also_removes = ["slurmd"]
    with pytest.raises(DriverError, match=r"driver 580\.173\.02: apt would remove slurmd"):
        resolve(NOBLE, Spec(driver="580"))


@pytest.mark.parametrize(
    ("device", "option", "suffix"),
    [
        (0x2330, "auto", "-open"),  # Hopper
        (0x2330, "proprietary", ""),
        (0x1DB6, "auto", ""),  # Volta
        (0x2901, "auto", "-open"),  # Blackwell
        (0xFFF0, "auto", "-open"),  # newer than this test
    ],
)
def test_the_kernel_module_is_one_that_ubuntu_drivers_offers_for_the_card(
    node: MachineDouble,
    paths: pathlib.Path,
    device: int,
    option: typing.Literal["auto", "proprietary"],
    suffix: str,
):
    (paths / "sys/bus/pci/devices/0000:1b:00.0/device").write_text(f"{device:#06x}\n")
    found = resolve(NOBLE, Spec(driver="580", kernel_module=option))
    assert f"nvidia-headless-no-dkms-580-server{suffix}" in found.packages


def test_a_module_that_does_not_drive_the_card_is_refused(node: MachineDouble, paths: pathlib.Path):
    (paths / "sys/bus/pci/devices/0000:1b:00.0/device").write_text("0x2901\n")
    with pytest.raises(
        DriverError, match="kernel-module: use auto: these GPUs have no proprietary one of 580"
    ):
        resolve(NOBLE, Spec(driver="580", kernel_module="proprietary"))


def test_archives_without_drivers_and_a_kernel_that_is_too_old_are_named(node: MachineDouble):
    node.kernel_warning = "Please update the kernel first"
    with pytest.raises(
        DriverError, match="ubuntu-drivers list --gpgpu exited 1: Please update the kernel first"
    ):
        resolve(NOBLE, Spec(driver="580"))
    node.kernel_warning, node.offers = "", {}
    with pytest.raises(DriverError, match="driver=580: enable restricted and multiverse"):
        resolve(NOBLE, Spec(driver="580"))


def test_any_release_of_ubuntu_is_served(node: MachineDouble):
    assert resolve(but(NOBLE, release="ubuntu 26.04"), Spec(driver="580")).version == "580.173.02"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"driver": "newest"}, "driver: use keep, or a branch such as 580"),
        ({"fabric-manager": "always"}, "fabric-manager: always contradicts driver=keep"),
        ({"kernel-module": "open"}, "kernel-module: open contradicts driver=keep"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, object], words: str):
    with pytest.raises(DriverError) as caught:
        spec(options)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("wanted", "branch", "version", "present", "answer"),
    [
        (Spec(driver="580"), None, None, "535", Spec(driver="580")),
        (Spec(), None, None, "535", Spec(driver="535")),
        (Spec(), None, "580.65.06", "535", Spec(driver="580", version="580.65.06")),
        (Spec(), None, None, "", "branch: driver=keep names none; give branch=580"),
        (Spec(), None, None, "390", Spec(driver="390")),
        (Spec(driver="535"), "580", None, "", "branch=580 contradicts the option driver=535"),
        (Spec(driver="580"), None, "535.288.01", "", "version=535.288.01 is not of branch 580"),
        (
            Spec(),
            None,
            "newest",
            "",
            "version: 'newest' is not a driver version such as 580.173.02",
        ),
    ],
)
def test_upgrade_driver_names_a_wrong_parameter(
    wanted: Spec, branch: str | None, version: str | None, present: str, answer: Spec | str
):
    if isinstance(answer, Spec):
        assert narrowed(wanted, branch, version, present) == answer
        return
    with pytest.raises(DriverError) as caught:
        narrowed(wanted, branch, version, present)
    assert str(caught.value).startswith(answer)


def without_smi(node: MachineDouble) -> Facts:
    """Upstream's driver: nvidia-headless-no-dkms, which brings no nvidia-smi."""
    node.install_driver("535", "535.288.01")
    del node.installed[SMI_535]
    node.show_library()
    return state.look()


def test_nvidia_smi_of_exactly_the_drivers_version_is_added(node: MachineDouble):
    facts = without_smi(node)
    before = dict(node.installed)
    install.ensure_utils(
        dataclasses.replace(facts, loaded="535.1")
    )  # a mismatch, which the status reports
    assert node.installed == before
    for _ in range(2):
        install.ensure_utils(facts)
    assert node.installed == before | {SMI_535: before["libnvidia-compute-535-server"]}
    assert len(node.log) == 1


def test_nothing_else_is_moved_for_nvidia_smi(node: MachineDouble):
    without_smi(node)
    node.also_removes = ["slurmd"]
    upgrade.ensure_settings(Spec())
    assert not node.log
    note = upgrade.note(Spec())
    assert note is not None
    assert note.startswith(
        "driver 535.288.01 is here without nvidia-smi, so its health is not checked (nvidia-utils-535"
    )
    assert "apt would remove slurmd" in note


def test_a_refused_driver_is_not_named_once_another_is_here(node: MachineDouble):
    upgrade.ensure_wanted(Spec(driver="550"))
    without_smi(node)
    node.installed["libnvidia-compute-580-server"] = (
        "1"  # so that it is not clear whose nvidia-smi to add
    )
    upgrade.ensure_settings(Spec())
    assert "so its health is not checked: run upgrade-driver" in (upgrade.note(Spec()) or "")


def test_a_driver_that_works_is_held_and_kept_awake(paths: pathlib.Path, node: MachineDouble):
    node.install_driver("535", "535.288.01")
    node.installed |= {"nvidia-container-toolkit": "1", "nvidia-cuda-toolkit": "12"}
    node.held = {"nvidia-firmware-535-server-535.288.01"}  # by an administrator
    (paths / "usr/bin/nvidia-persistenced").touch()
    for _ in range(2):
        upgrade.ensure_settings(Spec())
        assert {SMI_535, f"linux-modules-nvidia-535-server-open-{KERNEL}"} <= node.held
        assert not {"nvidia-container-toolkit", "nvidia-cuda-toolkit"} & node.held
        assert "nvidia-persistenced.service" in node.active
    dropin = paths / "etc/systemd/system/nvidia-persistenced.service.d/10-slurm-gpu.conf"
    assert "--user nvidia-persistenced --persistence-mode" in dropin.read_text()
    upgrade.ensure_settings(Spec(hold_driver=False, persistence_mode=False))
    assert node.held == {"nvidia-firmware-535-server-535.288.01"}
    assert not dropin.exists()


def test_the_option_installs_on_a_bare_machine_and_changes_no_driver(node: MachineDouble):
    upgrade.ensure_wanted(Spec())
    assert node.log == []
    upgrade.ensure_wanted(Spec(driver="535"))
    assert node.loaded is not None
    log = list(node.log)
    upgrade.ensure_wanted(Spec(driver="580"))
    assert node.log == log
    assert "but the option is driver=580: run upgrade-driver" in (
        upgrade.note(Spec(driver="580")) or ""
    )
    assert upgrade.note(Spec(driver="535")) is None
    node.add_kernel(NEXT)
    assert f"kernel {NEXT}, which boots next" in (upgrade.note(Spec()) or "")


def test_nouveau_gives_way_with_a_reboot(node: MachineDouble):
    node.add_nouveau()
    upgrade.ensure_wanted(Spec(driver="580"))
    assert diagnose(state.look()) == "nouveau"
    assert "reboot this machine" in PROBLEMS["nouveau"]
    node.reboot()
    assert node.loaded == "580.173.02"


def test_a_refusal_is_remembered_for_an_hour(node: MachineDouble, monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]
    monkeypatch.setattr(upgrade.time, "time", lambda: now[0])
    resolve = unittest.mock.Mock(wraps=plan.resolve)
    monkeypatch.setattr(plan, "resolve", resolve)
    for _ in range(2):
        upgrade.ensure_wanted(Spec(driver="550"))
    assert resolve.call_count == 1
    assert "is not offered for these GPUs" in (upgrade.note(Spec(driver="550")) or "")
    now[0] += 3601
    upgrade.ensure_wanted(Spec(driver="550"))
    assert resolve.call_count == 2


@pytest.fixture
def in_service(node: MachineDouble, monkeypatch: pytest.MonkeyPatch) -> MachineDouble:
    """A registered node with an H100 and branch 535, in service."""
    slurmd_options.PATH.write_text(OPTIONS)
    node.slurm.register()
    node.install_driver("535", "535.288.01")
    return node


def run(
    *, drain: bool = False, log: list[str] | None = None, version: str | None = None
) -> dict[str, str]:
    words = log if log is not None else []
    return upgrade.upgrade(Spec(driver="580", version=version), NODE, 60, words.append, drain=drain)


def test_a_free_node(in_service: MachineDouble, slurm: SlurmDouble):
    log: list[str] = []
    assert run(log=log) == {"result": "done", "driver": "580.173.02"}
    assert (log, in_service.loaded) == (["installing driver 580.173.02"], "580.173.02")
    assert slurm.record is not None
    assert slurm.record.reason == "gpu-driver: driver 580.173.02"  # until it is registered
    assert not [name for name in in_service.installed if "535" in name and "firmware" not in name]
    assert roles.maintain()
    assert slurm.record == Record("")
    assert kept.maintenance() is None
    assert run() == {"result": "up-to-date", "driver": "580.173.02"}


def test_jobs_are_never_ended(in_service: MachineDouble, slurm: SlurmDouble):
    slurm.jobs, slurm.waiting = ["7", "8"], ["9"]
    with pytest.raises(
        ActionError, match="slurmd-0 has 2 jobs: try again when it has none, or with drain=true"
    ):
        run()
    assert (slurm.log, slurm.record) == ([], Record(""))
    with pytest.raises(ActionError, match="slurmd-0 still had 2 jobs after 60 s"):
        run(drain=True)
    assert (slurm.record, slurm.ended, slurm.waiting, in_service.log) == (Record(""), [], [], [])


def test_upgrade_driver_drains_and_waits_for_the_jobs(
    in_service: MachineDouble, slurm: SlurmDouble, monkeypatch: pytest.MonkeyPatch
):
    slurm.jobs, slurm.waiting = ["7"], ["8"]

    def sleep(_: float) -> None:
        assert "DRAIN" in slurm.state()
        slurm.end_jobs()

    monkeypatch.setattr(reset.time, "sleep", sleep)
    log: list[str] = []
    assert run(drain=True, log=log)["result"] == "done"
    assert log == ["slurmd-0 is drained: waiting for 1 job", "installing driver 580.173.02"]
    assert slurm.jobs == []
    roles.maintain()
    assert (slurm.jobs, slurm.ended) == (["8"], [])


def test_no_reboot_into_a_kernel_without_the_driver(
    in_service: MachineDouble, monkeypatch: pytest.MonkeyPatch
):
    real = in_service.module_version
    monkeypatch.setattr(
        in_service, "module_version", lambda kernel: None if in_service.log else real(kernel)
    )  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(
        DriverError,
        match=f"kernel {KERNEL}, which boots next, has no module of it: see dkms status",
    ):
        run()


def test_a_driver_that_does_not_work_keeps_the_node_drained(
    in_service: MachineDouble, slurm: SlurmDouble, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(in_service, "library_version", lambda: "535.288.01")
    with pytest.raises(
        ActionError,
        match=r"580\.173\.02 is installed, but .* runs with the library of 535\.288\.01",
    ):
        run()
    roles.maintain(registration.Stage.LOST)
    assert "DRAIN" in slurm.state()


def test_stopped_services_run_again_after_any_failure(
    in_service: MachineDouble, paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    in_service.add_card("0000:01:00.0", 0x22A3, kind="0x068000")
    (paths / "usr/bin/nvidia-persistenced").touch()
    dcgm = ("snap.dcgm.dcgm-exporter.service", "snap.dcgm.nv-hostengine.service")
    in_service.active |= {"nvidia-persistenced.service", *dcgm}
    with monkeypatch.context() as context:
        context.setattr(
            install.apt,
            "install_exact",
            lambda _: (_ for _ in ()).throw(CommandError("disk is full")),
        )  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        with pytest.raises(CommandError, match="disk is full"):
            run()
    assert {"nvidia-persistenced.service", *dcgm} <= in_service.active
    run()
    assert in_service.fabric_version() == "580.173.02"
    assert {state.FABRIC, "nvidia-persistenced.service", *dcgm} <= in_service.active
    assert state.FABRIC in in_service.enabled
    assert not services.STOPPED.exists()


def test_a_refused_upgrade_changes_nothing(
    in_service: MachineDouble, slurm: SlurmDouble, paths: pathlib.Path
):
    with pytest.raises(DriverError):
        run(version="580.1")
    kept.take(kept.RESET, NODE, "0000:1b:00.0")
    slurm.log.clear()
    with pytest.raises(kept.KeptError, match="slurmd-0 is held for gpu-reset already"):
        run()
    (paths / "sys/bus/pci/devices/0000:1b:00.0/vendor").write_text("0x8086\n")
    with pytest.raises(DriverError, match="no NVIDIA GPU"):
        run()
    assert (slurm.log, in_service.log) == ([], [])


def test_an_upgrade_that_dies_after_any_command_is_finished_by_the_next(
    in_service: MachineDouble, slurm: SlurmDouble
):
    """The action dies before each command in turn; hooks and a second action finish it."""
    outcomes: set[str] = set()
    lives = 0
    for lives in itertools.count():
        slurm.record, slurm.maintained, in_service.log = Record(""), [], []
        in_service.installed, in_service.held, in_service.broken = {}, set(), False
        in_service.install_driver("535", "535.288.01")
        slurm.lives = lives
        try:
            run()
        except Killed:
            slurm.lives = None
        else:
            break
        works = state.explain(state.look()) is None
        roles.maintain(registration.Stage.REGISTERED if works else registration.Stage.FAILED)
        held = kept.maintenance() is not None
        assert works != held, "a node whose driver does not work is not given out"
        outcomes.add(str(diagnose(state.look())))
        run()
        roles.maintain()
        kept.keep()  # as the service does within seconds
        assert in_service.loaded == in_service.library_version() == "580.173.02"
        assert (slurm.record, slurm.maintained, in_service.broken) == (Record(""), [], False)
    slurm.lives = None
    assert lives > 25
    assert {"None", "unfinished", "mismatch"} <= outcomes
