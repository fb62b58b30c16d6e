"""Show a sandbox host its mock NVIDIA GPUs, and hide the real ones of the machine underneath.

Runs inside the host with its own python3, at each boot and whenever the GPUs change; imports
nothing of ours. It mocks the driver's `/proc/driver/nvidia`, device nodes, and the PCI functions
with the driver bound to them; if a GPU names its NUMA node, also the kernel's table of NUMA nodes.
The device nodes have NVIDIA's real major number, so cgroups tell them apart; opening one fails
(ENXIO) unless a real driver serves it.
"""

import json
import os
import pathlib
import stat
import subprocess
import sys
import typing

WANTED = pathlib.Path(
    "/etc/sandbox/gpus.json"
)  # [{"model": ..., "numa_node": ..., "uuid": ..., "bus": ...}, ...]
PROC = pathlib.Path("/proc/driver")
BUS = pathlib.Path("/sys/bus")
NODES = pathlib.Path("/sys/devices/system/node")
CPUS = pathlib.Path("/sys/devices/system/cpu/online")
LAYER = pathlib.Path("/run/sandbox/gpus/bus")
DEV = pathlib.Path("/dev")

NVIDIA_MAJOR = 195  # Linux, Documentation/admin-guide/devices.txt
CONTROL_MINOR = 255
VENDOR = "0x10de"
DEVICE = "0x2335"  # H200 SXM in pci.ids; nothing reads more than the vendor and the class from it
CLASS_3D = "0x030200"
DRIVER_VERSION = "580.159.04"

Gpus = list[dict[str, typing.Any]]


def main() -> None:
    """Make the host show exactly the wanted GPUs."""
    gpus: Gpus = json.loads(WANTED.read_text()) if WANTED.exists() else []
    show_proc(gpus)
    show_devices(len(gpus))
    try:
        show_bus(gpus, show_nodes(gpus))
    except (
        subprocess.CalledProcessError
    ) as e:  # a kernel that stacks no overlay on sysfs: the rest works without
        sys.stderr.write(f"PCI devices are not mocked: {e}\n")


def show_proc(gpus: Gpus) -> None:
    """Mock /proc/driver (NVIDIA's README, /proc interface) in a tmpfs."""
    unmount(PROC)
    if not PROC.is_dir():
        return
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "mode=0555,nosuid,nodev,noexec", "sandbox-gpus", str(PROC)],
        check=True,
    )
    if not gpus:
        return
    write(
        PROC / "nvidia/version",
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {DRIVER_VERSION}  (mock)\n",
    )
    for minor, gpu in reversed(
        [*enumerate(gpus)]
    ):  # tmpfs lists the newest first, procfs goes by name
        fields = {
            "Model": gpu["model"],
            "GPU UUID": gpu["uuid"],
            "Bus Location": gpu["bus"],
            "Device Minor": str(minor),
        }
        text = "".join(f"{name + ':':<8} \t {value}\n" for name, value in fields.items())
        write(PROC / "nvidia/gpus" / gpu["bus"] / "information", text)


def show_devices(count: int) -> None:
    """Make /dev/nvidia0 and so on, and remove those that are no longer wanted."""
    wanted = {f"nvidia{minor}": minor for minor in range(count)}
    if count:
        wanted["nvidiactl"] = CONTROL_MINOR
    for path in DEV.glob("nvidia*"):
        if path.name not in wanted and stat.S_ISCHR(path.lstat().st_mode):
            path.unlink()
    for name, minor in wanted.items():
        if not (DEV / name).exists():
            os.mknod(DEV / name, 0o666 | stat.S_IFCHR, os.makedev(NVIDIA_MAJOR, minor))
            (DEV / name).chmod(0o666)


def show_bus(gpus: Gpus, nodes: list[list[int]]) -> None:
    """Overlay /sys/bus with the mocked functions, and hide the machine's own."""
    unmount(BUS)
    unmount(LAYER.parent)
    hidden = [
        path.name for path in (BUS / "pci/devices").glob("*") if read(path / "vendor") == VENDOR
    ]
    if not gpus and not hidden:
        return
    LAYER.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "mode=0755", "sandbox-gpus", str(LAYER.parent)], check=True
    )
    (LAYER / "pci/devices").mkdir(parents=True)
    for name in hidden:
        os.mknod(
            LAYER / "pci/devices" / name, stat.S_IFCHR, os.makedev(0, 0)
        )  # overlayfs's whiteout
    if (BUS / "pci/drivers/nvidia").exists() and not gpus:
        (LAYER / "pci/drivers").mkdir(parents=True)
        os.mknod(LAYER / "pci/drivers/nvidia", stat.S_IFCHR, os.makedev(0, 0))
    if gpus:
        driver = LAYER / "pci/drivers/nvidia"
        driver.mkdir(parents=True)
        os.setxattr(driver, "trusted.overlay.opaque", b"y")
    for gpu in gpus:
        function = LAYER / "pci/devices" / gpu["bus"]
        node = gpu["numa_node"]
        cpus = read(CPUS) if node is None else listed(nodes[int(node)])
        values = {"vendor": VENDOR, "device": DEVICE, "class": CLASS_3D, "local_cpulist": cpus}
        values["numa_node"] = "-1" if node is None else str(node)
        for name, value in values.items():
            write(function / name, f"{value}\n")
        header = bytearray(64)  # the start of the configuration space: vendor, device, class
        header[0:4] = int(VENDOR, 16).to_bytes(2, "little") + int(DEVICE, 16).to_bytes(2, "little")
        header[9:12] = int(CLASS_3D, 16).to_bytes(3, "little")
        (function / "config").write_bytes(bytes(header))
        (function / "driver").symlink_to("../../drivers/nvidia")
        (LAYER / "pci/drivers/nvidia" / gpu["bus"]).symlink_to(f"../../devices/{gpu['bus']}")
    subprocess.run(
        ["mount", "-t", "overlay", "-o", f"ro,lowerdir={LAYER}:{BUS}", "sandbox-gpus", str(BUS)],
        check=True,
    )


def show_nodes(gpus: Gpus) -> list[list[int]]:
    """Divide CPUs and memory among the GPUs' NUMA nodes; return the CPUs of each."""
    unmount(NODES)
    count = max(
        [int(gpu["numa_node"]) + 1 for gpu in gpus if gpu["numa_node"] is not None], default=0
    )
    if not count:
        return []
    cpus = [cpu for first, last in ranges(read(CPUS)) for cpu in range(first, last + 1)]
    nodes = [
        cpus[number * len(cpus) // count : (number + 1) * len(cpus) // count]
        for number in range(count)
    ]
    memory = [
        line.split() for line in read(pathlib.Path("/proc/meminfo")).splitlines()[:2]
    ]  # MemTotal, MemFree
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "mode=0755", "sandbox-gpus", str(NODES)], check=True
    )
    for name in ("online", "possible", "has_cpu", "has_memory", "has_normal_memory"):
        write(NODES / name, f"{listed(list(range(count)))}\n")
    for number, members in enumerate(nodes):
        node = NODES / f"node{number}"
        write(node / "cpulist", f"{listed(members)}\n")
        write(node / "cpumap", f"{mask(members)}\n")
        write(
            node / "distance",
            " ".join("10" if other == number else "12" for other in range(count)) + "\n",
        )
        sizes = [
            f"Node {number} {name} {int(size) // count} {unit}\n" for name, size, unit in memory
        ]
        write(node / "meminfo", "".join(sizes))
    return nodes


def ranges(text: str) -> list[tuple[int, int]]:
    """Return first and last of each range in a list such as `0-3,8`, cpuset(7)."""
    pairs = (part.partition("-") for part in text.split(","))
    return [(int(first), int(last or first)) for first, _, last in pairs]


def listed(numbers: list[int]) -> str:
    """Return numbers as the kernel lists them, without ranges."""
    return ",".join(map(str, numbers))


def mask(numbers: list[int]) -> str:
    """Return numbers as the kernel's bit mask, in words of 32 bits."""
    bits = f"{sum(1 << number for number in numbers):x}"
    words = [bits[max(0, end - 8) : end] for end in range(len(bits), 0, -8)]
    return ",".join(reversed(words))


def unmount(path: pathlib.Path) -> None:
    """Take our mount off `path`, also when something still reads from it."""
    while f"sandbox-gpus {path} " in pathlib.Path("/proc/self/mounts").read_text():
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def read(path: pathlib.Path) -> str:
    """Return the file's text without its newline, empty when it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def write(path: pathlib.Path, text: str) -> None:
    """Write a file, with its parent directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o444)


if __name__ == "__main__":
    main()
