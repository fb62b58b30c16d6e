"""remove: delete runs with all of their files, or only their checkpoints."""

import dataclasses
import pathlib
import re

from ddp.host import disk_usage
from ddp.options import models
from ddp.problem import ParameterError, Problem
from ddp.results import tables
from ddp.results.progress import Log, with_progress
from ddp.results.result import Result
from ddp.run import catalog, dependents, folder, removal
from ddp.run.model import Run
from ddp.settings import Settings
from ddp.submit import tokens
from ddp.workspace.folders import Workspace

_LOOK_S = 600.0  # sizes are read file by file
_DELETE_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Item:
    """A thing that can be removed."""

    kind: str
    name: str
    paths: tuple[pathlib.Path, ...]
    size_bytes: int = 0

    def describe(self) -> dict[str, object]:
        """Return the item for programs."""
        return {"kind": self.kind, "name": self.name, "bytes": self.size_bytes}


def remove(settings: Settings, params: models.RemoveRuns, log: Log) -> Result:
    """Remove the named runs, or their checkpoints. Raises Problem before anything is removed."""
    workspace = settings.workspace
    names = dict.fromkeys(re.split("[, ]+", params.run))
    runs: list[Run] = []
    for name in names:
        runs += _named(workspace, name)
    for run in runs:
        claim(workspace, run.name)
    _refuse_used(workspace, runs)

    items: list[Item] = []
    for run in runs:
        if params.checkpoints:
            items += checkpoints_of(workspace, run)
        else:
            items.append(Item("run", run.name, (run.folder,)))
    items = measured(workspace, items)
    by_name = {run.name: run for run in runs}
    for item in items:
        hide(workspace, by_name[item.name.partition("/")[0]], item)
    delete_hidden(workspace, len(items), log)
    return result(items, {"removed": ", ".join(names)})


def _named(workspace: Workspace, name: str) -> list[Run]:
    """Return a run of this account by its name; a sweep's runs come before it.

    Raises ParameterError.
    """
    path = workspace.runs / name
    try:
        run = catalog.read(workspace, name, is_brief=True)
    except Problem as e:
        raise ParameterError("run", e.what, remedy=e.remedy) from e
    is_run = run.record or run.summary or run.job_id or run.metrics.num_records
    if not is_run:
        text = f"{path} is a folder without a run's files"
        raise ParameterError("run", text, remedy=catalog.LIST)
    runs = [*elements_of(workspace, run), run]
    for one in runs:
        workspace.do(removal.check_own, path=one.folder)
    return runs


def elements_of(workspace: Workspace, run: Run) -> list[Run]:
    """Return the runs of a sweep; [] for any other run."""
    if run.kind != "sweep":
        return []
    names = workspace.do(removal.list_elements, path=run.folder)
    return [catalog.read(workspace, name, is_brief=True) for name in names]


def claim(workspace: Workspace, name: str) -> None:
    """Keep other commands from submitting a run. Raises ParameterError if one is doing that."""
    if not workspace.claims.take(name):
        text = f"another command is submitting {name}"
        raise ParameterError("run", text, remedy=catalog.LIST)


def _refuse_used(workspace: Workspace, runs: list[Run]) -> None:
    """Raise ParameterError if a job in the queue uses one of these runs."""
    in_queue = dependents.ask(workspace)
    for run in runs:
        if why := in_queue.reason(run):
            text = f"{run.name} is in use: {why}; wait for its end, or cancel it"
            raise ParameterError("run", text, remedy=catalog.LIST)


# -- what goes -------------------------------------------------------------------------------------


def checkpoints_of(workspace: Workspace, run: Run) -> list[Item]:
    """List a run's checkpoints, whole or not, the oldest first."""
    saved = workspace.do(removal.list_saved, timeout_s=_LOOK_S, path=run.folder)
    left = workspace.do(removal.leftovers, path=run.folder)
    paths = [*left, *(one.path for one in saved)]
    return [checkpoint(run, path) for path in paths]


def checkpoint(run: Run, path: pathlib.Path) -> Item:
    """Return the item of a checkpoint."""
    return Item("checkpoint", f"{run.name}/{path.relative_to(run.folder)}", (path,))


def measured(workspace: Workspace, items: list[Item]) -> list[Item]:
    """Return the items with their sizes."""
    paths: list[pathlib.Path] = []
    for item in items:
        paths += item.paths
    sizes = iter(workspace.do(removal.measure, timeout_s=_LOOK_S, paths=paths))
    found: list[Item] = []
    for item in items:
        size_bytes = sum(next(sizes) for _ in item.paths)
        found.append(dataclasses.replace(item, size_bytes=size_bytes))
    return found


def hide(workspace: Workspace, run: Run, item: Item) -> None:
    """Hide a run, or a checkpoint of it, from all readers. Raises Problem."""
    _check_unchanged(workspace, run)
    if item.kind == "checkpoint":
        workspace.do(removal.unlink_names, path=run.folder, gone=item.paths)
    for path in item.paths:
        workspace.do(removal.hide, runs=workspace.runs, path=path)
    if item.kind == "run":
        tokens.drop(workspace, run.name)


def _check_unchanged(workspace: Workspace, run: Run) -> None:
    """Raise Problem if a run was submitted again since it was looked at, from another host."""
    now = workspace.do(folder.read_record, path=run.folder)
    if now != run.record:
        raise Problem(f"{run.name} was submitted again meanwhile", remedy=catalog.LIST)


def delete_hidden(workspace: Workspace, count: int, log: Log) -> None:
    """Delete the hidden files and folders; the next command deletes any that this one leaves."""
    paths = workspace.do(removal.hidden, runs=workspace.runs)

    def delete() -> None:
        workspace.do(removal.delete, timeout_s=_DELETE_S, paths=paths)

    text = f"removing {count} things" if count > 1 else "removing it"
    with_progress(log, text, delete)


def result(items: list[Item], shown: dict[str, str]) -> Result:
    """List the items with sizes and their sum."""
    total = sum(item.size_bytes for item in items)
    rows = [["KIND", "NAME", "SIZE"]]
    for item in items:
        rows.append([item.kind, item.name, disk_usage.in_words(item.size_bytes)])
    found = {**shown, "count": str(len(items)), "size": disk_usage.in_words(total)}
    if items:
        found["items"] = tables.Table(rows)
    values: dict[str, object] = {**shown, "count": len(items), "bytes": total}
    values["items"] = [item.describe() for item in items]
    return Result(found, values)
