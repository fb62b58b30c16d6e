"""Import torch and the modules named as arguments; print torch's version as JSON."""

import importlib
import json
import sys
import typing

if __name__ == "__main__":
    torch: typing.Any = importlib.import_module("torch")
    for name in ("numpy", *sys.argv[1:]):
        importlib.import_module(name)
    print(json.dumps({"torch": str(torch.__version__)}))
