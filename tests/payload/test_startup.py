"""What each Python of an environment does before anything else."""

import pathlib
import subprocess
import sys

import pytest

BEGIN = "import ddptrain.world.startup\n"


def python(code: str, *folders: pathlib.Path) -> str:
    code = f"import sys; sys.path[:0] = {list(map(str, folders))!r}\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    ).stdout


def package(folder: pathlib.Path, code: str) -> pathlib.Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(code)
    return folder


def test_a_program_without_torch_ends_at_once():
    printed = python(f"{BEGIN}import sys, time; time.sleep = None; print('pathlib' in sys.modules)")
    assert printed == "False\n", "it delays no start, and does not wait"


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
def test_the_end_waits_until_gloos_threads_are_idle(
    tmp_path: pathlib.Path, name: str, printed: str
):
    place = package(tmp_path, "")
    assert python(f"{BEGIN}import torch\n{BUSY.format(name=name)}", place) == printed


def test_the_end_waits_for_no_thread_that_stays_busy(tmp_path: pathlib.Path):
    place = package(tmp_path, "")
    code = BUSY.format(name="pt_gloo_runloop").replace("hashlib.", "while True: hashlib.")
    assert (
        python(f"{BEGIN}import torch\nddptrain.world.startup._LIMIT_S = 0.1\n{code}", place) == ""
    )
