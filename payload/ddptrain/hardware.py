"""What the machine can do: memory, bf16, a compiler, and the peak that MFU is measured against."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import ctypes
import pathlib
import re
import resource
import shutil
import sysconfig
import time
import typing

import torch
from torch import nn

from ddptrain import errors, files, shapes

GIB = 1 << 30
_TRIAL_TURNS, _TRIAL_S = 8, 4.0
_GAIN = 1.05  # bf16 must be this much quicker to be chosen
_FP32_ERROR = 1e-5  # of a product: fp32 is at about 1e-6, bf16 at 1e-2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_CLEAR = 1.25  # a difference that two turns are enough for


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
    return max(0, min(_meminfo("MemAvailable"), *left)) // max(1, sharers)


def need_memory(parameters: int, device: torch.device, *, sharers: int, extra_bytes: int) -> None:
    """Raise UserError when weights, gradients and AdamW's two moments in fp32 cannot fit, activations not counted."""
    need = 16 * parameters + extra_bytes
    have = available_bytes(device, sharers)
    if need > have:
        raise errors.UserError(
            f"too little memory: {parameters / 1e6:.0f} M parameters need {need / GIB:.1f} GiB on each rank, "
            f"{have / GIB:.1f} GiB is free "
            "for it; choose a smaller --model, fewer ranks per node or more memory for the job"
        )


def need_buffers(size_bytes: int) -> None:
    """Raise UserError when a GPU machine's own memory cannot hold the buffers that checkpoints are copied into."""
    have = available_bytes(torch.device("cpu"), 1)
    if size_bytes > have:
        raise errors.UserError(
            f"too little memory beside the GPU: the buffers for checkpoints need {size_bytes / GIB:.1f} GiB, "
            f"{have / GIB:.1f} GiB is free; give the job more memory, or use --checkpoint-format dcp"
        )


def need_disk(folder: pathlib.Path, parameters: int) -> None:
    """Raise UserError when two checkpoints would not fit."""
    need = 2 * 12 * parameters
    if (have := files.free_bytes(folder)) < need:
        raise errors.UserError(
            f"too little space in {folder}: two checkpoints need {need / GIB:.2f} GiB, {have / GIB:.2f} GiB is "
            f"free; {files.make_room(folder)}"
        )


def peak_resident_bytes() -> int:
    """Return the most memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
    faults of taking it anew took a fifth to a third of a step. The most that a process holds grew by up to 5 %.
    """
    if device.type == "cpu":
        with contextlib.suppress(AttributeError, OSError):  # a C library without mallopt(3)
            library = ctypes.CDLL(None)
            library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
            library.mallopt(_M_MMAP_THRESHOLD, 2**30)


def set_matmul(device: torch.device, *, is_own: bool) -> None:
    """Choose the fastest fp32 matrix products that are precise enough: TF32 on a GPU, oneDNN's on AMD with AVX-512.

    torch multiplies fp32 by MKL, which has half of oneDNN's rate on AMD's AVX-512. At "medium" torch leaves fp32 to
    oneDNN, which may round to bf16; where it does (AMX), MKL stays. The choice depends on the machine alone, so a run
    resumed there has the same results bit for bit. `is_own` is False for models whose attention is torch's blockwise
    one, which oneDNN slows down.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    elif is_own and _is_amd_with_avx512(pathlib.Path("/proc/cpuinfo")):
        torch.set_float32_matmul_precision("medium")
        if _matmul_error() > _FP32_ERROR:
            torch.set_float32_matmul_precision("highest")


def _is_amd_with_avx512(cpuinfo: pathlib.Path) -> bool:
    return _cpu(cpuinfo, "vendor_id") == ["AuthenticAMD"] and "avx512f" in _cpu(cpuinfo, "flags")


def _cpu(cpuinfo: pathlib.Path, key: str) -> list[str]:
    """Return the words of the first processor's line `key`, none where there is no such line."""
    with contextlib.suppress(OSError):
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
        return next((line.split(":", 1)[1].split() for line in text.splitlines() if re.match(rf"{key}\s*:", line)), [])
    return []


def _matmul_error() -> float:
    """Return the largest error of an fp32 product, relative to the largest value."""
    left, right = (torch.randn(128, 256, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    exact = left.double() @ right.double().t()
    return float(((left @ right.t()).double() - exact).abs().max() / exact.abs().max())


def may_gain_by_bf16(device: torch.device) -> bool:
    """Return whether the device has bf16 arithmetic of its own."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool({"avx512_bf16", "amx_bf16"} & set(_cpu(pathlib.Path("/proc/cpuinfo"), "flags")))


def trial(
    build: collections.abc.Callable[[], nn.Module], batch: int, seq_len: int, vocab: int, device: torch.device
) -> tuple[float, float]:
    """Return the processor seconds of forward and backward on CPUs in fp32 and in bf16: in turns, the least of each.

    A busy neighbour changes what the clock says, and a whole training would be the slower for it; the time that these
    threads were at work it hardly changes. Big models and clear cases get fewer turns.
    """
    model = build().to(device)
    tokens_BT = torch.randint(vocab, (batch, seq_len), device=device)
    times: tuple[list[float], list[float]] = ([], [])
    deadline = time.monotonic() + _TRIAL_S
    for turn in range(1 + _TRIAL_TURNS):
        if turn > 2 and (time.monotonic() > deadline or _is_clear(min(times[0][1:]), min(times[1][1:]))):
            break
        for bf16 in (False, True):
            began = time.process_time()
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
                loss = model(tokens_BT, tokens_BT)
            loss.backward()
            times[bf16].append(time.process_time() - began)
    return min(times[0][1:]), min(times[1][1:])


def _is_clear(fp32_s: float, bf16_s: float) -> bool:
    return max(fp32_s, bf16_s) > _CLEAR * min(fp32_s, bf16_s)


def prefers_bf16(fp32_s: float, bf16_s: float) -> bool:
    """Return whether bf16 gained enough in the trial."""
    return fp32_s > _GAIN * bf16_s


class GpuUse:
    """The share of the last moments in which a GPU was at work, as nvidia-smi shows it; nothing where NVML is not."""

    class _Rates(ctypes.Structure):
        """nvmlUtilization_t of nvml.h."""

        _fields_: typing.ClassVar = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]

    def __init__(self, device: torch.device, library: str = "libnvidia-ml.so.1") -> None:
        self._nvml: typing.Any = None
        self._handle = ctypes.c_void_p()
        if device.type == "cuda":
            uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # torch of an image may be older
            if uuid is not None:
                self.use(f"GPU-{uuid}", library)

    def use(self, uuid: str, library: str) -> None:
        """Look at the GPU with this UUID, in NVML's form."""
        with contextlib.suppress(OSError, AttributeError):  # no such library, or no such function in it
            nvml = ctypes.CDLL(library)
            if nvml.nvmlInit_v2() == 0:
                found = nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._handle))
                self._nvml = nvml if found == 0 else None

    def percent(self) -> float | None:
        """Return it in percent; None where it is not known, as on a MIG instance."""
        rates = self._Rates()
        if self._nvml is None or self._nvml.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(rates)) != 0:
            return None
        return float(rates.gpu)


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
