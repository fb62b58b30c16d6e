"""Operations on environments in the workspace: builds and their archives."""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

from ddp.environment import packing
from ddp.host import files
from ddp.node import small_files, spool

_OLD_S = 86400  # leftovers of killed commands
_BEHIND = 'import os, site, sys; site.addsitedir(os.path.join(os.path.dirname(sys.prefix), "{base}", "{site}"))\n'


def open_build(base: str) -> str:
    """Make the folder of this host's only build below `base`, which this account alone reads."""
    folder = pathlib.Path(spool.own_cache(base), "build")
    shutil.rmtree(folder, ignore_errors=True)  # a killed command's
    folder.mkdir()
    return str(folder)


def open_layer(build: str, base: str, part: tuple[int, str], skipped: int) -> list[str]:
    """Unpack scripts and metadata of an archive into an empty environment; return the names.

    They are the part of this size and SHA-256 behind `skipped` bytes. Raises RefusedError if it is
    damaged.
    """
    with pathlib.Path(base).open("rb") as file:
        file.seek(skipped)
        data = file.read(part[0])
    if hashlib.sha256(data).hexdigest() != part[1]:
        raise files.RefusedError(f"{base} is damaged; remove it")
    environment = pathlib.Path(build, "env")
    argv = ["tar", "-x", "-I", "zstd -q", f"--directory={environment}"]
    subprocess.run(argv, input=data, check=True, timeout=60, capture_output=True)
    return [path.name for path in environment.glob("lib/python3.*/site-packages/*.dist-info")]


def finish_layer(build: str, base: str, names: list[str]) -> int:
    """Put the environment `base` behind the layer on sys.path; return the layer's bytes.

    A node unpacks both side by side, and compiles modules as it imports them. The file's name sorts
    before the .pth files of packages, which may need the base.
    """
    environment = pathlib.Path(build, "env")
    (site,) = environment.glob("lib/python3.*/site-packages")
    for name in names:
        shutil.rmtree(site / name, ignore_errors=True)
    (site / "00-base.pth").write_text(_BEHIND.format(base=base, site=site.relative_to(environment)))
    return _clean(environment)


def finish_environment(build: str, payload: pathlib.Path) -> int:
    """Add the payload to a built environment, trim and compile it; return its bytes."""
    environment = pathlib.Path(build, "env")
    (site,) = environment.glob("lib/python3.*/site-packages")
    _copy_payload(payload, site)
    (site / "ddptrain.pth").write_text("import ddptrain.world.startup\n")
    tests = [
        path
        for path in site.rglob("tests")
        if path.relative_to(site).parts[0] not in ("torch", "ddptrain")
    ]
    for folder in [pathlib.Path(build, "cache"), site / "torch" / "test", *tests]:
        shutil.rmtree(folder, ignore_errors=True)
    binaries = site / "torch" / "bin"
    for path in [*binaries.glob("*[tT]est*"), *binaries.glob("protoc*")]:  # 50 MB
        path.unlink()
    argv = [str(environment / "bin" / "python"), "-m", "compileall", "-qq", "-j0", str(site)]
    subprocess.run(
        argv, check=False, timeout=1200, capture_output=True
    )  # some packages' templates are not valid code
    return _clean(environment)


def _clean(environment: pathlib.Path) -> int:
    """Remove the scripts that name the build's folder; return an environment's bytes."""
    for path in environment.glob("bin/[Aa]ctivate*"):
        path.unlink()
    return sum(
        path.lstat().st_size
        for path in environment.rglob("*")
        if path.is_file() and not path.is_symlink()
    )


def store_environment(build: str, folder: str, manifest: small_files.Json) -> small_files.Json:
    """Archive a built environment in `folder` under its hash.

    The manifest is written last and makes the archive valid.
    """
    descriptor, name = tempfile.mkstemp(prefix=".environment-", suffix=".tmp", dir=folder)
    partial = pathlib.Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            digest, parts = packing.pack(pathlib.Path(build, "env"), file)
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o644)
        partial.replace(pathlib.Path(folder, f"{digest[:16]}.tar.zst"))
    finally:
        partial.unlink(missing_ok=True)
    size = sum(size for size, _ in parts)
    complete = {
        **manifest,
        "hash": digest[:16],
        "sha256": digest,
        "size_bytes": size,
        "parts": parts,
    }
    files.replace(
        pathlib.Path(folder, f"{digest[:16]}.json"),
        json.dumps(complete, indent=1, sort_keys=True) + "\n",
    )
    return complete


def store_payload(source: pathlib.Path, target: str) -> None:
    """Copy the payload's package to a folder atomically."""
    if pathlib.Path(target).is_dir():
        return
    partial = pathlib.Path(tempfile.mkdtemp(prefix=".payload-", dir=pathlib.Path(target).parent))
    try:
        _copy_payload(source, partial)
        partial.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was faster
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy_payload(source: pathlib.Path, folder: pathlib.Path) -> None:
    shutil.copytree(
        source / "ddptrain", folder / "ddptrain", ignore=shutil.ignore_patterns("__pycache__")
    )


def remove_environments(folder: str, hashes: list[str]) -> None:
    """Remove environments and leftovers; manifests go first, so that no job uses half of one."""
    place = pathlib.Path(folder)
    for name in hashes:
        for suffix in (".json", ".tar.zst"):
            (place / f"{name}{suffix}").unlink(missing_ok=True)
    for path in place.glob(".environment-*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.lstat().st_mtime > _OLD_S:
                path.unlink()
