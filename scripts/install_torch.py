"""Install PyTorch's CPU build into the Python that runs this script; a no-op when it is there.

The CUDA build would bring gigabytes of libraries that no test here uses, so the version always carries `+cpu`: first
from the indexes that pip is configured with, else from PyTorch's own index of CPU wheels. What torch itself depends
on is in payload/requirements.txt, hashed.
"""

import importlib.metadata
import subprocess
import sys

REQUIREMENT = "torch==2.13.0+cpu"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # https://pytorch.org/get-started/locally/


def installed() -> str | None:
    """Return the requirement that the installed torch meets, or None without one."""
    try:
        return f"torch=={importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> int:
    """Install torch unless the wanted build is there."""
    if installed() == REQUIREMENT:
        return 0
    print(f"torch: installing {REQUIREMENT} (about 200 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--progress-bar", "off"]
    configured = subprocess.run([*pip, REQUIREMENT], check=False, capture_output=True, text=True)
    if configured.returncode == 0:
        return 0
    print("torch: pip's configured indexes have no CPU build; asking PyTorch's own", flush=True)
    fallback = subprocess.run([*pip, "--index-url", CPU_INDEX, REQUIREMENT], check=False)
    if fallback.returncode != 0:
        print(configured.stderr.strip(), file=sys.stderr)
        print(f"torch: {REQUIREMENT} is not available; see the two answers above", file=sys.stderr)
    return fallback.returncode


if __name__ == "__main__":
    sys.exit(main())
