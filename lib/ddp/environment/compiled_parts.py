"""The compiled parts of a layer's packages that need the libraries of torch.

They load only with the torch that they were built for: torchvision of another build fails with
`operator torchvision::nms does not exist`.
"""

import json
import pathlib
import subprocess

from ddp.environment import uv
from ddp.problem import Step

LOADER = pathlib.Path(__file__).with_name("loader.py")
# PyTorch's own index has these for each of torch's builds
OF_PYTORCH = ("torchvision", "torchaudio", "torchcodec")
_LIBRARIES = (b"libc10.so", b"libtorch.so", b"libtorch_cpu.so", b"libtorch_python.so")
_UNPACKING_S = 900.0


def find(environment: pathlib.Path) -> list[pathlib.Path]:
    """Return the compiled parts in an environment that name a library of torch."""
    found: list[pathlib.Path] = []
    for path in sorted(environment.glob("lib/python3.*/site-packages/**/*.so")):
        if path.is_file() and not path.is_symlink() and _names_torch(path):
            found.append(path)
    return found


def _names_torch(path: pathlib.Path) -> bool:
    data = path.read_bytes()
    return any(name in data for name in _LIBRARIES)


def of_other_builds(environment: pathlib.Path, build: str) -> list[str]:
    """Return the packages of PyTorch's in a layer that are not of this build, as requirements."""
    found: list[str] = []
    for path in sorted(environment.glob("lib/python3.*/site-packages/*.dist-info")):
        name, _, version = path.name.removesuffix(".dist-info").partition("-")
        release, _, local = version.partition("+")
        if name in OF_PYTORCH and local != build:
            found.append(f"{name}=={release}+{build}")
    return found


def unpack_base(archive: str, target: str) -> None:
    """Unpack the environment below a layer where the layer expects it.

    Raises SubprocessError.
    """
    pathlib.Path(target).mkdir()
    argv = ["tar", "-x", "-i", "-I", "zstd -q", f"--directory={target}", f"--file={archive}"]
    subprocess.run(argv, check=True, timeout=_UNPACKING_S, capture_output=True)


def check(python: pathlib.Path, parts: list[pathlib.Path], torch: str) -> None:
    """Check that all parts load with torch. Raises InstallError, which names the package."""
    printed = uv.call(python, "-I", LOADER, *parts, timeout=300)
    failed: dict[str, str] = json.loads(printed)
    for path, why in failed.items():
        package = pathlib.Path(path).parts[parts[0].parts.index("site-packages") + 1]
        text = f"{package} does not load beside torch {torch} ({why})"
        remedy = f"name in the requirements a version of {package} that is built for it"
        if package in OF_PYTORCH:
            remedy += ", or set torch-index to the index that torch came from"
        raise uv.InstallError(text, remedy=Step("requirements", remedy))
