"""`deploy`: from a bundle to applications, relations and units; again and again without harm."""

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
from sandbox.engine import Engine
from sandbox.store import Application, Model, SandboxError, section
from scripts import pack

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
STANDINS = REPOSITORY / "sandbox" / "standins"

Json = dict[str, typing.Any]


def stage(app: bundles.BundleApplication, directory: pathlib.Path) -> None:
    """Write the files of an application's charm into a folder; `SandboxError` if there is none.

    A charm of this repository is staged from its source, exactly as `make pack` would pack it;
    another local charm is a folder; a charm from Charmhub is played by its stand-in, which gets the
    stand-ins' common part, our library, and its base, which selects upstream's code for Ubuntu
    24.04 or 26.04.
    """
    path = pathlib.Path(app.charm)
    packed = {REPOSITORY / "dist" / name for name in ("", *(base.version for base in pack.BASES))}
    if app.is_local and path.parent in packed and path.stem in pack.charm_names():
        pack.stage(path.stem, directory)
    elif app.is_local:
        if not path.is_dir():
            raise SandboxError(f"{app.name}: no charm at {app.charm}")
        _copy(path, directory)
    else:
        known = sorted(found.parent.name for found in STANDINS.glob("*/charmcraft.yaml"))
        if app.charm not in known:
            raise SandboxError(
                f"{app.name}: the sandbox cannot play the charm {app.charm!r} (it plays {', '.join(known)}): "
                "remove it in an overlay"
            )
        _copy(STANDINS / app.charm, directory)
        _copy(STANDINS / "common", directory / "lib" / "common")
        _copy(REPOSITORY / "lib" / "slurm_ddp", directory / "lib" / "slurm_ddp")
        (directory / "base").write_text(app.body.get("base", bundles.BASES[0]))


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    shutil.copytree(
        source,
        target,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "tests"),
    )


def apply(engine: Engine, bundle: bundles.Bundle) -> None:
    """Bring the model to the bundle's state: applications, units, options, changed charms.

    The caller holds the model.

    Raises:
        SandboxError: the bundle is wrong; nothing changed.
    """
    model = engine.model
    with tempfile.TemporaryDirectory(prefix="sandbox-deploy-") as scratch:
        staged = {name: pathlib.Path(scratch) / name for name in bundle.applications}
        metadata: dict[str, Json] = {}
        for name, app in bundle.applications.items():
            stage(app, staged[name])
            metadata[name] = yaml.safe_load((staged[name] / "charmcraft.yaml").read_text())
        bundles.check(bundle, metadata)
        bundles.check_playable(bundle)
        _compare_constraints(model, bundle)
        for name, app in bundle.applications.items():
            _ensure_application(engine, app, staged[name], metadata[name])
    for ends in bundle.relations:
        if rules.find_relation(model, *ends) is None:
            rules.relate(model, *ends)
    for app in bundle.applications.values():
        current = model.applications[app.name]
        while not current.subordinate and len(model.app_units(app.name)) < app.body["num_units"]:
            rules.add_unit(model, current, attach=app.attach)


def _compare_constraints(model: Model, bundle: bundles.Bundle) -> None:
    """Give applications with units the bundle's constraints as this Juju does.

    A Juju that adds arch=amd64 itself misses it in the bundle when it compares
    (internal/bundle/changes/model.go, matchesCharmPermutation), so it uploads the charm again; a
    local one it looks for by its name in the model.

    Raises:
        SandboxError: it would not find the charm.
    """
    if not model.version.gives_arch:
        return
    for app in bundle.applications.values():
        current = model.applications.get(app.name)
        if current is None or current.subordinate:
            continue
        constraints = app.body.get("constraints", "")
        if app.is_local and "arch=" not in constraints:
            path = pathlib.Path(app.charm).with_suffix("")
            raise SandboxError(f"cannot deploy local charm at {path}: file does not exist")
        current.constraints = constraints


def _ensure_application(
    engine: Engine, app: bundles.BundleApplication, staged: pathlib.Path, metadata: Json
) -> None:
    model = engine.model
    declared = section(section(metadata, "config"), "options")
    options: Json = dict(app.body.get("options", {}))
    for name, value in options.items():
        if declared[name]["type"] == "secret":
            options[name] = settings.find_secret(model, value).id
    current = model.applications.get(app.name)
    if current is None:
        charm = pathlib.Path(app.charm).stem
        annotations = {key: str(value) for key, value in app.body.get("annotations", {}).items()}
        source = _keep(engine, app.name, 0, staged)
        current = Application(
            name=app.name,
            charm=charm,
            source=source,
            metadata=metadata,
            options=options,
            annotations=annotations,
        )
        current.constraints = app.body.get("constraints", "")
        if model.version.gives_arch and not current.subordinate:
            current.constraints = current.constraints or bundles.ARCH
        rules.add_application(model, current)
        engine.progress(
            app.name, f"deploys charm {charm}{'' if app.is_local else ' (played by its stand-in)'}"
        )
    elif current.dying:
        raise SandboxError(
            f"application {app.name!r} is being removed: deploy again when status shows it no more"
        )
    else:
        settings.replace_options(model, current, current.options | options)
        _upgrade(engine, current, staged, metadata)
    for name, path in app.body.get("resources", {}).items():
        _attach(engine, current, name, pathlib.Path(path))


def _keep(engine: Engine, app: str, revision: int, staged: pathlib.Path) -> str:
    """Make the sandbox's own copy of a charm's files; return its folder."""
    directory = engine.store.directory / "charms" / f"{app}-{revision}"
    shutil.rmtree(directory, ignore_errors=True)
    _copy(staged, directory)
    return str(directory)


def _attach(engine: Engine, app: Application, name: str, path: pathlib.Path) -> None:
    """Give a resource its content: a copy that hosts see, replaced when the file differs."""
    target = engine.store.directory / "resources" / app.name / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or not filecmp.cmp(path, target, shallow=False):
        temporary = target.with_name(f".{name}.{os.getpid()}")
        shutil.copyfile(path, temporary)
        temporary.replace(target)
    app.resources[name] = str(target)


def _upgrade(engine: Engine, app: Application, staged: pathlib.Path, metadata: Json) -> None:
    """Give the application the staged files if they differ; its units then get upgrade-charm."""
    if _contents(staged) == _contents(pathlib.Path(app.source)):
        return
    app.revision += 1
    app.source = _keep(engine, app.name, app.revision, staged)
    app.metadata = metadata
    for unit in engine.model.app_units(app.name):
        rules.enqueue(engine.model, unit, "upgrade-charm")
        rules.enqueue(engine.model, unit, "config-changed")
    engine.progress(app.name, f"upgrades to revision {app.revision}")


def _contents(root: pathlib.Path) -> dict[pathlib.Path, bytes]:
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
