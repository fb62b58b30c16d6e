"""A mount of any filesystem: the options (`Config`, `Spec`), and the `Plan` by kinds/."""

import dataclasses
import pathlib
import re
import typing

import jinja2
import pydantic

ETC = pathlib.Path("/etc/slurm-ddp")
LIB = pathlib.Path("/usr/local/lib/slurm-ddp")
STATE = pathlib.Path("/var/lib/slurm-ddp")
CACHE = pathlib.Path("/var/cache/slurm-ddp")
_TEMPLATES = pathlib.Path(__file__).with_name("templates")
# Folders of the system itself: nothing may be mounted over the first, nor anywhere inside the
# second
_SYSTEM = {"/", "/media", "/mnt", "/tmp", "/var"}  # noqa: S108 - compared, not used
_SYSTEM_TREES = tuple(
    "/bin /boot /dev /etc /lib /lib32 /lib64 /proc /root /run /sbin /sys /usr /var/cache /var/lib /var/log".split()
)

Stripped = typing.Annotated[str, pydantic.StringConstraints(strip_whitespace=True)]
Servers = tuple[tuple[str, int], ...]  # (host, port); one of them must answer


class MountError(Exception):
    """The mount cannot be made, and the operator must act. `str()` is one line that states how."""


class NotYetError(Exception):
    """The mount cannot be made now; it may be later, without the operator. `str()` is one line."""


class Config(pydantic.BaseModel, frozen=True):
    """The charm's options; charmcraft.yaml explains them."""

    mountpoint: str = ""
    subdirectory: str = ""
    read_only: bool = False
    noexec: bool = False
    profile: typing.Literal["none", "dataset", "checkpoint", "tokens"] = "none"
    mount_options: str = ""
    drain_on_failure: bool = False
    separate_accounts: Stripped = ""
    homes: Stripped = ""
    pam_slurm_adopt: bool = False
    cephfs_client: typing.Literal["auto", "kernel", "fuse"] = "auto"
    cache_size: Stripped = "auto"
    cache_directories: str = ""
    buffer_size: int = 0
    metrics_port: int = 0
    lustre_repository: Stripped = ""
    lnet_networks: Stripped = ""


class Spec(Config, frozen=True):
    """The options of an application, with the requests of the principal charm."""

    app: str  # names the files and units
    wanted_by: str = ""  # the Juju unit; one for each principal on the machine

    @property
    def holding(self) -> str:
        """Return the mount options that the charm's options set, which users may give too."""
        return f"{'ro' if self.read_only else 'rw'} {'noexec' if self.noexec else 'exec'}"

    @property
    def flags(self) -> dict[str, str]:
        """Return this charm's mount flags, which take no values."""
        names = ["nosuid", "nodev"]
        if self.noexec:
            names.append("noexec")
        names.append("ro" if self.read_only else "rw")
        return dict.fromkeys(names, "")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A mount, ready to be made."""

    spec: Spec
    unit: str
    unit_text: str
    fstypes: tuple[str, ...]  # as mountinfo shows them
    source: str
    servers: tuple[Servers, ...]
    speaks: str = ""  # the protocol of the first group: keeper.GREETINGS
    packages: tuple[str, ...] = ()
    # For root
    files: dict[pathlib.Path, str] = dataclasses.field(
        default_factory=dict[pathlib.Path, str], repr=False
    )
    # Values that must never be shown
    secrets: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    program_changed: bool = False
    client: str = ""  # which of several clients mounts it
    aliases: tuple[str, ...] = ()  # other names that the kernel may show for the source
    caches: tuple[pathlib.Path, ...] = ()  # folders that are ours, and go with the mount
    version: str = ""  # of the program
    port: int = 0  # of the client's metrics
    sticky: bool = (
        False  # whether the sticky bit of its root is ours to set, where others can write it
    )
    remedy: str = ""  # the command that sets it, if not the usual one

    @property
    def sources(self) -> tuple[str, ...]:
        """List the names under which the right filesystem may be mounted."""
        return (self.source, *self.aliases)


def check_mountpoint(path: str) -> None:
    """Raise `ValueError` unless something may be mounted at `path`."""
    if not re.fullmatch(r"(/[A-Za-z0-9._+@-]+)+", path) or any(
        part in (".", "..") for part in path.split("/")
    ):
        raise ValueError(
            "an absolute path of letters, digits and ._+@- is needed, like /mnt/shared"
        )
    if path in _SYSTEM or any(is_inside(path, tree) for tree in _SYSTEM_TREES):
        raise ValueError(f"{path} belongs to the system: mount elsewhere, like /mnt/shared")


def is_inside(path: str, folder: str) -> bool:
    """Report whether a path is a folder, or lies in it."""
    return path == folder or path.startswith(f"{folder}/")


def render(template: str, **values: object) -> str:
    """Fill in a template of this charm; a missing value is an error."""
    return jinja2.Template(
        _TEMPLATES.joinpath(template).read_text(),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).render(**values)


def quoted(argument: str) -> str:
    """Quote an argument for ExecStart= so that nothing in it expands (systemd.service(5))."""
    escaped = (
        argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    )
    return escaped if re.fullmatch(r"[A-Za-z0-9%$@:/._=,+?&-]+", argument) else f'"{escaped}"'


def environment_file(variables: dict[str, str]) -> str:
    """Format an EnvironmentFile (systemd.exec(5)).

    Raises `ValueError` for a value with a line break.
    """
    lines: list[str] = []
    for name, value in sorted(variables.items()):
        if any(character in value for character in "\0\r\n"):
            raise ValueError(f"{name} has a line break in it")
        escaped = re.sub(r'(["\\$`])', r"\\\1", value)
        lines.append(f'{name}="{escaped}"\n')
    return "".join(lines)
