"""The options of each kind of filesystem: defaults, profiles, and the options for users."""

import pathlib
import re
import tomllib
import typing

Options = dict[str, str]  # an option without a value has the empty one
Rows = dict[str, list[str]]  # option -> its value, and why

_TABLES: dict[str, typing.Any] = tomllib.loads(
    pathlib.Path(__file__).with_name("options.toml").read_text()
)
REFUSED: dict[str, str] = {
    name: why for why, names in _TABLES["refused"].items() for name in names.split()
}
_RIVALS: dict[str, str] = _TABLES["rivals"]


class OptionError(ValueError):
    """The user gave an impossible option. `str()` is one line with its name and valid values."""


class Kind(typing.NamedTuple):
    """The options of one kind of filesystem."""

    defaults: Rows
    allowed: dict[str, str]  # name -> pattern for the value; empty: no value
    profiles: dict[str, Rows]
    holding: frozenset[str]  # names that change nothing


def _kind(name: str) -> Kind:
    table = _TABLES[name]
    flags, numbers = (
        dict.fromkeys(table["flags"].split(), ""),
        dict.fromkeys(table["numbers"].split(), r"\d{1,9}"),
    )
    holding = frozenset(f"{_TABLES['holding']['all']} {_TABLES['holding'].get(name, '')}".split())
    return Kind(
        table.get("defaults", {}),
        flags | numbers | table["values"],
        table.get("profiles", {}),
        holding,
    )


NFS, CEPHFS, CEPH_FUSE, LUSTRE, JUICEFS = map(
    _kind, ("nfs", "cephfs", "ceph-fuse", "lustre", "juicefs")
)


def merge(kind: Kind, *, profile: str, given: str, holding: str = "") -> Options:
    """Merge defaults, profile and user's options, the last ones winning; raises as `parse`."""
    options = {
        option: row[0] for option, row in (kind.defaults | kind.profiles.get(profile, {})).items()
    }
    for name, value in parse(kind, given, holding=holding).items():
        options.pop(_RIVALS.get(name, ""), None)
        options[name] = value
    return options


def parse(kind: Kind, given: str, *, holding: str = "") -> Options:
    """Parse the user's options, separated by commas, without those that always hold.

    `holding`: further names that always hold. Raises `OptionError` if one is unknown, refused or
    wrong.
    """
    options: Options = {}
    holds = {*kind.holding, *holding.split()}
    for item in filter(None, map(str.strip, given.split(","))):
        name, equals, value = item.partition("=")
        name = name.removeprefix("--")
        if equals or name not in holds:
            _check(kind, name, value, has_value=bool(equals))
            options[name] = value
    return options


def _check(kind: Kind, name: str, value: str, *, has_value: bool) -> None:
    """Raise `OptionError` if an option is unknown, refused or wrong."""
    if name in REFUSED and name not in kind.allowed:
        raise OptionError(f"mount-options: {name[:40]} is rejected: {REFUSED[name]}")
    if name.startswith("x-"):
        raise OptionError(f"mount-options: {name[:40]!r} is rejected: the charm owns the unit")
    if name not in kind.allowed:
        raise OptionError(f"mount-options: {name[:40]!r} is not an option of this filesystem")
    pattern = kind.allowed[name]
    if has_value and not pattern:
        raise OptionError(f"mount-options: {name} takes no value")
    if pattern and not re.fullmatch(pattern, value):
        raise OptionError(f"mount-options: {name}={value[:40]!r} does not match {pattern}")


def text(options: Options) -> str:
    """Join the options as mount(8) takes them after -o."""
    words: list[str] = []
    for name, value in options.items():
        words.append(f"{name}={value}" if value else name)
    return ",".join(words)
