"""Compile every requirements.in of the repository into the hashed requirements.txt beside it.

    tox -e lock                                  after editing a .in file: keeps the pins that still fit
    tox -e lock -- --upgrade                     the newest of everything
    tox -e lock -- charms/slurm-gpu              only what lies under a folder

Resolve with the oldest Python that is supported (3.11): what it needs is a superset of what newer ones need. What needs
a newer one is resolved with that, in an environment of its own (NEWER).
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = {"build", "dist", ".tox", ".venv", "parts", "stage", "prime"}

NEWER = {"upstream.in": "3.12"}  # upstream's libraries


def sources(under: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """Return the .in files under a folder that are the repository's own, in a stable order."""
    found = [*under.rglob("requirements.in"), *(ROOT / "tests" / "requirements").glob("*.in")]
    inside = {path.resolve() for path in found if path.resolve().is_relative_to(under.resolve())}
    return sorted(path for path in inside if not SKIPPED & set(path.relative_to(ROOT).parts))


def interpreter(version: str) -> str:
    """Return a Python of that version with the same pip-tools as this one."""
    found = shutil.which(f"python{version}")
    if found is None:
        sys.exit(f"lock: needs python{version}, too, for {', '.join(NEWER)}")
    command = [str(ROOT / "scripts" / "venv.sh"), f"lock-{version}", "tests/requirements/lock.txt"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"SLURM_DDP_PYTHON": found}, check=True)
    return str(ROOT / "build" / "venvs" / f"lock-{version}" / "bin" / "python")


def compile_one(source: pathlib.Path, *, upgrade: bool) -> None:
    """Write the hashed .txt beside `source`. No index is named in it: the reader's pip knows where to look."""
    python = interpreter(NEWER[source.name]) if source.name in NEWER else sys.executable
    command = [python, "-m", "piptools", "compile", "--quiet", "--generate-hashes", "--strip-extras"]
    command += ["--no-emit-index-url", "--no-emit-find-links", "--no-header", "--allow-unsafe"]
    command += ["--upgrade"] if upgrade else []
    command += ["--output-file", str(source.with_suffix(".txt").relative_to(ROOT)), str(source.relative_to(ROOT))]
    # Wheels that lie on this machine would add hashes that no other machine can match: look at the index alone.
    env = {name: value for name, value in os.environ.items() if name not in {"PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"}}
    subprocess.run(command, cwd=ROOT, env=env | {"PIP_CONFIG_FILE": os.devnull}, check=True)


def main() -> int:
    """Compile what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("under", nargs="*", type=pathlib.Path, help="folders to look under; without one: everything")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    arguments = parser.parse_args()
    if sys.version_info[:2] != (3, 11):
        sys.exit("lock: needs Python 3.11, so that the pins hold from 3.11 on")
    chosen = sorted({path for under in arguments.under or [ROOT] for path in sources(under)})
    if not chosen:
        sys.exit("lock: no .in file there")
    for source in chosen:
        print(f"lock: {source.relative_to(ROOT)}", flush=True)
        compile_one(source, upgrade=arguments.upgrade)
    return 0


if __name__ == "__main__":
    sys.exit(main())
