"""The operations on environments in the workspace: builds and their archives; see workspace/operations.py."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time

from ddp.environment import packing
from ddp.node.explain import Json, read_object
from ddp.workspace import files

_OLD_S = 86400  # leftovers of killed commands
_KEPT = 3  # of each build and name


def open_build(base: str) -> str:
    """Make a folder for a build below `base`, which is private to this account; remove leftovers of other builds.

    Raises RefusedError.
    """
    pathlib.Path(base).mkdir(mode=0o700, exist_ok=True)
    for path in files.private(pathlib.Path(base)).glob("build-*"):
        if time.time() - path.lstat().st_mtime > _OLD_S:
            shutil.rmtree(path, ignore_errors=True)
    return tempfile.mkdtemp(prefix="build-", dir=base)


def finish_environment(build: str, payload: str) -> Json:
    """Add the payload to a built environment, remove what no run reads, compile the rest; return its size."""
    environment = pathlib.Path(build, "env")
    (site,) = environment.glob("lib/python3.*/site-packages")
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(pathlib.Path(payload, "ddptrain"), site / "ddptrain", ignore=unwanted)
    (site / "ddptrain.pth").write_text("import ddptrain.startup\n")
    tests = [path for path in site.rglob("tests") if path.relative_to(site).parts[0] not in ("torch", "ddptrain")]
    for folder in [pathlib.Path(build, "cache"), site / "torch" / "test", *tests]:
        shutil.rmtree(folder, ignore_errors=True)
    for path in (site / "torch" / "bin").glob("*"):
        if re.search(r"(^|_)[tT]est|Test$|^protoc", path.name):  # 50 MB
            path.unlink()
    argv = [str(environment / "bin" / "python"), "-m", "compileall", "-qq", "-j0", str(site)]
    subprocess.run(
        argv, check=False, timeout=1200, capture_output=True
    )  # some packages ship templates that are no code
    sizes = [path.lstat().st_size for path in environment.rglob("*") if path.is_file() and not path.is_symlink()]
    return {"size_bytes": sum(sizes), "files": len(sizes)}


def store_environment(build: str, folder: str, manifest: Json) -> Json:
    """Archive a built environment into `folder` under its hash; the manifest, written last, makes it valid."""
    descriptor, name = tempfile.mkstemp(prefix=".environment-", suffix=".tmp", dir=folder)
    partial = pathlib.Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            digest, parts = packing.pack(pathlib.Path(build, "env"), file)
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o644)
        size = partial.stat().st_size
        partial.replace(pathlib.Path(folder, f"{digest[:16]}.tar.zst"))
    finally:
        partial.unlink(missing_ok=True)
    complete = {**manifest, "hash": digest[:16], "sha256": digest, "size_bytes": size, "parts": parts}
    files.replace(pathlib.Path(folder, f"{digest[:16]}.json"), json.dumps(complete, indent=1, sort_keys=True) + "\n")
    return complete


def store_payload(source: str, target: str) -> None:
    """Copy the payload's package to a folder atomically."""
    if pathlib.Path(target).is_dir():
        return
    partial = pathlib.Path(tempfile.mkdtemp(prefix=".payload-", dir=pathlib.Path(target).parent))
    try:
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(pathlib.Path(source, "ddptrain"), partial / "ddptrain", ignore=unwanted)
        partial.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was faster
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_environments(folder: str, hashes: list[str]) -> None:
    """Remove environments; the manifest first, so that nothing half removed is ever used."""
    for name in hashes:
        for suffix in (".json", ".tar.zst"):
            pathlib.Path(folder, f"{name}{suffix}").unlink(missing_ok=True)


def environments_of(runs: list[str]) -> Json:
    """Return the hash of the environment of each run, by the run's folder."""
    found: dict[str, str] = {}
    for run in runs:
        with contextlib.suppress(OSError, ValueError):
            found[run] = str(read_object(pathlib.Path(run, "job.json")).get("environment"))
    return found


def prune_environments(workspace: str, keep: list[str], runs: list[str]) -> Json:
    """Remove environments that are neither in `keep`, nor used by these runs, nor the newest of their build and name.

    Remove leftovers, too.
    """
    folder = pathlib.Path(workspace, "environments")
    used = {*keep, *environments_of(runs).values()}
    found: dict[str, list[tuple[str, str]]] = {}
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            manifest = read_object(path)
            if manifest["hash"] == path.stem and re.fullmatch(r"[0-9a-f]{16}", path.stem):
                kind = f"{manifest['build']} {manifest.get('name', '')}"
                found.setdefault(kind, []).append((str(manifest["created"]), path.stem))
    removed = [name for made in found.values() for _, name in sorted(made, reverse=True)[_KEPT:] if name not in used]
    remove_environments(str(folder), removed)
    for path in [*folder.glob(".environment-*.tmp"), *folder.glob("*.tar.zst")]:
        with contextlib.suppress(OSError):
            is_alone = path.name.startswith(".") or not (folder / path.name.replace(".tar.zst", ".json")).exists()
            if is_alone and time.time() - path.lstat().st_mtime > _OLD_S:
                path.unlink()
    return {"removed": removed}
