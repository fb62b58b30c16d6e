"""The text of `status`, in the layout of `juju status` of Juju 3.6, and the same as data."""

import collections.abc
import time
import typing

from sandbox import settings
from sandbox.store import Application, Model, Status, Unit

Json = dict[str, typing.Any]
_ORDER = ("error", "blocked", "maintenance", "waiting", "active", "unknown")


def as_data(model: Model) -> Json:
    """Return the model in the shape of `juju status --format json`."""
    principals = sorted(
        (unit for unit in model.units.values() if unit.principal is None), key=lambda unit: unit.machine
    )
    return {
        "model": {"name": model.name, "type": "iaas", "controller": "sandbox", "cloud": "sandbox", "version": "3.6"},
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
    }


def options_as_data(app: Application) -> Json:
    """Return the application's options in the shape of `juju config`."""
    declared, values = app.declared_options(), settings.options(app)
    shown: dict[str, Json] = {}
    for name, spec in sorted(declared.items()):
        about = {key: spec[key] for key in ("default", "description") if key in spec}
        source = "user" if name in app.options else "default" if "default" in about else "unset"
        value = {"value": values[name]} if values.get(name) is not None else {}
        shown[name] = {**about, "source": source, "type": spec["type"], **value}
    return {"application": app.name, "charm": app.charm, "settings": shown}


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
        "workload-status": _status(_status_of(unit)),
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


def _status_of(unit: Unit) -> Status:
    return unit.agent if unit.agent.name == "error" else unit.status


def _worst(app: Application, units: list[Unit]) -> Status:
    """Return the application's own status, or else the most severe of its units', as Juju does."""
    if app.status.name != "unknown":
        return app.status
    return min((_status_of(unit) for unit in units), key=lambda status: _ORDER.index(status.name), default=Status())


def as_text(model: Model) -> str:
    """Return applications, units and machines as tables, subordinates indented below their principal."""
    head = [
        ("Model", "Controller", "Cloud/Region", "Version", "SLA", "Timestamp", "Notes"),
        (model.name, "sandbox", "this machine", "3.6", "unsupported", time.strftime("%H:%M:%S%z"), ""),
    ]
    apps = [("App", "Version", "Status", "Scale", "Charm", "Channel", "Rev", "Exposed", "Message")]
    for app in model.applications.values():
        members = model.app_units(app.name)
        version = next((unit.version for unit in members if unit.version), "")
        worst = _worst(app, members)
        apps.append(
            (app.name, version, worst.name, str(len(members)), app.charm, "", str(app.revision), "no", worst.message)
        )
    units: list[tuple[str, ...]] = [("Unit", "Workload", "Agent", "Machine", "Public address", "Ports", "Message")]
    machines = [("Machine", "State", "Address", "Inst id", "Base", "AZ", "Message")]
    for unit in model.units.values():
        if unit.principal is None:
            units.append(_row(model, unit, ""))
            units += [_row(model, other, "  ") for other in model.units.values() if other.principal == unit.name]
    for unit in sorted(model.units.values(), key=lambda unit: unit.machine):
        if unit.principal is None:
            state, host = _machine_state(unit), model.host(unit.machine)
            machines.append((str(unit.machine), state, unit.address, host, "debian@12", "", ""))
    return "\n\n".join(_table(table) for table in (head, apps, units, machines)) + "\n"


def _machine_state(unit: Unit) -> str:
    return "started" if unit.address else "pending"


def _ports(unit: Unit) -> list[str]:
    return [f"{port}/{protocol}" if port is not None else protocol for protocol, port in unit.ports]


def _row(model: Model, unit: Unit, indent: str) -> tuple[str, ...]:
    status = _status_of(unit)
    leader = "*" if model.leader(unit.app) == unit.name else ""
    machine = "" if unit.principal else str(unit.machine)
    ports = ",".join(_ports(unit))
    return (f"{indent}{unit.name}{leader}", status.name, unit.agent.name, machine, unit.address, ports, status.message)


def _table(rows: collections.abc.Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def summary(model: Model) -> str:
    """Return a line such as `12 units: 11 active, 1 blocked`."""
    counts: dict[str, int] = {}
    for unit in model.units.values():
        counts[_status_of(unit).name] = counts.get(_status_of(unit).name, 0) + 1
    parts = ", ".join(f"{counts[name]} {name}" for name in sorted(counts, key=_ORDER.index))
    return f"{len(model.units)} units: {parts}"
