"""The program of a node's task in one variable, which Slurm carries to the nodes: none of them reads a file for it.

Each module would be two opens and ten lookups on the shared filesystem, on each node and with `launcher=srun` in each
rank, all in the same second.
"""

import base64
import zlib

VARIABLE = "DDP_PROGRAM"
MODULES = (
    "ddp",
    "ddp.node",
    "ddp.node.environment",
    "ddp.node.network",
    "ddp.node.node",
    "ddp.node.ownership",
    "ddp.node.spec",
    "ddp.node.spool",
    "ddp.node.storage",
)
_PACKAGES = ("ddp", "ddp.node")
# For `python3 -I -S -B -c START FOLDER node SPEC …`, where FOLDER holds the same as files
START = f"import base64,os,zlib;exec(zlib.decompress(base64.b64decode(os.environ.pop('{VARIABLE}'))))"
_LOADER = """
import sys
from importlib.machinery import ModuleSpec

class Carried:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return ModuleSpec(name, cls, is_package=name in PACKAGES) if name in SOURCES else None

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        path, text = SOURCES[module.__name__]
        exec(compile(text, path, "exec"), module.__dict__)

sys.meta_path.insert(0, Carried)
from ddp.node import node
code = node.main(sys.argv[1] + "/" + sys.argv[3], sys.argv[4:], SPEC)
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""


def pack(folder: str, spec_text: str) -> str:
    """Return the variable's value: the modules below a program's folder and the job's specification. Raises OSError."""
    sources: dict[str, tuple[str, str]] = {}
    for name in MODULES:
        inner = "/__init__" if name in _PACKAGES else ""
        path = f"{folder}/{name.replace('.', '/')}{inner}.py"
        with open(path, encoding="utf-8") as file:
            sources[name] = (path, file.read())
    text = f"import os\nSOURCES = {sources!r}\nPACKAGES = {_PACKAGES!r}\nSPEC = {spec_text!r}\n{_LOADER}"
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
