"""Check packed charms: metadata, dispatch, the code and nothing else; run them with only that.

`tox -e pack` packs first. Each base has its own Python; if these tests run on another one, the
packages in the charm are first replaced by the same versions for this one, installed with the same
hashes.
"""

import collections.abc
import dataclasses
import hashlib
import json
import pathlib
import re
import stat
import subprocess
import sys
import zipfile
from typing import Any

import pytest
import yaml
from packaging.utils import canonicalize_name

from scripts import pack, uv

NAMES = pack.charm_names()
CHARMCRAFT_S = {"metadata.yaml", "manifest.yaml", "config.yaml", "actions.yaml", "dispatch"}


@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed charm, unpacked, with its sources."""

    name: str
    base: pack.Base
    folder: pathlib.Path
    declared: dict[str, Any]

    @property
    def site(self) -> str:
        return f"venv/lib/python{self.base.python}/site-packages"

    def files(self) -> set[str]:
        return {
            str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()
        }

    def own_files(self) -> set[str]:
        return {name for name in self.files() if not name.startswith("venv/")}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (name, base), id=f"{name}-{base.version}", marks=[pytest.mark.long] if number else []
        )
        for name in NAMES
        for number, base in enumerate(pack.BASES)
    ],
)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    name, base = request.param
    archive = pack.artifact(name, base)
    assert archive.is_file(), "python scripts/pack.py makes it"
    folder = tmp_path_factory.mktemp(name)
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
        for entry in file.infolist():  # extractall drops the modes
            if mode := stat.S_IMODE(entry.external_attr >> 16):
                (folder / entry.filename).chmod(mode)
    declared = yaml.safe_load((pack.ROOT / "charms" / name / "charmcraft.yaml").read_text())
    return Packed(name, base, folder, declared)


@pytest.mark.parametrize(
    ("file", "base"),
    [
        ("bundle.yaml", pack.BASES[0]),
        pytest.param("overlays/2604.yaml", pack.BASES[1], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_bundle_and_the_overlay_name_the_files_of_their_base_and_there_is_no_other(
    file: str, base: pack.Base
):
    path = pack.ROOT / file
    bodies = yaml.safe_load(path.read_text())["applications"].values()
    local = {
        (path.parent / body["charm"]).resolve()
        for body in bodies
        if body.get("charm", "").startswith(".")
    }
    assert local == {pack.artifact(name, base) for name in NAMES}
    assert local == set(pack.artifact(NAMES[0], base).parent.glob("*.charm"))


def test_it_holds_the_sources_and_nothing_else(packed: Packed, tmp_path: pathlib.Path):
    pack.stage(packed.name, tmp_path)
    carried = {"src", "lib", *pack.EXTRAS.get(packed.name, {}).values()}
    expected = {
        str(path.relative_to(tmp_path)): path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file() and path.relative_to(tmp_path).parts[0] in carried
    }
    assert packed.own_files() - CHARMCRAFT_S - {"README.md", "icon.svg", "LICENSE"} == set(expected)
    changed = [
        name for name, content in expected.items() if (packed.folder / name).read_bytes() != content
    ]
    assert changed == [], "the sources changed since the charm was packed"
    assert "src/charm.py" in expected
    assert "lib/slurm_ddp/commands.py" in expected


def test_no_tests_caches_bundle_or_secrets_inside(packed: Packed):
    for name in packed.own_files():
        parts = pathlib.PurePath(name).parts
        assert not {"tests", "__pycache__", ".git", ".tox"} & set(parts), name
        assert parts[-1] not in {"bundle.yaml", "charmcraft.yaml"}, (
            "Juju would deploy the bundle instead of the charm"
        )
        assert not name.endswith((".pyc", ".pem", ".key", ".env")), name
        text = (packed.folder / name).read_text(errors="replace")
        assert not re.search(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:\s|\\n)+[\w+/-]{8}", text), name
        assert str(pack.ROOT) not in text, f"{name} names the folder it was packed in"


def test_its_packages_are_the_pinned_ones_for_the_python_of_its_base(packed: Packed):
    requirements = (pack.ROOT / "charms" / packed.name / "requirements.txt").read_text()
    pinned = {
        (canonicalize_name(name), version)
        for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", requirements, re.MULTILINE)
    }
    installed = {
        (canonicalize_name(match[1]), match[2])
        for path in (packed.folder / packed.site).glob("*.dist-info")
        if (match := re.fullmatch(r"(.+)-([^-]+)\.dist-info", path.name))
    }
    assert installed == pinned
    modules = {name for name in packed.files() if name.endswith(".so")}
    tag = f".cpython-{packed.base.python.replace('.', '')}-x86_64-"
    assert modules
    assert all(
        name.startswith(packed.site) and (tag in name or ".abi3." in name) for name in modules
    ), modules


@pytest.fixture(scope="session")
def packages(
    tmp_path_factory: pytest.TempPathFactory,
) -> collections.abc.Callable[[pathlib.Path], pathlib.Path]:
    """Return the folder with the packages of a requirements.txt for the Python that runs here; equal texts share one."""
    root = tmp_path_factory.mktemp("packages")

    def installed(requirements: pathlib.Path) -> pathlib.Path:
        target = root / hashlib.sha256(requirements.read_bytes()).hexdigest()
        if not target.exists():
            what = (
                "--no-deps",
                "--require-hashes",
                "--only-binary",
                ":all:",
                "-r",
                str(requirements),
            )
            uv.run("pip", "install", "--python", sys.executable, "--target", str(target), *what)
        return target

    return installed


@pytest.fixture(scope="module")
def runnable(
    packed: Packed, packages: collections.abc.Callable[[pathlib.Path], pathlib.Path]
) -> Packed:
    """The charm with its packages for the Python that runs here."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    target = packed.folder / f"venv/lib/python{here}/site-packages"
    if not target.exists():
        target.parent.mkdir(parents=True)
        target.symlink_to(packages(pack.ROOT / "charms" / packed.name / "requirements.txt"))
    return packed


def test_every_module_of_the_charm_imports_with_only_what_is_inside(runnable: Packed):
    """Imports that hide in functions are found too: every name that any of its modules imports must resolve."""
    site = (
        runnable.folder
        / f"venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    )
    program = f"""
import ast, importlib.util, pathlib, sys
root = pathlib.Path({str(runnable.folder)!r})
sys.path += [str(root / "lib"), str(root / "src"), {str(site)!r}]
for path in [*(root / "src").rglob("*.py"), *(root / "lib").rglob("*.py")]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        for name in names:
            if importlib.util.find_spec(name) is None:
                sys.exit(f"{{path.relative_to(root)}} imports {{name}}, which is not in the charm")
"""
    command = [sys.executable, "-I", "-S", "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd="/", env={})
    assert done.returncode == 0, done.stderr


HOOK_TOOL = """\
#!/usr/bin/python3
# Stands in for Juju's hook tools: a unit that is no leader, has no relation, and all options at their defaults.
import json, pathlib, sys
name = pathlib.Path(sys.argv[0]).name
pathlib.Path(sys.argv[0]).with_name("calls").open("a").write(json.dumps([name, *sys.argv[1:]]) + "\\n")
answers = {"config-get": DEFAULTS, "is-leader": False, "relation-ids": [], "storage-list": [], "secret-ids": []}
answers["status-get"] = {"status": "unknown", "message": "", "status-data": {}}
if name in answers:
    print(json.dumps(answers[name]))
"""


def test_dispatch_starts_the_charm(runnable: Packed, tmp_path: pathlib.Path):
    """An event that the charm does not know makes it start, observe, and collect its status, but change nothing."""
    options = runnable.declared.get("config", {}).get("options", {})
    defaults = {name: option["default"] for name, option in options.items() if "default" in option}
    tools = "config-get is-leader juju-log relation-ids secret-get secret-ids state-get status-get status-set storage-list"
    for tool in tools.split():
        (tmp_path / tool).write_text(HOOK_TOOL.replace("DEFAULTS", repr(defaults)))
        (tmp_path / tool).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin",
        "JUJU_CHARM_DIR": str(runnable.folder),
        "JUJU_DISPATCH_PATH": "hooks/of-no-charm",
        "JUJU_MODEL_NAME": "model",
        "JUJU_MODEL_UUID": "0b8ab1a6-4b5d-4d0e-8b0c-1f1f3c1c3f1d",
        "JUJU_UNIT_NAME": f"{runnable.name}/0",
        "JUJU_VERSION": "3.6.0",
    }
    dispatch, folder = runnable.folder / "dispatch", runnable.folder
    done = subprocess.run(
        [dispatch], check=False, capture_output=True, text=True, cwd=folder, env=env
    )
    assert done.returncode == 0, done.stderr
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert any("of_no_charm not defined for" in call[-1] for call in calls if call[0] == "juju-log")
    assert not any("ERROR" in call for call in calls if call[0] == "juju-log")


def test_the_bundle_archive_holds_the_bundle():
    with zipfile.ZipFile(pack.artifact(pack.BUNDLE)) as archive:
        assert (
            {"bundle.yaml", "README.md"}
            <= set(archive.namelist())
            <= {"bundle.yaml", "README.md", "metadata.yaml"}
        )
        assert archive.read("bundle.yaml") == (pack.ROOT / "bundle.yaml").read_bytes()
