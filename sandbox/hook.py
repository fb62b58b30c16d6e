"""Give a hook its view of the model, and apply its changes to the model."""

import typing

from sandbox import model as rules
from sandbox import settings
from sandbox.store import Event, Model, Relation, Secret, Status, Unit

Json = dict[str, typing.Any]


def describe(
    model: Model, unit: Unit, event: Event, *, source: str, cidr: str, resources: dict[str, str]
) -> Json:
    """Return the request for the agent on the unit's host: the event and the unit's view."""
    app = model.applications[unit.app]
    endpoints = (
        {"juju-info": {}} | app.section("provides") | app.section("requires") | app.section("peers")
    )
    return {
        "unit": unit.name,
        "source": source,
        "machine_id": str(unit.machine),
        "principal": unit.principal,
        "juju": model.version.version,
        "event": event.model_dump(
            exclude={"sequence", "attempts", "retry_at", "problem", "not_before", "asked"}
        ),
        "state": {
            "address": unit.address,
            "cidr": cidr,
            "bindings": [
                name for name, spec in endpoints.items() if spec.get("scope") != "container"
            ],
            "config": settings.options(app),
            "leader": model.leader(unit.app) == unit.name,
            "relations": [
                _describe_relation(model, relation, unit, event)
                for relation in model.app_relations(unit.app)
                if _visible(model, relation, unit, event)
            ],
            "secrets": [
                _describe_secret(secret, unit)
                for secret in model.secrets.values()
                if settings.can_read(model, secret, unit)
            ],
            "storages": unit.storages,
            "resources": resources,
            "ports": unit.ports,
            "status": [
                unit.status.name,
                unit.status.message if unit.status.name != "unknown" else "",
            ],
            "app_status": [app.status.name, app.status.message],
            "version": unit.version,
            "planned_units": sum(not other.dying for other in model.app_units(unit.app)),
            "deferred": unit.deferred,
            "stored": unit.stored,
            "model": {"name": model.name, "uuid": model.uuid},
        },
    }


def _visible(model: Model, relation: Relation, unit: Unit, event: Event) -> bool:
    # Juju names a relation to a unit in its scope: from its install until relation-broken, which
    # may be the event
    is_in_scope = unit.name in relation.unit_data and rules.takes_part(model, relation, unit)
    if event.relation != relation.id and not is_in_scope:
        return False
    # scenario cannot have a subordinate relation without its one remote unit; a principal's
    # declared container endpoint shows only while a subordinate exists, or is the subject of the
    # event
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
    removed = [name for name in relation.left if name.partition("/")[0] == remote][
        -1:
    ]  # relation-broken
    return removed or [f"{remote}/0"]  # relation-created, before there is one; its databag is empty


def _type_of(relation: Relation) -> str:
    if relation.peer:
        return "peer"
    return "subordinate" if relation.container else "regular"


def _describe_relation(model: Model, relation: Relation, unit: Unit, event: Event) -> Json:
    remote = relation.remote_of(unit.app)
    members = set(unit.members.get(relation.id, []))
    if event.relation == relation.id and event.remote:
        members.add(event.remote)
    if relation.container:
        members = set(_container_members(model, relation, unit, event))
    return {
        "id": relation.id,
        "endpoint": relation.endpoint_of(unit.app),
        "type": _type_of(relation),
        "local_app_data": relation.app_data.get(unit.app, {}),
        "local_unit_data": relation.unit_data.get(unit.name, {}),
        "remote_app": remote,
        "remote_app_data": relation.app_data.get(remote, {}),
        "remote_units_data": {
            name.split("/")[1]: relation.unit_data.get(name) or relation.left.get(name, {})
            for name in sorted(members)
            if name != unit.name
        },
    }


def _describe_secret(secret: Secret, unit: Unit) -> Json:
    owner = {f"application:{unit.app}": "app", f"unit:{unit.name}": "unit"}.get(secret.owner)
    tracked = secret.tracked.setdefault(unit.name, secret.latest)
    return {
        "id": secret.id,
        "owner": owner,
        "label": secret.label if owner else secret.labels.get(unit.name),
        "tracked_revision": tracked,
        "latest_revision": secret.latest,
        "tracked_content": secret.contents.get(tracked, secret.contents[secret.latest]),
        "latest_content": secret.contents[secret.latest],
        "grants": secret.grants if owner else {},
    }


def apply(model: Model, unit: Unit, event: Event, given: Json, result: Json) -> None:
    """Write the changes of a hook or action to its `given` state, and queue the events that follow.

    Unchanged keys are not written: another unit may have changed them since, such as the leader
    before this one.
    """
    app = model.applications[unit.app]
    unit.status = Status(name=result["status"][0], message=result["status"][1])
    if model.leader(unit.app) == unit.name and list(result["app_status"]) != list(
        given["app_status"]
    ):
        app.status = Status(name=result["app_status"][0], message=result["app_status"][1])
    unit.version = result["version"]
    unit.ports = [(protocol, port) for protocol, port in result["ports"]]
    unit.deferred = result["deferred"]
    unit.stored = result["stored"]
    before = {str(described["id"]): described for described in given["relations"]}
    for key, data in result["relations"].items():
        relation = model.relations.get(int(key))
        is_broken = event.kind == "relation-broken" and event.relation == int(key)
        if relation is not None and not is_broken:  # else it was removed while this hook ran
            _apply_databags(model, relation, unit, before[key], data)
    _apply_secrets(model, unit, given["secrets"], result["secrets"])
    rules.finished(model, unit, event)


def _merged(now: dict[str, str], given: dict[str, str], result: dict[str, str]) -> dict[str, str]:
    """Return `now` with what `result` changed of `given`."""
    kept = {key: value for key, value in now.items() if key in result or key not in given}
    return kept | {key: value for key, value in result.items() if given.get(key) != value}


def _apply_databags(
    model: Model, relation: Relation, unit: Unit, given: Json, data: dict[str, dict[str, str]]
) -> None:
    remote = relation.remote_of(unit.app)
    now = relation.app_data.get(unit.app, {})
    merged = _merged(now, given["local_app_data"], data["app"])
    if now != merged and model.leader(unit.app) == unit.name:
        relation.app_data[unit.app] = merged
        for other in model.app_units(remote):  # of a peer relation the leader, too: juju/juju#20178
            rules.application_changed(model, relation, other)
    if unit.name in relation.unit_data and relation.unit_data[unit.name] != data["unit"]:
        relation.unit_data[unit.name] = data["unit"]
        for other in model.neighbours(relation, unit):
            if unit.name in other.members.get(relation.id, []) and not other.dying:
                rules.enqueue(
                    model, other, "relation-changed", relation=relation.id, remote=unit.name
                )


def _apply_secrets(model: Model, unit: Unit, given: list[Json], described: list[Json]) -> None:
    before = {secret["id"]: secret for secret in given}
    for item in described:
        old: Json = before.get(item["id"], {})
        secret = model.secrets.get(item["id"])
        if secret is None:
            if old:  # its owner removed it while this hook ran
                continue
            secret = _add_secret(model, unit, item)
        if settings.can_change(model, secret, unit):
            _change_secret(model, secret, old, item)
        elif item["label"] and item["owner"] is None:
            secret.labels[unit.name] = item["label"]
        # The revision that the hook read: the owner may have made another one since
        secret.tracked[unit.name] = min(item["tracked_revision"], secret.latest)

    removed = before.keys() - {secret["id"] for secret in described}
    for identifier in removed & model.secrets.keys():
        if settings.can_change(model, model.secrets[identifier], unit):
            del model.secrets[identifier]


def _add_secret(model: Model, unit: Unit, item: Json) -> Secret:
    owner = f"application:{unit.app}" if item["owner"] == "app" else f"unit:{unit.name}"
    secret = Secret(id=item["id"], owner=owner, contents={1: item["latest_content"]}, latest=1)
    model.secrets[secret.id] = secret
    return secret


def _change_secret(model: Model, secret: Secret, old: Json, item: Json) -> None:
    """Apply only the hook's own changes: another hook may have changed the rest."""
    if item["label"] != old.get("label"):
        secret.label = item["label"]
    grants = _grants(item)
    if grants != _grants(old):
        secret.grants = grants
    content = item["latest_content"]
    if content not in (secret.contents[secret.latest], old.get("latest_content")):
        settings.new_revision(model, secret, content)


def _grants(described: Json) -> dict[int, list[str]]:
    return {
        int(relation): sorted(grantees)
        for relation, grantees in described.get("grants", {}).items()
    }
