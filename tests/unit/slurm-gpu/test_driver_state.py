"""What is wrong with a driver: each row of the table, from a machine that shows it."""

import dataclasses
import pathlib

import pytest
from machine_double import MachineDouble

from driver import state as driver_state
from driver.state import PROBLEMS, Facts, Module, diagnose
from gpu.pci import Card

CARD = Card("0000:1b:00.0", 0x2330)
WORKS = Facts(
    release="ubuntu 24.04", kernel="6.8.0-134-generic", next_kernel="6.8.0-134-generic", cards=(CARD,),
    loaded="580.173.02", library="580.173.02", module=Module("580.173.02", "Canonical Ltd. Kernel"),
    next_module=Module("580.173.02", "Canonical Ltd. Kernel"),
)  # fmt: skip


def but(**changes: object) -> Facts:
    return dataclasses.replace(WORKS, **changes)  # pyright: ignore[reportArgumentType]


NONE = {"loaded": None, "library": None, "module": None, "next_module": None}
ROWS = [
    (WORKS, None, ""),
    (Facts(), None, ""),
    (but(library=None), None, ""),  # NVML is missing; the kernel's word is enough
    (but(cards=(Card("0000:9d:00.0", 0x2330, lost=True),)), "off-bus", "GPU 0000:9d:00.0 fell off the bus"),
    (but(library="580.65.06"), "mismatch", "driver 580.173.02 runs with the library of 580.65.06: run upgrade-driver"),
    (but(switches=4), "no-fabric", "error 802: run upgrade-driver, or install nvidia-fabricmanager-580 580.173.02"),
    (but(nvlink5=True), "no-fabric", "error 802"),
    (but(switches=4, fabric="580.65.06"), "fabric-mismatch", "fabric manager 580.65.06 does not fit driver 580.173.02"),
    (but(switches=4, fabric="580.173.02", fabric_state="failed"), "fabric-down", "the fabric manager is failed"),
    (but(switches=4, fabric="580.173.02"), "fabric-down", "not running: systemctl enable --now"),
    (but(switches=4, fabric="580.173.02", fabric_state="activating"), None, ""),
    (but(switches=4, fabric="580.173.02", fabric_state="active"), None, ""),
    (but(fabric="580.65.06"), None, ""),  # not needed here
    (but(**NONE), "no-driver", "1 NVIDIA GPU has no driver: set driver=580"),
    (but(**NONE, cards=(CARD, CARD)), "no-driver", "2 NVIDIA GPUs have no driver"),
    (but(**NONE, nouveau=True), "nouveau-alone", "nouveau has the GPUs and no NVIDIA driver is installed: set driver=580"),
    (but(loaded=None, nouveau=True), "nouveau", "nouveau has the GPUs instead of the installed driver"),
    (but(loaded=None, module=None), "no-module", "kernel 6.8.0-134-generic has no nvidia module: run upgrade-driver"),
    (but(loaded=None, secure_boot=True, module=Module("580.173.02")), "secure-boot", "Secure Boot refuses"),
    (but(loaded=None, secure_boot=True), "not-loaded", "driver 580.173.02 is installed and not loaded: reboot"),
    (but(loaded=None), "not-loaded", "see journalctl -k -g NVRM"),
    (but(**NONE, cards=(Card("0000:1b:00.0", 0x2330, "vfio-pci"),)), None, ""),  # given to a virtual machine
    (but(next_kernel="6.8.0-139-generic", next_module=None), "next-kernel", "kernel 6.8.0-139-generic, which boots next"),
    (but(next_kernel="6.8.0-139-generic"), None, ""),
    (but(next_kernel="6.8.0-139-generic", next_module=None, module=None), None, ""),  # a container
]  # fmt: skip


@pytest.mark.parametrize(("facts", "trouble", "words"), ROWS)
def test_each_row(facts: Facts, trouble: str | None, words: str):
    finding = diagnose(facts)
    assert (finding.name if finding else None) == trouble
    assert finding is None or words in finding.text
    if finding:
        assert "\n" not in finding.text
        assert finding.is_fatal is (trouble != "next-kernel")


def test_every_trouble_has_a_row():
    assert {trouble for _, trouble, _ in ROWS if trouble} == set(PROBLEMS)


def roots(paths: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    return paths / "proc", paths / "sys"


def test_a_bare_machine(paths: pathlib.Path, node: MachineDouble):
    facts = driver_state.look(*roots(paths))
    assert (facts.release, facts.kernel, facts.next_kernel) == (
        "ubuntu 24.04",
        "6.8.0-134-generic",
        "6.8.0-134-generic",
    )
    assert facts.cards == (CARD,)
    assert (facts.loaded, facts.library, facts.module, facts.version) == (None, None, None, "")


def test_a_machine_with_a_driver(paths: pathlib.Path, node: MachineDouble):
    node.install_driver("580", "580.173.02")
    for number in range(4):
        node.add_card(f"0000:0{number}:00.0", 0x22A3, kind="0x068000")
    facts = driver_state.look(*roots(paths))
    assert (facts.loaded, facts.library, facts.switches) == ("580.173.02", "580.173.02", 4)
    assert facts.module == Module("580.173.02", "Canonical Ltd. Kernel Module Signing")
    assert facts.fabric is None
    node.add_packages("nvidia-fabricmanager-580", version="580.65.06")
    node._show_fabric()
    facts = driver_state.look(*roots(paths))
    assert (facts.fabric, facts.fabric_state) == ("580.65.06", "inactive")


def test_a_user_space_that_moved_on(paths: pathlib.Path, node: MachineDouble):
    node.install_driver("580", "580.65.06")
    node.add_packages("libnvidia-compute-580-server", "nvidia-kernel-common-580-server", version="580.173.02")
    assert "driver 580.65.06 runs with the library of 580.173.02" in (driver_state.explain(*roots(paths)) or "")


def test_a_kernel_without_modules(paths: pathlib.Path, node: MachineDouble):
    node.install_driver("580", "580.173.02")
    node.add_kernel("6.8.0-139-generic")
    assert driver_state.explain(*roots(paths)) is None  # works now
    finding = diagnose(driver_state.look(*roots(paths)))
    assert finding is not None
    assert finding.name == "next-kernel"
    node.reboot()
    assert "kernel 6.8.0-139-generic has no nvidia module" in (driver_state.explain(*roots(paths)) or "")


@pytest.mark.parametrize("hangs", ["modinfo", "od", "nv-fabricmanager", "systemctl"])
def test_nothing_waits_for_what_hangs(paths: pathlib.Path, node: MachineDouble, hangs: str):
    node.install_driver("580", "580.173.02")
    node.add_card("0000:02:00.0", 0x22A3, kind="0x068000")
    node.add_packages("nvidia-fabricmanager-580", version="580.173.02")
    node._show_fabric()
    node.hanging.add(hangs)
    facts = driver_state.look(*roots(paths))
    assert facts.loaded == "580.173.02"
    assert facts.cards[0].lost is (hangs == "od")


def test_a_card_that_left_the_bus(paths: pathlib.Path, node: MachineDouble):
    (paths / "sys/bus/pci/devices/0000:1b:00.0/config").write_text("lost")
    assert "fell off the bus" in (driver_state.explain(*roots(paths)) or "")


def test_secure_boot_and_nvlink5_are_seen(paths: pathlib.Path, node: MachineDouble):
    efi = paths / "sys/firmware/efi/efivars"
    efi.mkdir(parents=True)
    variable = efi / "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    vpd = paths / "sys/class/infiniband/mlx5_0/device"
    vpd.mkdir(parents=True)
    (vpd / "vpd").write_text("plain")
    variable.write_bytes(b"\x06\0\0\0\0")
    facts = driver_state.look(*roots(paths))
    assert (facts.secure_boot, facts.nvlink5) == (False, False)
    variable.write_bytes(b"\x06\0\0\0\1")
    (vpd / "vpd").write_text("x SW_MNG y")
    assert not driver_state.look(*roots(paths)).nvlink5  # an H100 has none, so its network cards are not asked
    (paths / "sys/bus/pci/devices/0000:1b:00.0/device").write_text("0x2901")
    facts = driver_state.look(*roots(paths))
    assert (facts.secure_boot, facts.nvlink5, facts.needs_fabric) == (True, True, True)


def test_the_newest_kernel(paths: pathlib.Path):
    (paths / "boot").mkdir()
    assert driver_state.newest_kernel("6.8.0-99-generic") == "6.8.0-99-generic"
    for name in (
        "vmlinuz-6.8.0-99-generic",
        "vmlinuz-6.8.0-100-generic",
        "vmlinuz",
        "vmlinuz-old; rm",
        "vmlinuz-5.15.0-161-generic",
    ):
        (paths / "boot" / name).touch()
    assert driver_state.newest_kernel("x") == "6.8.0-100-generic"


def test_no_gpu_asks_for_nothing(paths: pathlib.Path):
    assert driver_state.explain(*roots(paths)) is None
