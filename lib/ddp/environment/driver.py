"""Exit with 0 if this node has a CUDA driver and this job may use a GPU of it, else with 40.

A node has no module of this package: the program is sent to `python3 -I -`.
"""

import ctypes
import sys

MISSING = 40  # no status of Python's, the shell's or Slurm's


def is_usable() -> bool:
    """Return whether the driver is loaded and has a GPU for this job."""
    count = ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        return not (cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))) and count.value > 0
    except (OSError, AttributeError):
        return False


if __name__ == "__main__":
    sys.exit(0 if is_usable() else MISSING)
