"""The documents, and the Slurm settings that they make through charm options."""

import collections.abc
import pathlib
import re
import shlex
import textwrap

import slurmutils
import yaml
from deployments import BUNDLE, OVERLAYS, ROOT
from slurm_charms import CHECKS, slurm_conf_problems

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "charms").glob("*/README.md"),
    ]
)


def named(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


Texts = collections.abc.Iterator[tuple[str, str]]
CHARMS = sorted((ROOT / "charms").glob("*/charmcraft.yaml"))
SOURCES = [*PAGES, *CHARMS, *OVERLAYS, BUNDLE]
# What slurm.conf holds anyway may be named, if the form is right.
ANYWHERE = CHECKS | {
    "code": lambda text: (
        found for found in slurm_conf_problems(text) if "itself says" not in found
    )
}


def settings(text: str) -> Texts:
    """Yield (option, value) of each command, YAML mapping and piece of code that sets one of Slurm's options."""
    options = "|".join(CHECKS)
    for option, value in re.findall(
        rf"({options})=('[^']*'|\"[^\"]*\"|[^\s`]*)", text
    ):  # as a shell reads it
        beside = (
            r"""\"[$][(].*?(?:(?:; printf '%s\\n'|\n *echo) (.+))?[)]\""""  # the option's value
        )
        if added := re.fullmatch(beside, value, re.DOTALL):
            yield option, "\n".join(shlex.split(added[1] or ""))
        elif not value.startswith(("...", "$")):
            yield option, " ".join(shlex.split(value)) if "\n" not in value else value[1:-1]
    for _, option, value in re.findall(
        rf"^( *)({options}): \|\n((?:\1 +\S.*\n)+)", text, re.MULTILINE
    ):
        yield option, textwrap.dedent(value)
    for option, value in re.findall(rf"^ *({options}): ([^|\n]+)$", text, re.MULTILINE):
        yield option, yaml.safe_load(value)
    for code in re.findall(r"`([A-Z][A-Za-z]+=[^`]+)`", re.sub(r"\n\s*(#\s*)?", " ", text)):
        key = code.partition("=")[0]
        if key not in {"NodeName", "PartitionName", "NodeSet"} and hasattr(
            slurmutils.SlurmConfig(), field(key)
        ):
            yield "code", code


def actions_typed(text: str) -> collections.abc.Iterator[tuple[str, str, list[str]]]:
    """Yield (application, action, words) of each `juju run` and `./sandboxctl run`, without Juju's own options."""
    text = re.sub(r"\\?\n *(?=[a-z-]+=)", " ", text)
    for application, rest in re.findall(
        r"(?:juju|sandboxctl) run ([a-z-]+)/(?:\d+|leader)(?: [a-z-]+/\d+)* ([^`\n|>)]+)", text
    ):
        action, *words = shlex.split(re.sub(r" --(?:wait[ =]|format=)\S+", "", rest), comments=True)
        yield application, action, words


def field(key: str) -> str:
    """Return the attribute of slurmutils' model for a key of slurm.conf: AccountingStorageTRES is accounting_storage_tres."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", key).lower()
