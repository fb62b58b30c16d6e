"""What each Python of an environment does before anything else."""

import pathlib
import subprocess
import sys

import pytest

BEGIN = "import ddptrain.startup, gc, sys; known = len(sys.meta_path)\n"
TELL = """
loader = torch.__spec__.loader
print(gc.isenabled(), gc.get_freeze_count() > 0, vars(loader).keys() == vars(type(loader)("x", "y")).keys(), known - len(sys.meta_path))
"""


def python(code: str, *folders: pathlib.Path) -> str:
    code = f"import sys; sys.path[:0] = {list(map(str, folders))!r}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True).stdout


def package(folder: pathlib.Path, code: str) -> pathlib.Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(code)
    return folder


def test_torch_is_imported_without_the_search_for_garbage():
    code = f"{BEGIN}searches = []; gc.callbacks.append(lambda *search: searches.append(search))\nimport torch\nbefore = len(searches)"
    printed = python(f"{code}{TELL}import inspect; print(before, inspect.getsource(torch).startswith(chr(34) * 3))")
    *state, last = printed.split("\n")[:-1]
    assert state == ["True True True 1"]
    assert last.split()[1] == "True", "its loader gives the source as ever"
    assert int(last.split()[0]) < 40, "a usual import makes hundreds of searches"


@pytest.mark.parametrize(
    ("before", "expected"),
    [("", "True True"), ("gc.disable()", "False False")],
)
def test_the_search_goes_on_as_it_was(tmp_path: pathlib.Path, before: str, expected: str):
    place = package(tmp_path, "import gc\nstate = gc.isenabled()\n")
    printed = python(f"{BEGIN}{before}\nimport torch\nassert not torch.state{TELL}", place)
    assert printed == f"{expected} True 1\n"


def test_an_import_that_fails_does_so_as_ever_and_can_be_tried_again(tmp_path: pathlib.Path):
    place = package(tmp_path, "import os\nif 'AGAIN' not in os.environ: raise ImportError('libcudart')\n")
    code = f"""{BEGIN}
try: import torch
except ImportError as e: print(e, gc.isenabled())
import os; os.environ["AGAIN"] = "1"
import torch{TELL}"""
    assert python(code, place) == "libcudart True\nTrue True True 1\n"


def test_without_torch_the_error_is_pythons():
    code = f"{BEGIN}sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\ntry: import torch\nexcept ImportError as e: print(e)"
    assert python(code) == "No module named 'torch'\n"


BUSY = """
import ctypes, hashlib, os, threading
def work():
    ctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0)  # PR_SET_NAME
    began.set()
    hashlib.sha256(bytes(200_000_000)).digest()  # without the GIL
    os.write(1, b"finished")
    threading.Event().wait()
began = threading.Event()
threading.Thread(target=work, daemon=True).start()
began.wait()
"""


@pytest.mark.parametrize(("name", "printed"), [("pt_gloo_runloop", "finished"), ("another", "")])
def test_the_end_waits_until_gloos_threads_are_idle(tmp_path: pathlib.Path, name: str, printed: str):
    place = package(tmp_path, "")
    assert python(f"{BEGIN}import torch\n{BUSY.format(name=name)}", place) == printed


def test_the_end_waits_for_no_thread_that_stays_busy(tmp_path: pathlib.Path):
    place = package(tmp_path, "")
    code = BUSY.format(name="pt_gloo_runloop").replace("hashlib.", "while True: hashlib.")
    assert python(f"{BEGIN}import torch\nddptrain.startup._LIMIT_S = 0.1\n{code}", place) == ""
