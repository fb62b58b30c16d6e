"""Pack the charms and the bundle into dist/ with Charmcraft 3.5, where bundle.yaml looks for them.

    python scripts/pack.py                         everything whose sources changed
    python scripts/pack.py slurm-gpu --force       one charm, whatever is in dist/
    python scripts/pack.py --base 24.04            what bundle.yaml deploys

A charm carries packages for one Python, so there is one file for each base: dist/<charm>.charm for
Ubuntu 24.04, which bundle.yaml deploys, and dist/26.04/<charm>.charm for Ubuntu 26.04, which
overlays/2604.yaml deploys.

Each charm is staged first: its own folder, its Grafana dashboards, lib/slurm_ddp under lib/, and
for the charm that submits jobs payload/ and lib/ddp. Charmcraft's managed mode mounts nothing else,
and the sandbox runs exactly such a folder.

The mode depends on the machine. On Ubuntu with LXD: managed mode, in a container of the charm's
base. Elsewhere: destructive mode, in which Charmcraft builds on this machine. It sees the base's
os-release through a private mount namespace, and pip fetches wheels for the base's Python, so that
the charm runs on the base and not only here.
"""

import argparse
import collections.abc
import concurrent.futures
import dataclasses
import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD, DIST = ROOT / "build", ROOT / "dist"
BUNDLE = "bundle"  # the name that stands for the bundle on the command line and under build/
VENV = BUILD / "venvs" / "charmcraft"
EXTRAS = {"ddp-trainer": {"payload": "payload", "lib/ddp": "lib/ddp"}}  # source -> folder in it
_INTERRUPTED = "metadata.yaml config.yaml actions.yaml"  # left by an interrupted Scenario
LEFT_OUT = set(f"tests build dist parts stage prime venv requirements.in {_INTERRUPTED}".split())
CRAFT_DIRS = ("parts", "stage", "prime")  # Charmcraft's own, in the folder it packs


@dataclasses.dataclass(frozen=True)
class Base:
    """A release of Ubuntu that the charms are packed for."""

    version: str
    codename: str
    python: str  # the release's own, which runs the charm

    @property
    def platform(self) -> str:
        """Return the platform's name in charmcraft.yaml."""
        return f"ubuntu@{self.version}:amd64"

    @property
    def os_release(self) -> str:
        """Build the lines of /etc/os-release that Charmcraft reads on this release."""
        return (
            f'PRETTY_NAME="Ubuntu {self.version} LTS"\nNAME="Ubuntu"\nVERSION_ID="{self.version}"\n'
            f"VERSION_CODENAME={self.codename}\nID=ubuntu\nID_LIKE=debian\nUBUNTU_CODENAME={self.codename}\n"
        )


# The first is bundle.yaml's
BASES = (Base("24.04", "noble", "3.12"), Base("26.04", "resolute", "3.14"))


class PackError(Exception):
    """Packing cannot go on. `str()` is the message for the user."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """How Charmcraft is run, and why, in a line."""

    managed: bool
    why: str
    disguise: bool = False  # show Charmcraft the base's os-release
    python: str | None = None  # fetch wheels for this Python instead of the one that runs here


def charm_names() -> list[str]:
    """Return the names of the repository's charms, sorted."""
    return sorted(path.parent.name for path in (ROOT / "charms").glob("*/charmcraft.yaml"))


# --- staging -------------------------------------------------------------------------------------


def stage(charm: str, dest: pathlib.Path) -> None:
    """Make the folder `dest` hold exactly what `charm` is packed from.

    Raises:
        PackError: there is no such charm, or one of its files is a link (it would dangle in the
        charm).
    """
    if charm not in charm_names():
        raise PackError(f"no charm `{charm}` under charms/; there are {', '.join(charm_names())}")
    wanted = dict(_tree(ROOT / "charms" / charm, pathlib.PurePath()))
    wanted |= dict(_tree(ROOT / "lib" / "slurm_ddp", pathlib.PurePath("lib", "slurm_ddp")))
    for source, target in EXTRAS.get(charm, {}).items():
        wanted |= dict(_tree(ROOT / source, pathlib.PurePath(target)))
    _fill(dest, wanted)
    _write_dashboards(charm, dest / "src" / "cos" / "dashboards")


def _write_dashboards(charm: str, folder: pathlib.Path) -> None:
    """Write the charm's Grafana dashboards into a folder of its stage."""
    from scripts import dashboards  # noqa: PLC0415 - it takes a fifth of a second to import

    for name, text in dashboards.of(charm).items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _stage_bundle(dest: pathlib.Path) -> None:
    wanted = {
        pathlib.PurePath(name): ROOT / name
        for name in ("bundle.yaml", "charmcraft.yaml", "README.md")
    }
    _fill(dest, wanted)


def _tree(
    source: pathlib.Path, target: pathlib.PurePath
) -> collections.abc.Iterator[tuple[pathlib.PurePath, pathlib.Path]]:
    """Yield (path in the stage, source file) for each file of a folder that belongs in a charm."""
    for path in sorted(source.iterdir()):
        if path.name in LEFT_OUT or path.name.startswith("."):
            continue
        if path.name == "__pycache__" or path.suffix == ".pyc":
            continue
        if path.is_symlink():
            raise PackError(f"{path.relative_to(ROOT)} is a link; a charm holds files only")
        if path.is_dir():
            yield from _tree(path, target / path.name)
        else:
            yield target / path.name, path


def _fill(dest: pathlib.Path, wanted: dict[pathlib.PurePath, pathlib.Path]) -> None:
    """Replace a folder's content, except Charmcraft's own folders.

    The folder itself stays: the container that Charmcraft builds in is named after it.
    """
    dest.mkdir(parents=True, exist_ok=True)
    for path in dest.iterdir():
        if path.is_dir() and path.name not in CRAFT_DIRS:
            shutil.rmtree(path)
        elif not path.is_dir():
            path.unlink()
    for inside, source in wanted.items():
        target = dest / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def _fingerprint(folder: pathlib.Path, base: Base, mode: Mode) -> str:
    digest = hashlib.sha256(repr((base, mode)).encode())
    digest.update((ROOT / "tests/requirements/charmcraft.txt").read_bytes())
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and inside.parts[0] not in CRAFT_DIRS:
            digest.update(f"{inside}\0{path.stat().st_mode:o}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


# --- choosing the mode ---------------------------------------------------------------------------


def choose_mode(base: Base) -> Mode:
    """Return how to pack for `base` on this machine.

    Raises:
        PackError: the charms cannot be packed on this machine's processor.
    """
    if platform.machine() != "x86_64":
        raise PackError(f"the charms are for amd64 machines; this is {platform.machine()}")
    release = platform.freedesktop_os_release()
    name = release.get("PRETTY_NAME", "this system")
    if release.get("ID") == "ubuntu" and _succeeds("lxc", "info"):
        return Mode(
            managed=True,
            why=f"managed mode: {name} with LXD; Charmcraft builds in a container of the base",
        )
    here = (release.get("ID"), release.get("VERSION_ID"), _system_python())
    if here == ("ubuntu", base.version, base.python):
        return Mode(managed=False, why=f"destructive mode: {name}, the base itself, without LXD")
    why = (
        f"destructive mode: {name} has no LXD to build in; Charmcraft is shown Ubuntu"
        f" {base.version}'s os-release, and wheels are fetched for its Python {base.python}"
    )
    return Mode(managed=False, disguise=True, python=base.python, why=why)


def _system_python() -> str:
    """Return the version (3.12) of the python3 that Charmcraft would build with."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run(
        ["/usr/bin/python3", "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, check=False, capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


# --- running Charmcraft --------------------------------------------------------------------------


def _charmcraft() -> str:
    """Install the pinned Charmcraft if necessary, and return its path. Raises `PackError`."""
    for script, *words in (
        ["setup.sh", "pack"],
        ["venv.sh", "charmcraft", "tests/requirements/charmcraft.txt"],
    ):
        done = subprocess.run([ROOT / "scripts" / script, *words], check=False)
        if done.returncode:
            raise PackError("Charmcraft could not be installed; the message is above")
    _link_python_apt()
    return str(VENV / "bin" / "charmcraft")


def _link_python_apt() -> None:
    """Let Charmcraft's environment import the system's python3-apt, which no index carries."""
    (site,) = VENV.glob("lib/python3.*/site-packages")
    system = pathlib.Path("/usr/lib/python3/dist-packages")
    for pattern in ("apt", "apt_pkg*.so", "apt_inst*.so"):
        for source in system.glob(pattern):
            link = site / source.name
            if not link.is_symlink():
                link.symlink_to(source)


def _environment(mode: Mode, folder: pathlib.Path) -> dict[str, str]:
    kept = tuple(
        "PIP_ SSL_CERT REQUESTS_CA CURL_CA http HTTP no_proxy NO_PROXY LANG HOME USER TERM".split()
    )
    env = {name: value for name, value in os.environ.items() if name.startswith(kept)}
    # The system's python3
    env["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/snap/bin"
    env["XDG_STATE_HOME"] = str(BUILD / "pack" / "state")  # Charmcraft's logs
    env["CRAFT_SNAP_CHANNEL"] = "3.x/stable"  # for a managed build not started from the snap
    part = _python_part(folder)
    if mode.python is None or part is None:
        return env
    packages = folder / f"parts/{part}/install/venv/lib/python{mode.python}/site-packages"
    env["PIP_PYTHON_VERSION"] = mode.python
    env["PIP_ONLY_BINARY"] = ":all:"
    env["PIP_NO_COMPILE"] = "no"  # pip's yes to --no-compile: bytecode would be for this Python
    env["PIP_TARGET"] = str(packages)
    return env


def _python_part(folder: pathlib.Path) -> str | None:
    """Return the name of the part that installs requirements.txt."""
    declared: dict[str, Any] = yaml.safe_load((folder / "charmcraft.yaml").read_text())
    for name, part in declared.get("parts", {}).items():
        if part.get("plugin", name) == "python":
            return name
    return None


def _disguised(command: list[str], base: Base) -> list[str]:
    """Wrap a command so that it sees the base's os-release. Raises `PackError`."""
    fake = BUILD / "pack" / f"os-release-{base.version}"
    fake.parent.mkdir(parents=True, exist_ok=True)
    fake.write_text(base.os_release)
    names = ("/etc/os-release", "/usr/lib/os-release")
    targets = sorted({str(pathlib.Path(name).resolve()) for name in names})
    mounts = " && ".join(f"mount --bind {shlex.quote(str(fake))} {target}" for target in targets)
    private = ["--mount", "--propagation", "private"]
    inside = ["sh", "-c", f'{mounts} && exec "$@"', "sh", *command]
    if os.geteuid() == 0:
        return ["unshare", *private, *inside]
    if _succeeds("unshare", "--map-root-user", "--mount", "true"):
        return ["unshare", "--map-root-user", *private, *inside]
    raise PackError(
        "a private mount namespace needs root here; run it with sudo, or on Ubuntu with LXD"
    )


def _pack(name: str, base: Base, mode: Mode, charmcraft: str) -> pathlib.Path:
    """Run Charmcraft in build/<name> and move the result to dist/; return the new file."""
    folder = BUILD / name
    log = BUILD / "logs" / f"pack-{name}-{base.version}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    for left in _packed(folder):
        left.unlink()
    if not mode.managed or name == BUNDLE:
        for directory in CRAFT_DIRS:  # Charmcraft builds on files of an older run
            shutil.rmtree(folder / directory, ignore_errors=True)
    with log.open("w") as file:
        done = subprocess.run(
            _command(name, base, mode, charmcraft),
            cwd=folder,
            env=_environment(mode, folder),
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    made = _packed(folder)
    if done.returncode != 0 or len(made) != 1:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        result = f"charmcraft exited {done.returncode} and left {len(made)} file(s)"
        raise PackError(f"{tail}\n{name}: {result}; see {log}")
    target = artifact(name, base)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(made[0], target)
    return target


def _command(name: str, base: Base, mode: Mode, charmcraft: str) -> list[str]:
    command = [charmcraft, "pack", "--verbosity", "verbose"]
    if name != BUNDLE:
        command += ["--platform", base.platform]
        if not mode.managed:
            command.append("--destructive-mode")
    return _disguised(command, base) if mode.disguise else command


def _packed(folder: pathlib.Path) -> list[pathlib.Path]:
    return [*folder.glob("*.charm"), *folder.glob("*.zip")]


def artifact(name: str, base: Base = BASES[0]) -> pathlib.Path:
    """Return the path of the packed charm, or of the packed bundle."""
    if name == BUNDLE:
        return DIST / "slurm-ddp.zip"
    return (DIST if base == BASES[0] else DIST / base.version) / f"{name}.charm"


def _check_python(path: pathlib.Path, base: Base, mode: Mode) -> None:
    """Refuse a charm with packages for another Python. Raises `PackError`."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    files = [
        name for name in names if name.startswith("venv/lib/python") and not name.endswith("/")
    ]
    found = {name.split("/")[2] for name in files}
    if found == {f"python{base.python}"}:
        return
    path.unlink()
    has = ", ".join(sorted(found)) or "no Python at all"
    raise PackError(
        f"{path.name} holds packages for {has}; its base has Python {base.python} ({mode.why})"
    )


@dataclasses.dataclass(frozen=True)
class Target:
    """A file to pack: a charm for one base, or the bundle."""

    name: str
    base: Base
    mode: Mode
    fingerprint: str  # of its sources

    @property
    def stamp(self) -> pathlib.Path:
        """The file with the fingerprint of what lies in dist/."""
        return BUILD / "pack" / f"{self.name}-{self.base.version}.sha256"

    @property
    def is_fresh(self) -> bool:
        """Whether dist/ has it, packed from the current sources."""
        if not artifact(self.name, self.base).is_file() or not self.stamp.is_file():
            return False
        return self.stamp.read_text() == self.fingerprint

    def pack(self, charmcraft: str) -> None:
        """Pack it, check it and keep its fingerprint. Raises PackError."""
        start = time.monotonic()
        print(f"pack: {self.name} for {self.base.version} ...", flush=True)
        self.stamp.unlink(missing_ok=True)
        path = _pack(self.name, self.base, self.mode, charmcraft)
        if self.name != BUNDLE:
            _check_python(path, self.base, self.mode)
        self.stamp.parent.mkdir(parents=True, exist_ok=True)
        self.stamp.write_text(self.fingerprint)
        size_mb = path.stat().st_size / 1e6
        took_s = time.monotonic() - start
        print(f"pack: {path.relative_to(ROOT)}, {size_mb:.1f} MB, in {took_s:.1f} s", flush=True)


def main() -> int:
    """Pack the targets of the command line."""
    arguments = _arguments()
    targets = _targets(arguments.names or [*charm_names(), BUNDLE], arguments.base)
    stale: list[Target] = []
    for target in targets:
        if arguments.force or not target.is_fresh:
            stale.append(target)
        else:
            path = artifact(target.name, target.base)
            print(f"pack: {path.relative_to(ROOT)} is up to date")
    if stale:
        _pack_all(stale)
    return 0


def _arguments() -> argparse.Namespace:
    """Read the command line. Raises PackError for an unknown charm."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"charms, or `{BUNDLE}`; without one: everything")
    parser.add_argument("--force", action="store_true", help="pack even what is unchanged")
    versions = [base.version for base in BASES]
    parser.add_argument(
        "--base", choices=versions, help="pack for one release of Ubuntu; without it: for each"
    )
    arguments = parser.parse_args()
    known = [*charm_names(), BUNDLE]
    for name in arguments.names:
        if name not in known:
            raise PackError(f"no `{name}`; there are {', '.join(known)}")
    return arguments


def _targets(names: list[str], version: str | None) -> list[Target]:
    """Stage charms and bundle; return the targets to pack, for one base or for each."""
    for name in names:
        if name == BUNDLE:
            _stage_bundle(BUILD / name)
        else:
            stage(name, BUILD / name)
    modes = {base: choose_mode(base) for base in BASES if version in (None, base.version)}
    found: list[Target] = []
    for name in names:
        for base, mode in modes.items():
            if name != BUNDLE or base == BASES[0]:
                found.append(Target(name, base, mode, _fingerprint(BUILD / name, base, mode)))
    return found


def _pack_all(targets: list[Target]) -> None:
    """Pack two charms at a time, and a charm's bases in turn: they share build/<name>."""
    for why in dict.fromkeys(target.mode.why for target in targets):
        print(f"pack: {why}", flush=True)
    charmcraft = _charmcraft()

    def pack_each(name: str) -> None:
        for target in targets:
            if target.name == name:
                target.pack(charmcraft)

    names = dict.fromkeys(target.name for target in targets)
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(pack_each, names))  # raises a pack's error


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PackError as e:
        sys.exit(f"pack: {e}")
