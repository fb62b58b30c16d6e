"""One of Slurm's daemons under systemd: package, options in /etc/default, keys in /etc/slurm.

An error of systemctl is a `CommandError`, one of `scontrol` a `SlurmError`. Upstream's handlers
catch only the second, so the first is a hook error, except out of `Service.reconfigure`.
"""

import base64
import dataclasses
import json
import pathlib
import secrets
import shlex
import shutil
import uuid

import dotenv

from slurm_ddp import apt, files, systemd
from slurm_ddp.commands import CommandError, Completed, run

ETC = pathlib.Path("/etc/slurm")
VAR = pathlib.Path("/var/lib/slurm")
DEFAULTS = pathlib.Path("/etc/default")
LIMITS = pathlib.Path("/etc/security/limits.d/20-charmed-hpc-openfile.conf")

# Upstream sets no deadline; a daemon of Type=notify that does not come up ends at systemd's own, 90
# s by default.
_PATIENCE_S = 600

Options = dict[str, str | bool]


class SlurmError(Exception):
    """A command of Slurm's failed, or a daemon could not be reconfigured. `str()` is one line."""


def systemctl(*arguments: str, check: bool = True) -> Completed:
    """Run systemctl. Raises `CommandError` if it fails and `check` is set."""
    return run("/usr/bin/systemctl", *arguments, timeout=_PATIENCE_S, check=check)


def scontrol(*arguments: str) -> str:
    """Run scontrol and return its output. Raises `SlurmError`."""
    try:
        return run("/usr/bin/scontrol", *arguments, timeout=_PATIENCE_S).stdout
    except CommandError as e:
        raise SlurmError(f"scontrol {' '.join(arguments)}: {e}") from e


@dataclasses.dataclass(frozen=True)
class Service:
    """A daemon and its host.

    Attributes:
        name: of the unit and of the package.
        owner: the account and group that its keys belong to.
        packages: packages to install besides the daemon's own.
        dropin: the unit's settings that upstream overrides.
        raises_limits: jobs and daemons on this host may open many files and lock memory.
    """

    name: str
    owner: str
    packages: tuple[str, ...] = ()
    dropin: str = ""
    raises_limits: bool = False

    def install(self) -> None:
        """Install the packages; the daemon neither runs nor starts at boot unconfigured."""
        # Debian starts daemons on install, and without a controller one would block until systemd
        # gives up.
        systemctl("mask", "--runtime", "--no-reload", self.name)
        try:
            apt.ensure_packages((self.name, *self.packages))
        finally:
            systemctl("unmask", "--runtime", self.name)
        for folder in (VAR, VAR / "checkpoint"):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            shutil.chown(folder, "slurm", "slurm")
        if self.raises_limits:
            files.ensure_file(LIMITS, _LIMITS)
            systemctl("disable", "--now", "munge")
        if self.dropin:
            systemd.ensure_dropin(f"{self.name}.service", "10-charmed-hpc.conf", self.dropin)
        self.stop_and_disable()

    def version(self) -> str:
        """Return the version of the installed package. Raises `CommandError` if it is missing."""
        return run("/usr/bin/dpkg-query", "--show", "--showformat=${Version}", self.name).stdout

    def is_installed(self) -> bool:
        """Return whether the daemon's package is installed."""
        return apt.is_installed(self.name)

    def is_active(self) -> bool:
        """Return whether systemd calls the daemon active."""
        return systemd.is_active(self.name)

    def enable_and_restart(self) -> None:
        """Start the daemon, now and at boot. Raises `CommandError`."""
        systemctl("enable", self.name)
        systemctl("restart", self.name)

    def stop_and_disable(self) -> None:
        """Stop the daemon, now and at boot. Raises `CommandError`."""
        systemctl("stop", self.name)
        systemctl("disable", self.name)

    def reload(self) -> None:
        """Have the daemon read its files again. Raises `SlurmError` if systemd cannot."""
        try:
            systemctl("reload", self.name)
        except CommandError as e:
            raise SlurmError(f"{self.name} was not reloaded: {e}") from e

    def reconfigure(self) -> None:
        """Start the daemon, now and at boot. Raises `SlurmError` if systemd cannot."""
        try:
            self.enable_and_restart()
        except CommandError as e:
            raise SlurmError(f"{self.name} was not restarted: {e}") from e

    # --- its options in /etc/default -------------------------------------------------------------

    def options(self) -> Options:
        """Return NAME_OPTIONS in order: a word with `-` takes the next one without `-`."""
        words = shlex.split(
            dotenv.get_key(DEFAULTS / self.name, f"{self.name.upper()}_OPTIONS") or ""
        )
        found: Options = {}
        for word, following in zip(words, [*words[1:], "-"], strict=False):
            if word.startswith("-"):
                found[word] = True if following.startswith("-") else following
        return found

    def set_options(self, options: Options) -> None:
        """Write NAME_OPTIONS, quoted as by a shell, without quotes around the whole."""
        words: list[str] = []
        for name, value in options.items():
            if value is not False:
                words += [name] if value is True else [name, value]
        variable = f"{self.name.upper()}_OPTIONS"
        dotenv.set_key(DEFAULTS / self.name, variable, shlex.join(words), quote_mode="never")

    def set_controllers(self, controllers: list[str]) -> None:
        """Make the daemon fetch its configuration from these controllers (host:port), if any."""
        self.set_options(self.options() | {"--conf-server": ",".join(controllers) or False})

    # --- its keys in /etc/slurm -----------------------------------------------------------------

    @property
    def auth_key_path(self) -> pathlib.Path:
        """Where auth/slurm finds its keys."""
        return ETC / "slurm.jwks"

    @property
    def jwt_key_path(self) -> pathlib.Path:
        """Where auth/jwt finds its key."""
        return ETC / "jwt_hs256.key"

    def set_auth_key(self, key: str, identifier: str) -> None:
        """Make this the key of auth/slurm. Raises ValueError if a part is empty."""
        self._write(self.auth_key_path, json.dumps({"keys": [_key_entry(key, identifier)]}))

    def add_auth_key(self, key: str, identifier: str) -> None:
        """Add a key of auth/slurm to those that are known. Raises ValueError if a part is empty."""
        known = json.loads(self.auth_key_path.read_text())["keys"]
        known.append(_key_entry(key, identifier))
        self._write(self.auth_key_path, json.dumps({"keys": known}))

    def set_jwt_key(self, key: str) -> None:
        """Make this the key of auth/jwt."""
        self._write(self.jwt_key_path, key)

    def _write(self, path: pathlib.Path, text: str) -> None:
        files.ensure_file(path, text, mode=0o600)
        shutil.chown(path, self.owner, self.owner)


def _key_entry(key: str, identifier: str) -> dict[str, str]:
    if not key or not identifier:
        raise ValueError("the key of auth/slurm or its identifier is empty")
    return {"alg": "HS256", "kty": "oct", "kid": identifier, "k": key}


def new_auth_key() -> dict[str, str]:
    """Return the content of the secret with a fresh key for auth/slurm."""
    return {"key": base64.b64encode(secrets.token_bytes(2048)).decode(), "keyid": str(uuid.uuid4())}


def new_jwt_key() -> dict[str, str]:
    """Return the content of the secret with a fresh key for auth/jwt, an RSA key in PEM."""
    return {"key": run("/usr/bin/openssl", "genrsa", "-traditional", "2048").stdout}


_LIMITS = "".join(
    f"* {kind} {item} {value}\n"
    for item, value in (("nofile", "1048576"), ("memlock", "unlimited"), ("stack", "unlimited"))
    for kind in ("soft", "hard")
)
