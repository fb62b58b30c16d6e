"""What the machine can do: memory, bf16, a compiler, and the peak that MFU is measured against."""

# pyright: basic, reportPrivateImportUsage=false
import contextlib
import ctypes
import pathlib
import re
import shutil
import sysconfig

import torch

from ddptrain import errors, files, shapes

GIB = 1 << 30
GPUS = "ask for as many GPUs per node as ranks"
CPUINFO = pathlib.Path("/proc/cpuinfo")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense bf16 peak in FLOP/s, or None when it is not known (every CPU)."""
    if device.type != "cuda":
        return None
    return shapes.peak_flops(torch.cuda.get_device_name(device))


def available_bytes(device: torch.device, sharers: int) -> int:
    """Return the memory that a rank, one of `sharers` on this host, may still take: the GPU's or the job's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    left = cgroup_left(pathlib.Path("/proc/self/cgroup"), pathlib.Path("/sys/fs/cgroup"))
    return max(0, min([_meminfo("MemAvailable"), *left])) // max(1, sharers)


def need_memory(parameters: int, device: torch.device, *, sharers: int, extra_bytes: int) -> None:
    """Raise UserError when weights, gradients and AdamW's two moments in fp32 cannot fit, activations not counted."""
    on_cpu = device.type == "cpu"
    need, have = 16 * parameters + on_cpu * extra_bytes, available_bytes(device, sharers if on_cpu else 1)
    if need > have:
        what = (
            f"{parameters / 1e6:.0f} M parameters need {need / GIB:.1f} GiB on each rank, {have / GIB:.1f} GiB is free"
        )
        raise errors.UserError(f"too little memory: {what}; lower --model or the ranks per node, or raise --mem")
    if not on_cpu and extra_bytes > (have := available_bytes(torch.device("cpu"), 1)):
        what = f"the buffers for checkpoints need {extra_bytes / GIB:.1f} GiB, {have / GIB:.1f} GiB is free"
        raise errors.UserError(f"too little memory beside the GPU: {what}; raise --mem")


def need_disk(folder: pathlib.Path, parameters: int) -> None:
    """Raise UserError when two checkpoints would not fit."""
    need = 2 * 12 * parameters
    if (have := files.free_bytes(folder)) < need:
        what = f"two checkpoints need {need / GIB:.2f} GiB, {have / GIB:.2f} GiB is free"
        raise errors.UserError(f"too little space in {folder}: {what}; {files.MAKE_ROOM}")


def can_compile() -> str | None:
    """Return why torch.compile cannot work here, or None."""
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang", "g++")):
        return "no C compiler"
    if not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "no Python.h, which compiled code is built with; install this Python's headers (python3-dev)"
    return None


def keep_memory(device: torch.device) -> None:
    """On a CPU, let the C library keep what is freed instead of returning it to the kernel.

    A step frees what the next one takes again, and glibc returns it whenever much of it lies at the heap's end: page
    faults of taking it again took a fifth to a third of a step. The most that a process holds grew by up to 5 %.
    """
    if device.type == "cpu":
        with contextlib.suppress(AttributeError, OSError):  # a C library without mallopt(3)
            library = ctypes.CDLL(None)
            library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
            library.mallopt(_M_MMAP_THRESHOLD, 2**30)


def has_bf16(device: torch.device) -> bool:
    """Return whether the device multiplies bf16 in hardware: AMX or AVX512-BF16, or compute capability 8.0."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    with contextlib.suppress(OSError):
        return bool(re.search(r"^flags\s*:.*\b(avx512_bf16|amx_bf16)\b", CPUINFO.read_text(), re.MULTILINE))
    return False


def _meminfo(name: str) -> int:
    for line in pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def cgroup_left(own: pathlib.Path, mounted: pathlib.Path) -> list[int]:
    """Read the memory, in bytes, that each control group around this process, from its own to the root, has left.

    `own` is /proc/self/cgroup, `mounted` where the groups are. Version 2 has one tree, version 1 one for memory; Slurm
    nests job, step and task, and any of them may have the limit. What files were read through counts as used but is
    given back on demand.
    """
    left: list[int] = []
    with contextlib.suppress(OSError):
        for line in own.read_text(encoding="utf-8", errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                roots, names = [mounted, mounted / "unified"], ("memory.max", "memory.current", "", "memory.stat")
            elif "memory" in controllers.split(","):
                roots = [mounted / "memory", mounted / controllers]
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "memory.stat")
            else:
                continue
            for root in roots:
                folder = root / path.lstrip("/")
                for group in (folder, *(parent for parent in folder.parents if root in (parent, *parent.parents))):
                    with contextlib.suppress(OSError, ValueError):  # no such group here, or it has no limit ("max")
                        left.append(_left(group, *names))
    return left


def _left(group: pathlib.Path, limit: str, used: str, prefix: str, stat: str) -> int:
    free = int((group / limit).read_text()) - int((group / used).read_text())
    cached = dict(line.split(maxsplit=1) for line in (group / stat).read_text().splitlines())
    return free + sum(int(cached.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device of a rank: `auto` is a GPU where torch sees one, else the CPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = f"was built for CUDA {torch.version.cuda}" if torch.version.cuda else "was built for CPUs only"
        text = f"--device cuda: torch {torch.__version__} sees no GPU ({built}); use --device cpu or a GPU node"
        raise errors.UserError(text)
    visible = torch.cuda.device_count()
    if visible == 1:  # srun's --gpus-per-task and --gpu-bind show each task its own one alone
        return torch.device("cuda", 0)
    if local_rank >= visible:
        raise errors.UserError(f"local rank {local_rank} has no GPU: {visible} visible; {GPUS}")
    return torch.device("cuda", local_rank)


def gpu_id(device: torch.device) -> str | None:
    """Return the GPU's UUID; None for a CPU, and if torch, which an image brings, is too old to know it."""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None) if device.type == "cuda" else None
    return None if found is None else str(found)
