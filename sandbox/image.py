"""The image that every host of the sandbox boots from: made once, cached, shared read-only.

An image is two directories that overlayfs stacks: `system`, a Debian with the contents of a minimal
cloud image and a newer Debian's Slurm downloaded, and `python`, the virtual environment that runs
charm code plus pip's configuration. Each is named after its recipe's hash: packages, archives, CA
certificates and the charms' pinned requirements decide which image is used, and an interrupted
build never counts.
"""

import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
import typing
import urllib.parse

import yaml

from sandbox import store
from sandbox.store import SandboxError
from scripts import uv
from slurm_ddp import files
from slurm_ddp.commands import CommandError, clean_env, last_line, run

CACHE = pathlib.Path("/var/cache/slurm-ddp")
PIP_CACHE = CACHE / "pip"
ENVIRONMENTS = CACHE / "environments"  # made by the trainer in an earlier demo, see demo.py
GUEST_ENVIRONMENTS = pathlib.Path("/opt/sandbox/environments")
VENV = pathlib.Path("/opt/sandbox/venv")  # in the guest; its python runs charms under ops.testing
SUITE = "bookworm"
PYTHON = "3.11"  # of that suite
SLURM_SUITE = "trixie"
SLURM = "24.11"

Progress = collections.abc.Callable[[str], None]

_REVISION = 4  # counts changes of the build steps below that the recipes cannot see
_HERE = pathlib.Path(__file__).resolve().parent
_CHARMS = _HERE.parent / "charms"
_GUEST: dict[str, typing.Any] = yaml.safe_load((_HERE / "guest" / "image.yaml").read_text())
_HEARTBEAT_S = 8.0
_KEEP_S = 86_400
_CA_BUNDLE = pathlib.Path("/etc/ssl/certs/ca-certificates.crt")
_KEYRING = pathlib.Path("/usr/share/keyrings/debian-archive-keyring.gpg")


@dataclasses.dataclass(frozen=True)
class Image:
    """A complete image.

    Attributes:
        layers: the directories for overlayfs's `lowerdir`, topmost first.
        read_only_binds: folders of this machine that pip reads; guests need them at this path.
    """

    layers: tuple[pathlib.Path, ...]
    read_only_binds: tuple[pathlib.Path, ...]


def ensure_image(progress: Progress) -> Image:
    """Return the image for the present recipe; build the layers that are missing.

    `progress` gets one line per step.

    Raises:
        SandboxError: the archive or the package index cannot be reached, or the charms'
        requirements contradict.
    """
    for folder in (PIP_CACHE, ENVIRONMENTS, images := CACHE / "images"):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        pip_text, folders = pip_conf()
        recipe = _system_recipe()
        requirements = [path.read_text() for path in _requirements()]
        of_python: dict[str, object] = {
            "system": _digest(recipe),
            "requirements": requirements,
            "pip": pip_text,
        }
        system, python = images / _digest(recipe), images / _digest(of_python)
        if not (system.is_dir() and python.is_dir()):
            progress("image: built here, or by another command that this one waits for")
            with contextlib.closing(store.Lock(images / ".lock", fcntl.LOCK_EX)):
                for leftover in images.glob(".new-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                if not (
                    system.is_dir() and python.is_dir()
                ):  # otherwise another build has just made them
                    shutil.rmtree(python, ignore_errors=True)
                    _build(system, python, recipe, pip_text, progress)
                prune(images, {system.name, python.name})
    except (CommandError, uv.InstallError) as e:
        raise SandboxError(f"image: {e}") from e
    return Image(layers=(python / "tree", system / "tree"), read_only_binds=folders)


def host_proxies() -> dict[str, str]:
    """Return the proxy variables of this machine's environment; guests get the same."""
    return {
        name: os.environ[name]
        for name in os.environ
        if name.lower() in ("http_proxy", "https_proxy", "no_proxy")
    }


# --- recipes: everything that decides the contents of an image ------------------------------------


def _system_recipe() -> dict[str, object]:
    return {
        "revision": _REVISION,
        "suites": (SUITE, SLURM_SUITE),
        "guest": _GUEST,
        "script": (_HERE / "guest" / "build.sh").read_text(),
        "sources": _archives(),
        "apt": _apt_settings(),
        "certificates": hashlib.sha256(_host_certificates()).hexdigest(),
        "environment": host_proxies(),
    }


def _requirements() -> list[pathlib.Path]:
    """Return the pinned requirements of the guest's environment, for the charms and the sandbox."""
    return [*sorted(_CHARMS.glob("*/requirements.txt")), _HERE / "guest" / "requirements.txt"]


def _digest(recipe: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def _archives() -> list[str]:
    """Return this machine's Debian archives as `URI suite components`; none on other systems."""
    os_release = platform.freedesktop_os_release()
    found: dict[tuple[str, str], list[str]] = {}
    if os_release["ID"] == "debian":
        codename = os_release.get("VERSION_CODENAME", SUITE)
        form = ("--format", "$(REPO_URI)|$(RELEASE)|$(COMPONENT)", "Created-By: Packages")
        for line in run("/usr/bin/apt-get", "indextargets", *form).stdout.splitlines():
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
    """Return the apt configuration that lets guests reach the same archives."""
    wanted = re.compile(
        r"Acquire::((http|https)::(?!.*Password)[A-Za-z]|Check-Valid-Until|Check-Date|Retries|ForceIPv4)"
    )
    dump = run("/usr/bin/apt-config", "dump").stdout.splitlines()
    keep = [line for line in dump if wanted.match(line) and not line.endswith('"";')]
    own = ['Acquire::Languages "none";', 'APT::Periodic::Enable "0";', 'Acquire::Retries "3";']
    return [*own, *keep]


def _host_certificates() -> bytes:
    """Return this machine's CA bundle, empty when it has none."""
    path = pathlib.Path(os.environ.get("SSL_CERT_FILE") or _CA_BUNDLE)
    return path.read_bytes() if path.is_file() else b""


def pip_conf() -> tuple[str, tuple[pathlib.Path, ...]]:
    """Return the text of guests' /etc/pip.conf, and this machine's folders that it names."""
    values = {
        key: words for key, words in uv.pip_settings().items() if key not in ("cert", "client-cert")
    }
    folders = {
        folder for key in uv.INDEX_KEYS for word in values.get(key, []) for folder in _folders(word)
    }
    lines = [
        "[global]",
        f"cert = {_CA_BUNDLE}",
        f"cache-dir = {PIP_CACHE}",
        "disable-pip-version-check = true",
    ]
    lines += [f"{key} = {' '.join(words)}" for key, words in sorted(values.items())]
    return "\n".join(lines) + "\n", tuple(sorted(folders))


def _folders(location: str) -> list[pathlib.Path]:
    """Return the local folder of a find-links entry or index URL, and a `simple` index's parent."""
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


# --- building
# --------------------------------------------------------------------------------------


def prune(images: pathlib.Path, keep: set[str]) -> None:
    """Remove layers of earlier recipes that are older than a day and that no host uses."""
    mounts = pathlib.Path("/proc/self/mounts").read_text()
    records = "".join(path.read_text() for path in store.ROOT.glob("*/hosts/*/host.json"))
    for path in images.iterdir():
        old = time.time() - path.stat().st_mtime > _KEEP_S
        if (
            path.is_dir()
            and path.name not in keep
            and old
            and str(path / "tree") not in mounts + records
        ):
            shutil.rmtree(path)


@contextlib.contextmanager
def _new_layer(target: pathlib.Path, progress: Progress) -> collections.abc.Generator[pathlib.Path]:
    """Yield a folder for the layer's files; it becomes `target` when it is complete."""
    begin = time.monotonic()
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    try:
        temporary.chmod(0o755)
        (temporary / "tree").mkdir(mode=0o755)
        yield temporary / "tree"
        for path in temporary.iterdir():
            if path.name != "tree":
                shutil.rmtree(path)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    progress(f"image: {target.name} ready in {time.monotonic() - begin:.0f} s")


def _build(
    system: pathlib.Path,
    python: pathlib.Path,
    recipe: dict[str, object],
    pip_conf: str,
    progress: Progress,
) -> None:
    """Build the layers; Python's packages arrive while the system unpacks."""
    with _new_layer(python, progress) as tree, concurrent.futures.ThreadPoolExecutor(1) as pool:
        packages = pool.submit(_install_packages, tree, pip_conf)
        if not system.is_dir():
            with _new_layer(system, progress) as system_tree:
                _build_system(system_tree, recipe, progress)
        packages.result()
        compile_all = ["/usr/bin/python3", "-m", "compileall", "-q", "-j", "0", f"{VENV}/lib"]
        bind = f"--bind={tree / VENV.parent.relative_to('/')}:{VENV.parent}"
        run_step(
            "image: compiling Python for charms",
            _in_guest(system / "tree", *compile_all, options=[bind]),
            progress,
        )


def _install_packages(tree: pathlib.Path, pip_conf: str) -> None:
    """Write the environment that `python -m venv` makes and uv fills, for the guest's Python."""
    files.ensure_file(tree / "etc/pip.conf", pip_conf)
    venv = tree / VENV.relative_to("/")
    site_packages = venv / "lib" / f"python{PYTHON}" / "site-packages"
    site_packages.mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to("/usr/bin/python3")
    files.ensure_file(
        venv / "pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = false\n"
    )
    guest = [
        "--python-version",
        PYTHON,
        "--python-platform",
        f"{platform.machine()}-manylinux_2_28",
    ]
    pinned = [word for path in _requirements() for word in ("-r", str(path))]
    options = [
        "--cache-dir",
        str(CACHE / "uv"),
        "--target",
        str(site_packages),
        "--no-build",
        "--require-hashes",
    ]
    uv.run("pip", "install", "--quiet", *options, *guest, *pinned)


def _build_system(tree: pathlib.Path, recipe: dict[str, object], progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="sandbox-image-") as scratch:
        dpkg, preferences = (pathlib.Path(scratch, name) for name in ("dpkg", "slurm"))
        dpkg.write_text("\n".join(_GUEST["dpkg"]) + "\n")
        preferences.write_text(
            f"Package: *\nPin: release n={SLURM_SUITE}\nPin-Priority: 100\n\n"
            f"Package: {' '.join(f'src:{source}' for source in _GUEST['slurm-sources'])}\n"
            f"Pin: release n={SLURM_SUITE}\nPin-Priority: 900\n"
        )
        newer = f"s/ {SUITE} .*/ {SLURM_SUITE} main/p"  # the archive that has the suite has its successor
        step = [
            "mmdebstrap",
            "--mode=root",
            "--format=directory",
            "--variant=minbase",
            f"--keyring={_KEYRING}",
        ]
        step += [
            f"--include={','.join(_GUEST['packages'])}",
            f"--dpkgopt={dpkg}",
            "--skip=cleanup/apt",
        ]
        step += [f"--aptopt={line}" for line in _apt_settings()]
        # A base system of one suite; from then on Slurm's suite, too, for Slurm and the libraries
        # that it needs
        step += [f"--essential-hook=copy-in {preferences} /etc/apt/preferences.d"]
        step += [
            f'--essential-hook=cd "$1/etc/apt" && sed -n "{newer}" sources.list >>sources.list'
        ]
        step += ["--essential-hook=APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-get update"]
        step += [SUITE, f"{tree}.merged", *(f"deb {archive}" for archive in _archives())]
        run_step(f"image: mmdebstrap {SUITE}", [*_unsynced(tree), *step], progress, timeout_s=1800)
    for name, content in _GUEST["files"].items():
        mode = 0o440 if name.startswith("etc/sudoers.d/") else 0o644
        files.ensure_file(tree / name, content, mode=mode)
    environment = "".join(f'{name}="{value}"\n' for name, value in sorted(host_proxies().items()))
    files.ensure_file(tree / "etc/environment", f"LANG=C.UTF-8\n{environment}")
    add_certificates(tree)
    (tree / "etc/resolv.conf").unlink(missing_ok=True)
    files.ensure_file(tree / "etc/resolv.conf", "")  # bound over in every host
    words = {
        "DOWNLOADS": _GUEST["downloads"],
        "MASKED": _GUEST["masked"],
        "SLURM": [SLURM],
        "SUITE": [SLURM_SUITE],
    }
    variables = [f"--setenv={name}={' '.join(value)}" for name, value in words.items()]
    script = (_HERE / "guest" / "build.sh").read_text()
    step = _in_guest(pathlib.Path(f"{tree}.merged"), "/bin/sh", "-c", script, options=variables)
    run_step("image: accounts, units, package downloads", [*_unsynced(tree), *step], progress)
    files.ensure_file(
        tree / "etc/sandbox/recipe.json", json.dumps(recipe, indent=1, sort_keys=True) + "\n"
    )


def add_certificates(tree: pathlib.Path) -> None:
    """Give the guest those CA certificates of this machine that its own bundle lacks."""
    own = tree / "etc/ssl/certs/ca-certificates.crt"
    known = own.read_bytes() if own.is_file() else b""
    pattern = rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----"
    for block in re.findall(pattern, _host_certificates(), re.DOTALL):
        if block not in known:
            name = hashlib.sha256(block).hexdigest()[:16]
            files.ensure_file(tree / f"usr/local/share/ca-certificates/{name}.crt", block + b"\n")


def _unsynced(tree: pathlib.Path) -> list[str]:
    """Return the prefix that runs a command on `<tree>.merged`, in a mount namespace."""
    pathlib.Path(f"{tree}.merged").mkdir(exist_ok=True)
    scratch = tempfile.mkdtemp(dir=tree.parent)
    program = str(_HERE / "shell" / "unsynced.sh")
    return [
        "unshare",
        "--mount",
        "--propagation=private",
        program,
        str(tree),
        scratch,
        f"{tree}.merged",
    ]


def _in_guest(
    tree: pathlib.Path, *argv: str, options: collections.abc.Sequence[str] = ()
) -> list[str]:
    """Return the command that runs `argv` in `tree` with this machine's network."""
    nspawn = [
        "--quiet",
        "--register=no",
        "--keep-unit",
        "--settings=no",
        "--as-pid2",
        "--pipe",
        "--timezone=off",
    ]
    nspawn += ["--resolv-conf=off", "--bind-ro=/etc/resolv.conf", f"--directory={tree}", *options]
    nspawn += [f"--setenv={name}={value}" for name, value in host_proxies().items()]
    return ["systemd-nspawn", *nspawn, "--", *argv]


def run_step(text: str, argv: list[str], progress: Progress, *, timeout_s: float = 900) -> None:
    """Run one step of a build. `progress` gets a line at once, and again every few seconds.

    Raises:
        CommandError: the command failed or took too long; the message holds its last words.
    """
    begin = time.monotonic()
    progress(text)
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=clean_env(),
            start_new_session=True,
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
            raise CommandError(
                f"{text} failed ({process.returncode}): {_error_line(output.read())}"
            )


def _error_line(text: str) -> str:
    """Return the first error in a build's output; the next ones follow from it."""
    lines = [line for line in text.splitlines() if re.match(r"(E:|ERROR|error:)", line.strip())]
    return last_line(lines[0] if lines else text)
