"""The image that every host of the sandbox boots from: made once, cached, shared read-only.

An image is two directories that overlayfs stacks: `system`, a Debian with what a minimal cloud image has and a newer
Debian's Slurm fetched, and `python`, the virtual environment that runs charm code plus pip's configuration. Each lives
under its recipe's hash, so whatever goes in (packages, archives, CA certificates, the charms' pinned requirements)
decides which image is used, and a build that was interrupted never counts.
"""

import ast
import collections.abc
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse

from slurm_ddp import files
from slurm_ddp.run import CommandError, clean_env, last_line, run

CACHE = pathlib.Path("/var/cache/slurm-ddp")
PIP_CACHE = CACHE / "pip"
ENVIRONMENTS = CACHE / "environments"  # what the trainer made in an earlier demo, see demo.py
GUEST_ENVIRONMENTS = pathlib.Path("/opt/sandbox/environments")
HOSTS = pathlib.Path("/var/lib/slurm-ddp")  # models with their hosts
VENV = pathlib.Path("/opt/sandbox/venv")  # in the guest; its python runs charms under ops.testing
SUITE = "bookworm"
SLURM_SUITE = "trixie"
SLURM = "24.11"

Progress = collections.abc.Callable[[str], None]

_REVISION = 2  # counts changes of the build steps below that the recipes cannot see
_CHARMS = pathlib.Path(__file__).resolve().parent.parent / "charms"
_HEARTBEAT_S = 8.0
_KEEP_S = 86_400
_CA_BUNDLE = pathlib.Path("/etc/ssl/certs/ca-certificates.crt")
_KEYRING = pathlib.Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_INSTALL = "DEBIAN_FRONTEND=noninteractive apt-get -y --no-install-recommends"
_DEBS = "/var/cache/apt/archives"  # in the guest, with a list of what is there
_PIP_CONF = pathlib.Path("/etc/pip.conf")
_PIP_INDEX_KEYS = ("index-url", "extra-index-url", "find-links")
_PIP_KEYS = (*_PIP_INDEX_KEYS, "trusted-host", "proxy", "timeout", "default-timeout", "retries", "no-index")

# What a minimal cloud image has; charms install everything else themselves.
_PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "libpam-systemd", "init-system-helpers",
    "python3", "python3-venv", "ca-certificates", "apt-utils",
    "iproute2", "iputils-ping", "netbase", "openssh-client", "curl",
    "sudo", "procps", "psmisc", "kmod", "less", "xz-utils",
)  # fmt: skip
# What the stand-ins and the charms install with apt: only fetched here, so that installing needs no network.
_DOWNLOADS = (
    "slurmctld", "slurmd", "slurm-client", "sackd", "slurmdbd", "slurmrestd", "slurm-wlm-jwt-plugin",
    "mariadb-server", "redis-server", "openssh-server", "openssh-sftp-server",
    "fuse3", "nfs-common", "zstd", "rsync", "acl", "prometheus",
)  # fmt: skip
# The source packages that the guest takes from SLURM_SUITE: Slurm's own and what that needs.
_SLURM_SOURCES = (
    "slurm-wlm", "munge", "hwloc", "level-zero", "libgcrypt20", "libgpg-error", "libzstd", "openssl", "openssh",
    "gcc-14", "glibc", "base-files", "init-system-helpers",
)  # fmt: skip
_MASKED = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer",
    "console-getty.service", "systemd-resolved.service", "e2scrub_reap.service",
)  # fmt: skip
_GUEST_FILES = {
    "etc/dpkg/dpkg.cfg.d/90sandbox": (
        "force-unsafe-io\n"
        "path-exclude=/usr/share/doc/*\npath-include=/usr/share/doc/*/copyright\n"
        "path-exclude=/usr/share/man/*\npath-exclude=/usr/share/locale/*\n"
    ),
    "etc/systemd/journald.conf.d/90-sandbox.conf": "[Journal]\nStorage=persistent\nSystemMaxUse=64M\n",
    "etc/systemd/system.conf.d/90-sandbox.conf": "[Manager]\nDefaultTimeoutStopSec=20s\n",
    # As udev makes it on a real machine. Bound from the host it would keep the host's mode.
    "etc/tmpfiles.d/sandbox.conf": "c /dev/fuse 0666 root root - 10:229\n",
    # systemd-nspawn mounts version 1's hierarchies read-only, cgroups(7); slurmd needs to write to them.
    "etc/systemd/system/sandbox-cgroups.service": """\
[Unit]
Description=cgroup hierarchies that slurmd can write to
DefaultDependencies=no
Before=sysinit.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'findmnt -rnt cgroup -o TARGET | xargs -rn1 mount -o remount,bind,rw'

[Install]
WantedBy=sysinit.target
""",
    "etc/sudoers.d/90-ubuntu": "ubuntu ALL=(ALL) NOPASSWD:ALL\n",
    "etc/default/locale": "LANG=C.UTF-8\n",
    "etc/apt/preferences.d/slurm": (
        f"Package: *\nPin: release n={SLURM_SUITE}\nPin-Priority: 100\n\n"
        f"Package: {' '.join(f'src:{source}' for source in _SLURM_SOURCES)}\n"
        f"Pin: release n={SLURM_SUITE}\nPin-Priority: 900\n"
    ),
    # The guest's systemd does not know the newer suite's `u!`, which locks the account.
    "etc/sysusers.d/slurm-wlm-basic-plugins.conf": "u slurm 64030\n",
}


class ImageError(Exception):
    """The image cannot be made. `str()` is one line: what failed, and the next step."""


@dataclasses.dataclass(frozen=True)
class Image:
    """A complete image.

    Attributes:
        layers: the directories for overlayfs's `lowerdir`, topmost first.
        read_only_binds: folders of this machine that pip is configured to read; guests need them at the same path.
    """

    layers: tuple[pathlib.Path, ...]
    read_only_binds: tuple[pathlib.Path, ...]


def ensure_image(progress: Progress) -> Image:
    """Return the image for the present recipe; make what is missing of it.

    `progress` gets one line per step.

    Raises:
        ImageError: a tool is missing, the archive cannot be reached, or the charms' requirements contradict each other.
    """
    for tool in ("debootstrap", "systemd-nspawn", "unshare"):
        if shutil.which(tool, path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
            raise ImageError(f"{tool} is not installed: run scripts/setup.sh demo, or apt install {_package_of(tool)}")
    if not _KEYRING.exists():  # debootstrap would only warn, and then verify nothing
        raise ImageError(
            "Debian's keys are not installed: run scripts/setup.sh demo, or apt install debian-archive-keyring"
        )
    for folder in (PIP_CACHE, ENVIRONMENTS):
        folder.mkdir(parents=True, exist_ok=True)
    images = CACHE / "images"
    images.mkdir(parents=True, exist_ok=True)
    pip = _pip_settings()
    system_recipe = _system_recipe()
    python_recipe = _python_recipe(system_recipe, pip)
    system, python = (images / _digest(recipe) for recipe in (system_recipe, python_recipe))
    if not (system.is_dir() and python.is_dir()):
        with _build_lock(images, progress):
            _remove_leftovers(images)
            if not system.is_dir():
                _build(system, progress, lambda tree: _build_system(tree, system_recipe, progress))
            if not python.is_dir():
                _build(python, progress, lambda tree: _build_python(tree, system, pip, progress))
            _prune(images, {system.name, python.name})
    return Image(layers=(python / "tree", system / "tree"), read_only_binds=pip.folders)


def host_proxies() -> dict[str, str]:
    """Return the proxy variables of this machine's environment; guests get the same."""
    return {name: os.environ[name] for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "no_proxy")}


# --- recipes: everything that decides what an image holds -------------------------------------------------------------


def _system_recipe() -> dict[str, object]:
    sources = _archives()
    return {
        "revision": _REVISION,
        "suites": (SUITE, SLURM_SUITE),
        "packages": _PACKAGES,
        "downloads": _DOWNLOADS,
        "masked": _MASKED,
        "files": _GUEST_FILES,
        "sources": sources,
        "apt": _apt_settings(),
        "certificates": hashlib.sha256(_host_certificates()).hexdigest(),
        "environment": host_proxies(),
    }


def _python_recipe(system_recipe: dict[str, object], pip: "_PipSettings") -> dict[str, object]:
    requirements = {name: path.read_text() for name, path in _requirements().items()}
    return {
        "system": _digest(system_recipe),
        "requirements": requirements,
        "pip": pip.text,
    }


def _requirements() -> dict[str, pathlib.Path]:
    """Return the pinned requirements that the environment in the guest holds: the charms' and the sandbox's own."""
    charms = {path.parent.name: path for path in sorted(_CHARMS.glob("*/requirements.txt"))}
    return charms | {"sandbox": pathlib.Path(__file__).parent / "guest" / "requirements.txt"}


def _digest(recipe: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def _archives() -> list[str]:
    """Return this machine's own Debian archives as `URI suite components`; none where it is not a Debian."""
    os_release = dict(
        line.split("=", 1) for line in pathlib.Path("/etc/os-release").read_text().splitlines() if "=" in line
    )
    if os_release.get("ID", "").strip('"') != "debian":
        return []
    codename = os_release.get("VERSION_CODENAME", SUITE).strip('"')
    listing = run(
        "/usr/bin/apt-get", "indextargets", "--format", "$(REPO_URI)|$(RELEASE)|$(COMPONENT)", "Created-By: Packages"
    )
    found: dict[tuple[str, str], list[str]] = {}
    for line in listing.stdout.splitlines():
        uri, suite, component = line.split("|")
        base = re.fullmatch(rf"{re.escape(codename)}(-updates|-security)?", suite)
        if base and uri.startswith(("http://", "https://")):
            components = found.setdefault((uri, SUITE + (base.group(1) or "")), [])
            if component not in components:
                components.append(component)
    if not any(suite == SUITE for _, suite in found):
        return []
    return [f"{uri} {suite} {' '.join(components)}" for (uri, suite), components in found.items()]


def _apt_settings() -> list[str]:
    """Return the part of this machine's apt configuration that guests need to reach the same archives."""
    wanted = re.compile(
        r"Acquire::((http|https)::(?!.*Password)[A-Za-z]|Check-Valid-Until|Check-Date|Retries|ForceIPv4)"
    )
    if shutil.which("apt-config") is None:
        return []
    dump = run("/usr/bin/apt-config", "dump").stdout.splitlines()
    keep = [line for line in dump if wanted.match(line) and not line.endswith('"";')]
    own = ['Acquire::Languages "none";', 'APT::Periodic::Enable "0";', 'Acquire::Retries "3";']
    return [*own, *keep]


def _host_certificates() -> bytes:
    """Return this machine's CA bundle, empty when it has none."""
    path = pathlib.Path(os.environ.get("SSL_CERT_FILE") or _CA_BUNDLE)
    return path.read_bytes() if path.is_file() else b""


@dataclasses.dataclass(frozen=True)
class _PipSettings:
    """pip's configuration for guests: the text of their /etc/pip.conf, and this machine's folders that it names."""

    text: str
    folders: tuple[pathlib.Path, ...]


@functools.cache
def _pip_settings() -> _PipSettings:
    values: dict[str, list[str]] = {}
    for line in _pip_config_list():
        name, separator, literal = line.partition("=")
        scope, _, key = name.strip().rpartition(".")
        if separator and scope in ("global", "install", "user", "site", ":env:") and key in _PIP_KEYS:
            with contextlib.suppress(ValueError, SyntaxError):
                values[key] = str(ast.literal_eval(literal)).split()  # ":env:" comes last and wins, as in pip
    folders = sorted({folder for key in _PIP_INDEX_KEYS for word in values.get(key, []) for folder in _folders(word)})
    lines = ["[global]", f"cert = {_CA_BUNDLE}", f"cache-dir = {PIP_CACHE}", "disable-pip-version-check = true"]
    lines += [f"{key} = {' '.join(words)}" for key, words in sorted(values.items())]
    return _PipSettings("\n".join(lines) + "\n", tuple(folders))


def _pip_config_list() -> list[str]:
    env = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    for python in dict.fromkeys((sys.executable, shutil.which("python3") or sys.executable, "/usr/bin/python3")):
        listing = run(python, "-m", "pip", "config", "list", env=env, check=False)
        if listing.returncode == 0:
            return listing.stdout.splitlines()
    return []


def _folders(location: str) -> list[pathlib.Path]:
    """Return the local folder behind a find-links entry or index URL, and its parent for a `simple` index of files."""
    url = urllib.parse.urlsplit(location)
    if url.scheme == "file":
        path = pathlib.Path(urllib.parse.unquote(url.path))
    elif location.startswith("/"):
        path = pathlib.Path(location)
    else:
        return []
    if path.name == "simple":  # its pages point at ../packages or the like
        path = path.parent
    return [path] if path.exists() and path != pathlib.Path("/") else []


# --- building ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _build_lock(images: pathlib.Path, progress: Progress) -> collections.abc.Generator[None]:
    with (images / ".lock").open("w") as file:
        begin = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(f"image: waiting for another build, {time.monotonic() - begin:.0f} s")
                time.sleep(_HEARTBEAT_S)
        yield


def _remove_leftovers(images: pathlib.Path) -> None:
    for path in images.glob(".new-*"):
        shutil.rmtree(path, ignore_errors=True)


def _prune(images: pathlib.Path, keep: set[str]) -> None:
    """Remove layers of earlier recipes that are older than a day and that no host uses."""
    mounts = pathlib.Path("/proc/self/mounts").read_text()
    records = "".join(path.read_text() for path in HOSTS.glob("*/hosts/*/host.json"))
    for path in images.iterdir():
        old = time.time() - path.stat().st_mtime > _KEEP_S
        if path.is_dir() and path.name not in keep and old and str(path / "tree") not in mounts + records:
            shutil.rmtree(path)


def _build(target: pathlib.Path, progress: Progress, fill: collections.abc.Callable[[pathlib.Path], None]) -> None:
    """Fill a directory beside `target` and rename it when it is complete."""
    if target.is_dir():
        return
    begin = time.monotonic()
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    try:
        (temporary / "tree").mkdir(mode=0o755)
        fill(temporary / "tree")
        temporary.chmod(0o755)
        temporary.rename(target)
    except CommandError as e:
        raise ImageError(f"image: {e}") from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    progress(f"image: {target.name} ready in {time.monotonic() - begin:.0f} s")


def _build_system(tree: pathlib.Path, recipe: dict[str, object], progress: Progress) -> None:
    archives = [line.split() for line in _archives()]
    mirror = next((uri for uri, suite, *_ in archives if suite == SUITE), None)
    debs = CACHE / "debs"
    debs.mkdir(exist_ok=True)
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", f"--cache-dir={debs}"]
    bootstrap += [f"--keyring={_KEYRING}", "--force-check-gpg"]
    dpkg = "etc/dpkg/dpkg.cfg.d/90sandbox"  # before debootstrap: its dpkg obeys it too
    files.ensure_file(tree / dpkg, _GUEST_FILES[dpkg])
    # In a mount namespace of its own: whatever debootstrap mounts goes with it, also when it is interrupted.
    step = ["unshare", "--mount", "--propagation=private", *bootstrap, SUITE, str(tree), *([mirror] if mirror else [])]
    _step(f"image: debootstrap {SUITE}", step, progress, timeout_s=1800)
    if not mirror:  # debootstrap chose one: its neighbours hold the updates and the security fixes
        mirror = (tree / "etc/apt/sources.list").read_text().split()[1].rstrip("/")
        security = re.sub(r"/debian$", "/debian-security", mirror)
        archives = [[mirror, SUITE, "main"], [mirror, f"{SUITE}-updates", "main"]]
        if security != mirror:
            archives.append([security, f"{SUITE}-security", "main"])
    archives.append([mirror, SLURM_SUITE, "main"])
    files.ensure_file(tree / "etc/apt/sources.list", "".join(f"deb {' '.join(line)}\n" for line in archives))
    files.ensure_file(tree / "etc/apt/apt.conf.d/90sandbox", "\n".join(_apt_settings()) + "\n")
    for name, content in _GUEST_FILES.items():
        mode = 0o440 if name.startswith("etc/sudoers.d/") else 0o644
        files.ensure_file(tree / name, content, mode=mode)
    environment = "".join(f'{name}="{value}"\n' for name, value in sorted(host_proxies().items()))
    files.ensure_file(tree / "etc/environment", f"LANG=C.UTF-8\n{environment}")
    _add_certificates(tree)
    (tree / "etc/resolv.conf").unlink(missing_ok=True)
    shutil.copyfile("/etc/resolv.conf", tree / "etc/resolv.conf")
    # The C library that Slurm needs wants a newer base-files; its os-release stays aside, for the guest is a Debian 12.
    # apt takes a second of processor time to read two whole suites, in each of its runs, so the guest has lists of what
    # is fetched alone; `apt-get update` brings the others.
    script = f"""set -e
update-ca-certificates
useradd --create-home --uid 1000 --shell /bin/bash --groups sudo ubuntu
systemctl mask {" ".join(_MASKED)}
systemctl enable systemd-networkd.service sandbox-cgroups.service
systemctl disable systemd-networkd-wait-online.service
systemctl set-default multi-user.target
rm -f /etc/machine-id /var/lib/dbus/machine-id /etc/hostname
touch /etc/machine-id
dpkg-divert --local --no-rename --divert /usr/lib/os-release.{SLURM_SUITE} --add /usr/lib/os-release
apt-get update
apt-cache policy slurmctld | grep -q 'Candidate: {SLURM}' || {{ echo 'E: no Slurm {SLURM} in {SLURM_SUITE}'; exit 1; }}
{_INSTALL} dist-upgrade
{_INSTALL} install {" ".join(_PACKAGES)}
apt-get clean
{_INSTALL} --download-only install {" ".join(_DOWNLOADS)}
cd {_DEBS}
apt-ftparchive packages . >Packages
rm -rf /var/lib/apt/lists/*
echo 'deb [trusted=yes] file:{_DEBS} ./' >/etc/apt/sources.list.d/fetched.list
apt-get -o Dir::Etc::sourcelist=/etc/apt/sources.list.d/fetched.list -o Dir::Etc::sourceparts=- update
"""
    _step("image: accounts, units, package downloads", _in_guest(tree, "/bin/sh", "-c", script), progress)
    files.ensure_file(tree / "etc/resolv.conf", "")  # bound over in every host
    files.ensure_file(tree / "etc/sandbox/recipe.json", json.dumps(recipe, indent=1, sort_keys=True) + "\n")


def _add_certificates(tree: pathlib.Path) -> None:
    """Give the guest those CA certificates of this machine that its own bundle lacks."""
    own = tree / "etc/ssl/certs/ca-certificates.crt"
    known = set(_pem_blocks(own.read_bytes())) if own.is_file() else set[bytes]()
    for block in _pem_blocks(_host_certificates()):
        if block not in known:
            name = hashlib.sha256(block).hexdigest()[:16]
            files.ensure_file(tree / f"usr/local/share/ca-certificates/{name}.crt", block + b"\n")


def _pem_blocks(bundle: bytes) -> list[bytes]:
    return re.findall(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", bundle, re.DOTALL)


def _build_python(tree: pathlib.Path, system: pathlib.Path, pip: _PipSettings, progress: Progress) -> None:
    files.ensure_file(tree / _PIP_CONF.relative_to("/"), pip.text)
    folder = tree / "opt/sandbox/requirements"
    folder.mkdir(parents=True)
    requirements = _requirements()
    for name, path in requirements.items():
        shutil.copyfile(path, folder / f"{name}.txt")
    pinned = " ".join(f"-r /opt/sandbox/requirements/{name}.txt" for name in requirements)
    script = f"""set -e
/usr/bin/python3 -m venv {VENV}
{VENV}/bin/python -m pip install --no-compile --require-hashes {pinned}
{VENV}/bin/python -m compileall -q {VENV}/lib
"""
    _in_layer("image: Python environment for charms", tree, system, script, progress, binds=[PIP_CACHE, *pip.folders])


def _in_layer(
    text: str,
    tree: pathlib.Path,
    system: pathlib.Path,
    script: str,
    progress: Progress,
    *,
    binds: collections.abc.Sequence[pathlib.Path] = (),
) -> None:
    """Run a script in the system, what it writes going to `tree`."""
    merged, work = tree.parent / "merged", tree.parent / "work"
    merged.mkdir()
    work.mkdir()
    mount = f"lowerdir={system / 'tree'},upperdir={tree},workdir={work}"
    guest = _in_guest(merged, "/bin/sh", "-c", script, binds=binds)
    # The overlay exists in a mount namespace of its own, and so never outlives the build.
    nested = [
        "unshare",
        "--mount",
        "--propagation=private",
        "/bin/sh",
        "-c",
        'mount -t overlay overlay -o "$0" "$1" && shift && exec "$@"',
    ]
    _step(text, [*nested, mount, str(merged), *guest], progress)
    shutil.rmtree(work, ignore_errors=True)
    merged.rmdir()
    for name in ("tmp", "var/tmp", "run", "root"):
        shutil.rmtree(tree / name, ignore_errors=True)


def _in_guest(tree: pathlib.Path, *argv: str, binds: collections.abc.Sequence[pathlib.Path] = ()) -> list[str]:
    """Return the command that runs `argv` in `tree` with this machine's network."""
    options = ["--quiet", "--register=no", "--keep-unit", "--settings=no", "--as-pid2", "--pipe", "--timezone=off"]
    options += ["--resolv-conf=off", "--bind-ro=/etc/resolv.conf", f"--directory={tree}"]
    options += [f"--bind={path}" if path == PIP_CACHE else f"--bind-ro={path}" for path in binds]
    options += [f"--setenv={name}={value}" for name, value in host_proxies().items()]
    return ["systemd-nspawn", *options, "--", *argv]


def _step(text: str, argv: list[str], progress: Progress, *, timeout_s: float = 900) -> None:
    """Run one step of a build. `progress` gets a line at once, and again every few seconds.

    Raises:
        CommandError: the command failed or took too long; the message holds its last words.
    """
    begin = time.monotonic()
    progress(text)
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=clean_env(), start_new_session=True
        )
        try:
            while True:
                try:
                    process.wait(timeout=_HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    elapsed = time.monotonic() - begin
                    if elapsed > timeout_s:
                        raise CommandError(f"{text}: not done within {timeout_s:.0f} s") from None
                    output.seek(0)
                    progress(f"{text}, {elapsed:.0f} s: {last_line(output.read(), 90)}")
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if process.returncode != 0:
            output.seek(0)
            raise CommandError(f"{text} failed ({process.returncode}): {_error_line(output.read())}")


def _error_line(text: str) -> str:
    """Return the line of a build's output that says what went wrong."""
    lines = [line for line in text.splitlines() if re.match(r"(E:|ERROR|error:)", line.strip())]
    return last_line("\n".join(lines) or text)


def _package_of(tool: str) -> str:
    return {"systemd-nspawn": "systemd-container", "unshare": "util-linux"}.get(tool, tool)
