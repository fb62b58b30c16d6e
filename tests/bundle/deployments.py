"""bundle.yaml with overlays as an operator fills them in, and what the charms declare.

The sandbox reads and merges them, as it does for `./sandboxctl deploy`.
"""

import collections
import dataclasses
import functools
import json
import pathlib
import re
from typing import Any

import yaml

from sandbox import bundle as bundles

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "bundle.yaml"
OVERLAYS = sorted((ROOT / "overlays").glob("*.yaml"))
SECOND = sorted((ROOT / "overlays" / "2604").glob("*.yaml"))  # further parts, on Ubuntu 26.04

Json = dict[str, Any]


@functools.cache
def facts() -> Json:
    """Read what the charms that others publish declare, and the offers of other models."""
    return yaml.safe_load(pathlib.Path(__file__).with_name("upstream.yaml").read_text())


@functools.cache
def declaration(charm: str) -> Json:
    """Return a charm's charmcraft.yaml, by its name, or an offer's endpoints by the offer's name.

    Raises KeyError: there is no such charm.
    """
    ours = ROOT / "charms" / charm / "charmcraft.yaml"
    if ours.exists():
        return yaml.safe_load(ours.read_text())
    about: Json = facts()["offers"].get(charm) or facts()["charms"][charm]
    options = {name: {"type": kind} for name, kind in about.get("options", {}).items()}
    return {**about, "config": {"options": options}}


def bases(app: bundles.BundleApplication) -> list[str]:
    """Return the bases that an application's charm has in its channel."""
    if not app.is_local:
        return declaration(app.charm)["channels"][app.body["channel"]]
    release = pathlib.Path(app.charm).parent.name  # as scripts/pack.py has it
    declared = [base.partition(":")[0] for base in _charm(app)["platforms"]]
    if release == "dist":
        return declared[:1]
    return [base for base in declared if base.endswith(f"@{release}")]


def filled(path: pathlib.Path) -> str:
    """Return an overlay's text with each *FILL-IN replaced by the example from its comment.

    `*FILL-IN` is an alias without an anchor: no YAML parser accepts a file that still has one.
    """

    def example(found: re.Match[str]) -> str:
        return f"{json.dumps(found[1])}  #"

    return re.sub(r"[*]FILL-IN  # ([^;\n]+);", example, path.read_text())


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A merged bundle beside the declarations of its charms, by application."""

    bundle: bundles.Bundle
    declared: dict[str, Json]

    def named(self, charm: str) -> list[str]:
        """Return the applications of a charm."""
        return [name for name, about in self.declared.items() if about.get("name") == charm]

    def principals(self) -> dict[str, set[str]]:
        """Return the applications whose units each subordinate application joins."""
        found: dict[str, set[str]] = collections.defaultdict(set)
        for first, second in self.bundle.relations:
            if not bundles.check_relation((first, second), self.declared):
                continue
            for end, other in ((first, second), (second, first)):
                app, beside = end.partition(":")[0], other.partition(":")[0]
                is_principal = not self.declared[beside].get("subordinate")
                if self.declared[app].get("subordinate") and is_principal:
                    found[app].add(beside)
        return found

    def options(self, name: str) -> Json:
        """Return the options that the bundle sets for an application."""
        return self.bundle.applications[name].body.get("options", {})


class Files:
    """A copy of the bundle and its overlays that are filled in, to deploy from."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        for source in (BUNDLE, *OVERLAYS, *SECOND):
            copy = folder / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(filled(source))

    def overlay(self, name: str) -> pathlib.Path:
        """Return the path of an overlay, such as `nfs` or `2604/cos`."""
        return self._folder / "overlays" / f"{name}.yaml"

    def deployment(self, *overlays: pathlib.Path) -> Deployment:
        """Merge overlays into the bundle, in order. Raises SandboxError, KeyError: no such charm."""
        bundle = bundles.load(self._folder / "bundle.yaml", overlays)
        declared = {name: declaration(name) for name in bundle.offers}
        for name, app in bundle.applications.items():
            declared[name] = _charm(app)
        return Deployment(bundle, declared)

    def write(self, name: str, overlay: Json) -> pathlib.Path:
        """Write an overlay of a test."""
        path = self.overlay(name)
        path.write_text(yaml.safe_dump(overlay))
        return path


def _charm(app: bundles.BundleApplication) -> Json:
    name = pathlib.Path(app.charm).stem if app.is_local else app.charm
    return {"name": name, **declaration(name)}
