"""What a mount is, whatever its filesystem: what is asked for (`Spec`) and all that making it takes (`Plan`).

`kinds/` draws up plans; `mount/` makes, judges and removes what they describe.
"""

import dataclasses
import pathlib
import re

import jinja2

ETC = pathlib.Path("/etc/slurm-ddp")
LIB = pathlib.Path("/usr/local/lib/slurm-ddp")
STATE = pathlib.Path("/var/lib/slurm-ddp")
CACHE = pathlib.Path("/var/cache/slurm-ddp")
_TEMPLATES = pathlib.Path(__file__).parent / "templates"
_PYTHON = "/usr/bin/python3"
# Folders of the system itself: nothing may be mounted over the first, nor anywhere inside the second
_SYSTEM = {"/", "/home", "/media", "/mnt", "/opt", "/srv", "/tmp", "/var"}  # noqa: S108 - compared, not used
_SYSTEM_TREES = tuple(
    "/bin /boot /dev /etc /lib /lib32 /lib64 /proc /root /run /sbin /sys /usr /var/cache /var/lib /var/log".split()
)


class MountError(Exception):
    """The mount cannot be made, and a person must act. `str()` is one line that says how."""


class NotYetError(Exception):
    """The mount cannot be made now; it may be later, without a person. `str()` is one line."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What was asked for, whatever the filesystem is."""

    app: str  # names the files and units
    mountpoint: str
    read_only: bool = False
    noexec: bool = False
    subdirectory: str = ""
    profile: str = "none"
    mount_options: str = ""
    drain: bool = False  # the node in Slurm while the mount is broken


@dataclasses.dataclass(frozen=True)
class File:
    """A file that the mount needs."""

    path: pathlib.Path
    text: str = dataclasses.field(repr=False)
    mode: int = 0o644


@dataclasses.dataclass(frozen=True)
class Plan:
    """A mount, ready to be made."""

    spec: Spec
    unit: str
    unit_text: str
    fstypes: tuple[str, ...]  # as mountinfo shows them
    source: str
    servers: tuple[tuple[tuple[str, int], ...], ...]  # of each group one must answer
    speaks: str = ""  # what the first group is asked in: keeper.GREETINGS
    packages: tuple[str, ...] = ()
    environment: str | None = dataclasses.field(default=None, repr=False)  # an EnvironmentFile; holds secrets
    secrets: tuple[str, ...] = dataclasses.field(default=(), repr=False)  # values that must never be shown
    program_changed: bool = False
    aliases: tuple[str, ...] = ()  # other names that the kernel may show for the source
    files: tuple[File, ...] = ()
    caches: tuple[pathlib.Path, ...] = ()  # folders that are ours, and go with the mount
    version: str = ""  # of the program
    reloads: bool = False  # the program can be exchanged under a running mount
    port: int = 0  # where the client tells its metrics
    sticky: bool = False  # whether the sticky bit of its root is ours to set, where others can write it
    remedy: str = ""  # what to type where they can

    @property
    def sources(self) -> tuple[str, ...]:
        """The names under which the right filesystem may be mounted."""
        return (self.source, *self.aliases)


def check_mountpoint(path: str) -> None:
    """Raise `ValueError` unless something may be mounted at `path`."""
    if not re.fullmatch(r"(/[A-Za-z0-9._+@-]+)+", path) or any(part in (".", "..") for part in path.split("/")):
        raise ValueError("an absolute path of letters, digits and ._+@- is needed, like /mnt/shared")
    if path in _SYSTEM - {"/home", "/opt", "/srv"} or any(is_inside(path, tree) for tree in _SYSTEM_TREES):
        raise ValueError(f"{path} belongs to the system: mount elsewhere, like /mnt/shared")


def is_inside(path: str, folder: str) -> bool:
    """Report whether a path is a folder, or lies in it."""
    return path == folder or path.startswith(f"{folder}/")


def helper(app: str) -> str:
    """Return the command line of the helper that units run, without its arguments."""
    return f"{_PYTHON} -B {LIB / app / 'slurm_ddp' / 'mounts.py'}"


def render(template: str, **values: object) -> str:
    """Return a rendered template of this charm."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - unit files, not HTML
    )
    return environment.get_template(template).render(**values)


def quoted(argument: str) -> str:
    """Return an argument as ExecStart= takes it: quoted, with no specifier and no variable (systemd.service(5))."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[A-Za-z0-9%$@:/._=,+?&-]+", argument) else f'"{escaped}"'


def environment_file(variables: dict[str, str]) -> str:
    """Return the text of an EnvironmentFile (systemd.exec(5)).

    Raises:
        ValueError: a value has a line break or NUL in it; the message names the variable.
    """
    lines: list[str] = []
    for name, value in sorted(variables.items()):
        if any(character in value for character in "\0\r\n"):
            raise ValueError(f"{name} has a line break in it")
        escaped = re.sub(r'(["\\$`])', r"\\\1", value)
        lines.append(f'{name}="{escaped}"\n')
    return "".join(lines)
