"""Choose the next of a unit's waiting events; everything that Juju leaves open is drawn from the model's seed.

Sources: Juju's uniter (internal/worker/uniter of juju/juju: resolver.go, relation/resolver.go, actions/resolver.go,
runcommands/runcommands.go, reboot/resolver.go, operation/executor.go), and what was seen on Juju 4.0.15.
docs/reference/sandbox.md has the table.
A draw depends on the seed, the unit and how many hooks the unit has run, not on the speed of this machine.
"""

import time

from sandbox import model as rules
from sandbox.store import Event, Model, Unit

_ALONE = ("install", "start", "stop", "remove", "storage-attached", "storage-detaching", "upgrade-charm")
_UPDATE_STATUS = 0.1  # the share of a unit's idle moments in which update-status comes


def next_event(model: Model, unit: Unit) -> Event | None:
    """Return the event that the unit's agent takes next; None while none may be delivered.

    A unit in error gets the failed event again after a pause, and actions meanwhile; nothing else.
    """
    if unit.executing is not None:
        return unit.executing  # where nobody holds its locks it was interrupted, and runs again from its start
    failed = unit.failed
    if failed is not None:
        action = next((event for event in unit.events if event.action), None)
        return action or (failed if time.time() >= failed.retry_at else None)
    waiting = [event for event in unit.events if event.not_before <= unit.ran]
    if not waiting:
        return None
    created = [event for event in waiting if event.kind == "relation-created"]
    if not unit.started and created and waiting[0].kind not in ("storage-attached", "install"):
        return _one_of(model, unit, created)  # all of them come before leader-elected, config-changed and start
    if waiting[0].kind in _ALONE:
        return waiting[0]
    heads: dict[int | None, Event] = {}  # the first of each relation, and the first of all others
    for event in waiting:
        if event.kind in _ALONE:
            break
        heads.setdefault(event.relation, event)
    return _one_of(model, unit, list(heads.values()))


def _one_of(model: Model, unit: Unit, events: list[Event]) -> Event:
    return events[int(model.draw("next", unit.name, unit.ran) * len(events))]


def ran(model: Model, unit: Unit, *, update_status: bool = True) -> None:
    """Count a hook of `unit`; if nothing else waits, update-status may come."""
    unit.ran += 1
    idle = unit.started and not unit.dying and not unit.events
    if update_status and idle and model.draw("update-status", unit.name, unit.ran) < _UPDATE_STATUS:
        rules.enqueue(model, unit, "update-status")


def rebooted(model: Model, machine: int) -> None:
    """Queue what the units of a machine get after its reboot, in an order of units that the seed decides.

    Each gets start, and by chance config-changed.
    """
    units = [unit for unit in model.machine_units(machine) if unit.started and not unit.dying]
    for unit in sorted(units, key=lambda unit: model.draw("reboot", unit.name, unit.ran)):
        interrupted = [event for event in unit.events if unit.has_started(event)]
        waiting = [event for event in unit.events if event not in interrupted and not event.asked]
        unit.events = []
        rules.enqueue(model, unit, "start")
        if model.draw("reboot config-changed", unit.name, unit.ran) < 0.5:
            rules.enqueue(model, unit, "config-changed")
        behind = [event for event in waiting if not any(event.same_as(other) for other in unit.events)]
        unit.events = interrupted + unit.events + behind  # start waits for a hook that was interrupted
