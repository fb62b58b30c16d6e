"""Juju's rules as changes to a `store.Model`: the events that follow from commands and from hooks.

Nothing here touches a host. The order of events is Juju's: storage-attached, install, then the unit
enters the scope of its relations; relation-created, leader-elected, config-changed, start; then
relation-joined and relation-changed of the units in scope; when they leave, relation-departed,
relation-broken; at the end stop and remove. (Sources: Juju 3.6 documentation, "Hook";
internal/worker/uniter of juju/juju: resolver.go, relation/resolver.go, actions/resolver.go,
runcommands/runcommands.go, reboot/resolver.go, operation/executor.go; observations on Juju 4.0.15.)
docs/reference/sandbox.md has the table.
"""

import collections.abc
import time
import typing

from sandbox import bundle as bundles
from sandbox import storage
from sandbox.store import Application, Event, Model, Relation, SandboxError, Status, Unit

Json = dict[str, typing.Any]


def enqueue(model: Model, unit: Unit, kind: str, **fields: typing.Any) -> Event | None:
    """Add an event for `unit`, unless the same one already waits; a running one does not count."""
    event = Event(kind=kind, sequence=model.next_sequence, **fields)
    if event.relation is not None:
        event.endpoint = model.relations[event.relation].endpoint_of(unit.app)
    waiting = [other for other in unit.events if other is not unit.executing]
    if kind != "action" and any(event.same_as(other) for other in waiting):
        return None
    model.next_sequence += 1
    joins = [
        other
        for other in waiting
        if other.relation == event.relation and other.kind == "relation-joined"
    ]
    is_of_application = event.kind == "relation-changed" and event.remote is None
    place = unit.events.index(joins[0]) if joins and is_of_application else len(unit.events)
    unit.events.insert(place, event)
    return event


def add_application(model: Model, app: Application) -> None:
    """Add an application without units, and its peer relations."""
    model.applications[app.name] = app
    for endpoint in app.section("peers"):
        _new_relation(model, [(app.name, endpoint)], container=False)


def _new_relation(model: Model, ends: list[tuple[str, str]], *, container: bool) -> Relation:
    relation = Relation(id=model.next_relation, ends=ends, container=container)
    model.next_relation += 1
    model.relations[relation.id] = relation
    return relation


def add_unit(
    model: Model,
    app: Application,
    principal: Unit | None = None,
    attach: collections.abc.Sequence[str] = (),
) -> Unit:
    """Add a unit with its first events. A principal gets a machine; a subordinate shares it.

    `attach` names storage that it gets in place of new one.
    """
    number = model.next_units.get(app.name, 0)
    name = f"{app.name}/{number}"
    machine = model.next_machine if principal is None else principal.machine
    unit = Unit(
        name=name, app=app.name, machine=machine, principal=principal.name if principal else None
    )
    unit.storages = storage.give(model, app, unit, attach)
    model.next_units[app.name] = number + 1
    if principal is None:
        model.next_machine += 1
    unit.address = principal.address if principal else ""
    unit.status = Status(
        name="waiting", message="waiting for machine" if principal is None else "installing agent"
    )
    model.units[name] = unit
    for one in unit.storages:
        enqueue(model, unit, "storage-attached", storage=one)
    enqueue(model, unit, "install")
    for relation in model.app_relations(app.name):
        if takes_part(model, relation, unit):
            enqueue(model, unit, "relation-created", relation=relation.id)
    if model.leader(app.name) == name:
        enqueue(model, unit, "leader-elected")
    enqueue(model, unit, "config-changed")
    enqueue(model, unit, "start")
    return unit


def relate(model: Model, first: str, second: str) -> Relation:
    """Relate two `application:endpoint`s. Raises `SandboxError` if they do not fit."""
    metadata = {name: app.metadata for name, app in model.applications.items()}
    container = bundles.check_relation((first, second), metadata)
    if find_relation(model, first, second):
        raise SandboxError(f"{first} and {second} are related already")
    ends = _ends(first, second)
    for app, endpoint in ends:
        _check_end(model, app, endpoint)
    relation = _new_relation(model, ends, container=container)
    units = [unit for app, _ in ends for unit in model.app_units(app)]
    for unit in units:
        if unit.dying:
            continue
        if takes_part(model, relation, unit):
            enqueue(model, unit, "relation-created", relation=relation.id)
        if unit.installed:
            _enter_scope(model, relation, unit)
    return relation


def _check_end(model: Model, app: str, endpoint: str) -> None:
    """Raise `SandboxError` if an endpoint takes no further relation."""
    if model.applications[app].dying:
        raise SandboxError(f"application {app!r} is being removed")
    limit = bundles.endpoints_of(model.applications[app].metadata)[endpoint]["limit"]
    used = sum((app, endpoint) in other.ends for other in model.relations.values())
    if limit is not None and used >= limit:
        most = f"takes {limit} relation at most"
        raise SandboxError(f"{app}:{endpoint} {most}: remove the other one first")


def _declares(model: Model, app: str, endpoint: str) -> bool:
    """Return whether the charm declares the endpoint itself, unlike the implicit juju-info."""
    return any(
        endpoint in model.applications[app].section(role)
        for role in ("provides", "requires", "peers")
    )


def takes_part(model: Model, relation: Relation, unit: Unit) -> bool:
    """Return whether `unit` sees `relation`; a container relation, only on its own machine."""
    if not _declares(model, unit.app, relation.endpoint_of(unit.app)):
        return False
    if not relation.container or unit.principal is None:
        return True
    return any(
        other.app == relation.remote_of(unit.app) for other in model.machine_units(unit.machine)
    )


def _enter_scope(model: Model, relation: Relation, unit: Unit) -> None:
    """Let `unit` enter `relation`: subordinates are created, and units that meet join."""
    if unit.name in relation.unit_data or relation.dying:
        return
    if relation.container and not _born_together(model, relation, unit):
        return
    relation.unit_data[unit.name] = addresses(unit)
    if relation.app_data.get(relation.remote_of(unit.app)):
        application_changed(model, relation, unit)
    for other in model.neighbours(relation, unit):
        for here, there in ((unit, other), (other, unit)):
            if _declares(model, here.app, relation.endpoint_of(here.app)):
                enqueue(model, here, "relation-joined", relation=relation.id, remote=there.name)
                enqueue(model, here, "relation-changed", relation=relation.id, remote=there.name)


def application_changed(model: Model, relation: Relation, unit: Unit) -> None:
    """Tell a unit in scope of the other application's data, before it meets more of its units."""
    if unit.name in relation.unit_data and not unit.dying and takes_part(model, relation, unit):
        enqueue(model, unit, "relation-changed", relation=relation.id)


def addresses(unit: Unit) -> dict[str, str]:
    """Return the keys that Juju puts into each unit's databag."""
    return {
        "egress-subnets": f"{unit.address}/32",
        "ingress-address": unit.address,
        "private-address": unit.address,
    }


def _born_together(model: Model, relation: Relation, unit: Unit) -> bool:
    """Create the subordinate on a principal's machine; return whether `unit` may enter."""
    remote = model.applications[relation.remote_of(unit.app)]
    is_beside = any(other.app == remote.name for other in model.machine_units(unit.machine))
    if unit.principal is None and remote.subordinate and not is_beside:
        add_unit(model, remote, principal=unit)
    return unit.principal is None or is_beside


def remove_applications(model: Model, names: collections.abc.Sequence[str]) -> None:
    """Remove applications with their units and relations; each is forgotten with its last unit."""
    apps = [model.application(name) for name in names]
    for app in apps:
        app.dying = True
    for app in apps:
        for relation in model.app_relations(app.name):
            if not relation.peer and relation.id in model.relations:
                remove_relation(model, relation)
        for unit in model.app_units(app.name):
            remove_unit(model, unit)
    _forget_applications(model)


def _forget_applications(model: Model) -> None:
    for app in [
        app for app in model.applications.values() if app.dying and not model.app_units(app.name)
    ]:
        for relation in model.app_relations(app.name):
            relation.dying = True
        _forget_relations(model)
        if not model.app_relations(app.name):
            del model.applications[app.name]
            for secret in [
                secret
                for secret in model.secrets.values()
                if secret.owner == f"application:{app.name}"
            ]:
                del model.secrets[secret.id]


def find_relation(model: Model, first: str, second: str) -> Relation | None:
    """Return the relation of two `application:endpoint`s; None if it does not exist."""
    ends = _ends(first, second)
    return next((relation for relation in model.relations.values() if relation.ends == ends), None)


def _ends(*words: str) -> list[tuple[str, str]]:
    """Return `application:endpoint`s as a relation holds them."""
    return sorted((app, endpoint) for app, _, endpoint in (word.partition(":") for word in words))


def remove_relation(model: Model, relation: Relation) -> None:
    """End a relation on both sides, and remove the subordinates that it placed."""
    if relation.dying:
        return
    relation.dying = True
    for unit in list(model.units.values()):
        if unit.app in dict(relation.ends) and takes_part(model, relation, unit):
            _leave(model, relation, unit, departing=None)
            if (
                relation.container
                and unit.principal
                and unit.principal.split("/")[0] == relation.remote_of(unit.app)
            ):
                remove_unit(model, unit)
    _forget_relations(model)


def _leave(model: Model, relation: Relation, unit: Unit, departing: str | None) -> None:
    """Let `unit` depart from every unit that it joined, then break the relation.

    Events that wait are dropped: a unit that has not seen the relation yet never does.
    """
    mine = [event for event in unit.events if event.relation == relation.id]
    if any(event.kind == "relation-broken" for event in mine):
        return
    started = [event for event in mine if unit.has_started(event)]
    dropped = [event for event in mine if event not in started]
    unit.events = [event for event in unit.events if event not in dropped]
    if any(event.kind == "relation-created" for event in dropped):
        return
    for name in _joined(unit, relation, started):
        known = {"relation": relation.id, "remote": name}
        enqueue(model, unit, "relation-departed", departing=departing or name, **known)
    enqueue(model, unit, "relation-broken", relation=relation.id)


def _joined(unit: Unit, relation: Relation, started: list[Event]) -> list[str]:
    """List the units that `unit` has joined, or joins now, and that have not departed."""
    names = list(unit.members.get(relation.id, []))
    gone: list[str] = []
    for event in started:
        if event.kind == "relation-joined" and event.remote:
            names.append(event.remote)
        elif event.kind == "relation-departed" and event.remote:
            gone.append(event.remote)
    return [name for name in dict.fromkeys(names) if name not in gone]


def remove_unit(model: Model, unit: Unit) -> None:
    """Start to remove a unit. Its subordinates are removed first."""
    if unit.dying:
        return
    unit.dying = True
    unit.events = [event for event in unit.events if unit.has_started(event)]
    subordinates = [other for other in model.units.values() if other.principal == unit.name]
    for other in subordinates:
        remove_unit(model, other)
    if not subordinates:
        _end(model, unit)
    successor = model.units.get(model.leader(unit.app) or "")
    if successor is not None and successor.started and model.app_units(unit.app)[0] is unit:
        enqueue(model, successor, "leader-elected")


def _end(model: Model, unit: Unit) -> None:
    """Queue a unit's last events, in Juju's order, and relation-departed for the others."""
    for one in unit.storages:
        enqueue(model, unit, "storage-detaching", storage=one)
    for relation in model.app_relations(unit.app):
        if not takes_part(model, relation, unit):
            continue
        for other in model.units.values():
            if unit.name in other.members.get(relation.id, []) and not other.dying:
                _depart(model, relation, unit, other)
        if not relation.peer:
            _leave(model, relation, unit, departing=unit.name)
    enqueue(model, unit, "stop")
    enqueue(model, unit, "remove")


def _depart(model: Model, relation: Relation, gone: Unit, other: Unit) -> None:
    """Queue relation-departed of a removed unit, once."""
    known = {"relation": relation.id, "remote": gone.name}
    if any(
        event.kind == "relation-departed" and known.items() <= dict(event).items()
        for event in other.events
    ):
        return
    enqueue(model, other, "relation-departed", departing=gone.name, **known)


def _removed(model: Model, unit: Unit) -> None:
    """Forget a removed unit. Only relation-departed still tells other units of it."""
    for relation in model.relations.values():
        if unit.name in relation.unit_data:
            relation.left[unit.name] = relation.unit_data.pop(unit.name)
    del model.units[unit.name]
    storage.release(model, unit)
    for other in model.units.values():
        other.events = [event for event in other.events if _outlives(event, unit.name, other)]
    _end_lonely_principal(model, unit)
    _take_back_secrets(model, unit)


def _outlives(event: Event, removed: str, other: Unit) -> bool:
    """Return whether another unit still gets an event after the unit was removed."""
    is_about_it = event.remote == removed
    return not is_about_it or event.kind == "relation-departed" or other.has_started(event)


def _end_lonely_principal(model: Model, removed: Unit) -> None:
    """End the dying principal of a removed subordinate if that was its last one."""
    principal = model.units.get(removed.principal or "")
    if principal is None or not principal.dying:
        return
    has_subordinates = any(unit.principal == principal.name for unit in model.units.values())
    if not has_subordinates:
        _end(model, principal)


def _take_back_secrets(model: Model, removed: Unit) -> None:
    """Delete the secrets that a removed unit owned, and forget which revisions it had seen."""
    for secret in list(model.secrets.values()):
        secret.tracked.pop(removed.name, None)
        if secret.owner == f"unit:{removed.name}":
            del model.secrets[secret.id]


def _forget_relations(model: Model) -> None:
    for relation in list(model.relations.values()):
        busy = any(
            event.relation == relation.id for unit in model.units.values() for event in unit.events
        )
        if relation.dying and not busy:
            del model.relations[relation.id]
            for unit in model.units.values():
                unit.members.pop(relation.id, None)
            for secret in model.secrets.values():
                secret.grants.pop(relation.id, None)


def finished(model: Model, unit: Unit, event: Event) -> None:
    """Take an event that ran off the queue, and queue what follows from it."""
    unit.events = [other for other in unit.events if other.sequence != event.sequence]
    relation = model.relations.get(-1 if event.relation is None else event.relation)
    if relation is not None:
        _relation_event_ended(relation, unit, event)
    elif event.kind == "install" and not unit.dying:
        for each in model.app_relations(unit.app):
            _enter_scope(model, each, unit)
    elif event.kind == "start":
        unit.started = True
    elif event.kind == "remove":
        _removed(model, unit)
    _forget_relations(model)
    _forget_applications(model)


def _relation_event_ended(relation: Relation, unit: Unit, event: Event) -> None:
    """Keep who a unit has met over a relation, as its hook context lists them from now on."""
    members = unit.members.setdefault(relation.id, [])
    if event.kind == "relation-joined" and event.remote and event.remote not in members:
        members.append(event.remote)
    elif event.kind == "relation-departed" and event.remote in members:
        members.remove(event.remote)
    elif event.kind == "relation-broken":
        del unit.members[relation.id]
        relation.left[unit.name] = relation.unit_data.pop(unit.name, {})


def failed(unit: Unit, event: Event, problem: str, retry_at: float) -> None:
    """Put a failed event at the front of the queue; the unit is in error until it succeeds."""
    current = next(other for other in unit.events if other.sequence == event.sequence)
    current.attempts += 1
    current.retry_at = retry_at
    current.problem = problem
    unit.agent = Status(name="error", message=problem)
    unit.events.remove(current)
    unit.events.insert(0, current)


# --- what comes next ---------------------------------------------------------------------------


def next_event(unit: Unit) -> Event | None:
    """Return the event that the unit's agent takes next, or None if none may be delivered now.

    A unit in error gets only actions and, after a pause, the hook that failed.
    """
    if unit.executing is not None:
        return unit.executing  # its locks are free: it was interrupted, and runs again
    if unit.failed is not None:
        return _next_in_error(unit, unit.failed)
    if not unit.events:
        return None
    first = unit.events[0]
    if unit.started or first.kind in ("storage-attached", "install"):
        return first
    # All relation-created come before leader-elected, config-changed and start
    return next((event for event in unit.events if event.kind == "relation-created"), first)


def _next_in_error(unit: Unit, failed: Event) -> Event | None:
    for event in unit.events:
        if event.action:
            return event
    return failed if time.time() >= failed.retry_at else None


def rebooted(model: Model, machine: int) -> None:
    """Queue start for the units of a machine, after an interrupted hook and before all others.

    Requests by juju-exec are lost.
    """
    for unit in model.machine_units(machine):
        if unit.dying or not unit.started:
            continue
        interrupted = [event for event in unit.events if unit.has_started(event)]
        waiting = [event for event in unit.events if event not in interrupted and not event.asked]
        unit.events = []
        enqueue(model, unit, "start")
        start = unit.events[0]
        behind = [event for event in waiting if not event.same_as(start)]
        unit.events = [*interrupted, start, *behind]
