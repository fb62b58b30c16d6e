"""uv, which installs packages: its pinned version, the site's indexes, the source of torch.

Imports the standard library and modules that need no more, for scripts/install_torch.py runs before
all packages.
"""

import ast
import collections.abc
import contextlib
import dataclasses
import os
import pathlib
import re

from ddp.problem import Problem, Step
from slurm_ddp.commands import CommandError, run

TORCH = "2.13.0"  # whose CPU wheel is small
# The payload's tests pass with these, and its locked packages hold what each of them needs. Their
# CUDA builds are of CUDA 13: driver 580 or newer (CUDA's minor version compatibility).
TESTED = (TORCH, "2.15.0")
PINNED = pathlib.Path(__file__).with_name("requirements.txt")  # uv itself, by its hashes
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # https://pytorch.org/get-started/locally/
CONNECT_S = 10  # for PyTorch's index, which many sites do not reach
TIMEOUT_S = 5400.0
DEFAULT_BUILD = (
    "installing torch's default build, as no index that answers has the CPU build: a download of 0.5 GB and about 2 GB "
    "of CUDA libraries; {} with the CPU build avoids that"
)
_OWN = {
    "UV_NO_CONFIG": "1",
    "UV_PYTHON_DOWNLOADS": "never",
    "UV_NO_EDITABLE": "1",  # nodes do not have the project's folder
    "UV_SYSTEM_CERTS": "1",  # as pip does
    "UV_INDEX_STRATEGY": "unsafe-best-match",  # as pip does: the best version of all indexes
    "UV_LINK_MODE": "hardlink",  # the cache is removed, so a copy would only take room
}
_SITE = {  # settings of pip that name package indexes, with uv's variables
    "index-url": ("UV_DEFAULT_INDEX",),
    "extra-index-url": ("UV_INDEX",),
    "find-links": ("UV_FIND_LINKS",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"),
}
Do = collections.abc.Callable[[str, collections.abc.Callable[[], None]], None]
_LONGEST = 560  # of uv's explanations, which end with the user's own requirements
_UNSATISFIABLE = re.compile(
    "No solution found when resolving|No matching distribution found"
)  # uv's, pip's


class InstallError(Problem):
    """Packages could not be installed.

    With `is_unsatisfiable` the indexes answered, and no set of packages fits.
    """

    def __init__(
        self, what: str, *, is_unsatisfiable: bool = False, remedy: Step | None = None
    ) -> None:
        super().__init__(what, remedy=remedy)
        self.is_unsatisfiable = is_unsatisfiable


@dataclasses.dataclass(frozen=True)
class Uv:
    """uv, installing into the environment of one interpreter."""

    program: str
    python: str
    variables: dict[
        str, str
    ]  # the package indexes among them; in no command line, since a URL may hold a password
    options: tuple[str, ...] = ()

    def install(self, *arguments: str | pathlib.Path, also: str = "", **variables: str) -> None:
        """Install packages; `also` is the option torch-index, `variables` replace others.

        Raises InstallError.
        """
        indexes = " ".join(filter(None, (also, self.variables.get("UV_INDEX"))))
        env = {**_OWN, **self.variables, **({"UV_INDEX": indexes} if indexes else {}), **variables}
        try:
            call(
                self.program,
                "pip",
                "install",
                "-q",
                f"--python={self.python}",
                *self.options,
                *arguments,
                env=env,
            )
        except InstallError as e:
            if not also or e.is_unsatisfiable or also.rpartition("@")[2].rstrip("/") not in e.what:
                raise
            remedy = Step("torch-index", "correct torch-index, or use a wheelhouse")
            raise InstallError(f"torch-index: {e.what}", remedy=remedy) from e


def bootstrap(
    python: pathlib.Path,
    folder: pathlib.Path,
    wheels: collections.abc.Sequence[str] = (),
    **variables: str,
) -> Uv:
    """Return the pinned uv with the site's indexes; `python`'s pip installs it if needed.

    `wheels` are folders that replace all indexes; `variables` are uv's own. Raises InstallError.
    """
    options: tuple[str, ...] = ()
    if wheels:
        links = [f"--find-links={one}" for one in wheels]
        options = ("--no-index", "--only-binary=:all:", *links)
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "--no-input")
    target = (f"--target={folder}", "--require-hashes", "-r", PINNED)
    if not (folder / "bin" / "uv").exists():
        call(*pip, "install", "--quiet", *options, *target, env=pip_variables())
    if not wheels:
        indexes, options = site(pip)
        variables |= indexes
    return Uv(str(folder / "bin" / "uv"), str(python), variables, options)


def site(pip: collections.abc.Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the package indexes of pip's files and PIP_* as uv's variables and options.

    Raises InstallError.
    """
    listed = call(*pip, "config", "list", env=pip_variables())
    known: dict[str, str] = {}
    for scope in ("global", "install", ":env:"):  # the last wins
        for key, literal in re.findall(rf"^{scope}\.([a-z-]+)=(.+)$", listed, re.MULTILINE):
            if words := str(ast.literal_eval(literal)).split():
                known[key] = ("," if key == "find-links" else " ").join(words)
    bundle = os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE")
    found = {"SSL_CERT_FILE": bundle} if bundle else {}
    found |= {name: known[key] for key in _SITE.keys() & known.keys() for name in _SITE[key]}
    is_offline = known.get("no-index", "").lower() in ("1", "true", "yes", "on")
    return found, ("--no-index",) if is_offline else ()


def pip_variables() -> dict[str, str]:
    """Return the variables that name pip's package indexes.

    Others, such as PIP_TARGET, would lead elsewhere.
    """
    names = ["PIP_CONFIG_FILE", "PIP_NO_INDEX", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"]
    names += [f"PIP_{name.upper().replace('-', '_')}" for name in _SITE]
    return {name: os.environ[name] for name in names if name in os.environ}


def install_cpu_torch(
    uv: Uv,
    do: Do,
    *,
    version: str = TORCH,
    index: str = "",
    ways: str = "torch-index or a wheelhouse",
) -> None:
    """Install torch for CPUs from the first source that has it. Raises InstallError.

    The order: the CPU build from the site's indexes and `index`; from PyTorch's own index; the
    default build from the site's, which computes the same on CPUs. `do` reports a text while it
    calls a function; `ways` lead to another one.
    """
    why, build = "", f"torch=={version}+cpu"
    try:
        return do(f"installing {build}", lambda: uv.install(build, also=index))
    except InstallError as e:
        if not e.is_unsatisfiable:
            raise
    if "--no-index" not in uv.options:
        alone = only_pytorch()
        text = f"installing {build} from PyTorch's index, as no configured index has it"
        try:
            return do(text, lambda: uv.install("--no-deps", build, **alone))
        except InstallError as e:  # its last causes
            why = (
                ""
                if e.is_unsatisfiable
                else f" (PyTorch's index: {': '.join(e.what.split(': ')[-2:])})"
            )
    do(DEFAULT_BUILD.format(ways), lambda: None)
    try:
        text = f"installing torch {version}"
        return do(text, lambda: uv.install(f"torch=={version}", also=index))
    except InstallError as e:
        remedy = Step("torch-index", f"use {ways} with torch")
        raise InstallError(e.what + why, is_unsatisfiable=e.is_unsatisfiable, remedy=remedy) from e


def only_pytorch() -> dict[str, str]:
    """Return the variables that make PyTorch's index the only one, asked once and not for long."""
    return {
        "UV_DEFAULT_INDEX": PYTORCH_INDEX,
        "UV_INDEX": "",
        "UV_FIND_LINKS": "",
        "UV_HTTP_RETRIES": "0",
        "UV_HTTP_TIMEOUT": str(CONNECT_S),
        "UV_HTTP_CONNECT_TIMEOUT": str(CONNECT_S),
    }


def call(
    *argv: str | pathlib.Path, env: dict[str, str] | None = None, timeout: float = TIMEOUT_S
) -> str:
    """Run a command and return its output. Raises InstallError with the reason that it printed."""
    try:
        return run(*argv, cwd="/", timeout=timeout, env=env).stdout
    except CommandError as e:
        found = re.search(r"(?ims)^error: (.*)", e.stderr)
        reason = re.sub(r"(?im)\s*^(\s*cause|error|warning): ", ": ", found[1]) if found else str(e)
        reason = " ".join(re.sub(r"`(/[^`]+)` at position (\d+)", _with_line, reason).split())
        reason = (
            reason
            if len(reason) < _LONGEST
            else f"{reason[: _LONGEST // 3]} ... {reason[-_LONGEST // 2 :]}"
        )
        name = argv[2] if argv[1] == "-m" else pathlib.Path(argv[0]).name
        raise InstallError(
            f"{name}: {reason}", is_unsatisfiable=bool(_UNSATISFIABLE.search(e.stderr))
        ) from e


def _with_line(found: re.Match[str]) -> str:
    """Return a place in a file that is named by the characters before it as file:line."""
    lines = 0
    with contextlib.suppress(OSError):
        lines = pathlib.Path(found[1]).read_bytes()[: int(found[2])].count(b"\n")
    return f"{found[1]}:{lines + 1}"
