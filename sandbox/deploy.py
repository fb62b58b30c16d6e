"""`deploy`: from a bundle to applications, relations and units; again and again without harm."""

import collections.abc
import filecmp
import os
import pathlib
import shutil
import tempfile
import typing

import yaml

from sandbox import bundle as bundles
from sandbox import model as rules
from sandbox import settings
from sandbox.engine import Progress
from sandbox.store import Application, Model, SandboxError, Store, section
from scripts import pack

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
STANDINS = REPOSITORY / "sandbox" / "standins"

Filler = collections.abc.Callable[[pathlib.Path], object]


def charm_filler(app: bundles.BundleApplication) -> Filler:
    """Return the function that writes the charm's files into a folder.

    A charm of this repository is staged from its source, exactly as `make pack` would pack it; another local charm is a
    folder; a charm from Charmhub is played by its stand-in.
    """
    name = pathlib.Path(app.charm).stem
    if (
        app.is_local
        and (REPOSITORY / "charms" / name / "charmcraft.yaml").is_file()
        and pathlib.Path(app.charm).parent.name == "dist"
    ):
        return lambda directory: pack.stage(name, directory)
    if app.is_local:
        path = pathlib.Path(app.charm)
        if not path.is_dir():
            raise SandboxError(f"{app.name}: no charm at {app.charm}")
        return lambda directory: _copy(path, directory)
    if not (STANDINS / app.charm / "charmcraft.yaml").is_file():
        known = ", ".join(sorted(path.name for path in STANDINS.iterdir() if (path / "charmcraft.yaml").is_file()))
        raise SandboxError(
            f"{app.name}: the sandbox cannot play the charm {app.charm!r} (it plays {known}): remove it in an overlay",
        )
    return lambda directory: stage_standin(app.charm, directory)


def stage_standin(name: str, directory: pathlib.Path) -> None:
    """Write a stand-in's files: its own, what the stand-ins share, and our library."""
    _copy(STANDINS / name, directory)
    if (STANDINS / "common").is_dir():
        _copy(STANDINS / "common", directory / "lib" / "common")
    _copy(REPOSITORY / "lib", directory / "lib")


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "tests"))


def read_metadata(directory: pathlib.Path) -> dict[str, typing.Any]:
    """Return a charm's charmcraft.yaml."""
    return yaml.safe_load((directory / "charmcraft.yaml").read_text())


class Deployment:
    """Changes to a model that need charms' files."""

    def __init__(self, store: Store, model: Model, progress: Progress) -> None:
        self.store = store
        self.model = model
        self.progress = progress

    def apply(self, bundle: bundles.Bundle) -> None:
        """Bring the model to what the bundle says: applications and units added, options set, changed charms upgraded.

        Raises:
            SandboxError: the bundle is wrong; nothing was changed then.
        """
        fillers = {app.name: charm_filler(app) for app in bundle.applications.values()}
        with tempfile.TemporaryDirectory(prefix="sandbox-deploy-") as scratch:
            staged = {name: pathlib.Path(scratch) / name for name in fillers}
            for name, fill in fillers.items():
                staged[name].mkdir()
                fill(staged[name])
            bundles.check(bundle, {name: read_metadata(directory) for name, directory in staged.items()})
            for app in bundle.applications.values():
                self._ensure_application(app, staged[app.name])
        for ends in bundle.relations:
            if rules.find_relation(self.model, *ends) is None:
                rules.relate(self.model, *ends)
        for app in bundle.applications.values():
            current = self.model.applications[app.name]
            while not current.subordinate and len(self.model.app_units(app.name)) < app.body["num_units"]:
                rules.add_unit(self.model, current)
        self.store.save(self.model)

    def _ensure_application(self, app: bundles.BundleApplication, staged: pathlib.Path) -> None:
        metadata = read_metadata(staged)
        declared = section(section(metadata, "config"), "options")
        options = {
            name: settings.find_secret(self.model, value).id if declared[name]["type"] == "secret" else value
            for name, value in app.body.get("options", {}).items()
        }
        current = self.model.applications.get(app.name)
        if current is not None and current.dying:
            raise SandboxError(f"application {app.name!r} is being removed: deploy again when status shows it no more")
        if current is None:
            charm = pathlib.Path(app.charm).stem if app.is_local else app.charm
            current = Application(
                name=app.name,
                charm=charm,
                source=self._stage(app.name, 0, staged),
                metadata=metadata,
                options=options,
                annotations={key: str(value) for key, value in app.body.get("annotations", {}).items()},
            )
            rules.add_application(self.model, current)
            self.progress(app.name, f"deploys charm {charm}{'' if app.is_local else ' (played by its stand-in)'}")
        else:
            settings.replace_options(self.model, current, current.options | options)
            self._upgrade(current, staged)
        for name, path in app.body.get("resources", {}).items():
            self._attach(current, name, pathlib.Path(path))

    def _stage(self, app: str, revision: int, staged: pathlib.Path) -> str:
        """Make the sandbox's own copy of a charm's files; return its folder."""
        directory = self.store.directory / "charms" / f"{app}-{revision}"
        shutil.rmtree(directory, ignore_errors=True)
        _copy(staged, directory)
        return str(directory)

    def _attach(self, app: Application, name: str, path: pathlib.Path) -> None:
        """Give a resource its content: a copy that hosts see, replaced when the file differs."""
        target = self.store.directory / "resources" / app.name / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or not filecmp.cmp(path, target, shallow=False):
            temporary = target.with_name(f".{name}.{os.getpid()}")
            shutil.copyfile(path, temporary)
            temporary.replace(target)
        app.resources[name] = str(target)

    def _upgrade(self, app: Application, staged: pathlib.Path) -> None:
        """Give the application the staged files if they differ from its own; its units then get upgrade-charm."""
        if _same_tree(staged, pathlib.Path(app.source)):
            return
        app.revision += 1
        app.source = self._stage(app.name, app.revision, staged)
        app.metadata = read_metadata(staged)
        for unit in self.model.app_units(app.name):
            rules.enqueue(self.model, unit, "upgrade-charm")
            rules.enqueue(self.model, unit, "config-changed")
        self.progress(app.name, f"upgrades to revision {app.revision}")


def _same_tree(one: pathlib.Path, other: pathlib.Path) -> bool:
    def files(root: pathlib.Path) -> dict[str, bytes]:
        return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}

    return files(one) == files(other)
