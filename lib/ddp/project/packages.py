"""Find the packages of a project: the folders that `pip install -e` would put on sys.path."""

import configparser
import contextlib
import pathlib
import sys
import typing

from ddp.host import files
from slurm_ddp import backports

Json = dict[str, typing.Any]
# Folders and modules that setuptools skips
_NO_PACKAGES = frozenset(
    "test tests doc docs example examples script scripts tool tools bench benchmarks build dist"
    " setup conftest".split()
)


def importable(folder: pathlib.Path, root: pathlib.Path) -> list[pathlib.Path]:
    """Find the folders of packages of the nearest project between `folder` and `root`."""
    for place in (folder, *folder.parents):
        if not place.is_relative_to(root):
            break
        found = _packages(place)
        if found:
            return found
    return []


def _packages(root: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders that a project's build names, or `src`, or the root; [] without a build.

    A setup.py only marks a project: it is a program, and is not read.
    """
    pyproject = _read_pyproject(root)
    setup = _read_setup(root)
    tools = pyproject.get("tool", {})
    is_built = "build-system" in pyproject or "project" in pyproject or "poetry" in tools
    has_setup = setup.has_section("metadata") or setup.has_section("options")
    if not (is_built or has_setup or (root / "setup.py").is_file()):
        return []
    named = ["src"]
    with contextlib.suppress(AttributeError, TypeError):  # a table that is none
        named += _named_in(tools)
    named += _named_in_setup(setup)
    found: list[pathlib.Path] = []
    for name in dict.fromkeys(named):
        place = root / name
        if place != root and _holds_modules(place):
            found.append(place)
    if not found and _holds_modules(root):
        found.append(root)
    return found


def _read_pyproject(root: pathlib.Path) -> Json:
    with contextlib.suppress(OSError, ValueError, files.RefusedError):
        return backports.parse_toml(files.read_named(root / "pyproject.toml").decode())
    return {}


def _read_setup(root: pathlib.Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(OSError, ValueError, configparser.Error, files.RefusedError):
        parser.read_string(files.read_named(root / "setup.cfg").decode())
    return parser


def _named_in(tools: Json) -> list[str]:
    """List the folders that setuptools, poetry, maturin and hatch name in pyproject.toml."""
    setuptools = tools.get("setuptools", {})
    named = _texts(setuptools.get("package-dir", {}).get(""))
    packages = setuptools.get("packages", {})
    if isinstance(packages, dict):
        named += _texts(typing.cast(Json, packages).get("find", {}).get("where"))
    for package in tools.get("poetry", {}).get("packages", []):
        named += _texts(package.get("from"))
    named += _texts(tools.get("maturin", {}).get("python-source"))
    wheel = tools.get("hatch", {}).get("build", {}).get("targets", {}).get("wheel", {})
    for package in _texts(wheel.get("packages")):
        named.append(str(pathlib.PurePath(package).parent))
    return named


def _named_in_setup(setup: configparser.ConfigParser) -> list[str]:
    """List the folders in the sections of setuptools, in setup.cfg."""
    named = setup.get("options.packages.find", "where", fallback="").split()
    for line in setup.get("options", "package_dir", fallback="").splitlines():
        package, _, folder = line.partition("=")
        if folder and not package.strip():
            named.append(folder.strip())
    return named


def _texts(value: object) -> list[str]:
    values = typing.cast("list[object]", value) if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, str)]


def _holds_modules(folder: pathlib.Path) -> bool:
    """Return whether the folder may go on PYTHONPATH: it has modules, and none shadows the library.

    PYTHONPATH comes before the standard library, whereas `pip install -e` puts folders behind it.
    """
    if (folder / "__init__.py").exists():  # it is a package itself
        return False
    modules = {path.stem for path in folder.glob("*.py")}
    for pattern in ("*/*.py", "*/*/*.py"):  # the second: a package without __init__.py
        modules |= {path.relative_to(folder).parts[0] for path in folder.glob(pattern)}
    own = modules - _NO_PACKAGES
    return bool(own) and own.isdisjoint(sys.stdlib_module_names)
