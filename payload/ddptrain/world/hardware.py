"""The machine's abilities: devices, bf16, a compiler, disk and memory."""

# pyright: basic, reportPrivateImportUsage=false
import contextlib
import ctypes
import pathlib
import re
import shutil
import sysconfig

import torch

from ddptrain.ground import errors, files

GIB = 1 << 30
CPUINFO = pathlib.Path("/proc/cpuinfo")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


# Of a parameter in a checkpoint: itself, and AdamW's two moments
STATE_BYTES = 12
OUTER_BYTES = 8  # of the sites' exchanges: the anchor and its momentum


def need_disk(folder: pathlib.Path, parameters: int, num_sites: int = 0) -> None:
    """Raise UserError if two checkpoints would not fit, with a part for each site but the first.

    A part may have the site's own weights. Without exchanges `num_sites` is 0.
    """
    each = STATE_BYTES * max(1, num_sites)
    if num_sites:
        each += OUTER_BYTES
    need = 2 * each * parameters
    have = files.free_bytes(folder)
    if have < need:
        what = f"two checkpoints need {need / GIB:.2f} GiB, {have / GIB:.2f} GiB is free"
        raise errors.UserError(f"too little space in {folder}: {what}; {files.MAKE_ROOM}")


def can_compile() -> str | None:
    """Return why torch.compile cannot work here, or None."""
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang", "g++")):
        return "no C compiler"
    if not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file():
        remedy = "install this Python's headers (python3-dev)"
        return f"no Python.h, which compiled code is built with; {remedy}"
    return None


def keep_memory(device: torch.device) -> None:
    """On a CPU, let the C library keep freed memory instead of returning it to the kernel.

    Each step allocates what the last one freed, and glibc returns much of it to the kernel in
    between: page faults of taking it again took a fifth to a third of a step. The most that a
    process holds grew by up to 5 %.
    """
    if device.type == "cpu":
        with contextlib.suppress(AttributeError, OSError):  # a C library without mallopt(3)
            library = ctypes.CDLL(None)
            library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
            library.mallopt(_M_MMAP_THRESHOLD, 2**30)


def has_bf16(device: torch.device) -> bool:
    """Return whether the device multiplies bf16 in hardware.

    That is AMX or AVX512-BF16, or compute capability 8.0.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        text = CPUINFO.read_text()
    except OSError:
        return False
    return bool(re.search(r"^flags\s*:.*\b(avx512_bf16|amx_bf16)\b", text, re.MULTILINE))


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device of a rank: `auto` is a GPU if torch sees one, otherwise the CPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = "was built for CPUs only"
        if torch.version.cuda:
            built = f"was built for CUDA {torch.version.cuda}"
        what = f"--device cuda: torch {torch.__version__} sees no GPU ({built})"
        raise errors.UserError(f"{what}; use --device cpu or a GPU node")
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        what = f"local rank {local_rank} has no GPU: {visible} visible"
        raise errors.UserError(f"{what}; ask for as many GPUs per node as ranks")
    return torch.device("cuda", local_rank)
