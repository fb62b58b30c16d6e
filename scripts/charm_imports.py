"""Check with import-linter that charms' imports run one way, down [tool.charm-imports]'s layers.

    python scripts/charm_imports.py        # of pyproject.toml

Each charm is a separate world, with a module called `charm`. import-linter reads packages only, so
a folder of links shows it each module as one. In a charm's code, only charm.py and relations/
import ops.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
_MAY_IMPORT_OPS = {"charm", "relations"}


def main() -> int:
    """Check every charm of the table; return 1 if one breaks it."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["charm-imports"]
    broken = [charm for charm, layers in table.items() if not is_kept(charm, layers)]
    return 1 if broken else 0


def is_kept(charm: str, layers: list[str]) -> bool:
    """Print import-linter's findings in a charm, and return whether it keeps to its layers."""
    named = {name for layer in layers for name in layer.split(" | ")}
    sources = ROOT / "charms" / charm / "src"
    modules = {path.stem: path for path in sources.iterdir() if _is_module(path)}
    if named != set(modules):
        print(f"[tool.charm-imports] {charm}: {sorted(named ^ set(modules))} differ from {sources}")
        return False
    with tempfile.TemporaryDirectory() as folder:
        shown = pathlib.Path(folder)
        for name, path in modules.items():
            if path.is_dir():
                (shown / name).symlink_to(path)
                continue
            (shown / name).mkdir()
            (shown / name / "__init__.py").symlink_to(path)
        config = shown / "contracts.toml"
        config.write_text(contracts(charm, layers, modules))
        command = [pathlib.Path(sys.executable).with_name("lint-imports"), "--no-cache", config]
        found = subprocess.run(
            command,
            cwd=shown,
            env={**os.environ, "PYTHONPATH": f"{shown}{os.pathsep}{ROOT / 'lib'}"},
            capture_output=True,
            text=True,
            check=False,
        )
    print(f"{charm}: {'kept' if found.returncode == 0 else found.stdout + found.stderr}")
    return found.returncode == 0


def contracts(charm: str, layers: list[str], modules: dict[str, pathlib.Path]) -> str:
    """Write import-linter's configuration of a charm."""
    names = json.dumps(sorted(modules))
    without_ops = json.dumps(sorted(set(modules) - _MAY_IMPORT_OPS))
    return f"""
[tool.importlinter]
root_packages = {names}
include_external_packages = true

[[tool.importlinter.contracts]]
name = "The layers of {charm}"
type = "layers"
layers = {json.dumps(layers)}

[[tool.importlinter.contracts]]
name = "Only charm.py and relations/ import ops"
type = "forbidden"
source_modules = {without_ops}
forbidden_modules = ["ops"]
"""


def _is_module(path: pathlib.Path) -> bool:
    return path.suffix == ".py" or (path / "__init__.py").exists()


if __name__ == "__main__":
    sys.exit(main())
