"""The operations on environments in the workspace: wheels, builds, archives; see workspace/operations.py."""

import collections.abc
import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import stat
import subprocess
import tarfile
import tempfile
import time
import typing
import zipfile
import zlib

from ddp import backports
from ddp.environment import packing
from ddp.node.explain import Json, opened, read_object, tail
from ddp.workspace.files import RefusedError, replace


def verify_environments(folder: str) -> list[str]:
    """Return those of the newest eight archives that do not match their manifests."""
    manifests = sorted(pathlib.Path(folder).glob("*.json"), key=lambda path: path.lstat().st_mtime, reverse=True)
    damaged: list[str] = []
    for path in manifests[:8]:
        with contextlib.suppress(ValueError, KeyError):
            manifest = read_object(path)
            if path.stem != manifest["hash"]:
                continue
            archive = path.with_suffix(".tar.zst")
            try:
                is_intact = _digest(archive) == manifest["sha256"]
            except OSError:
                is_intact = False
            if not is_intact:
                damaged.append(str(archive))
    return damaged


def open_cache(base: str, store: str) -> Json:
    """Make a folder for a build below `base`, which is private to this account; remove leftovers of more than a day.

    Return the folder, and the bytes that are free there and in the folder `store`.
    """
    top = pathlib.Path(base)
    with contextlib.suppress(FileExistsError):
        top.mkdir(mode=0o700)
    about = top.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise RefusedError(f"{base} is not a folder of this account (uid {os.geteuid()}); remove it")
    top.chmod(0o700)
    for path in top.glob("build-*"):
        if time.time() - path.lstat().st_mtime > 86400:
            shutil.rmtree(path, ignore_errors=True)
    free = {"free_bytes": shutil.disk_usage(base).free, "store_free_bytes": shutil.disk_usage(store).free}
    return {"folder": tempfile.mkdtemp(prefix="build-", dir=base), **free}


def digest_wheelhouse(path: str) -> str:
    """Hash the content of a folder or an archive of wheels."""
    place = pathlib.Path(path)
    if not place.is_dir():
        return _digest(place)
    listed = "".join(f"{wheel.name}\0{_digest(wheel)}\n" for wheel in _wheels(place))
    return hashlib.sha256(listed.encode()).hexdigest()


def open_wheelhouse(path: str, target: str) -> Json:
    """Return the folder of the wheels: `path` itself, or `target` with an archive unpacked. Raises RefusedError.

    Refuse an archive with a member that would lead outside, or is a link or a device; skip what is no wheel.
    """
    place, folder = pathlib.Path(path), pathlib.Path(target)
    if place.is_dir():
        return {"folder": path, "wheels": len(_wheels(place))}
    folder.mkdir(mode=0o700)
    room = shutil.disk_usage(folder).free - (256 << 20)
    with opened(place) as file:
        magic = file.read(4)
    unpack = _unzip if magic[:2] == b"PK" else _untar
    try:
        for name, size, source in unpack(place):
            if (room := room - size) < 0:
                raise RefusedError(f"{path} does not fit into {folder.parent}")
            try:
                with (folder / name).open("xb") as wheel:
                    shutil.copyfileobj(source, wheel, 1 << 20)
            except FileExistsError:
                raise RefusedError(f"{path} holds {name} twice") from None
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, RuntimeError) as e:
        raise RefusedError(f"{path} is damaged: {e}") from e
    return {"folder": target, "wheels": len(_wheels(folder))}


def finish_environment(build: str, payload: str) -> Json:
    """Add the payload to a built environment, remove what no run reads, compile the rest; return its size."""
    environment = pathlib.Path(build, "env")
    (site,) = environment.glob("lib/python3.*/site-packages")
    target = site / "ddptrain"
    shutil.copytree(pathlib.Path(payload, "ddptrain"), target, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "ddptrain.pth").write_text("import ddptrain.startup\n")
    for folder in [site / "torch" / "test", *_folders_of_tests(site)]:
        shutil.rmtree(folder, ignore_errors=True)
    for path in (site / "torch" / "bin").glob("*"):
        if re.search(r"(^|_)[tT]est|Test$|^protoc", path.name):  # what is needed there is torch_shm_manager
            path.unlink()
    compiled = [str(environment / "bin" / "python"), "-m", "compileall", "-qq", "-j0"]
    subprocess.run([*compiled, str(target)], check=True, timeout=300, capture_output=True)
    subprocess.run(
        [*compiled, str(site)], check=False, timeout=1200, capture_output=True
    )  # of templates some are no code
    sizes = [path.lstat().st_size for path in environment.rglob("*") if path.is_file() and not path.is_symlink()]
    return {"size_bytes": sum(sizes), "files": len(sizes)}


def store_environment(build: str, folder: str, manifest: Json) -> Json:
    """Archive a built environment into `folder` under its hash; the manifest, written last, makes it valid."""
    descriptor, name = tempfile.mkstemp(prefix=".environment-", suffix=".tmp", dir=folder)
    partial = pathlib.Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            digest, parts = packing.pack(pathlib.Path(build, "env"), file, pathlib.Path(build))
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o644)
        size = partial.stat().st_size
        partial.replace(pathlib.Path(folder, f"{digest[:16]}.tar.zst"))
    finally:
        partial.unlink(missing_ok=True)
    complete = {**manifest, "hash": digest[:16], "sha256": digest, "size_bytes": size, "parts": parts}
    replace(pathlib.Path(folder, f"{digest[:16]}.json"), json.dumps(complete, indent=1, sort_keys=True) + "\n")
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
    """Remove environments that are neither in `keep`, nor used by these runs, nor the newest three of their kind.

    Remove leftovers of more than a day, too.
    """
    folder = pathlib.Path(workspace, "environments")
    used = {*keep, *environments_of(runs).values()}
    found: dict[str, list[tuple[str, str]]] = {}
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            manifest = read_object(path)
            if manifest["hash"] == path.stem and re.fullmatch(r"[0-9a-f]{16}", path.stem):
                found.setdefault(f"{manifest['build']} {manifest.get('name', '')}", []).append(
                    (str(manifest["created"]), path.stem)
                )
    removed = [name for made in found.values() for _, name in sorted(made, reverse=True)[3:] if name not in used]
    remove_environments(str(folder), removed)
    for path in [*folder.glob(".environment-*.tmp"), *folder.glob("*.tar.zst")]:
        with contextlib.suppress(OSError):
            alone = path.name.startswith(".") or not (folder / path.name.replace(".tar.zst", ".json")).exists()
            if alone and time.time() - path.lstat().st_mtime > 86400:
                path.unlink()
    return {"removed": removed}


def remove_build(build: str) -> None:
    """Remove a build's folder."""
    shutil.rmtree(build, ignore_errors=True)


def last_step(path: str) -> str:
    """Return pip's current step from its log, which may not exist yet."""
    with contextlib.suppress(OSError):
        for line in reversed(tail(pathlib.Path(path), 65536)):
            if found := re.search(
                r"\b(Collecting|Downloading|Using cached|Building|Installing|Attempting|Successfully) .*", line
            ):
                return found[0]
    return ""


def _digest(path: pathlib.Path) -> str:
    with opened(path) as file:
        return backports.sha256(file)


def _folders_of_tests(site: pathlib.Path) -> list[pathlib.Path]:
    packages = [path for path in site.iterdir() if path.is_dir() and path.name not in ("torch", "ddptrain")]
    return [folder for package in packages for folder in package.rglob("tests") if folder.is_dir()]


def _wheels(folder: pathlib.Path) -> list[pathlib.Path]:
    """List a folder's wheels. Raises RefusedError where there are none, or one is not a plain file."""
    wheels = sorted(folder.glob("*.whl"))
    if strange := [wheel for wheel in wheels if not stat.S_ISREG(wheel.lstat().st_mode)]:
        raise RefusedError(f"{strange[0]} is no plain file; put the wheel itself there")
    if not wheels:
        raise RefusedError(f"no .whl file is in {folder.name}")
    return wheels


Member = tuple[str, int, typing.IO[bytes]]  # the wheel's name, its size, its content


def _untar(path: pathlib.Path) -> collections.abc.Iterator[Member]:
    """Yield the wheels of a .tar or .tar.zst."""
    with opened(path) as file:
        is_packed = file.read(4) == b"\x28\xb5\x2f\xfd"  # RFC 8878, 3.1.1
    argv = ["zstd", "-q", "-d", "-c"] if is_packed else ["cat"]
    with opened(path) as file, subprocess.Popen(argv, stdin=file, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                name = _member(path, member.name)
                if not (member.isfile() or member.isdir()):
                    raise RefusedError(f"{path}: {name} is a link or a device; pack plain files only")
                if name.endswith(".whl") and (source := archive.extractfile(member)) is not None:
                    yield name, member.size, source
        while process.stdout.read(1 << 20):  # what fills the last block
            pass
    if process.returncode:
        raise RefusedError(f"{path} is damaged: {argv[0]} cannot read it")


def _unzip(path: pathlib.Path) -> collections.abc.Iterator[Member]:
    """Yield the wheels of a .zip."""
    with opened(path) as file, zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            name = _member(path, member.filename)
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise RefusedError(f"{path}: {name} is a link or a device; pack plain files only")
            if name.endswith(".whl") and not member.is_dir():
                with archive.open(member) as source:
                    yield name, member.file_size, source


def _member(path: pathlib.Path, name: str) -> str:
    """Return the last part of a member's name. Raises RefusedError where the name leads out of the archive."""
    parts = name.replace("\\", "/").split("/")
    if parts[0] == "" or ".." in parts:
        raise RefusedError(
            f"{path}: the member {ascii(name)[:200]} leads outside; pack names without .. and a leading /"
        )
    return parts[-1]
