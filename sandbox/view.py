"""What `status` shows: the text as `juju status` of Juju 3.6 lays it out, and the same as data."""

import collections.abc
import time
import typing

from sandbox.store import Application, Model, Status, Unit

Json = dict[str, typing.Any]
_ORDER = ("error", "blocked", "maintenance", "waiting", "active", "unknown")


def select(model: Model, names: collections.abc.Collection[str]) -> Model:
    """Return the model with only these applications and units, and what stands on the same hosts for them.

    Raises:
        SandboxError: there is nothing of that name.
    """
    if not names:
        return model
    for name in names:
        if name not in model.applications:
            model.unit(name)
    meant = {unit.name for unit in model.units.values() if {unit.app, unit.name} & set(names)}
    meant |= {unit.principal for unit in model.units.values() if unit.principal and unit.name in meant}
    units = {
        name: unit for name, unit in model.units.items()
        if name in meant or (unit.principal in names or (unit.principal or "").split("/")[0] in names)
    }  # fmt: skip
    apps = {unit.app for unit in units.values()} | {name for name in names if name in model.applications}
    return model.model_copy(
        update={
            "units": units,
            "applications": {name: app for name, app in model.applications.items() if name in apps},
            "relations": {
                number: relation
                for number, relation in model.relations.items()
                if all(app in apps for app, _ in relation.ends)
            },
        }
    )


def as_data(model: Model) -> Json:
    """Return the model in the shape of `juju status --format json`."""
    principals = sorted(
        (unit for unit in model.units.values() if unit.principal is None), key=lambda unit: unit.machine
    )
    return {
        "model": {
            "name": model.name,
            "type": "iaas",
            "controller": "sandbox",
            "cloud": "sandbox",
            "version": "3.6",
        },
        "machines": {
            str(unit.machine): {
                "juju-status": {"current": _machine_state(unit)},
                "hostname": model.host(unit.machine),
                "dns-name": unit.address,
                "instance-id": model.host(unit.machine),
            }
            for unit in principals
        },
        "applications": {name: _application(model, app) for name, app in model.applications.items()},
        "relations": [
            {
                "id": relation.id,
                "interface": relation.interface,
                "endpoints": [f"{app}:{end}" for app, end in relation.ends],
            }
            for relation in model.relations.values()
        ],
    }


def _application(model: Model, app: Application) -> Json:
    units = model.app_units(app.name)
    data: Json = {
        "charm": app.charm,
        "charm-rev": app.revision,
        "version": next((unit.version for unit in units if unit.version), ""),
        "exposed": False,
        "application-status": _status(_worst(app, units)),
    }
    if app.subordinate:
        data["subordinate-to"] = sorted({(unit.principal or "").split("/")[0] for unit in units})
    else:
        data["units"] = {unit.name: _unit(model, unit) for unit in units}
    return data


def _unit(model: Model, unit: Unit) -> Json:
    data: Json = {
        "workload-status": _status(_shown(unit)),
        "juju-status": _status(unit.agent),
        **({} if unit.principal else {"machine": str(unit.machine)}),
        "open-ports": _ports(unit),
        "public-address": unit.address,
        "leader": model.leader(unit.app) == unit.name,
        "workload-version": unit.version,
    }
    subordinates = [other for other in model.units.values() if other.principal == unit.name]
    if subordinates:
        data["subordinates"] = {other.name: _unit(model, other) for other in subordinates}
    return data


def _status(status: Status) -> Json:
    return {"current": status.name, "message": status.message}


def _shown(unit: Unit) -> Status:
    return unit.agent if unit.agent.name == "error" else unit.status


def _worst(app: Application, units: list[Unit]) -> Status:
    """Return the application's own status, or else the gravest of its units', as Juju does."""
    if app.status.name != "unknown":
        return app.status
    return min((_shown(unit) for unit in units), key=lambda status: _ORDER.index(status.name), default=Status())


def as_text(model: Model, *, relations: bool = False) -> str:
    """Return applications, units and machines as tables, subordinates indented below their principal."""
    head = [
        ("Model", "Controller", "Cloud/Region", "Version", "SLA", "Timestamp", "Notes"),
        (
            model.name,
            "sandbox",
            "this machine",
            "3.6",
            "unsupported",
            time.strftime("%H:%M:%S%z"),
            "",
        ),
    ]
    apps: list[tuple[str, ...]] = [
        ("App", "Version", "Status", "Scale", "Charm", "Channel", "Rev", "Exposed", "Message")
    ]
    for app in model.applications.values():
        members = model.app_units(app.name)
        version = next((unit.version for unit in members if unit.version), "")
        worst = _worst(app, members)
        apps.append(
            (app.name, version, worst.name, str(len(members)), app.charm, "", str(app.revision), "no", worst.message)
        )
    units: list[tuple[str, ...]] = [("Unit", "Workload", "Agent", "Machine", "Public address", "Ports", "Message")]
    machines: list[tuple[str, ...]] = [("Machine", "State", "Address", "Inst id", "Base", "AZ", "Message")]
    for unit in model.units.values():
        if unit.principal is None:
            units.append(_row(model, unit, ""))
            units += [_row(model, other, "  ") for other in model.units.values() if other.principal == unit.name]
    for unit in sorted(model.units.values(), key=lambda unit: unit.machine):
        if unit.principal is None:
            state, host = _machine_state(unit), model.host(unit.machine)
            machines.append((str(unit.machine), state, unit.address, host, "debian@12", "", ""))
    tables = [head, apps, units, machines]
    if relations:
        tables.append([("Integration provider", "Requirer", "Interface", "Type", "Message"), *_relations(model)])
    return "\n\n".join(_table(table) for table in tables) + "\n"


def _relations(model: Model) -> collections.abc.Iterator[tuple[str, ...]]:
    for relation in model.relations.values():
        ends = [(f"{app}:{endpoint}", app, endpoint) for app, endpoint in relation.ends]
        # the provider comes first; `juju-info` is provided by every charm implicitly
        ends.sort(key=lambda end: end[2] in model.applications[end[1]].section("requires"))
        kind = "peer" if relation.peer else "subordinate" if relation.container else "regular"
        yield (ends[0][0], ends[-1][0], relation.interface, kind, "")


def _machine_state(unit: Unit) -> str:
    return "started" if unit.address else "pending"


def _ports(unit: Unit) -> list[str]:
    return [f"{port}/{protocol}" if port is not None else protocol for protocol, port in unit.ports]


def _row(model: Model, unit: Unit, indent: str) -> tuple[str, ...]:
    shown = _shown(unit)
    leader = "*" if model.leader(unit.app) == unit.name else ""
    machine = "" if unit.principal else str(unit.machine)
    ports = ",".join(_ports(unit))
    return (
        f"{indent}{unit.name}{leader}", shown.name, unit.agent.name, machine, unit.address, ports, shown.message
    )  # fmt: skip


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def summary(model: Model) -> str:
    """Return a line such as `12 units: 11 active, 1 blocked`."""
    counts: dict[str, int] = {}
    for unit in model.units.values():
        counts[_shown(unit).name] = counts.get(_shown(unit).name, 0) + 1
    parts = ", ".join(f"{counts[name]} {name}" for name in sorted(counts, key=_ORDER.index))
    return f"{len(model.units)} units: {parts}"
