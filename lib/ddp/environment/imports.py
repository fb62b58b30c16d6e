"""Import torch, and what is named as arguments; print as JSON how long torch took, and what is there.

An environment's own Python runs it: by its path where the environment is made; on a node, where nothing of this package
lies, it is sent to `python -`.
"""

import importlib
import json
import platform
import sys
import time
import typing


def look(names: typing.Sequence[str]) -> dict[str, typing.Any]:
    """Import torch, numpy and the named modules: their versions and devices. Raises what the imports raise."""
    began = time.perf_counter()
    torch: typing.Any = importlib.import_module("torch")
    seconds = time.perf_counter() - began
    numpy: typing.Any = importlib.import_module("numpy")
    for name in names:
        importlib.import_module(name)
    has_gpus = bool(torch.cuda.is_available())
    return {
        "seconds": seconds,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_gpus else None,
        "devices": torch.cuda.device_count() if has_gpus else 0,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    print(json.dumps(look(sys.argv[1:])))
