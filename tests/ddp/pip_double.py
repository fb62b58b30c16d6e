"""Doubles of venv, pip, uv and zstd, which make the same files."""

import json
import pathlib

from slurm_ddp.commands import CommandError, Completed

ZSTD = """#!/bin/sh
# like zstd as far as it is called here, without compressing anything
while [ $# -gt 0 ]; do
  case $1 in
    -o) out=$2; shift ;;
    -q | -c | -d | -T0 | -3) ;;
    *) echo "zstd: $1 is not known" >&2; exit 2 ;;
  esac
  shift
done
if [ -n "$out" ]; then cat > "$out"; else cat; fi
"""

FILES = "torch/test/big torch/bin/test_api torch/bin/torch_shm_manager networkx/tests/one torch-2.dist-info/METADATA"


class Pip:
    """Stand in for venv, pip and uv: make the same files, and record the calls."""

    def __init__(self, cache: pathlib.Path) -> None:
        self.cache = cache  # the folder of the node's own disk
        self.calls: list[tuple[str, ...]] = []
        self.cpu_wheel = True  # whether an index has torch's CPU build
        self.failure = ""
        self.env: dict[str, str] = {}  # variables in addition to every command's
        self.torch = ""  # its version

    def save(self, path: pathlib.Path) -> None:
        """Write down the calls, in the environment that they made."""
        path.write_text(json.dumps({"calls": self.calls, "env": self.env, "torch": self.torch}))

    def restore(self, path: pathlib.Path) -> None:
        """Continue as after the calls that were saved."""
        saved = json.loads(path.read_text())
        self.calls = [tuple(call) for call in saved["calls"]]
        self.env = saved["env"]
        self.torch = saved["torch"]

    def run(
        self,
        *argv: str | pathlib.Path,
        timeout: float,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
    ) -> Completed:
        """Stand in for slurm_ddp.commands.run."""
        assert timeout > 0
        assert cwd == "/"
        call = tuple(str(word) for word in argv)
        if call == ("/usr/bin/python3", "-V"):
            return Completed(0, "Python 3.12.3\n", "")
        self.calls.append(call)
        if call[:3] == ("/usr/bin/python3", "-m", "venv"):
            home = pathlib.Path(call[-1])
            (home / "bin").mkdir(parents=True)
            (home / "bin" / "python").symlink_to("/usr/bin/python3")
            site = home / "lib" / "python3.12" / "site-packages"
            site.mkdir(parents=True)
            (site / "made").write_text(str(len(self.calls)))  # no two environments are alike
            return Completed(0, "", "")
        if call[1:3] == ("-m", "pip"):
            for word in (word for word in call if word.startswith("--target=")):
                program = pathlib.Path(word.removeprefix("--target="), "bin", "uv")
                program.parent.mkdir(parents=True)
                program.touch()
            return Completed(0, "", "")
        if call[1:3] == ("pip", "install"):
            self.env = dict(env or {})
            if self.failure:
                raise CommandError("uv exited 1", returncode=1, stderr=self.failure)
            if not self.cpu_wheel and call[-1].endswith("+cpu"):
                output = "error: No solution found when resolving dependencies\n  cause: no version of torch"
                raise CommandError("uv exited 1", returncode=1, stderr=output)
            if call[-1].startswith("torch=="):
                self.torch = call[-1].removeprefix("torch==").partition(",")[0]
                (site,) = (
                    pathlib.Path(call[4].removeprefix("--python="))
                    .parents[1]
                    .glob("lib/*/site-packages")
                )
                for name in FILES.split():
                    (site / name).parent.mkdir(parents=True, exist_ok=True)
                    (site / name).write_text("x")
            return Completed(0, "", "")
        if call[1] == "-I" and call[3:5] == ("ddptrain", "torch.distributed.run"):
            assert pathlib.Path(call[2]).is_file()
            return Completed(0, json.dumps({"torch": self.torch}) + "\n", "")
        raise AssertionError(f"{call} is not known")
