"""Juju's rules as changes to a `store.Model`: which events follow from what was asked for and from what a hook wrote.

Nothing here touches a host. The order of events is Juju's: storage-attached, install, relation-created,
leader-elected, config-changed, start; then, as units enter a relation's scope, relation-joined and relation-changed;
when they leave, relation-departed, relation-broken; at the end stop and remove. (Source: Juju 3.6 documentation,
"Hook", and the uniter's resolver.)
"""

import collections.abc
import time
import typing

from sandbox import bundle as bundles
from sandbox.store import Application, Event, Model, Relation, SandboxError, Secret, Status, Unit, new_id

Json = dict[str, typing.Any]
_LATE = 0.35  # the share of relation-departed of removed units that come late
_LATE_HOOKS = 3  # and how many other hooks of the unit come first


def enqueue(model: Model, unit: Unit, kind: str, **fields: typing.Any) -> Event | None:
    """Add an event for `unit`, unless the same one is already waiting; the one that runs now does not count."""
    event = Event(kind=kind, sequence=model.next_sequence, **fields)
    if event.relation is not None:
        event.endpoint = model.relations[event.relation].endpoint_of(unit.app)
    waiting = [other for other in unit.events if other is not unit.executing]
    if kind != "action" and any(event.same_as(other) for other in waiting):
        return None
    model.next_sequence += 1
    unit.events.append(event)
    return event


def add_application(model: Model, app: Application) -> None:
    """Add an application without units, and its peer relations."""
    if app.name in model.applications:
        raise SandboxError(f"application {app.name!r} exists already")
    model.applications[app.name] = app
    for endpoint, spec in app.section("peers").items():
        _new_relation(model, [(app.name, endpoint)], spec["interface"], container=False)


def _new_relation(model: Model, ends: list[tuple[str, str]], interface: str, *, container: bool) -> Relation:
    relation = Relation(id=model.next_relation, ends=ends, interface=interface, container=container)
    model.next_relation += 1
    model.relations[relation.id] = relation
    return relation


def add_unit(model: Model, app: Application, principal: Unit | None = None) -> Unit:
    """Add a unit with the events of its birth; a principal gets a machine, a subordinate is on its principal's."""
    name = f"{app.name}/{app.next_unit}"
    app.next_unit += 1
    if principal is None:
        machine, model.next_machine = model.next_machine, model.next_machine + 1
    else:
        machine = principal.machine
    unit = Unit(name=name, app=app.name, machine=machine, principal=principal.name if principal else None)
    unit.address = principal.address if principal else ""
    unit.status = Status(name="waiting", message="waiting for machine" if principal is None else "installing agent")
    model.units[name] = unit
    for storage, spec in app.section("storage").items():
        multiple: Json = spec.get("multiple") or {}
        count = int(str(multiple.get("range", "1")).rstrip("+-").split("-")[0])
        for _ in range(count):
            unit.storages.append((storage, model.next_storage))
            enqueue(model, unit, "storage-attached", storage=(storage, model.next_storage))
            model.next_storage += 1
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
    """Relate two `application:endpoint`s. Raises `SandboxError` when they do not fit or are related already."""
    metadata = {name: app.metadata for name, app in model.applications.items()}
    provider, requirer, interface, container = bundles.check_relation((first, second), metadata)
    for relation in model.relations.values():
        if sorted(relation.ends) == sorted([provider, requirer]):
            raise SandboxError(f"{first} and {second} are related already")
    for app, endpoint in (provider, requirer):
        if model.applications[app].dying:
            raise SandboxError(f"application {app!r} is being removed")
        limit = bundles.endpoints_of(metadata[app])[endpoint]["limit"]
        if limit is not None and sum((app, endpoint) in other.ends for other in model.relations.values()) >= limit:
            raise SandboxError(f"{app}:{endpoint} takes {limit} relation at most: remove the other one first")
    relation = _new_relation(model, [provider, requirer], interface, container=container)
    for unit in list(model.units.values()):
        if unit.app in (provider[0], requirer[0]) and not unit.dying:
            if takes_part(model, relation, unit):
                enqueue(model, unit, "relation-created", relation=relation.id)
            if unit.started:
                enter_scope(model, relation, unit)
    return relation


def _declares(model: Model, app: str, endpoint: str) -> bool:
    """Check whether the charm itself declares the endpoint; hooks of the implicit juju-info reach no charm."""
    return any(endpoint in model.applications[app].section(role) for role in ("provides", "requires", "peers"))


def takes_part(model: Model, relation: Relation, unit: Unit) -> bool:
    """Check whether `unit` sees `relation`: it declares the endpoint; a container relation is one of its machine."""
    if not _declares(model, unit.app, relation.endpoint_of(unit.app)):
        return False
    if not relation.container:
        return True
    remote = relation.remote_of(unit.app)
    if unit.principal is not None:
        on_host = [unit.principal, *(other.name for other in model.units.values() if other.machine == unit.machine)]
        return any(name.split("/")[0] == remote for name in on_host)
    return True


def started(model: Model, unit: Unit) -> None:
    """Note that `unit` ran its first start hook: it enters the scope of its relations."""
    if unit.started:
        return
    unit.started = True
    for relation in model.app_relations(unit.app):
        enter_scope(model, relation, unit)


def enter_scope(model: Model, relation: Relation, unit: Unit) -> None:
    """Let `unit` into `relation`: subordinates are born, units that meet get relation-joined and relation-changed."""
    if unit.name in relation.unit_data or relation.dying:
        return
    if relation.container and not _born_together(model, relation, unit):
        return
    relation.unit_data[unit.name] = relation.early.pop(unit.name, None) or _addresses(unit)
    for other in model.neighbours(relation, unit):
        for here, there in ((unit, other), (other, unit)):
            if _declares(model, here.app, relation.endpoint_of(here.app)):
                enqueue(model, here, "relation-joined", relation=relation.id, remote=there.name)
                enqueue(model, here, "relation-changed", relation=relation.id, remote=there.name)


def _addresses(unit: Unit) -> dict[str, str]:
    """Return the keys that Juju puts into each unit's databag."""
    return {
        "egress-subnets": f"{unit.address}/32",
        "ingress-address": unit.address,
        "private-address": unit.address,
    }


def _born_together(model: Model, relation: Relation, unit: Unit) -> bool:
    """For a container relation: make the subordinate's unit on a principal's host; return whether `unit` may enter."""
    remote = model.applications[relation.remote_of(unit.app)]
    if unit.principal is not None:
        return unit.principal.split("/")[0] == remote.name or any(
            other.app == remote.name
            for other in model.units.values()
            if other.machine == unit.machine and other is not unit
        )
    if remote.subordinate and not any(
        other.app == remote.name and other.principal == unit.name for other in model.units.values()
    ):
        add_unit(model, remote, principal=unit)
    return True


def set_options(
    model: Model,
    app: Application,
    values: collections.abc.Mapping[str, str],
    *,
    reset: collections.abc.Collection[str] = (),
) -> None:
    """Set options from text, and others back to their defaults, as `juju config APP --reset a,b key=value` does."""
    declared = app.declared_options()
    for name in reset:
        if name not in declared:
            raise SandboxError(f"{app.name}: no option {name!r} (there are: {', '.join(sorted(declared))})")
        if name in values:
            raise SandboxError(f"{app.name}: {name} is both set and reset")
    parsed: Json = {}
    for name, text in values.items():
        value = parse_option(text, declared.get(name, {}).get("type"))
        problem = bundles.option_problem(name, value, declared)
        if problem:
            raise SandboxError(f"{app.name}: {problem}")
        if declared[name]["type"] == "secret":
            value = find_secret(model, str(value)).id
        parsed[name] = value
    before = options(app)
    app.options = {name: value for name, value in app.options.items() if name not in reset} | parsed
    if options(app) != before:
        for unit in model.app_units(app.name):
            if not unit.dying:
                enqueue(model, unit, "config-changed")


def parse_option(text: str, kind: str | None) -> object:
    """Return the value that `text` stands for in an option or parameter of type `kind`; `text` if none fits."""
    if kind == "boolean" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        if kind in ("int", "integer"):
            return int(text)
        if kind in ("float", "number"):
            return float(text)
    except ValueError:
        pass
    return text


def options(app: Application) -> Json:
    """Return the application's options with their defaults; those without a value are absent, as in a hook."""
    declared = app.declared_options()
    defaults = {name: spec["default"] for name, spec in declared.items() if spec.get("default") is not None}
    return defaults | app.options


def action_params(app: Application, action: str, values: collections.abc.Mapping[str, str]) -> Json:
    """Return an action's parameters from text, checked against the charm's schema as the controller does.

    Raises:
        SandboxError: an unknown action, an unknown parameter or a value of another type, by name.
    """
    import jsonschema  # noqa: PLC0415 - a third of the start of every other command

    actions = app.section("actions")
    if action not in actions:
        raise SandboxError(f"{app.name} has no action {action!r} (there are: {', '.join(sorted(actions)) or 'none'})")
    spec: Json = actions[action] or {}
    properties: dict[str, Json] = spec.get("params") or {}
    params: Json = {}
    for name, text in values.items():
        if name not in properties and not spec.get("additionalProperties", False):
            known = ", ".join(sorted(properties)) or "none"
            raise SandboxError(f"{action}: unknown parameter {name!r} (there are: {known})")
        params[name] = parse_option(text, properties.get(name, {}).get("type"))
    for name, schema in properties.items():
        if name not in params and "default" in schema:
            params[name] = schema["default"]
    object_schema: Json = {"type": "object", "properties": properties, "required": spec.get("required", [])}
    validator: typing.Any = jsonschema.Draft7Validator(object_schema)
    for error in validator.iter_errors(params):
        name = str(error.path[0]) if error.path else ""
        text = f"parameter {name!r}: {error.message}" if name else error.message
        raise SandboxError(f"{action}: {text[:300]}")
    return params


def request_action(model: Model, unit: Unit, action: str, values: collections.abc.Mapping[str, str]) -> Event:
    """Queue an action. Raises `SandboxError` for what the controller would refuse."""
    params = action_params(model.applications[unit.app], action, values)
    parallel = bool((model.applications[unit.app].section("actions")[action] or {}).get("parallel", False))
    described = {"name": action, "id": new_id(), "params": params, "parallel": parallel}
    event = enqueue(model, unit, "action", action=described)
    assert event is not None
    return event


def find_secret(model: Model, name: str) -> Secret:
    """Return a user's secret by name or id."""
    for secret in model.secrets.values():
        if secret.id.removeprefix("secret:") == name.removeprefix("secret:") or (
            secret.name == name and secret.owner == "user"
        ):
            return secret
    raise SandboxError(f"secret {name!r} not found: ./sandboxctl add-secret NAME key=value makes one")


def add_user_secret(model: Model, name: str, content: dict[str, str]) -> Secret:
    """Add a user's secret."""
    if any(secret.name == name for secret in model.secrets.values()):
        raise SandboxError(f"secret {name!r} exists already: ./sandboxctl update-secret changes it")
    secret = Secret(id=f"secret:{new_id()}", owner="user", name=name, contents={1: content})
    model.secrets[secret.id] = secret
    return secret


def update_user_secret(model: Model, name: str, content: dict[str, str]) -> None:
    """Give a user's secret a new revision; equal content makes none."""
    secret = find_secret(model, name)
    if secret.contents[secret.latest] != content:
        _new_revision(model, secret, content)


def grant_user_secret(model: Model, name: str, app: Application) -> None:
    """Let an application read a user's secret; its units see it from their next event on."""
    secret = find_secret(model, name)
    if app.name not in secret.granted_apps:
        secret.granted_apps.append(app.name)
        if secret.id in options(app).values():
            for unit in model.app_units(app.name):
                enqueue(model, unit, "config-changed")


def can_read(model: Model, secret: Secret, unit: Unit) -> bool:
    """Check whether `unit` may read `secret`: as owner, or by a grant over a relation that lives."""
    if secret.owner in (f"application:{unit.app}", f"unit:{unit.name}") or unit.app in secret.granted_apps:
        return True
    return any(
        relation in model.relations and (unit.app in grantees or unit.name in grantees)
        for relation, grantees in secret.grants.items()
    )


def _manages(model: Model, secret: Secret, unit: Unit) -> bool:
    leads = secret.owner == f"application:{unit.app}" and model.leader(unit.app) == unit.name
    return leads or secret.owner == f"unit:{unit.name}"


def _new_revision(model: Model, secret: Secret, content: dict[str, str]) -> None:
    secret.latest += 1
    secret.contents[secret.latest] = content
    for name, revision in secret.tracked.items():
        unit = model.units.get(name)
        if unit and revision < secret.latest and can_read(model, secret, unit) and not _manages(model, secret, unit):
            enqueue(model, unit, "secret-changed", secret=secret.id)


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
    for app in [app for app in model.applications.values() if app.dying and not model.app_units(app.name)]:
        for relation in model.app_relations(app.name):
            relation.dying = True
        _forget_relations(model)
        if not model.app_relations(app.name):
            del model.applications[app.name]
            for secret in [secret for secret in model.secrets.values() if secret.owner == f"application:{app.name}"]:
                del model.secrets[secret.id]


def find_relation(model: Model, first: str, second: str) -> Relation:
    """Return the relation of two `application:endpoint`s. Raises `SandboxError` if it does not exist."""
    ends = sorted(tuple(end.partition(":")[::2]) for end in (first, second))
    for relation in model.relations.values():
        if sorted(relation.ends) == ends:
            return relation
    raise SandboxError(f"{first} and {second} are not related")


def remove_relation(model: Model, relation: Relation) -> None:
    """End a relation: departed and broken on both sides; subordinates whose place it was go with it."""
    if relation.dying:
        return
    relation.dying = True
    for name in list(model.units):
        unit = model.units.get(name)
        if unit is None or unit.app not in dict(relation.ends) or not takes_part(model, relation, unit):
            continue
        _leave(model, relation, unit, departing=None)
        if relation.container and unit.principal and unit.principal.split("/")[0] == relation.remote_of(unit.app):
            remove_unit(model, unit)
    _forget_relations(model)


def _leave(model: Model, relation: Relation, unit: Unit, departing: str | None) -> None:
    """Let `unit` depart from every unit that it joined, then break the relation; what it had not got is dropped."""
    mine = [event for event in unit.events if event.relation == relation.id]
    if any(event.kind == "relation-broken" for event in mine):
        return
    started = [event for event in mine if event.attempts or event is unit.executing]
    dropped = [event for event in mine if event not in started]
    unit.events = [event for event in unit.events if event not in dropped]
    if any(event.kind == "relation-created" for event in dropped):
        return
    joining = [event.remote for event in started if event.kind == "relation-joined" and event.remote]
    gone = [event.remote for event in started if event.kind == "relation-departed"]
    for name in dict.fromkeys([*unit.members.get(relation.id, []), *joining]):
        if name not in gone:
            enqueue(model, unit, "relation-departed", relation=relation.id, remote=name, departing=departing or name)
    enqueue(model, unit, "relation-broken", relation=relation.id)


def remove_unit(model: Model, unit: Unit) -> None:
    """Begin a unit's end; a principal waits for the subordinates on its machine to be removed first."""
    if unit.dying:
        return
    unit.dying = True
    unit.events = [event for event in unit.events if event.attempts or event is unit.executing]
    was_leader = model.leader(unit.app)
    subordinates = [other for other in model.units.values() if other.principal == unit.name]
    for other in subordinates:
        remove_unit(model, other)
    if not subordinates:
        _end(model, unit)
    if was_leader is not None and was_leader != unit.name:
        successor = model.units[was_leader]
        if model.app_units(unit.app)[0] is unit and successor.started:
            enqueue(model, successor, "leader-elected")


def _end(model: Model, unit: Unit) -> None:
    """Queue a unit's last events: its storage first, then its relations, stop and remove; and what others get of it."""
    for storage in unit.storages:
        enqueue(model, unit, "storage-detaching", storage=storage)
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
    """Queue relation-departed of a removed unit; by chance it comes only behind other hooks, as seen on Juju 4.0.15."""
    known = {"relation": relation.id, "remote": gone.name}
    if any(event.kind == "relation-departed" and known.items() <= dict(event).items() for event in other.events):
        return
    event = enqueue(model, other, "relation-departed", departing=gone.name, **known)
    if event is not None and model.draw("late", other.name, relation.id, gone.name) < _LATE:
        event.not_before = other.ran + _LATE_HOOKS


def removed(model: Model, unit: Unit) -> None:
    """Forget a unit that was removed. Of the events about it that wait for others only relation-departed stays."""
    for relation in model.relations.values():
        if unit.name in relation.unit_data:
            relation.left[unit.name] = relation.unit_data.pop(unit.name)
    del model.units[unit.name]
    for other in model.units.values():
        other.events = [
            event
            for event in other.events
            if event.remote != unit.name
            or event.kind == "relation-departed"
            or event.attempts
            or event is other.executing
        ]
    principal = model.units.get(unit.principal or "")
    if principal and principal.dying and not any(other.principal == principal.name for other in model.units.values()):
        _end(model, principal)
    for secret in list(model.secrets.values()):
        secret.tracked.pop(unit.name, None)
        if secret.owner == f"unit:{unit.name}" or (
            secret.owner == f"application:{unit.app}"
            and not model.app_units(unit.app)
            and unit.app not in model.applications
        ):
            del model.secrets[secret.id]
        _forget_relations(model)
    _forget_applications(model)


def _forget_relations(model: Model) -> None:
    for relation in list(model.relations.values()):
        busy = any(event.relation == relation.id for unit in model.units.values() for event in unit.events)
        if relation.dying and not busy:
            del model.relations[relation.id]
            for unit in model.units.values():
                unit.members.pop(relation.id, None)
            for secret in model.secrets.values():
                secret.grants.pop(relation.id, None)


def describe(model: Model, unit: Unit, event: Event, *, source: str, cidr: str, resources: dict[str, str]) -> Json:
    """Return the request that the agent on the unit's host runs: the event and the unit's view of the model."""
    app = model.applications[unit.app]
    leader = model.leader(unit.app) == unit.name
    bindings = ["juju-info"] + [
        name
        for role in ("provides", "requires", "peers")
        for name, spec in app.section(role).items()
        if spec.get("scope") != "container" and name != "juju-info"
    ]
    if "juju-info" in app.section("requires"):
        bindings.remove("juju-info")
    return {
        "unit": unit.name,
        "source": source,
        "machine_id": str(unit.machine),
        "principal": unit.principal,
        "event": event.model_dump(exclude={"sequence", "attempts", "retry_at", "problem", "not_before", "asked"}),
        "state": {
            "address": unit.address,
            "cidr": cidr,
            "bindings": bindings,
            "config": options(app),
            "leader": leader,
            "relations": [
                _describe_relation(model, relation, unit, event)
                for relation in model.app_relations(unit.app)
                if _visible(model, relation, unit, event)
            ],
            "secrets": [
                _describe_secret(secret, unit) for secret in model.secrets.values() if can_read(model, secret, unit)
            ],
            "storages": unit.storages,
            "resources": resources,
            "ports": unit.ports,
            "status": [unit.status.name, unit.status.message if unit.status.name != "unknown" else ""],
            "app_status": [app.status.name, app.status.message],
            "version": unit.version,
            "planned_units": sum(not other.dying for other in model.app_units(unit.app)),
            "deferred": unit.deferred,
            "stored": unit.stored,
            "model": {"name": model.name, "uuid": model.uuid},
        },
    }


def _visible(model: Model, relation: Relation, unit: Unit, event: Event) -> bool:
    # The event may be its end; behind relation-broken Juju names it no more, also where the other end is still there
    if event.relation != relation.id and (unit.name in relation.left or not takes_part(model, relation, unit)):
        return False
    # scenario has no subordinate relation without its one remote unit; a declared container endpoint of a principal
    # shows only while a subordinate is there, or is the one that the event is about
    return not relation.container or bool(_container_members(model, relation, unit, event))


def _container_members(model: Model, relation: Relation, unit: Unit, event: Event) -> list[str]:
    """Return the remote unit of a container relation; none if there is nothing to show."""
    is_its = event.relation == relation.id
    if is_its and event.remote:
        return [event.remote]
    remote = relation.remote_of(unit.app)
    here = [other.name for other in model.machine_units(unit.machine) if other.app == remote]
    if here or not is_its:
        return here
    removed = [name for name in relation.left if name.partition("/")[0] == remote][-1:]  # relation-broken
    return removed or [f"{remote}/0"]  # relation-created, before there is one; its databag is empty


def _describe_relation(model: Model, relation: Relation, unit: Unit, event: Event) -> Json:
    remote = relation.remote_of(unit.app)
    members = set(unit.members.get(relation.id, []))
    if event.relation == relation.id and event.remote:
        members.add(event.remote)
    if relation.container:
        members = set(_container_members(model, relation, unit, event))
    own = relation.unit_data.get(unit.name) or relation.early.get(unit.name) or _addresses(unit)
    return {
        "id": relation.id,
        "endpoint": relation.endpoint_of(unit.app),
        "type": "peer" if relation.peer else "subordinate" if relation.container else "regular",
        "local_app_data": relation.app_data.get(unit.app, {}),
        "local_unit_data": own,
        "remote_app": remote,
        "remote_app_data": relation.app_data.get(remote, {}),
        "remote_units_data": {
            name.split("/")[1]: relation.unit_data.get(name) or relation.left.get(name, {})
            for name in sorted(members)
            if name != unit.name
        },
    }


def _describe_secret(secret: Secret, unit: Unit) -> Json:
    kind = secret.owner.partition(":")[0]
    owner = None
    if secret.owner == f"application:{unit.app}":
        owner = "app"
    elif secret.owner == f"unit:{unit.name}":
        owner = "unit"
    tracked = secret.tracked.setdefault(unit.name, secret.latest)
    return {
        "id": secret.id,
        "owner": owner,
        "label": secret.label if owner and kind != "user" else secret.labels.get(unit.name),
        "description": secret.description,
        "tracked_revision": tracked,
        "latest_revision": secret.latest,
        "tracked_content": secret.contents.get(tracked, secret.contents[secret.latest]),
        "latest_content": secret.contents[secret.latest],
        "grants": secret.grants if owner else {},
    }


def apply(model: Model, unit: Unit, event: Event, given: Json, result: Json) -> None:
    """Write what a hook or an action changed of the state that it was `given`, and queue what follows from it.

    What it left as it was is not written: another unit may have changed it since, as the leader that this one follows.
    """
    app = model.applications[unit.app]
    unit.status = _status(unit.status, result["status"])
    if model.leader(unit.app) == unit.name and list(result["app_status"]) != list(given["app_status"]):
        app.status = _status(app.status, result["app_status"])
    unit.version = result["version"]
    unit.ports = [(protocol, port) for protocol, port in result["ports"]]
    unit.deferred = result["deferred"]
    unit.stored = result["stored"]
    before = {str(described["id"]): described for described in given["relations"]}
    for key, data in result["relations"].items():
        relation = model.relations.get(int(key))
        if relation is None:  # it was removed while this hook ran
            continue
        if event.kind == "relation-broken" and event.relation == relation.id:
            continue
        _apply_databags(model, relation, unit, before[key], data)
    _apply_secrets(model, unit, given["secrets"], result["secrets"])
    finished(model, unit, event)


def _status(old: Status, new: list[str]) -> Status:
    if (old.name, old.message) == (new[0], new[1]):
        return old
    return Status(name=new[0], message=new[1], since=time.time())


def _merged(now: dict[str, str], given: dict[str, str], result: dict[str, str]) -> dict[str, str]:
    """Return `now` with what `result` changed of `given`."""
    kept = {key: value for key, value in now.items() if key in result or key not in given}
    return kept | {key: value for key, value in result.items() if given.get(key) != value}


def _apply_databags(model: Model, relation: Relation, unit: Unit, given: Json, data: dict[str, dict[str, str]]) -> None:
    remote = relation.remote_of(unit.app)
    now = relation.app_data.get(unit.app, {})
    merged = _merged(now, given["local_app_data"], data["app"])
    if now != merged and model.leader(unit.app) == unit.name:
        relation.app_data[unit.app] = merged
        for other in list(model.units.values()):
            if other.app == remote and other is not unit and other.members.get(relation.id) and not other.dying:
                enqueue(model, other, "relation-changed", relation=relation.id)
    if unit.name in relation.unit_data and relation.unit_data[unit.name] != data["unit"]:
        relation.unit_data[unit.name] = data["unit"]
        for other in model.neighbours(relation, unit):
            if unit.name in other.members.get(relation.id, []) and not other.dying:
                enqueue(model, other, "relation-changed", relation=relation.id, remote=unit.name)
    elif unit.name not in relation.unit_data:
        relation.early[unit.name] = data["unit"]  # the others read it when the unit enters the scope


def _apply_secrets(model: Model, unit: Unit, given: list[Json], described: list[Json]) -> None:
    before = {secret["id"]: secret for secret in given}
    for item in described:
        old: Json = before.get(item["id"], {})
        secret = model.secrets.get(item["id"])
        if secret is None and old:  # its owner removed it while this hook ran
            continue
        if secret is None:
            owner = f"application:{unit.app}" if item["owner"] == "app" else f"unit:{unit.name}"
            secret = Secret(id=item["id"], owner=owner, contents={1: item["latest_content"]}, latest=1)
            model.secrets[secret.id] = secret
        if _manages(model, secret, unit):
            if item["label"] != old.get("label"):
                secret.label = item["label"]
            if item["description"] != old.get("description"):
                secret.description = item["description"]
            grants, granted = _grants(item), _grants(old)
            if grants != granted:
                secret.grants = grants
            if item["latest_content"] not in (secret.contents[secret.latest], old.get("latest_content")):
                _new_revision(model, secret, item["latest_content"])
        elif item["label"] and item["owner"] is None:
            secret.labels[unit.name] = item["label"]
        # the revision that the hook read: the owner may have made another one meanwhile
        secret.tracked[unit.name] = min(item["tracked_revision"], secret.latest)
    kept = {secret["id"] for secret in described}
    for secret in list(model.secrets.values()):
        if secret.id in before and secret.id not in kept and _manages(model, secret, unit):
            del model.secrets[secret.id]


def _grants(described: Json) -> dict[int, list[str]]:
    return {int(relation): sorted(grantees) for relation, grantees in described.get("grants", {}).items()}


def finished(model: Model, unit: Unit, event: Event) -> None:
    """Take an event that ran, or that is skipped, off the queue, and queue what follows from it."""
    unit.events = [other for other in unit.events if other.sequence != event.sequence]
    if event.kind == "start":
        started(model, unit)
    elif event.kind == "relation-joined":
        members = unit.members.setdefault(_relation(event), [])
        if event.remote and event.remote not in members:
            members.append(event.remote)
    elif event.kind == "relation-departed":
        members = unit.members.get(_relation(event), [])
        if event.remote in members:
            members.remove(event.remote)
    elif event.kind == "relation-broken":
        relation = model.relations.get(_relation(event))
        unit.members.pop(_relation(event), None)
        if relation is not None:
            relation.left[unit.name] = relation.unit_data.pop(unit.name, {})
    if event.kind == "remove":
        removed(model, unit)
    _forget_relations(model)
    _forget_applications(model)


def failed(unit: Unit, event: Event, problem: str, retry_at: float) -> None:
    """Leave a failed event in the queue, in front of what else waits; the unit is in error until it is done."""
    current = next(other for other in unit.events if other.sequence == event.sequence)
    current.attempts += 1
    current.retry_at = retry_at
    current.problem = problem
    unit.agent = Status(name="error", message=problem, since=time.time())
    unit.events = [current, *(other for other in unit.events if other is not current)]


def resolve(model: Model, unit: Unit, *, retry: bool) -> None:
    """End a unit's error: its failed hook runs again at once, or counts as done."""
    event = unit.failed
    if event is None:
        raise SandboxError(f"unit {unit.name!r} is not in an error state")
    if retry:
        event.retry_at = 0.0
        return
    unit.agent = Status(name="idle", since=time.time())
    finished(model, unit, event)


def _relation(event: Event) -> int:
    assert event.relation is not None
    return event.relation
