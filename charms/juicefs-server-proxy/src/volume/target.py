"""A volume and the tools for it: the application's copy of juicefs, and its credentials."""

import collections.abc
import dataclasses
import pathlib
import typing

import jinja2

from slurm_ddp import juicefs, juicefs_access
from slurm_ddp.commands import CommandError, Completed
from slurm_ddp.interfaces import filesystem_info as fs
from volume import format_journal
from volume.spec import Volume

PROGRAM_DIR = pathlib.Path("/usr/local/lib/slurm-ddp")
CONFIG_DIR = pathlib.Path("/etc/slurm-ddp")


@dataclasses.dataclass(frozen=True)
class Target:
    """A volume and the way to it."""

    app: str
    program: pathlib.Path
    volume: Volume
    credentials: fs.JuicefsSecret
    access: juicefs_access.Access

    @property
    def directory(self) -> pathlib.Path:
        """Locate the application's reports, backups and exports."""
        return format_journal.STATE_DIR / self.app

    def inspect(self) -> juicefs.Setting | None:
        """Ask the engine for its volume, as `juicefs.inspect` does."""
        return juicefs.inspect(self.program, self.access)

    def invoke(
        self, *arguments: str, env: collections.abc.Mapping[str, str] | None = None, timeout: float
    ) -> Completed:
        """Run juicefs with the credentials in its environment."""
        return juicefs.invoke(self.program, self.access, *arguments, env=env, timeout=timeout)

    def change(
        self, command: str, *arguments: str, env: collections.abc.Mapping[str, str] | None = None
    ) -> None:
        """Run a command that changes the volume.

        Raises `juicefs.JuicefsError` with the command's name.
        """
        try:
            self.invoke(command, *arguments, env=env, timeout=120)
        except CommandError as e:
            raise juicefs.JuicefsError(f"juicefs {command}: {juicefs.explain(e)}") from e


class Unit(typing.Protocol):
    """The subject of the actions: this unit, its application's volume, and the ways to it."""

    name: str
    leads: bool
    target: collections.abc.Callable[[], Target]  # the volume that should be there, unseen
    # After a look that it is there
    verify: collections.abc.Callable[[], tuple[Target, juicefs.Setting]]
    # The state of its disk, if this unit serves the volume
    storage: collections.abc.Callable[[], dict[str, str]]
    pin: collections.abc.Callable[[str], None]  # keeps the UUID of a volume that was restored

    @property
    def uuid(self) -> str | None:
        """The volume's UUID; None before it is formatted."""


def program_path(app: str) -> pathlib.Path:
    """Locate an application's copy of juicefs."""
    return PROGRAM_DIR / app / "juicefs"


def open_target(app: str, volume: Volume, credentials: fs.JuicefsSecret) -> Target:
    """Write the files that juicefs must find for this volume."""
    program = program_path(app)
    access = volume.access(credentials, directory=CONFIG_DIR / app)
    access.ensure_files()
    return Target(app, program, volume, credentials, access)


def render(folder: pathlib.Path, template: str, **values: object) -> str:
    """Fill in a template of a folder; a missing value is an error."""
    return jinja2.Template(
        (folder / template).read_text(),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).render(**values)
