"""Juju's storage: attached to a unit, kept when the unit is removed, attached to another one.

While a unit has it, its files lie on the unit's host. They are kept in the model's folder when the
host is removed, and copied onto the host of the unit that gets the storage next: as from a pool
whose storage can move between machines.
"""

import collections.abc
import pathlib
import shutil

from sandbox.store import Application, Model, SandboxError, Storage, Store, Unit
from slurm_ddp import text_table
from slurm_ddp.commands import run

_COPY_S = 600.0
_GUEST = pathlib.PurePosixPath(
    "var/lib/juju/storage"
)  # where guest/agent.py has it, below a host's root


def give(
    model: Model, app: Application, unit: Unit, attach: collections.abc.Sequence[str]
) -> list[tuple[str, int]]:
    """Give a new unit the storage that its charm declares; some may exist already."""
    wanted = [find(model, identifier) for identifier in attach]
    declared = app.section("storage")
    for storage in wanted:
        if storage.name not in declared:
            raise SandboxError(
                f"{app.charm} has no storage {storage.name!r}: it cannot take {storage.id}"
            )
        if storage.unit is not None:
            raise SandboxError(f"storage {storage.id} is attached to {storage.unit}")
        if storage.machine is not None:
            raise SandboxError(
                f"storage {storage.id} is still being detached: try again in a moment"
            )
    given: list[tuple[str, int]] = []
    for name in declared:
        storage = next((one for one in wanted if one.name == name), None) or _new(model, name)
        storage.unit, storage.machine = unit.name, unit.machine
        given.append((storage.name, storage.index))
    return given


def find(model: Model, identifier: str) -> Storage:
    """Return a storage by its id, such as volume/0. Raises `SandboxError`."""
    if identifier not in model.storage:
        raise SandboxError(
            f"storage {identifier!r} not found (there is: {', '.join(model.storage) or 'none'})"
        )
    return model.storage[identifier]


def release(model: Model, unit: Unit) -> None:
    """Detach a removed unit's storage; delete it if it is to be destroyed."""
    for storage in [storage for storage in model.storage.values() if storage.unit == unit.name]:
        storage.unit = None
        if storage.destroy:
            del model.storage[storage.id]


def destroy_with(model: Model, units: collections.abc.Iterable[Unit]) -> None:
    """Have the storage that these units have now destroyed with them."""
    names = {unit.name for unit in units}
    for storage in model.storage.values():
        if storage.unit in names:
            storage.destroy = True


def remove(store: Store, model: Model, identifier: str) -> None:
    """Destroy a detached storage with its files."""
    storage = find(model, identifier)
    if storage.unit is not None:
        raise SandboxError(
            f"storage {storage.id} is attached to {storage.unit}: remove the unit first"
        )
    shutil.rmtree(_kept(store, storage), ignore_errors=True)
    del model.storage[storage.id]


def keep(store: Store, model: Model, machine: int, root: pathlib.Path) -> None:
    """Save the files of detached storage before its host is removed; `root` is the host's."""
    for storage in model.storage.values():
        if storage.machine == machine and storage.unit is None:
            _copy(_on_host(root, storage), _kept(store, storage))
            storage.machine = None


def bring(store: Store, model: Model, machine: int, root: pathlib.Path) -> None:
    """Put kept files onto the new host of the unit that has their storage now."""
    for storage in model.storage.values():
        kept = _kept(store, storage)
        if storage.machine == machine and kept.exists():
            _copy(kept, _on_host(root, storage))
            shutil.rmtree(kept)


def as_text(model: Model) -> str:
    """Return the table of `juju storage`."""
    rows = [("Unit", "Storage ID", "Type", "Status")]
    for storage in model.storage.values():
        rows.append(
            (
                storage.unit or "",
                storage.id,
                "filesystem",
                "attached" if storage.unit else "detached",
            )
        )
    return f"{text_table.aligned(rows)}\n"


def _new(model: Model, name: str) -> Storage:
    storage = Storage(name=name, index=model.next_storage)
    model.next_storage += 1
    model.storage[storage.id] = storage
    return storage


def _kept(store: Store, storage: Storage) -> pathlib.Path:
    return store.directory / "storage" / f"{storage.name}-{storage.index}"


def _on_host(root: pathlib.Path, storage: Storage) -> pathlib.Path:
    return root / _GUEST / f"{storage.name}-{storage.index}"


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy a folder with its owners and modes; it appears whole or not at all."""
    if not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    run("/usr/bin/cp", "-a", source, partial, timeout=_COPY_S)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
