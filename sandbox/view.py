"""What `status` shows: the text as `juju status` lays it out, and the same as data."""

import typing

from sandbox.store import Application, Model, Status, Unit

Json = dict[str, typing.Any]
_ORDER = ("error", "blocked", "maintenance", "waiting", "active", "unknown")


def as_data(model: Model) -> Json:
    """Return the model in the shape of `juju status --format json`."""
    return {
        "model": {"name": model.name, "cloud": "sandbox", "version": "3.6"},
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
    data: Json = {"charm": app.charm, "charm-rev": app.revision, "application-status": _status(_worst(app, units))}
    if app.subordinate:
        data["subordinate-to"] = sorted({(unit.principal or "").split("/")[0] for unit in units})
    else:
        data["units"] = {unit.name: _unit(model, unit) for unit in units}
    return data


def _unit(model: Model, unit: Unit) -> Json:
    data: Json = {
        "workload-status": _status(_shown(unit)),
        "juju-status": _status(unit.agent),
        "machine": unit.host,
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


def as_text(model: Model) -> str:
    """Return applications and units as tables, subordinates indented below their principal."""
    apps: list[tuple[str, ...]] = [("App", "Version", "Status", "Scale", "Charm", "Rev")]
    for app in model.applications.values():
        members = model.app_units(app.name)
        version = next((unit.version for unit in members if unit.version), "")
        worst = _worst(app, members)
        apps.append((app.name, version, worst.name, str(len(members)), app.charm, str(app.revision)))
    units: list[tuple[str, ...]] = [("Unit", "Workload", "Agent", "Address", "Message")]
    for unit in model.units.values():
        if unit.principal is None:
            units.append(_row(model, unit, ""))
            units += [_row(model, other, "  ") for other in model.units.values() if other.principal == unit.name]
    return f"Model  {model.name} (sandbox)\n\n{_table(apps)}\n\n{_table(units)}\n"


def _row(model: Model, unit: Unit, indent: str) -> tuple[str, ...]:
    shown = _shown(unit)
    leader = "*" if model.leader(unit.app) == unit.name else ""
    return (f"{indent}{unit.name}{leader}", shown.name, unit.agent.name, unit.address, shown.message)


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
