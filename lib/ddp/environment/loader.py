"""Load compiled parts together with torch; print as JSON, by path, why some do not fit."""

import ctypes
import importlib
import json
import re
import sys

# Others, such as a missing libcuda.so.1, say nothing of the build
_MISFIT = re.compile(
    r"(lib(c10|torch|cudart|cublas|cudnn)\S*): cannot open shared object|undefined symbol: \S+"
)

if __name__ == "__main__":
    importlib.import_module("torch")
    failed: dict[str, str] = {}
    for path in sys.argv[1:]:
        try:
            ctypes.CDLL(path)
        except OSError as e:
            if found := _MISFIT.search(str(e)):
                failed[path] = f"{found[1]} is missing" if found[1] else found[0]
    print(json.dumps(failed))
