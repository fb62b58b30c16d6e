"""The program as the charm installs it for everyone, in a folder that all accounts can reach."""

import collections.abc
import contextlib
import os
import pathlib
import shutil
import sys

import pytest

import program

REPOSITORY = pathlib.Path(__file__).parents[2]


@contextlib.contextmanager
def installed(name: str) -> collections.abc.Generator[pathlib.Path]:
    """Install it from a folder laid out as the packed charm is; take it away as the charm does."""
    top = pathlib.Path("/var/tmp") / f"{name}-{os.getpid()}"
    charm = top / "charm"
    (charm / "lib").mkdir(parents=True)
    top.chmod(0o755)
    for source in ("lib/ddp", "lib/slurm_ddp", "payload"):
        (charm / source).symlink_to(REPOSITORY / source)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program, "COMMAND", top / "bin" / "ddp")
            patch.setattr(program, "LIBRARY", top / "lib" / "ddp")
            patch.setattr(program, "CONFIG", top / "slurm-ddp.toml")
            patch.setattr(program, "SITE", top / "site")
            patch.setattr(
                program, "PYTHON", os.path.realpath(sys.executable)
            )  # of no virtual environment
            assert program.install(charm)
            assert not program.install(charm), "it is there"
            yield top
            program.remove()
            assert not program.COMMAND.exists()
            assert not program.LIBRARY.exists()
    finally:
        shutil.rmtree(top)
