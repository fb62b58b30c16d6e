"""Drivers on a machine: one transaction, held afterwards, and nothing else removed."""

import dataclasses
import pathlib

import pytest
from machine_double import MachineDouble

from driver import install as driver_install
from driver import plan as driver_plan
from driver import state as driver_state
from driver.plan import Spec
from driver.state import DriverError
from slurm_ddp import apt
from slurm_ddp.run import CommandError


def facts(paths: pathlib.Path) -> driver_state.Facts:
    return driver_state.look(paths / "proc", paths / "sys")


def plan(paths: pathlib.Path, wanted: Spec | None = None) -> driver_plan.Plan:
    return driver_plan.resolve(facts(paths), wanted or Spec(branch="580"))


def test_one_transaction(paths: pathlib.Path, node: MachineDouble):
    got = plan(paths)
    assert not driver_install.is_installed(got)
    driver_install.install(got)
    assert [line.partition(" ")[0] for line in node.log] == ["install"]
    assert node.installed == got.packages
    assert driver_install.is_installed(got)
    driver_install.install(got)  # again: nothing to do
    assert len(node.log) == 1


def test_another_branch_gives_way(paths: pathlib.Path, node: MachineDouble):
    node.install_driver("535", "535.288.01")
    driver_install.install(plan(paths))
    assert [name for name in node.installed if "535" in name] == ["nvidia-firmware-535-server-535.288.01"]
    assert node.library_version() == "580.173.02"
    assert node.loaded == "535.288.01"


def test_a_held_driver_moves_as_a_whole(paths: pathlib.Path, node: MachineDouble):
    driver_install.install(plan(paths, Spec(branch="580", version="580.65.06")))
    driver_install.ensure_hold(on=True)
    assert node.library_version() == "580.65.06"
    driver_install.install(plan(paths))
    assert node.library_version() == "580.173.02"
    behind = [name for name, number in node.installed.items() if number.startswith("580.65.06")]
    assert behind == ["nvidia-firmware-580-server-580.65.06"]  # beside the new one, for autoremove


def test_nothing_else_is_removed(paths: pathlib.Path, node: MachineDouble):
    node.also_removes = ["slurmd"]
    with pytest.raises(DriverError, match=r"driver 580\.173\.02: apt would remove slurmd"):
        plan(paths)
    assert node.log == []


def test_what_apt_prints_is_reported(paths: pathlib.Path, node: MachineDouble):
    name = "libnvidia-cfg1-580-server"
    got = plan(paths)
    node.offers[name] = (("999-1", ""),)
    with pytest.raises(
        apt.AptError, match=r"Version '580\.173\.02-0ubuntu0\.24\.04\.1' for 'libnvidia-cfg1-580-server' was not found"
    ):
        apt.simulate(apt.assigned(got.packages))
    with pytest.raises(CommandError, match="libnvidia-cfg1-580-server"):
        driver_install.install(got)


def test_an_interrupted_dpkg_is_finished_first(paths: pathlib.Path, node: MachineDouble):
    got = plan(paths)
    node.broken = True
    driver_install.install(got)
    assert driver_install.is_installed(got)


def test_debian(paths: pathlib.Path, node: MachineDouble):
    (paths / "etc/os-release").write_text('ID=debian\nVERSION_ID="12"\n')
    node.offers = MachineDouble(paths, node.slurm, "bookworm").offers
    for kernel in list((paths / "boot").iterdir()):
        kernel.unlink()
    node.boot("6.1.0-56-amd64")
    got = plan(paths, Spec(branch="535"))
    driver_install.install(got)
    driver_install.check_next_kernel(got, node.kernel)
    assert driver_install.load(got.version, facts(paths))
    assert node.loaded == "535.309.01"


def test_settings(paths: pathlib.Path, node: MachineDouble):
    (paths / "usr/bin/nvidia-persistenced").parent.mkdir(parents=True, exist_ok=True)
    (paths / "usr/bin/nvidia-persistenced").touch()
    (paths / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\nnvidia-persistenced:x:990:990::/nonexistent:/x\n")
    driver_install.install(plan(paths))
    node.installed |= {"nvidia-container-toolkit": "1", "nvidia-cuda-toolkit": "12"}
    driver_install.ensure_settings(persistence=True, hold=True)
    assert "nvidia-utils-580-server" in node.held
    assert "linux-modules-nvidia-580-server-open-6.8.0-134-generic" in node.held
    assert not {"nvidia-container-toolkit", "nvidia-cuda-toolkit"} & node.held
    assert "blacklist nouveau" in driver_install.NOUVEAU.read_text()
    assert '"linux-modules-nvidia-";' in driver_install.UNATTENDED.read_text()
    dropin = (paths / "etc/systemd/system/nvidia-persistenced.service.d/10-slurm-gpu.conf").read_text()
    assert "StopWhenUnneeded=false" in dropin
    assert "--user nvidia-persistenced --persistence-mode" in dropin
    driver_install.ensure_settings(persistence=False, hold=False)
    assert node.held == set()
    assert not driver_install.UNATTENDED.exists()
    assert not (paths / "etc/systemd/system/nvidia-persistenced.service.d").exists()


def test_what_an_administrator_holds_stays_held(paths: pathlib.Path, node: MachineDouble):
    node.install_driver("580", "580.173.02")
    node.held = {"nvidia-utils-580-server"}
    driver_install.ensure_hold(on=False)
    assert node.held == {"nvidia-utils-580-server"}
    for _ in range(2):
        driver_install.ensure_hold(on=True)
    assert len(node.held) > 1
    driver_install.ensure_hold(on=False)
    assert node.held == {"nvidia-utils-580-server"}
    assert not driver_install.HELD.exists()


def test_a_driver_that_nobody_uses_is_exchanged_in_place(paths: pathlib.Path, node: MachineDouble):
    node.install_driver("535", "535.288.01")
    got = plan(paths)
    driver_install.install(got)
    assert driver_install.load(got.version, facts(paths))
    assert node.loaded == "580.173.02"
    assert driver_install.load(got.version, facts(paths))  # again


def test_what_asks_for_a_reboot(paths: pathlib.Path, node: MachineDouble):
    node.install_driver("535", "535.288.01")
    got = plan(paths)
    driver_install.install(got)
    node.in_use = True
    assert not driver_install.load(got.version, facts(paths))
    assert node.loaded == "535.288.01"


def test_nouveau_asks_for_a_reboot(paths: pathlib.Path, node: MachineDouble):
    node.add_nouveau()
    got = plan(paths)
    driver_install.install(got)
    driver_install.ensure_settings(persistence=True, hold=True)
    assert not driver_install.load(got.version, facts(paths))
    node.reboot()
    assert node.loaded == got.version


def test_no_reboot_into_a_kernel_without_the_driver(paths: pathlib.Path, node: MachineDouble):
    got = plan(paths)
    driver_install.install(got)
    driver_install.check_next_kernel(got, node.kernel)
    node.add_kernel("6.8.0-139-generic")
    with pytest.raises(
        DriverError, match=r"no reboot: kernel 6\.8\.0-139-generic, which boots next, has no nvidia module"
    ):
        driver_install.check_next_kernel(got, node.kernel)


def test_services(paths: pathlib.Path, node: MachineDouble):
    node.active |= {"nvidia-persistenced.service", "snap.dcgm.dcgm-exporter.service", "slurmd.service"}
    driver_install.stop_holders()
    assert node.active == {"slurmd.service"}
    node.add_card("0000:02:00.0", 0x22A3, kind="0x068000")
    got = plan(paths)
    driver_install.install(got)
    driver_install.load(got.version, facts(paths))
    driver_install.start_services(fabric=True)
    assert {"nvidia-fabricmanager.service", "snap.dcgm.dcgm-exporter.service"} <= node.active
    assert not driver_install.STOPPED.exists()
    node.loaded = "1"
    with pytest.raises(DriverError, match="journalctl -u nvidia-fabricmanager"):
        driver_install.start_services(fabric=True)


def test_an_unknown_command_is_noticed(node: MachineDouble):
    with pytest.raises(AssertionError, match="nobody expected"):
        apt.run("/usr/bin/apt-get", "autoremove")


SMI_535 = "nvidia-utils-535-server"


def without_smi(node: MachineDouble) -> driver_state.Facts:
    """Upstream's driver: nvidia-headless-no-dkms, which brings no nvidia-smi."""
    node.install_driver("535", "535.288.01")
    del node.installed[SMI_535]
    return driver_state.look(node.root / "proc", node.root / "sys")


def test_nvidia_smi_of_exactly_the_drivers_version_is_added(node: MachineDouble):
    facts = without_smi(node)
    before = dict(node.installed)
    driver_install.ensure_utils(facts)
    number = before["libnvidia-compute-535-server"]
    assert node.installed == before | {SMI_535: number}
    node.log.clear()
    driver_install.ensure_utils(facts)
    assert node.log == []


def test_nothing_else_is_moved_for_nvidia_smi(node: MachineDouble):
    facts = without_smi(node)
    node.also_removes = ["slurmd"]
    with pytest.raises(DriverError, match=r"nvidia-utils-535-server .*: apt would remove slurmd"):
        driver_install.ensure_utils(facts)
    assert not node.log
    node.also_removes = []
    node.offers[SMI_535] = ()  # the archive went on
    with pytest.raises(apt.AptError, match="nvidia-utils-535-server"):
        driver_install.ensure_utils(facts)
    assert SMI_535 not in node.installed


def test_no_nvidia_smi_for_a_driver_of_another_version_or_origin(node: MachineDouble):
    facts = without_smi(node)
    driver_install.ensure_utils(dataclasses.replace(facts, loaded="535.1"))  # mismatch, which the status tells
    assert "apt-get install nvidia-utils-535-server=" in driver_install.utils_advice()
    node.installed.clear()
    driver_install.ensure_utils(facts)
    assert node.log == []
    assert driver_install.utils_advice().startswith("install nvidia-smi of exactly the driver's version")
