"""The environment on a node: unpacked once from a verified archive, and held by its jobs."""

import collections.abc
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import pathlib
import stat
import subprocess
import sys
import tarfile
import time
import typing

import pytest

from ddp.environment import packing
from ddp.node import spec
from ddp.run import folder as run_folder

DRIVER = """
import os, sys
from ddp.node import exit_codes, spec, unpacking
if "# before" in sys.argv[2]:
    exec(sys.argv[2])
try:
    python, locks = unpacking.use(spec.parse(spec.Environment, sys.argv[1]), "slurmd-0", os.environ["CONTROL"])
except exit_codes.FatalError as e:
    print(f"[FATAL] slurmd-0: {e}", file=sys.stderr)
    sys.exit(78)
print(f"PY={python}", flush=True)
exec(sys.argv[2])
"""

LAYER = {field.name for field in dataclasses.fields(spec.Archive)}


class Store:
    """An archive in a workspace, and a node that unpacks it."""

    def __init__(self, tmp_path: pathlib.Path) -> None:
        self.cache = tmp_path / "cache"
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            interpreter = tarfile.TarInfo("./bin/python")
            interpreter.type, interpreter.linkname = tarfile.SYMTYPE, sys.executable
            tar.addfile(interpreter)
            big = tarfile.TarInfo("./lib/data")
            big.size = 200000
            tar.addfile(big, io.BytesIO(os.urandom(big.size)))
        data = subprocess.run(
            ["zstd", "-q", "-c"], input=packed.getvalue(), check=True, capture_output=True
        ).stdout
        self.sha256 = hashlib.sha256(data).hexdigest()
        folder = tmp_path / "environments"
        folder.mkdir()
        self.archive = folder / f"{self.sha256[:16]}.tar.zst"
        self.archive.write_bytes(data)
        self.home = self.cache / self.sha256[:16]
        self.path, self.control = "/usr/bin:/bin", ""

    def argv(self, then: str, **more: typing.Any) -> list[str]:
        layer = spec.Archive(str(self.archive), self.sha256, 300000, "ddp env install")
        layer = dataclasses.replace(layer, **{name: more.pop(name) for name in LAYER & more.keys()})
        about = spec.Environment((layer,), str(self.cache), f"3.{sys.version_info[1]}", ())
        return [
            sys.executable,
            "-c",
            DRIVER,
            json.dumps(dataclasses.asdict(dataclasses.replace(about, **more))),
            then,
        ]

    def env(self) -> dict[str, str]:
        return {
            "PATH": self.path,
            "CONTROL": self.control,
            "PYTHONPATH": str(pathlib.Path(spec.__file__).parents[2]),
        }

    def use(self, then: str = "pass", **more: typing.Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(then, **more), env=self.env(), text=True, capture_output=True, check=False
        )

    def start(self, then: str) -> subprocess.Popen[str]:
        return subprocess.Popen(self.argv(then), env=self.env(), text=True, stdout=subprocess.PIPE)


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Store:
    return Store(tmp_path)


def test_the_environment_is_unpacked_once(store: Store):
    first = store.use()
    assert first.returncode == 0, first.stderr
    assert f"PY={store.home}/bin/python" in first.stdout
    assert "unpacked the environment" in first.stdout
    again = store.use()
    assert again.stdout == f"PY={store.home}/bin/python\n"
    assert stat.S_IMODE(store.cache.stat().st_mode) == 0o700


def test_a_node_without_the_zstd_program_uses_the_library(store: Store, tmp_path: pathlib.Path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for path in pathlib.Path(folder).iterdir():
            if path.name not in ("zstd", "zstdmt") and not (tools / path.name).exists():
                (tools / path.name).symlink_to(path)
    store.path = str(tools)
    done = store.use()
    assert done.returncode == 0, done.stderr
    assert (store.home / "lib" / "data").stat().st_size == 200000


def test_how_far_a_node_is_stands_in_the_runs_folder_until_it_is_done(
    store: Store, make_run: collections.abc.Callable[..., pathlib.Path]
):
    run, seen = make_run(), set[str]()
    store.control = str(run / "control")
    slow = "lambda *a, real=unpacking.extract_part: (real(*a), time.sleep(1.5))[0]"
    process = store.start(f"import time; unpacking.extract_part = {slow}  # before")
    while process.poll() is None:
        seen.add(run_folder.read(run).beginning)
    process.communicate()
    assert seen >= {"", "unpacking the environment: 100%"}
    assert process.returncode == 0
    assert run_folder.read(run).beginning == ""


def test_jobs_that_start_together_unpack_once(store: Store):
    processes = [store.start("print('ok')") for _ in range(4)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert all(output.endswith("ok\n") for output in outputs)
    assert sum("unpacked the environment" in output for output in outputs) == 1


def test_the_parts_of_an_archive_are_unpacked(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """As the trainer packs them: folders, links, modes, an empty file, odd names."""
    monkeypatch.setattr(packing, "PART_BYTES", 1000)
    source = tmp_path / "env"
    for folder in ("bin", "lib/empty", "lib/many", "lib/x-1.dist-info"):
        (source / folder).mkdir(parents=True)
    (source / "lib/x-1.dist-info/METADATA").write_text("x")
    (source / "bin" / "python").symlink_to(sys.executable)
    (source / "lib64").symlink_to("lib")
    (source / "bin" / "tool").write_text("#!/bin/sh\n")
    (source / "bin" / "tool").chmod(0o755)
    (source / "lib" / "-x\ny").write_text("")
    (source / "lib" / "many" / "copy").hardlink_to(source / "bin" / "tool")
    for number in range(40):
        (source / "lib" / "many" / f"{number}").write_bytes(os.urandom(number * 1000))
    store = Store(tmp_path)
    with store.archive.open("wb") as file:
        sha256, parts = packing.pack(source, file)
    assert len(parts) == packing.PARTS + 2
    data = store.archive.read_bytes()
    listed, scripts = (
        subprocess.run(["tar", "--zstd", "-t"], input=part, stdout=-1, check=True)
        for part in (data[: parts[0][0]], data[parts[0][0] : parts[0][0] + parts[1][0]])
    )
    assert scripts.stdout.decode().split() == ["./bin/tool", "./lib/x-1.dist-info/METADATA"]
    folders = sorted(
        f"./{path.relative_to(source)}/"
        for path in source.rglob("*")
        if path.is_dir() and path.name != "lib64"
    )
    assert sorted(listed.stdout.decode().splitlines()) == folders, (
        "tars that both make a folder fail"
    )
    assert hashlib.sha256(store.archive.read_bytes()).hexdigest() == sha256
    done = store.use(sha256=sha256, parts=tuple(parts))
    assert done.returncode == 0, done.stderr
    assert snapshot(store.home) == snapshot(source)
    whole = tmp_path / "whole"  # as another program reads it
    whole.mkdir()
    subprocess.run(["tar", "--zstd", "-xi", "-f", store.archive, "-C", whole], check=True)
    assert snapshot(whole) == snapshot(source)


def snapshot(folder: pathlib.Path) -> dict[str, tuple[int, int, bytes]]:
    """Return mode, mtime in seconds and content of all files, except unpacking marks."""
    found: dict[str, tuple[int, int, bytes]] = {}
    for path in folder.rglob("*"):
        about = path.lstat()
        is_link = stat.S_ISLNK(about.st_mode)
        content = (
            str(path.readlink()).encode()
            if is_link
            else b""
            if path.is_dir()
            else path.read_bytes()
        )
        found[str(path.relative_to(folder))] = (
            about.st_mode,
            int(about.st_mtime) if path.is_file() and not is_link else 0,
            content,
        )
    found.pop("unpacked-in-s", None)
    return found


@pytest.mark.parametrize("has_parts", [True, False])
@pytest.mark.parametrize("damage", ["cut", "more", "changed"])
def test_a_damaged_archive_is_never_used(store: Store, damage: str, has_parts: bool):
    data = store.archive.read_bytes()
    parts = tuple(
        (len(half), hashlib.sha256(half).hexdigest()) for half in (data[:90000], data[90000:])
    )
    changed = data[:100000] + bytes([data[100000] ^ 1]) + data[100001:]
    store.archive.write_bytes({"cut": data[:-1], "more": data + b"x", "changed": changed}[damage])
    done = store.use(parts=parts if has_parts else ())
    remedy = f"{store.archive} is damaged; remove it, then: ddp env install"
    assert (done.returncode, done.stderr) == (78, f"[FATAL] slurmd-0: {remedy}\n")
    assert sorted(path.suffix for path in store.cache.iterdir()) == [".lock", ".lock"]


def test_a_disk_that_fills_is_named(store: Store, tmp_path: pathlib.Path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "tar").write_text(
        "#!/bin/sh\necho 'tar: ./lib/data: Cannot write: No space left on device' >&2; exit 2\n"
    )
    (tools / "tar").chmod(0o755)
    store.path = f"{tools}:{store.path}"
    done = store.use()
    assert done.returncode == 78
    assert done.stderr.endswith(": tar: ./lib/data: Cannot write: No space left on device\n")
    assert len(done.stderr.splitlines()) == 1
    assert not store.home.exists()


@pytest.mark.parametrize(
    ("about", "why"),
    [
        (
            {"path": "/none.zst"},
            "/none.zst cannot be read (No such file or directory); is the shared filesystem mounted",
        ),
        (
            {"python": "3.7"},
            f"this node has Python 3.{sys.version_info[1]}, the environment was made for 3.7",
        ),
        (
            {"unpacked_bytes": 1 << 60, "cache_remedy": "set node-cache"},
            f"MiB free, the environment needs {(1 << 40) + 256} MiB; free space there; or set node-cache",
        ),
        (
            {"cache": "/nowhere/slurm-ddp-1", "cache_remedy": "set node-cache"},
            "/nowhere/slurm-ddp-1 cannot be made (No such file or directory); or set node-cache",
        ),
    ],
)
def test_an_environment_that_this_node_cannot_use_is_refused(
    store: Store, about: dict[str, typing.Any], why: str
):
    done = store.use(**about)
    assert (done.returncode, why in done.stderr, len(done.stderr.splitlines())) == (78, True, 1)


NOEXEC = """
def statvfs(path, real=os.statvfs):  # before the environment is used
    about = list(real(path))
    about[8] |= os.ST_NOEXEC
    return os.statvfs_result(about)
os.statvfs = statvfs
"""


@pytest.mark.parametrize("is_unpacked", [False, True])
def test_a_disk_that_is_mounted_noexec_is_named_with_its_remedy(store: Store, is_unpacked: bool):
    if is_unpacked:
        assert store.use().returncode == 0
    done = store.use(then=NOEXEC, cache_remedy="set node-cache to another disk")
    assert done.returncode == 78
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"[FATAL] slurmd-0: {store.cache} is on a disk that is mounted noexec, from which no library loads; "
        "as root: mount -o remount,exec /"
    )
    assert line.endswith("; or set node-cache to another disk")
    assert not list(store.home.glob("**/*")) or is_unpacked


@pytest.mark.parametrize("boot", [None, "00000000-0000-0000-0000-000000000000"])
def test_an_unpacking_that_was_interrupted_or_lost_in_a_crash_is_done_again(
    store: Store, boot: str | None
):
    assert store.use().returncode == 0
    complete = store.cache / f"{store.home.name}.complete"
    complete.write_text(f"{store.sha256} {boot}\n") if boot else complete.unlink()
    (store.home / "lib" / "data").write_text("half")
    (store.cache / f"{store.home.name}.partial").mkdir()
    assert "unpacked the environment" in store.use().stdout
    assert (store.home / "lib" / "data").stat().st_size == 200000
    assert not (store.cache / f"{store.home.name}.partial").exists()


def test_a_cache_that_another_account_made_first_is_left_to_it(
    store: Store, tmp_path: pathlib.Path
):
    real = tmp_path / "elsewhere"
    real.mkdir()
    store.cache.symlink_to(real)
    os.chown(store.cache, 33, 33, follow_symlinks=False)
    for unpacks in (True, False):
        done = store.use()
        assert (done.returncode, "unpacked the environment" in done.stdout) == (0, unpacks), (
            done.stderr
        )
    (own,) = store.cache.parent.glob(f"{store.cache.name}.*")
    assert (own / f"{store.home.name}.complete").exists()
    assert not list(real.iterdir())


def test_an_old_environment_goes_unless_a_job_holds_it(store: Store):
    store.cache.mkdir(mode=0o700)
    for name in ("old", "held", "young"):
        (store.cache / name).mkdir()
        (store.cache / f"{name}.complete").touch()
        if name != "young":
            long_ago = time.time() - 15 * 86400
            os.utime(store.cache / f"{name}.complete", (long_ago, long_ago))
    with (store.cache / "held.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert store.use().returncode == 0
    left = {name for name in ("old", "held", "young") if (store.cache / name).exists()}
    assert left == {"held", "young"}


def test_a_running_job_keeps_the_lock_and_so_do_its_ranks(store: Store):
    process = store.start("os.execvp('sleep', ['sleep', '60'])")
    try:
        lock = store.cache / f"{store.home.name}.lock"
        for _ in range(1800):
            if (store.cache / f"{store.home.name}.complete").exists():
                break
            time.sleep(0.05)
        time.sleep(0.5)
        assert subprocess.run(["flock", "-n", str(lock), "true"], check=False).returncode == 1
        assert subprocess.run(["flock", "-n", "-s", str(lock), "true"], check=False).returncode == 0
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_an_archive_that_others_can_replace_is_never_used(store: Store):
    folder = store.archive.parent
    folder.chmod(0o777)
    done = store.use()
    assert done.returncode == 78
    assert done.stderr.startswith(
        f"[FATAL] slurmd-0: the environment is not used: {folder} has mode 0777 without"
    )
    assert not store.home.exists()
    folder.chmod(0o755)
    assert store.use().returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another account")
def test_an_archive_of_another_account_is_used_only_where_that_is_trusted(store: Store):
    os.chown(store.archive, 2077, 2077)
    done = store.use()
    assert (done.returncode, "belongs to uid 2077" in done.stderr) == (78, True)
    assert store.use(trusted_uids=(2077,)).returncode == 0


def test_the_archive_that_was_checked_is_unpacked_even_if_its_name_is_exchanged(store: Store):
    """The archive is exchanged between the check of its owner and the unpacking."""
    other = store.archive.with_name("other")
    other.write_bytes(b"not an archive")
    exchange = f"lambda *a, real=unpacking.unpack_archive: (os.replace({str(other)!r}, {str(store.archive)!r}), real(*a))"
    done = store.use(then=f"unpacking.unpack_archive = {exchange}  # before")
    assert done.returncode == 0, done.stderr
    assert (store.home / "lib" / "data").stat().st_size == 200000
    assert store.archive.read_bytes() == b"not an archive"
