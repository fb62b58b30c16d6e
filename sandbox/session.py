"""The wait of an operator at the end of a command, and the end of a model."""

from sandbox import bundle as bundles
from sandbox import deploy as deployment
from sandbox import model as rules
from sandbox import view
from sandbox.engine import Engine, Progress
from sandbox.hosts import Hosts
from sandbox.store import Model, SandboxError, Store, Unit

_SETTLED = ("active", "blocked", "error", "terminated")
# Before each update-status after a command, for units that wait for what time brings; deploy waits
# two minutes
_PAUSES_S = (1.0, *[5.0] * 6)
_DEPLOY_PAUSES_S = (0.5, *[5.0] * 24)


def deploy(engine: Engine, bundle: bundles.Bundle, *, once: bool = False) -> None:
    """Bring the model to the bundle, and wait for active units; with `once`, only for all hooks.

    Raises:
        SandboxError: units do not become active; it names them.
    """
    with engine.change() as model:
        before = model.model_dump()
        deployment.apply(engine, bundle)
        if model.model_dump() == before:
            engine.progress("sandbox", "No changes to apply.")
    settle(engine, once=once, until_active=True)
    engine.progress("sandbox", view.summary(engine.model))
    left = _not_active(engine.model)
    if left and not once:
        raise SandboxError(f"not active: {', '.join(left)}; ./sandboxctl status shows why")


def settle(engine: Engine, *, once: bool, until_active: bool = False) -> None:
    """Run every waiting event, then, unless `once`, send update-status to units that are not settled.

    Args:
        engine: the engine to run.
        once: send no update-status.
        until_active: a unit is settled only if it is active.

    Raises:
        SandboxError: units are in error; with `until_active` it also names those that are not
            active.
    """

    def unsettled() -> set[str]:
        waiting = [
            unit
            for unit in engine.model.units.values()
            if unit.started and not engine.is_held(unit)
        ]
        if until_active:
            return {unit.name for unit in waiting if not _is_active(unit)}
        return {unit.name for unit in waiting if unit.status.name not in _SETTLED}

    engine.settle()
    pauses = _DEPLOY_PAUSES_S if until_active else _PAUSES_S
    for pause_s in () if once else pauses:
        if not unsettled() or engine.errors():
            break
        engine.settle(until=lambda: not unsettled(), listen_s=pause_s)  # a unit may wake itself
        with engine.change() as model:
            for name in sorted(unsettled() & set(model.units)):
                rules.enqueue(model, model.units[name], "update-status")
                engine.progress(
                    name, "has not settled: sending update-status, as Juju does within five minutes"
                )
        engine.settle()
    if errors := engine.errors():
        others = ", ".join(
            _not_active(engine.model)[1 : None if until_active and not once else len(errors)]
        )
        raise SandboxError(errors[0] + (f"; also not active: {others}" if others else ""))


def _not_active(model: Model) -> list[str]:
    """Return the units that are not active with their states, those in error first."""
    in_error: list[str] = []
    others: list[str] = []
    for unit in model.units.values():
        if unit.agent.name == "error":
            in_error.append(f"{unit.name} (error)")
        elif not _is_active(unit):
            others.append(f"{unit.name} ({unit.status.name})")
    return in_error + others


def _is_active(unit: Unit) -> bool:
    """Check whether a unit works: it is active, and its agent is not in error."""
    return unit.status.name == "active" and unit.agent.name != "error"


def remove_abandoned(store: Store, progress: Progress) -> None:
    """Remove a model whose clone was deleted: its hosts cannot boot any more."""
    missing = Hosts(store.name).missing_sources()
    if missing:
        progress(
            "sandbox",
            f"model {store.name} is left over from a deleted clone ({missing[0]} is missing); removing it",
        )
        remove(store, progress)


def remove(store: Store, progress: Progress) -> None:
    """Remove a model with its hosts. Raises `SandboxError` while a command uses it."""
    lock = store.try_lock("session") if store.directory.exists() else None
    if lock is None and store.directory.exists():
        raise SandboxError(f"another sandboxctl uses model {store.name!r}; wait for it, or end it")
    Hosts(store.name).destroy()
    store.forget()
    if lock is not None:
        lock.close()
    progress("sandbox", f"model {store.name} was removed")
