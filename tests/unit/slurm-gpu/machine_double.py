"""A machine with apt, kernels, NVIDIA's driver and systemd, for tests that install drivers.

It fails on any other command. Its rules, each seen on real machines: the real apt resolves, over a
recorded index; the user space changes at once, the loaded module only by unloading it or with a
reboot; modules exist for the kernels that packages brought them for; installing one branch removes
another branch's packages; a fabric manager whose version differs from the driver's does not start.
"""

import dataclasses
import json
import pathlib
import re
import shlex
import shutil

import real_apt
from slurm_double import Killed, SlurmDouble, checked

from driver import state as driver_state
from slurm_ddp import apt
from slurm_ddp.commands import CommandError, Completed

_REMOVED = re.compile(r"^(?:Remv|Purg) (\S+)", re.MULTILINE)
_INSTALLED = re.compile(r"^Inst (\S+)(?: \[[^]]*\])? \((\S+)", re.MULTILINE)
INDEXES = pathlib.Path(__file__).with_name("indexes")
# The drivers that ubuntu-drivers offers for cards, by PCI device id; other cards have the open and
# the proprietary one. By the packages' Modaliases, as for Volta, and for Blackwell, which the
# proprietary modules do not drive.
_PROPRIETARY_ONLY, _OPEN_ONLY = (0x1D80, 0x1DFF), (0x2900, 0x2FFF)
_APT = "/usr/bin/apt-get -o DPkg::Lock::Timeout=600 -y "
_EXACT = "-o APT::Ignore-Hold=true --no-install-recommends --allow-downgrades --allow-change-held-packages install "


def index(name: str) -> dict[str, tuple[real_apt.Offer, ...]]:
    """Return a recorded package index."""
    packages = json.loads((INDEXES / f"{name}.json").read_text())["packages"]
    return {
        package: tuple((number, depends) for number, depends in offers)
        for package, offers in packages.items()
    }


class MachineDouble:
    """One compute node."""

    def __init__(self, root: pathlib.Path, slurm: SlurmDouble, distribution: str = "noble") -> None:
        self.root = root
        self.slurm = slurm
        self.offers = index(distribution)
        self.installed: dict[str, str] = {}
        self.held: set[str] = set()
        self.loaded: str | None = None
        self.lost: set[str] = set()  # cards that the driver does not find
        self.signer = "Canonical Ltd. Kernel Module Signing"
        self.broken = False  # dpkg was interrupted
        self.in_use = False  # the module cannot be unloaded
        self.also_removes: list[str] = []
        self.active: set[str] = set()
        self.enabled: set[str] = set()
        self.smi = SmiDouble()
        self.boots = 1
        self.booted_at = ""
        self.log: list[str] = []  # what changed something
        self.hanging: set[str] = set()  # programs that never answer
        self.kernel_warning = ""  # of ubuntu-drivers, which then lists nothing
        self.kernel = ""
        self.boot("6.8.0-134-generic")

    # What tests arrange.

    def add_kernel(self, release: str) -> None:
        """Put a kernel into /boot."""
        (self.root / "boot").mkdir(exist_ok=True)
        (self.root / "boot" / f"vmlinuz-{release}").touch()

    def boot(self, release: str | None = None) -> None:
        """Boot the newest kernel, or this one."""
        if release:
            self.add_kernel(release)
        self.kernel = release or driver_state.newest_kernel(self.kernel)
        (self.root / "proc/sys/kernel").mkdir(parents=True, exist_ok=True)
        (self.root / "proc/sys/kernel/osrelease").write_text(f"{self.kernel}\n")
        (self.root / "proc/sys/kernel/random").mkdir(parents=True, exist_ok=True)
        (self.root / "proc/sys/kernel/random/boot_id").write_text(f"boot-{self.boots}\n")
        nouveau = self.root / "sys/module/nouveau"
        if nouveau.exists() and (self.root / "etc/modprobe.d/slurm-gpu-nouveau.conf").exists():
            nouveau.rmdir()
        self.active = {"slurmd.service"} & self.active
        self.load(None)
        if not nouveau.exists():
            self.load(self.module_version(self.kernel))
        if (
            "nvidia-fabricmanager" in self.active
            or self.fabric_version() == self.loaded is not None
        ):
            self.active.add(driver_state.FABRIC)
        self._show_fabric()

    def reboot(self) -> None:
        """Reboot the machine."""
        self.boots += 1
        self.log.append("reboot")
        if self.slurm.record is not None:  # a reason that is there stays
            self.slurm.record.base = "DOWN"
            self.slurm.record.reason = self.slurm.record.reason or "Node unexpectedly rebooted"
        self.boot()

    def add_card(
        self, bus_id: str = "0000:1b:00.0", device: int = 0x2330, *, kind: str = "0x030200"
    ) -> pathlib.Path:
        """Put a card on the bus."""
        path = self.root / "sys/bus/pci/devices" / bus_id
        path.mkdir(parents=True)
        for name, text in (("vendor", "0x10de"), ("device", f"{device:#06x}"), ("class", kind)):
            (path / name).write_text(f"{text}\n")
        return path

    def add_nouveau(self) -> None:
        """Let nouveau have the cards."""
        (self.root / "sys/module/nouveau").mkdir(parents=True)

    def add_packages(self, *names: str, version: str) -> None:
        """Install these from the index, as an administrator did before."""
        for name in names:
            self.installed[name] = next(
                o[0] for o in self.offers[name] if apt.upstream(o[0]) == version
            )
        self.show_library()

    def install_driver(self, branch: str, version: str, *, load: bool = True) -> None:
        """Have the driver of Ubuntu's archive, as an image brings it."""
        names = [
            f"{name}-{branch}-server"
            for name in ("nvidia-kernel-common", "libnvidia-compute", "nvidia-utils")
        ]
        self.add_packages(*names, f"nvidia-firmware-{branch}-server-{version}", version=version)
        modules = f"linux-modules-nvidia-{branch}-server-open-{self.kernel}"
        self.installed[modules] = self.offers[modules][0][0]
        if load:
            self.load(version)

    # The machine's state

    def module_version(self, kernel: str) -> str | None:
        """Return the version of the modules that this kernel has."""
        for name in self.installed:
            if re.fullmatch(
                rf"linux-modules-nvidia-(\d+)(-server)?(-open)?-{re.escape(kernel)}", name
            ):
                common = re.sub(
                    r"linux-modules-nvidia-(\d+(?:-server)?).*", r"nvidia-kernel-common-\1", name
                )
                return apt.upstream(self.installed[common])
        for name in self.installed:
            if name.startswith("nvidia-dkms-"):
                return (
                    apt.upstream(self.installed[name])
                    if f"linux-headers-{kernel}" in self.installed
                    else None
                )
        return None

    def library_version(self) -> str | None:
        """Return the version of the user space."""
        for name in self.installed:
            if re.fullmatch(r"libnvidia-compute-\d+(-server)?", name):
                return apt.upstream(self.installed[name])
        return None

    def fabric_version(self) -> str | None:
        """Return the version of the fabric manager."""
        return next(
            (
                apt.upstream(v)
                for n, v in self.installed.items()
                if n.startswith("nvidia-fabricmanager-")
            ),
            None,
        )

    # The boundary.

    def run(
        self, *argv: str | pathlib.Path, timeout: float = 60, check: bool = True, **more: object
    ) -> Completed:
        assert timeout > 0
        words = [str(word) for word in argv]
        if words[0] in {"/usr/bin/scontrol", "/usr/bin/squeue", "/usr/sbin/slurmd"}:
            return self.slurm.run(*argv, timeout=timeout, check=check)
        if self.slurm.lives is not None:
            if self.slurm.lives == 0:
                self.slurm.lives = None
                self._half_install(shlex.join(words))
                raise Killed
            self.slurm.lives -= 1
        if pathlib.Path(words[0]).name in self.hanging:
            raise CommandError(f"{words[0]}: no answer within {timeout:g} s")
        answer = self._answer(shlex.join(words), words)
        return checked(words[0], answer) if check else answer

    def _answer(self, command: str, words: list[str]) -> Completed:
        if command.startswith(_APT):
            return self._apt_get(command.removeprefix(_APT), words)
        match words:
            case ["/usr/bin/ubuntu-drivers", "list", "--gpgpu"]:
                return self._list_drivers()
            case ["/usr/bin/dpkg-query", *_, "ubuntu-drivers-common"]:
                return Completed(0, "installed ubuntu-drivers-common 1:0.9.7.6ubuntu3.3\n", "")
            case ["/usr/bin/apt-cache", *_]:
                return Completed(*real_apt.run(words, self.offers, self.installed, self.held))
            case [
                "/usr/bin/dpkg-query",
                "-W",
                "-f",
                "${db:Status-Status} ${Package}\\n",
                *patterns,
            ]:
                status = "unpacked" if self.broken else "installed"
                return Completed(
                    0,
                    "".join(f"{status} {n}\n" for n in self.installed if _matches(n, patterns)),
                    "",
                )
            case [
                "/usr/bin/dpkg-query",
                "-W",
                "-f",
                "${db:Status-Status} ${Package} ${Version}\\n",
                *patterns,
            ]:
                rows = [
                    f"installed {n} {v}\n"
                    for n, v in self.installed.items()
                    if _matches(n, patterns)
                ]
                return Completed(0 if rows else 1, "".join(rows), "")
            case ["/usr/bin/apt-mark", "showhold"]:
                return Completed(0, "".join(f"{name}\n" for name in sorted(self.held)), "")
            case ["/usr/bin/apt-mark", "hold", *names]:
                self.held |= set(names)
                return Completed(0, "", "")
            case ["/usr/bin/apt-mark", "unhold", *names]:
                self.held -= set(names)
                return Completed(0, "", "")
            case ["/usr/bin/dpkg", "--configure", "-a", "--force-confdef", "--force-confold"]:
                self.broken = False
                return Completed(0, "", "")
            case ["/usr/sbin/modinfo", "-k", kernel, name]:
                return self._modinfo(kernel, name)
            case [program, "--version"] if program.endswith("nv-fabricmanager"):
                return Completed(0, f"Fabric Manager version is : {self.fabric_version()}\n", "")
            case ["/usr/sbin/rmmod", name]:
                return self._rmmod(name)
            case ["/usr/sbin/modprobe", "nvidia" | "nvidia-uvm"]:
                self.load(self.module_version(self.kernel))
                return Completed(0, "", "")
            case [program, *order] if program.endswith("nvidia-smi"):
                code, message = self.smi.answer(order)
                return Completed(code, message, "")
            case ["/usr/bin/systemctl", *order]:
                return self._systemctl(order)
            case _:
                raise AssertionError(f"nobody expected {command}")

    def _list_drivers(self) -> Completed:
        """Print as ubuntu-drivers (list_gpgpu(), 0.9.7.6): a line per fitting headless package."""
        if self.kernel_warning:
            return Completed(1, f"{self.kernel_warning}\n", "")
        devices = self.root / "sys/bus/pci/devices"
        ids = [
            int((path / "device").read_text(), 16)
            for path in sorted(devices.glob("*"))
            if _is_gpu(path)
        ]
        lines = ""
        for name in sorted(self.offers):
            found = re.fullmatch(r"nvidia-headless-no-dkms-(\d+-server(-open)?)", name)
            if found and any(_drives(bool(found[2]), device) for device in ids):
                modules = f"linux-modules-nvidia-{found[1]}-generic"
                lines += f"{name}, (kernel modules provided by {modules})\n"
        return Completed(0, lines, "")

    def _apt_get(self, command: str, words: list[str]) -> Completed:
        if command == "update":
            return Completed(0, "", "")
        if self.broken:
            return Completed(
                100, "", "E: dpkg was interrupted, you must manually run 'dpkg --configure -a'\n"
            )
        simulated = "--simulate" in words
        assert _EXACT in f"{command} ", f"nobody expected apt-get {command}"
        flags = words if simulated else [*words[:4], "--simulate", *words[4:]]
        code, printed, message = real_apt.run(flags, self.offers, self.installed, self.held)
        if code:
            return Completed(code, printed, message)
        printed += "".join(f"Remv {name} [1]\n" for name in self.also_removes)
        if simulated:
            return Completed(0, printed, "")
        self.log.append("install " + command.removeprefix(_EXACT))
        for name in _REMOVED.findall(printed):
            self.installed.pop(name, None)
        self.installed |= dict(_INSTALLED.findall(printed))
        self.show_library()
        self._show_fabric()
        return Completed(0, "", "")

    def _half_install(self, command: str) -> None:
        """Cut the power while apt installs: conflicts removed, half the rest installed."""
        if command.startswith(_APT + _EXACT):
            words = shlex.split(command)
            _, printed, _ = real_apt.run(
                [*words[:4], "--simulate", *words[4:]], self.offers, self.installed, self.held
            )
            for name in _REMOVED.findall(printed):
                self.installed.pop(name, None)
            unpacked = _INSTALLED.findall(printed)
            self.installed |= dict(unpacked[: len(unpacked) // 2])
            self.broken = True
            self.show_library()

    def _modinfo(self, kernel: str, name: str) -> Completed:
        version = self.module_version(kernel)
        if version is None or name != "nvidia":
            return Completed(1, "", f"modinfo: ERROR: Module {name} not found.\n")
        signer = (
            ""
            if any(package.startswith("nvidia-dkms-") for package in self.installed)
            else self.signer
        )
        return Completed(
            0,
            f"filename: /lib/modules/{kernel}/nvidia.ko\nversion:        {version}\nsigner:         {signer}\n",
            "",
        )

    def _rmmod(self, name: str) -> Completed:
        if self.in_use or "nvidia-persistenced.service" in self.active:
            return Completed(1, "", f"rmmod: ERROR: Module {name} is in use\n")
        if name == "nvidia":
            self.load(None)
        return Completed(0, "", "")

    def _systemctl(self, order: list[str]) -> Completed:
        match order:
            case ["is-active", "--quiet", "slurmd.service" | "slurmctld.service"] | [
                "show",
                "-P",
                _,
                "slurmd.service",
            ]:
                return self.slurm.run("/usr/bin/systemctl", *order, check=False)
            case ["is-active", "--quiet", unit]:
                return Completed(0 if unit in self.active else 3, "", "")
            case ["is-active", unit]:
                return Completed(
                    *((0, "active\n") if unit in self.active else (3, "inactive\n")), ""
                )
            case ["enable", unit]:
                self.enabled.add(unit)
            case ["stop", unit]:
                self.active.discard(unit)
            case ["restart", "slurmd.service"]:
                return self.slurm.run("/usr/bin/systemctl", *order, check=False)
            case ["restart", unit] | ["enable", "--now", unit]:
                if unit == driver_state.FABRIC and self.fabric_version() != self.loaded:
                    return Completed(1, "", "Job for nvidia-fabricmanager.service failed\n")
                self.active.add(unit)
            case ["disable", "--now", unit]:
                self.active.discard(unit)
                self.enabled.discard(unit)
            case ["daemon-reload"] | ["reset-failed", _] | ["start", "--no-block", _]:
                pass
            case _:
                raise AssertionError(f"nobody expected systemctl {order}")
        return Completed(0, "", "")

    def load(self, version: str | None) -> None:
        self.loaded = version
        module = self.root / "sys/module/nvidia"
        modules = self.root / "proc/modules"
        shutil.rmtree(self.root / "proc/driver/nvidia/gpus", ignore_errors=True)
        if version is None:
            (module / "version").unlink(missing_ok=True)
            modules.write_text("")
            return
        module.mkdir(parents=True, exist_ok=True)
        (module / "version").write_text(f"{version}\n")
        (self.root / "dev").mkdir(exist_ok=True)
        cards = [
            path for path in sorted((self.root / "sys/bus/pci/devices").glob("*")) if _is_gpu(path)
        ]
        for minor, card in enumerate(cards):
            if card.name in self.lost:
                continue
            directory = self.root / "proc/driver/nvidia/gpus" / card.name
            directory.mkdir(parents=True)
            (directory / "information").write_text(
                f"Model: \t NVIDIA H100 80GB HBM3\nDevice Minor: \t {minor}\n"
            )
            (self.root / f"dev/nvidia{minor}").touch()
        modules.write_text("nvidia_uvm 1 0 - Live 0x0\nnvidia 1 1 nvidia_uvm, Live 0x0\n")

    def show_library(self) -> None:
        directory = self.root / "lib"
        directory.mkdir(exist_ok=True)
        for path in directory.glob("libnvidia-ml.so*"):
            path.unlink()
        version = self.library_version()
        smi = self.root / "usr/bin/nvidia-smi"
        smi.parent.mkdir(parents=True, exist_ok=True)
        smi.unlink(missing_ok=True)
        if any(name.startswith("nvidia-utils-") for name in self.installed):
            smi.touch()
        if version:
            (directory / f"libnvidia-ml.so.{version}").touch()
            (directory / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{version}")

    def _show_fabric(self) -> None:
        program = self.root / "usr/bin/nv-fabricmanager"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.unlink(missing_ok=True)
        if self.fabric_version():
            program.touch()


@dataclasses.dataclass
class MigCard:
    """A card as nvidia-smi shows it."""

    name: str
    enabled: bool | None = False
    pending: bool | None = False
    instances: list[str] = dataclasses.field(default_factory=list)
    compute: bool = True  # whether the instances have compute instances


class SmiDouble:
    """nvidia-smi of driver 580, as far as MIG and resets go; it fails on anything else.

    Seen on real cards: an A100 in use changes the mode only after a reset; a reset and a reboot
    remove the instances; instances that do not fit are refused and the earlier ones stay.
    """

    def __init__(self) -> None:
        self.cards: dict[str, MigCard] = {}
        self.log: list[str] = []
        self.needs_reset = False
        self.needs_reboot = False
        self.refuses: set[str] = set()  # profiles
        self.broken = ""  # the message of a reset
        self.most = 7

    def answer(self, order: list[str]) -> tuple[int, str]:
        match order:
            case [
                "--query-gpu=pci.bus_id,name,mig.mode.current,mig.mode.pending",
                "--format=csv,noheader",
            ]:
                words = {True: "Enabled", False: "Disabled", None: "[N/A]"}
                rows = [
                    f"0000{bus_id.upper()}, {card.name}, {words[card.enabled]}, {words[card.pending]}\n"
                    for bus_id, card in sorted(self.cards.items())
                ]
                return 0, "".join(rows)
            case ["mig", "-i", bus_id, "-lgi"]:
                return self._list(self.cards[bus_id])
            case _:
                self.log.append(" ".join(order))
        match order:
            case ["mig", "-i", bus_id, "-dci"]:
                card = self.cards[bus_id]
                if not card.compute:
                    return 6, "No compute instances found: Not Found\n"
                card.compute = False
            case ["mig", "-i", bus_id, "-dgi"]:
                if self.cards[bus_id].compute:
                    return 19, "Unable to destroy GPU instance: In use by another client\n"
                self.cards[bus_id].instances = []
            case ["-i", bus_id, "-mig", mode]:
                self._switch(self.cards[bus_id], on=mode == "1")
            case ["-r", "-i", bus_id]:
                return self._reset([self.cards[bus_id]])
            case ["-r"]:
                return self._reset(list(self.cards.values()))
            case ["mig", "-i", bus_id, "-cgi", profiles, "-C"]:
                return self._create(self.cards[bus_id], profiles.split(","))
            case _:
                raise AssertionError(f"nobody expected nvidia-smi {order}")
        return 0, "All done.\n"

    def _list(self, card: MigCard) -> tuple[int, str]:
        if not card.instances:
            return 6, "No GPU instances found: Not Found\n"
        rows = [
            f"|   0  MIG {name:<16} {9:>4} {i + 1:>8} {4 * i:>10}:4     |\n"
            for i, name in enumerate(card.instances)
        ]
        return 0, "+----------------+\n| GPU instances: |\n" + "".join(rows)

    def _switch(self, card: MigCard, *, on: bool) -> None:
        card.pending = on
        if not self.needs_reset:
            card.enabled = on

    def _reset(self, cards: list[MigCard]) -> tuple[int, str]:
        if self.broken:
            return 255, f"{self.broken}\n"
        for card in cards:
            if not self.needs_reboot:
                card.enabled = card.pending
            card.instances = []
        return 0, "GPU was successfully reset.\nAll done.\n"

    def _create(self, card: MigCard, profiles: list[str]) -> tuple[int, str]:
        if not card.enabled:
            return 6, "No MIG-enabled devices found.\n"
        card.compute = True
        for profile in profiles:
            if profile in self.refuses or len(card.instances) >= self.most:
                return (
                    4,
                    f"Unable to create a GPU instance on GPU 0 using profile {profile}: Insufficient Resources\n",
                )
            card.instances.append(profile)
        return 0, "".join(
            f"Successfully created GPU instance ID {i}\n" for i, _ in enumerate(profiles)
        )


def _drives(is_open: bool, device: int) -> bool:
    only = _PROPRIETARY_ONLY if is_open else _OPEN_ONLY
    return not only[0] <= device <= only[1]


def _is_gpu(path: pathlib.Path) -> bool:
    return (path / "class").read_text().startswith("0x0302")


def _matches(name: str, patterns: list[str]) -> bool:
    return any(pathlib.PurePath(name).match(pattern) for pattern in patterns)
