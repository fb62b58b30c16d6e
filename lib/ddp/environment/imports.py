"""Import torch and the modules named as arguments; print as JSON how long torch took, and what it finds.

An environment's own Python runs it: by its path where the environment is made; on a node, which has nothing of this
package, it is sent to `python -`.
"""

import importlib
import json
import sys
import time
import typing

if __name__ == "__main__":
    began = time.perf_counter()
    torch: typing.Any = importlib.import_module("torch")
    seconds = time.perf_counter() - began
    for name in ("numpy", *sys.argv[1:]):
        importlib.import_module(name)
    found = {"seconds": seconds, "torch": str(torch.__version__), "cuda": torch.version.cuda}
    found["devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    print(json.dumps(found))
