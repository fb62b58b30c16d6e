"""Install PyTorch for this Python, unless it is installed. --newest: the newest tested version.

The CPU build if any index has it, in the order of ddp.environment.uv; its dependencies are in
payload/requirements.txt, hashed. Needs pip and the standard library.
"""

import collections.abc
import contextlib
import importlib.metadata
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "lib"))
from ddp.environment import uv


def main() -> int:
    """Install torch unless its version is installed, in any build."""
    version = uv.TESTED[-1] if sys.argv[1:] == ["--newest"] else uv.TORCH
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("torch").partition("+")[0] == version:
            return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="install-torch-") as folder:
        try:
            installer = uv.bootstrap(pathlib.Path(sys.executable), pathlib.Path(folder))
            ways = "PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS"
            uv.install_cpu_torch(installer, _report, version=version, ways=ways)
        except uv.InstallError as e:
            print(f"torch: {e}", file=sys.stderr)
            return 1
    print(f"torch: installed in {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _report(text: str, work: collections.abc.Callable[[], None]) -> None:
    print(f"torch: {text}", flush=True)
    work()


if __name__ == "__main__":
    sys.exit(main())
