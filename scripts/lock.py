"""Compile every requirements.in of the repository into the hashed requirements.txt beside it, with uv.

    tox -e lock                                  after editing a .in file: keeps the pins that still fit
    tox -e lock -- --upgrade                     the newest of everything
    tox -e lock -- charms/slurm-gpu              only those under a folder

Resolves for the oldest Python that is supported (3.11): its packages are a superset of those of
newer ones.
"""

import argparse
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = {"build", "dist", ".tox", ".venv", "parts", "stage", "prime"}
OLDEST = "3.11"
NEWER = {"upstream.in": "3.12", "upstream-main.in": "3.14"}  # upstream's libraries


def sources(under: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """Return the .in files under a folder that are the repository's own, in a stable order."""
    found = [*under.rglob("requirements.in"), *(ROOT / "tests" / "requirements").glob("*.in")]
    inside = {path.resolve() for path in found if path.resolve().is_relative_to(under.resolve())}
    return sorted(path for path in inside if not SKIPPED & set(path.relative_to(ROOT).parts))


def compile_one(source: pathlib.Path, *, upgrade: bool) -> int:
    """Write the hashed .txt next to `source`, and return uv's exit status.

    The file names no index: the reader's pip knows where to look.
    """
    command = [
        str(pathlib.Path(sys.executable).with_name("uv")),
        "pip",
        "compile",
        "--quiet",
        "--generate-hashes",
    ]
    command += ["--no-emit-index-url", "--no-emit-find-links", "--no-header", "--python-version"]
    command += [NEWER.get(source.name, OLDEST), *(["--upgrade"] if upgrade else [])]
    command += [
        "--output-file",
        str(source.with_suffix(".txt").relative_to(ROOT)),
        str(source.relative_to(ROOT)),
    ]
    # Wheels that lie on this machine would add hashes that no other machine can match: look at the
    # index alone.
    hidden = {"UV_FIND_LINKS", "UV_INDEX", "PIP_FIND_LINKS"}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def main() -> int:
    """Compile the requirements that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "under", nargs="*", type=pathlib.Path, help="folders to look under [default: everything]"
    )
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    arguments = parser.parse_args()
    chosen = sorted({path for under in arguments.under or [ROOT] for path in sources(under)})
    for source in chosen:
        print(f"lock: {source.relative_to(ROOT)}", flush=True)
        if code := compile_one(source, upgrade=arguments.upgrade):
            print(
                f"lock: {source.relative_to(ROOT)} could not be compiled; uv's message is above",
                file=sys.stderr,
            )
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
