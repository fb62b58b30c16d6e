"""The configuration: /etc/slurm-ddp.toml, ~/.config/slurm-ddp.toml, DDP_* variables, flags."""

import collections.abc
import json
import os
import pathlib
import pwd
import typing

from ddp.options import fields
from ddp.problem import ParameterError
from ddp.settings import Settings
from ddp.workspace.folders import NODE_DISK, Workspace
from slurm_ddp import backports

# The charm writes it; on another cluster its administrator may
SYSTEM = pathlib.Path("/etc/slurm-ddp.toml")
USER = ".config/slurm-ddp.toml"
PREFIX = "DDP_"
_FLAGS = {"true": True, "1": True, "false": False, "0": False, "": False}  # of variables
# In the home folder, which clusters without the charm share between their nodes
DEFAULT_WORKSPACE = "slurm-ddp"


class Choices(fields.Parsed):
    """The operator's choices about environments, trackers, images and contacts."""

    torch_build: fields.TorchBuild = "auto"
    torch_version: fields.TorchVersion = ""
    torch_index: fields.Index = ""
    mlflow_tracking_uri: fields.Tracking = ""
    tensorboard: bool = False
    wandb: bool = False
    transformers: bool = False
    accept_oci_risk: bool = False
    contact: fields.Contact = ""


class Config(Choices):
    """The options of a configuration file; the variable of `torch-index` is DDP_TORCH_INDEX."""

    workspace: fields.Folder | None = None
    node_cache: fields.Folder = str(NODE_DISK)  # on each node's own disk, open to all accounts
    account: fields.Account = ""  # whose environments and datasets all users share
    unit: typing.Annotated[
        str, fields.matches(r"([a-z][a-z0-9-]*/[0-9]+)?", 80, "a unit such as trainer/0")
    ] = ""


def load(flags: collections.abc.Mapping[str, object] | None = None) -> Config:
    """Read the effective options. Raises ParameterError, which names the file or variable."""
    given: dict[str, object] = {}
    sources: dict[str, str] = {}
    for name, value, source in _given(flags or {}):
        given[name] = value
        sources[name] = source
    try:
        return fields.parse(Config, given)
    except ParameterError as e:
        raise ParameterError(sources.get(e.name, "configuration"), str(e)) from None


def _given(
    flags: collections.abc.Mapping[str, object],
) -> collections.abc.Iterator[tuple[str, object, str]]:
    """Yield each given option with its value and its source; a later one wins."""
    home = pathlib.Path(os.environ.get("HOME") or _account().pw_dir)
    for path in (SYSTEM, home / USER):
        for name, value in _read(path).items():
            yield name, value, str(path)

    for name, field in Config.model_fields.items():
        variable = PREFIX + name.upper()
        text = os.environ.get(variable)
        if text is None:
            continue
        is_flag = field.annotation is bool
        yield str(field.alias), _FLAGS.get(text.lower(), text) if is_flag else text, f"${variable}"

    for name, value in flags.items():
        if value is not None:
            yield name, value, f"--{name}"


def settings(config: Config) -> Settings:
    """Make the settings of this process. Raises ParameterError if its account has no name."""
    about = _account()
    place = pathlib.Path(about.pw_dir, DEFAULT_WORKSPACE)
    if config.workspace:
        place = pathlib.Path(config.workspace.rstrip("/"))
    return Settings(
        workspace=Workspace(
            place,
            about.pw_name,
            about.pw_uid,
            account=config.account,
            unit=config.unit,
            node_disk=pathlib.Path(config.node_cache),
        ),
        gid=about.pw_gid,
        payload=payload(),
        torch_build=config.torch_build,
        torch_version=config.torch_version,
        torch_index=config.torch_index,
        mlflow_uri=config.mlflow_tracking_uri,
        tensorboard=config.tensorboard,
        wandb=config.wandb,
        transformers=config.transformers,
        accept_oci_risk=config.accept_oci_risk,
        contact=config.contact,
        takes_any_script=True,
    )


def payload() -> pathlib.Path:
    """Find the payload's folder: inside the installed package, or next to lib in the repository."""
    here = pathlib.Path(__file__).resolve()
    inside = here.parents[1] / "payload"
    return inside if inside.is_dir() else here.parents[3] / "payload"


def _account() -> pwd.struct_passwd:
    try:
        return pwd.getpwuid(os.geteuid())
    except KeyError:
        uid = os.geteuid()
        hint = f"is the directory of accounts (LDAP, sssd) up? see: getent passwd {uid}"
        raise ParameterError("account", f"uid {uid} has none on this host; {hint}") from None


def _read(path: pathlib.Path) -> dict[str, object]:
    """Read a configuration file; {} if it does not exist. Raises ParameterError."""
    from ddp.host import files  # noqa: PLC0415 - `ddp --help` starts without it

    try:
        return backports.parse_toml(files.read_named(path).decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, files.RefusedError) as e:
        raise ParameterError(str(path), f"{e}; correct the file, or remove it") from e


def write(config: collections.abc.Mapping[str, str | bool]) -> str:
    """Format a configuration file. The alphabets of the values exclude quotes and backslashes."""
    lines = ["# Written by the charm ddp-trainer; change its options instead. Read by ddp."]
    lines += [f"{name} = {json.dumps(value)}" for name, value in sorted(config.items())]
    return "\n".join(lines) + "\n"
