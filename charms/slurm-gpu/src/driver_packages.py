"""NVIDIA's driver as the distributions package it: names, branches and devices, each with its source.

Ubuntu: Ubuntu's archive, components restricted and multiverse, of 22.04 and 24.04 as of November 2026, and what
ubuntu-drivers-common 0.9.7 (UbuntuDrivers/detect.py) makes of it. Debian: bookworm and bookworm-security, components
contrib, non-free and non-free-firmware, as of November 2026.
"""

import dataclasses

BRANCHES = ("535", "550", "570", "575", "580", "590", "595")  # that one of the distributions ever had


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A range of PCI device ids of one generation."""

    name: str
    first: int
    last: int
    module: str  # "open", "proprietary" or "either" kernel modules drive it
    since: int  # the first branch that knows it
    until: int | None = None  # the last one


# Ranges of device ids: pci-ids.ucw.cz, vendor 10de. Which modules drive what: docs.nvidia.com/datacenter/tesla/
# driver-installation-guide, "NVIDIA Kernel Modules". First and last branches: NVIDIA's "Supported NVIDIA GPU Products"
# of each release (580 is the last for Maxwell, Pascal and Volta).
ARCHITECTURES = (
    Architecture("Maxwell", 0x1340, 0x15EF, "proprietary", 340, 580),
    Architecture("Pascal", 0x15F0, 0x15FF, "proprietary", 367, 580),
    Architecture("Maxwell", 0x1600, 0x17FF, "proprietary", 340, 580),
    Architecture("Pascal", 0x1B00, 0x1D7F, "proprietary", 367, 580),
    Architecture("Volta", 0x1D80, 0x1DFF, "proprietary", 384, 580),
    Architecture("Turing", 0x1E00, 0x1FFF, "either", 410),
    Architecture("Ampere", 0x2080, 0x20FF, "either", 450),
    Architecture("Turing", 0x2180, 0x21FF, "either", 410),
    Architecture("Ampere", 0x2200, 0x22FF, "either", 450),
    Architecture("Hopper", 0x2300, 0x2341, "either", 520),
    Architecture("Grace Hopper", 0x2342, 0x2342, "open", 535),
    Architecture("Hopper", 0x2343, 0x2347, "either", 520),
    Architecture("Grace Hopper", 0x2348, 0x2348, "open", 550),
    Architecture("Hopper", 0x2349, 0x23FF, "either", 520),
    Architecture("Ampere", 0x2400, 0x25FF, "either", 450),
    Architecture("Ada", 0x2600, 0x28FF, "either", 525),
    Architecture("Blackwell", 0x2900, 0x2FFF, "open", 570),
    Architecture("Blackwell Ultra", 0x3180, 0x31FF, "open", 580),
)


@dataclasses.dataclass(frozen=True)
class Release:
    """How one release of a distribution packages the driver. `{b}`: branch, `{f}`: -server or nothing, `{o}`: -open."""

    name: str
    branches: tuple[str, ...]
    flavours: tuple[str, ...]
    locked: tuple[str, ...]  # user space that must be of exactly the driver's version
    utils: tuple[str, ...]  # nvidia-smi, of the same version too
    loose: tuple[str, ...]  # of any version
    dkms: dict[str, tuple[str, ...]]  # by kernel module
    headers: str  # `{k}`: kernel
    prebuilt: str = ""  # `{k}`: kernel; empty where there is none
    names_version: str = ""  # the package in whose dependencies the prebuilt modules name their driver version
    fabric: tuple[str, ...] = ()
    nvlink5: tuple[str, ...] = ()
    cuda: tuple[str, ...] = ("nvidia-cuda-toolkit",)
    hint: str = ""  # what to do when a package is not in the archives


_UBUNTU_LOCKED = (
    "nvidia-headless-no-dkms-{b}{f}{o}",
    "nvidia-compute-utils-{b}{f}",  # nvidia-persistenced
    "nvidia-kernel-common-{b}{f}",
    "libnvidia-compute-{b}{f}",
    "libnvidia-cfg1-{b}{f}",
)
_UBUNTU_HINT = "check that restricted and multiverse are enabled (add-apt-repository restricted multiverse)"


def _ubuntu(name: str, branches: tuple[str, ...]) -> Release:
    return Release(
        name=name,
        branches=branches,
        flavours=("server", "desktop"),
        locked=_UBUNTU_LOCKED,
        utils=("nvidia-utils-{b}{f}",),
        loose=("nvidia-modprobe",),
        dkms={"open": ("nvidia-dkms-{b}{f}-open",), "proprietary": ("nvidia-dkms-{b}{f}",)},
        headers="linux-headers-{k}",
        prebuilt="linux-modules-nvidia-{b}{f}{o}-{k}",
        names_version="nvidia-kernel-common-{b}{f}",
        fabric=("nvidia-fabricmanager-{b}", "libnvidia-nscq-{b}"),
        nvlink5=("nvlsm",),
        hint=_UBUNTU_HINT,
    )


# Debian 12 has one branch, no prebuilt modules and no fabric manager. Its open modules may lag behind a security
# update of the rest; then the newest version that is there as a whole is taken.
_DEBIAN = Release(
    name="debian 12",
    branches=("535",),
    flavours=("server", "desktop"),  # the same packages
    locked=("libcuda1", "libnvidia-ml1", "libnvidia-cfg1", "firmware-nvidia-gsp"),
    utils=("nvidia-smi",),
    loose=("nvidia-modprobe", "nvidia-persistenced"),
    dkms={
        "open": ("nvidia-open-kernel-dkms", "nvidia-open-kernel-support"),
        "proprietary": ("nvidia-kernel-dkms", "nvidia-kernel-support"),
    },
    headers="linux-headers-{k}",
    hint="check that contrib, non-free and non-free-firmware are in the apt sources, or use NVIDIA's own repository "
    "and driver=keep",
)

RELEASES = {
    release.name: release
    for release in (
        _ubuntu("ubuntu 22.04", ("535", "550", "570", "575", "580", "590", "595")),
        _ubuntu("ubuntu 24.04", ("535", "550", "570", "575", "580", "590", "595")),
        _DEBIAN,
    )
}

# Packages that a change of driver may take away: the other branch's. Anything else that apt wants to remove stops it.
MAY_GO = ("nvidia-", "libnvidia-", "linux-modules-nvidia-", "linux-objects-nvidia-", "linux-signatures-nvidia-",
          "xserver-xorg-video-nvidia", "cuda-drivers", "libcuda1", "libcudadebugger1", "firmware-nvidia-")  # fmt: skip
# What apt must not move by itself: the same, without what is merely called so.
HOLD_PATTERNS = ("nvidia-*", "libnvidia-*", "linux-modules-nvidia-*", "libcuda1", "cuda-drivers*", "firmware-nvidia-*")
NOT_HELD = ("nvidia-cuda-", "nvidia-container-", "libnvidia-container")


def architecture(device: int) -> Architecture | None:
    """Return the generation of the card with this PCI device id, None for one that the table does not have."""
    return next((row for row in ARCHITECTURES if row.first <= device <= row.last), None)
