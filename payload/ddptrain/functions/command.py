"""The command `ddp`, asked by JSON."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import typing

from ddptrain.functions import errors

Json = dict[str, typing.Any]
_INSTALL = "install it (docs: Use ddp on your own Slurm), or put its folder on PATH"


def ask(*words: str, is_quiet: bool = True) -> Json:
    """Return the answer of `ddp --json WORDS`; progress goes to stderr unless `is_quiet`.

    Raises FunctionError with ddp's own line.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [_find(), "--json", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=_environment(),
        )
        assert process.stderr is not None
        last = ""
        with process.stderr:
            for line in process.stderr:
                last = line.strip() or last
                if not is_quiet and not line.startswith("ddp: "):
                    print(line, end="", file=sys.stderr, flush=True)  # a notebook shows it, too
        code = process.wait()
        output.seek(0)
        text = output.read()

    found: Json = {}
    with contextlib.suppress(ValueError):
        found = json.loads(text)
    if code:
        raise errors.FunctionError(str(found.get("error") or last.removeprefix("ddp: ")))
    return found


def _find() -> str:
    beside = str(pathlib.Path(sys.executable).parent)
    home = str(pathlib.Path("~/.local/bin").expanduser())  # pipx's, which a kernel's PATH may lack
    places = os.pathsep.join((os.environ.get("PATH", os.defpath), beside, home))
    found = shutil.which("ddp", path=places)
    if found is None:
        raise errors.FunctionError(f"there is no command ddp on this host; {_INSTALL}")
    return found


def _environment() -> dict[str, str]:
    """Return the variables of the command: this Python's environment is the active one."""
    env = dict(os.environ)
    env.pop("PYTHONPATH", None)  # of another Python
    env["NO_COLOR"] = "1"
    if sys.prefix != sys.base_prefix:
        env["VIRTUAL_ENV"] = sys.prefix
    elif pathlib.Path(sys.prefix, "conda-meta").is_dir():
        env["CONDA_PREFIX"] = sys.prefix
    return env
