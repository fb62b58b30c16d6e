"""Which packages a machine gets: every row of the table, on recorded indexes, and every refusal by name."""

import dataclasses
import itertools

import pytest
from machine_double import MachineDouble, index

from driver import plan as driver_plan
from driver.plan import Spec, narrowed, resolve, spec
from driver.state import DriverError, Facts
from gpu.pci import Card

NOBLE = Facts(
    release="ubuntu 24.04",
    kernel="6.8.0-134-generic",
    next_kernel="6.8.0-134-generic",
    cards=(Card("0000:1b:00.0", 0x2330),),
)
JAMMY = dataclasses.replace(
    NOBLE, release="ubuntu 22.04", kernel="5.15.0-161-generic", next_kernel="5.15.0-161-generic"
)
BOOKWORM = dataclasses.replace(NOBLE, release="debian 12", kernel="6.1.0-56-amd64", next_kernel="6.1.0-56-amd64")
INDEX = {"ubuntu 24.04": "noble", "ubuntu 22.04": "jammy", "debian 12": "bookworm"}


@pytest.fixture(autouse=True)
def archives(node: MachineDouble) -> MachineDouble:
    """The machine whose apt resolves, over the index of the release that a test names."""
    machine.append(node)
    return node


machine: list[MachineDouble] = []


def plan(facts: Facts, wanted: Spec) -> driver_plan.Plan:
    machine[-1].offers = index(INDEX.get(facts.release, "noble"))
    return resolve(facts, wanted)


def but(facts: Facts, **changes: object) -> Facts:
    return dataclasses.replace(facts, **changes)  # pyright: ignore[reportArgumentType]


def test_ubuntu_takes_signed_modules_of_exactly_the_version():
    got = plan(NOBLE, Spec(branch="580"))
    assert (got.version, got.fabric) == ("580.173.02", False)
    assert got.packages["linux-modules-nvidia-580-server-open-6.8.0-134-generic"] == "6.8.0-134.134+1"
    assert got.packages["nvidia-headless-no-dkms-580-server-open"] == "580.173.02-0ubuntu0.24.04.1"
    assert got.packages["nvidia-utils-580-server"] == "580.173.02-0ubuntu0.24.04.1"
    assert got.packages["nvidia-kernel-source-580-server-open"] == "580.173.02-0ubuntu0.24.04.1"  # a dependency
    assert got.packages["nvidia-firmware-580-server-580.173.02"]
    assert not any(
        name.startswith("nvidia-dkms") or "fabric" in name or "cuda-toolkit" in name for name in got.packages
    )


def test_both_the_running_and_the_next_kernel_get_modules():
    got = plan(but(NOBLE, next_kernel="6.8.0-139-generic"), Spec(branch="580"))
    assert got.kernels == ("6.8.0-134-generic", "6.8.0-139-generic")


def test_jammy_on_a_cloud_kernel():
    got = plan(
        but(JAMMY, kernel="6.8.0-1044-aws", next_kernel="6.8.0-1044-aws"), Spec(branch="535", module="proprietary")
    )
    assert "linux-modules-nvidia-535-server-6.8.0-1044-aws" in got.packages


def test_nvswitches_bring_the_fabric_manager_of_the_same_version():
    got = plan(but(NOBLE, switches=4), Spec(branch="580"))
    assert got.fabric
    assert (
        got.packages["nvidia-fabricmanager-580"] == got.packages["libnvidia-nscq-580"] == "580.173.02-0ubuntu0.24.04.1"
    )
    assert "nvidia-fabricmanager-580" not in plan(but(NOBLE, switches=4), Spec(branch="580", fabric="off")).packages
    assert plan(NOBLE, Spec(branch="580", fabric="on")).fabric


def test_a_fabric_manager_of_another_version_is_no_fit():
    with pytest.raises(
        DriverError, match=r"driver=570: the archives have no 570.211.01 as a whole: .*fabricmanager-570 is 570.195.03"
    ):
        plan(but(NOBLE, switches=4), Spec(branch="570"))


def test_without_utils_and_with_cuda():
    assert "nvidia-utils-580-server" not in plan(NOBLE, Spec(branch="580", utils=False)).packages
    assert "nvidia-cuda-toolkit" in plan(NOBLE, Spec(branch="580", cuda=True)).packages


def test_signed_modules_of_an_older_driver_are_no_fit(archives: MachineDouble):
    """User space came first: apt alone would pair it with them, since they name a lower bound only."""
    archives.offers = index("noble")
    name = "linux-modules-nvidia-580-server-6.8.0-134-generic"
    archives.offers[name] = (("6.8.0-134.134", "nvidia-kernel-common-580-server (>= 580.65.06)"),)
    facts = but(NOBLE, secure_boot=True)
    with pytest.raises(DriverError, match=r"no signed modules for kernel 6\.8\.0-134-generic"):
        resolve(facts, Spec(branch="580", module="proprietary"))


def test_a_version_may_be_asked_for():
    old = Spec(branch="580", version="580.65.06")
    with pytest.raises(DriverError, match=r"no signed modules for kernel 6\.8\.0-134-generic, and Secure Boot refuses"):
        plan(but(NOBLE, secure_boot=True), old)
    got = plan(NOBLE, old)  # the archive has signed modules of the newest version only
    assert got.version == "580.65.06"
    assert got.packages["nvidia-dkms-580-server-open"] == "580.65.06-0ubuntu0.24.04.1"
    assert got.packages["linux-headers-6.8.0-134-generic"]
    with pytest.raises(DriverError, match=r"the archives have no 580\.1\.1 as a whole"):
        plan(NOBLE, Spec(branch="580", version="580.1.1"))


def test_a_kernel_without_signed_modules_builds_them_unless_secure_boot():
    hwe = but(NOBLE, kernel="6.17.0-29-generic", next_kernel="6.17.0-29-generic")
    assert "nvidia-dkms-580-server-open" in plan(hwe, Spec(branch="580")).packages
    with pytest.raises(DriverError, match="Secure Boot refuses modules built on this machine"):
        plan(but(hwe, secure_boot=True), Spec(branch="580"))
    foreign = but(NOBLE, kernel="6.9.1-custom", next_kernel="6.9.1-custom")
    with pytest.raises(DriverError, match=r"no linux-headers-6\.9\.1-custom to build them with"):
        plan(foreign, Spec(branch="580"))


def test_debian_takes_the_newest_version_that_is_there_as_a_whole():
    got = plan(BOOKWORM, Spec(branch="535"))  # the open modules lag behind the security update
    assert got.version == "535.309.01"
    assert "nvidia-open-kernel-dkms" not in got.packages
    assert got.packages["nvidia-kernel-dkms"] == "535.309.01-0+deb12u1"
    assert got.packages["nvidia-alternative"] == "535.309.01-0+deb12u1"
    assert got.packages["nvidia-persistenced"] == "535.171.04-1~deb12u1"
    asked = plan(BOOKWORM, Spec(branch="535", module="open"))
    assert (asked.version, asked.packages["nvidia-smi"]) == ("535.261.03", "535.261.03-1")
    assert asked.packages["libnvidia-ptxjitcompiler1"] == "535.261.03-1"  # or apt would take the newer one


@pytest.mark.parametrize(
    ("facts", "wanted", "words"),
    [
        (but(NOBLE, release="fedora 42"), Spec(branch="580"), "driver=580: this machine has fedora 42, not one of ubuntu 22.04"),
        (but(NOBLE, release=""), Spec(branch="580"), "an unknown system"),
        (BOOKWORM, Spec(branch="580"), "driver: debian 12 has no branch 580, only 535"),
        (but(BOOKWORM, switches=4), Spec(branch="535"), "fabric-manager: debian 12 packages none"),
        (but(NOBLE, runfile=True), Spec(branch="580"), "driver: NVIDIA's own installer put one here: run nvidia-uninstall"),
        (but(NOBLE, cards=(Card("0000:01:00.0", 0x2901),)), Spec(branch="535"), r"GPU 0000:01:00.0 \(Blackwell\) needs branch 570"),
        (but(NOBLE, cards=(Card("0000:01:00.0", 0x1DB6),)), Spec(branch="595"), r"\(Volta\) works up to branch 580, not 595"),
        (but(NOBLE, cards=(Card("0000:01:00.0", 0x2901),)), Spec(branch="580", module="proprietary"), "needs the open module"),
        (but(NOBLE, cards=(Card("0000:01:00.0", 0x1DB6),)), Spec(branch="580", module="open"), "needs the proprietary module"),
        (
            but(NOBLE, cards=(Card("0000:01:00.0", 0x1DB6), Card("0000:02:00.0", 0x2901))), Spec(branch="580"),
            "kernel-module: GPU 0000:02:00.0 needs the open module and 0000:01:00.0 the proprietary one",
        ),
        (but(NOBLE, nvlink5=True), Spec(branch="580"), "NVLink 5 switches need nvlsm, which only NVIDIA's repository has"),
        (NOBLE, Spec(branch="590"), "only leads on to branch 595 now: set driver=595"),
        (NOBLE, Spec(branch="550"), "nvidia-headless-no-dkms-550-server-open.* not in this machine's archives: check that restricted"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_by_name(facts: Facts, wanted: Spec, words: str):
    with pytest.raises(DriverError, match=words) as caught:
        plan(facts, wanted)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("devices", "module"),
    [
        ((0x2330,), "open"), ((0x20B0,), "open"), ((0x1EB8,), "open"), ((0x2901,), "open"), ((0x2342,), "open"),
        ((0x1DB6,), "proprietary"), ((0x15F8,), "proprietary"), ((0x1DB6, 0x1EB8), "proprietary"),
        ((0x2330, 0x2901), "open"), ((0xFFF0,), "open"), ((), "open"),
    ],
)  # fmt: skip
def test_the_kernel_module_follows_the_cards(devices: tuple[int, ...], module: str):
    facts = but(NOBLE, cards=tuple(Card(f"0000:0{i}:00.0", device) for i, device in enumerate(devices)))
    assert driver_plan.kernel_modules(facts, Spec(branch="580"))[0] == module


def test_the_table_of_devices_has_no_overlaps():
    ranges = sorted(one for _, ranges, *_ in driver_plan.GENERATIONS for one in ranges)
    assert all(first <= last for first, last in ranges)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(ranges))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"driver": "581"}, "driver: input should be 'keep', '535', '550'"),
        ({"driver": "580.173.02"}, "driver: input should be 'keep'"),
        ({"driver": ""}, "driver: input should be 'keep'"),
        ({"driver": "580; rm -rf /"}, "driver: "),
        ({"driver-flavour": "desktop"}, "driver-flavour: input should be 'server'"),
        ({"kernel-module": "Open"}, "kernel-module: input should be 'auto', 'open' or 'proprietary'"),
        ({"fabric-manager": "yes"}, "fabric-manager: input should be 'auto', 'on' or 'off'"),
        ({"cuda-toolkit": True}, "cuda-toolkit: true contradicts driver=keep"),
        ({"kernel-module": "open"}, "kernel-module: open contradicts driver=keep"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, object], words: str):
    with pytest.raises(DriverError) as caught:
        spec(options)
    assert str(caught.value).startswith(words)


def test_options():
    assert spec({}) == Spec()
    assert spec({}).keeps
    got = spec({"driver": "580", "kernel-module": "open", "cuda-toolkit": True, "hold-driver": False})
    assert got == Spec(branch="580", module="open", cuda=True, hold=False)


@pytest.mark.parametrize(
    ("wanted", "branch", "version", "words"),
    [
        (Spec(), None, None, "branch: driver=keep names none; give branch=580"),
        (Spec(branch="535"), "580", None, "branch=580 contradicts the option driver=535"),
        (Spec(branch="580"), None, "535.288.01", "version=535.288.01 is not of branch 580"),
        (Spec(), None, "123.45", "version: 123 is none of 535"),
    ],
)
def test_parameters_are_refused_by_name(
    wanted: Spec, branch: driver_plan.Branch | None, version: str | None, words: str
):
    with pytest.raises(DriverError) as caught:
        narrowed(wanted, branch, version)
    assert str(caught.value).startswith(words)


def test_parameters():
    assert narrowed(Spec(branch="580"), None, None).branch == "580"
    assert narrowed(Spec(), "580", None).branch == "580"
    assert narrowed(Spec(), None, None, "535").branch == "535"
    assert narrowed(Spec(branch="580"), None, None, "535").branch == "580"
    with pytest.raises(DriverError, match="branch: that of the driver here, 470, is none of 535"):
        narrowed(Spec(), None, None, "470")
    assert narrowed(Spec(), None, "580.65.06") == Spec(branch="580", version="580.65.06")


@pytest.mark.parametrize("name", ["noble", "jammy", "bookworm"])
def test_the_recorded_indexes_can_be_read(name: str):
    offers = index(name)
    assert all(number for rows in offers.values() for number, _ in rows)
