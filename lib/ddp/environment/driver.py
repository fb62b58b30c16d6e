"""Print the CUDA version of a node's driver: `driver 13000` for one that supports CUDA 13.0, `driver 0` without one.

Runs on a node, where nothing of this package lies: it is sent to `python3 -I -`.
"""

import ctypes


def version() -> int:
    """Return the CUDA version of the driver, 0 where there is no driver or no GPU that this step may use."""
    found, count = ctypes.c_int(), ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        failed = cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(found))
        failed = failed or cuda.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return found.value if count.value and not failed else 0


if __name__ == "__main__":
    print("driver", version())
