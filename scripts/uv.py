"""Run uv with the settings of this machine's pip, which uv itself does not read.

python3 scripts/uv.py pip install ...

Needs nothing but the standard library: scripts/venv.sh makes every other environment with it.
"""

import ast
import contextlib
import functools
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
UV = ROOT / "build" / "venvs" / "uv" / "bin" / "uv"
INDEX_KEYS = ("index-url", "extra-index-url", "find-links")
_KEYS = (
    tuple("trusted-host proxy timeout default-timeout no-index retries cert client-cert".split())
    + INDEX_KEYS
)
# https://docs.astral.sh/uv/reference/environment/
_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
}


class InstallError(Exception):
    """uv could not install packages. uv's own message is on standard error."""


@functools.cache
def pip_settings() -> dict[str, list[str]]:
    """Return the words of each setting of pip that concerns where packages come from."""
    values: dict[str, list[str]] = {}
    for line in _config_list():
        name, separator, literal = line.partition("=")
        scope, _, key = name.strip().rpartition(".")
        if separator and scope in ("global", "install", "user", "site", ":env:") and key in _KEYS:
            with contextlib.suppress(ValueError, SyntaxError):
                values[key] = str(
                    ast.literal_eval(literal)
                ).split()  # ":env:" comes last and wins, as in pip
    return values


def _config_list() -> list[str]:
    own = UV.with_name("python")  # its environment has a pip; the system's Python may have none
    for python in (own, sys.executable, shutil.which("python3") or "/usr/bin/python3"):
        if not pathlib.Path(python).exists():
            continue
        command = [python, "-m", "pip", "config", "list"]
        listing = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if listing.returncode == 0:
            return listing.stdout.splitlines()
    return []


def environment() -> dict[str, str]:
    """Return the variables for uv: this process's, and pip's settings under uv's names."""
    settings = pip_settings()
    found = {
        _VARIABLES[key]: " ".join(words) for key, words in settings.items() if key in _VARIABLES
    }
    if "find-links" in settings:
        found["UV_FIND_LINKS"] = ",".join(settings["find-links"])
    # pip takes the best version of all indexes; the hashes of our requirements rule out a
    # stranger's package
    own = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_SYSTEM_CERTS": "1"}
    if bundle := os.environ.get("REQUESTS_CA_BUNDLE"):
        own["SSL_CERT_FILE"] = bundle
    return own | found | os.environ


def run(*arguments: str) -> None:
    """Run uv; its output goes to standard error.

    Raises:
        InstallError: uv failed, or cannot be installed itself.
    """
    made = [ROOT / "scripts" / "venv.sh", "uv", "tests/requirements/uv.txt"]
    if not UV.exists() and subprocess.run(made, check=False, stdout=sys.stderr).returncode != 0:
        raise InstallError("uv could not be installed; pip's message is above")
    if (
        subprocess.run(
            [UV, *arguments], check=False, stdout=sys.stderr, env=environment()
        ).returncode
        != 0
    ):
        where = "the indexes of pip's settings (`pip config list`)"
        raise InstallError(f"packages could not be fetched from {where}; uv's message is above")


if __name__ == "__main__":
    sys.exit(subprocess.run([UV, *sys.argv[1:]], check=False, env=environment()).returncode)
