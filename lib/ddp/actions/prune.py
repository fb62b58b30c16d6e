"""prune: show runs and environments that are old and unused, with sizes, and remove them."""

import dataclasses
import datetime
import pathlib
import time

from ddp.actions import list as listing
from ddp.actions import remove as removing
from ddp.actions.remove import Item
from ddp.environment import archives, store
from ddp.options import models
from ddp.problem import Command, Problem
from ddp.results.progress import Log
from ddp.results.result import Result
from ddp.run import catalog, dependents, folder, removal, untrusted
from ddp.run.model import UTC, Run
from ddp.settings import Settings
from ddp.workspace import operations
from ddp.workspace.folders import Contents, Manifest, Workspace, WorkspaceError

_CLAIM = "environments"  # of commands that make one
_LOOK_S = 120.0


def prune(settings: Settings, params: models.Prune, log: Log) -> Result:
    """Show unused runs and environments, and with `yes` remove them. Raises Problem."""
    workspace = settings.workspace
    before = listing.begin_of(params.older, "older")
    units = _units(workspace)
    old = _old_and_free(workspace, units, before)

    keeps_runs = params.keep_best or params.keep_last is not None
    going: list[Run] = [] if keeps_runs else _runs(old)
    items = [Item("run", run.name, (run.folder,)) for run in going]
    if keeps_runs:
        items = _checkpoints(workspace, old, params)
    staying = {run.name for run in _runs(units)} - {run.name for run in going}
    unused = _unused_environments(settings, before, staying, log)
    items += [_environment_item(one) for one in unused]
    items = removing.measured(workspace, items)

    if params.dry_run or not params.yes:
        shown = removing.result(items, {})
        return _with_command(settings, params, shown) if items else shown
    _remove(settings, old, items, unused, log)
    return removing.result(items, {})


def _runs(units: "list[_Unit]") -> list[Run]:
    found: list[Run] = []
    for unit in units:
        found += unit.runs
    return found


def _with_command(settings: Settings, params: models.Prune, shown: Result) -> Result:
    """Add the command that removes the runs and environments shown."""
    options: dict[str, object] = {
        "older": params.older,
        "keep-best": "true" if params.keep_best else None,
        "keep-last": params.keep_last,
        "yes": "true",
    }
    line = settings.render(Command("prune", options))
    return dataclasses.replace(
        shown,
        shown={**shown.shown, "to-remove-them": line},
        values={**shown.values, "to-remove-them": line},
    )


def _remove(
    settings: Settings, old: "list[_Unit]", items: list[Item], unused: list[Manifest], log: Log
) -> None:
    workspace = settings.workspace
    own = [item for item in items if item.kind in ("run", "checkpoint")]
    runs = {run.name: run for run in _runs(old)}
    for item in own:
        name = item.name.partition("/")[0]
        removing.claim(workspace, name)
        removing.hide(workspace, runs[name], item)
        workspace.claims.drop(name)
    removing.delete_hidden(workspace, len(own), log)
    if not unused:
        return
    if not workspace.claims.take(_CLAIM):
        raise Problem("another command is making an environment; try again when it has ended")
    hashes = [one.hash for one in unused]
    place = str(workspace.environments)
    workspace.do(archives.remove_environments, timeout_s=_LOOK_S, folder=place, hashes=hashes)


# -- runs ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Unit:
    """A run, or a sweep with its runs, which go together."""

    runs: tuple[Run, ...]  # a sweep's own comes last

    @property
    def written(self) -> float:
        """When one of their files changed last."""
        return max(run.written for run in self.runs)


def _units(workspace: Workspace) -> list[_Unit]:
    """Read this account's runs, the newest first."""
    names = catalog.names(workspace)
    known = [catalog.read(workspace, name, is_brief=True) for name in names]
    sweeps = {run.name for run in known if run.kind == "sweep"}
    units: list[_Unit] = []
    for run in known:
        if run.record.get("sweep") in sweeps:  # it comes with its sweep
            continue
        units.append(_Unit((*removing.elements_of(workspace, run), run)))
    return units


def _old_and_free(workspace: Workspace, units: list[_Unit], before: float) -> list[_Unit]:
    """Keep those that are old, belong to this account, and that no job uses. Raises Problem."""
    in_queue = dependents.ask(workspace)
    found: list[_Unit] = []
    for unit in units:
        is_used = any(in_queue.reason(run) for run in unit.runs)
        if unit.written < before and not is_used and _is_own(workspace, unit):
            found.append(unit)
    return found


def _is_own(workspace: Workspace, unit: _Unit) -> bool:
    try:
        for run in unit.runs:
            workspace.do(removal.check_own, path=run.folder)
    except Problem:
        return False
    return True


def _checkpoints(workspace: Workspace, units: list[_Unit], params: models.Prune) -> list[Item]:
    """Return the checkpoints that the options do not keep."""
    items: list[Item] = []
    for unit in units:
        for run in unit.runs:
            saved = workspace.do(removal.list_saved, timeout_s=_LOOK_S, path=run.folder)
            left = workspace.do(removal.leftovers, path=run.folder)
            kept = _kept(saved, params)
            paths = [*left, *(one.path for one in saved if one not in kept)]
            items += [removing.checkpoint(run, path) for path in paths]
    return items


def _kept(saved: list[removal.Saved], params: models.Prune) -> list[removal.Saved]:
    kept: list[removal.Saved] = []
    if params.keep_last:
        kept = saved[-params.keep_last :]
    if params.keep_best:
        best = [one for one in saved if one.is_best]
        kept += best or saved[-1:]
    return kept


# -- environments ----------------------------------------------------------------------------------


def _unused_environments(
    settings: Settings, before: float, staying: set[str], log: Log
) -> list[Manifest]:
    """List the account's own environments, layers and images that no run and no job uses.

    `staying` are the account's runs that stay. The trainer's environments serve the runs of all
    users. The newest environment of each build stays, and so does the base of a layer that stays.
    """
    workspace = settings.workspace
    contents = workspace.look()
    stored = [*contents.environments, *contents.images]
    mine = [one for one in stored if one.folder == str(workspace.environments)]
    old = [one for one in mine if _created(one) < before]
    if not old:
        return []

    kept = _used(workspace, staying) | _newest(settings, contents)
    if _serves_all(workspace):
        try:
            kept |= workspace.do(_hashes_of_users, timeout_s=_LOOK_S, path=workspace.path)
        except WorkspaceError as e:
            log(f"environments stay, since it is not known which ones users need: {e.what}")
            return []
    kept |= {one.hash for one in mine if one not in old}
    kept |= {one.base for one in stored if one.base and one.hash in kept}
    return [one for one in old if one.hash not in kept]


def _created(one: Manifest) -> float:
    """Return when an environment was made; one without a time counts as new."""
    try:
        made = datetime.datetime.strptime(one.created, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        return time.time()
    return made.replace(tzinfo=UTC).timestamp()


def _newest(settings: Settings, contents: Contents) -> set[str]:
    """Return the hashes of the environments that jobs use by default."""
    newest: dict[str, str] = {}
    for one in contents.environments:  # the newest first
        if not one.name and not one.base:
            newest.setdefault(one.build, one.hash)
    kept = set(newest.values())
    installed = store.Store(settings).installed(contents)
    if installed is not None:
        kept.add(installed.hash)
    return kept


def _serves_all(workspace: Workspace) -> bool:
    """Return whether this account's environments serve the jobs of all users."""
    return workspace.folder == workspace.path and bool(workspace.account)


def _used(workspace: Workspace, staying: set[str]) -> set[str]:
    """Return the hashes of the environments of runs and of jobs. Raises Problem."""
    user = None if _serves_all(workspace) else workspace.user
    used = set(store.in_use(workspace, user).values())
    places = [workspace.runs / name for name in staying]
    return used | workspace.do(_environments_of, timeout_s=_LOOK_S, places=places)


def _environments_of(places: list[pathlib.Path]) -> set[str]:
    return {str(folder.read_record(place).get("environment")) for place in places}


def _hashes_of_users(path: pathlib.Path) -> set[str]:
    """Return the hashes that users' runs refer to, and those of the bases of users' layers.

    Raises OSError if a user's folder cannot be read.
    """
    found: set[str] = set()
    users = path / operations.USERS
    if not users.is_dir():
        return found
    for user in sorted(users.iterdir()):
        runs = user / "runs"
        if runs.is_dir():
            found |= _environments_of(list(runs.iterdir()))
        for manifest in (user / "environments").glob("*.json"):
            found.add(str(untrusted.json_object(manifest).get("base")))
    return found


def _environment_item(one: Manifest) -> Item:
    kind = "environment"
    if one.digest:
        kind = "image"
    elif one.base:
        kind = "layer"
    name = f"{one.name} ({one.hash})" if one.name else one.hash
    archive = pathlib.Path(one.archive)
    manifest = archive.with_name(f"{one.hash}.json")
    return Item(kind, name, (archive, manifest))
