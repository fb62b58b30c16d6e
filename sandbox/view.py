"""The model as `juju status` and `juju config` show it: as data, and as text in the same layout."""

import collections
import time
import typing

from sandbox import settings
from sandbox.store import Application, Model, Status, Unit
from slurm_ddp import text_table

Json = dict[str, typing.Any]
_MESSAGE_LIMIT = 120  # of the tables: cmd/juju/status/output_tabular.go, maxMessageLength
_ORDER = ("error", "blocked", "maintenance", "waiting", "active", "unknown")


def as_data(model: Model) -> Json:
    """Return the model in the shape of `juju status --format json`."""
    principals = sorted(
        (unit for unit in model.units.values() if unit.principal is None),
        key=lambda unit: unit.machine,
    )
    return {
        "model": {
            "name": model.name,
            "type": "iaas",
            "controller": "sandbox",
            "cloud": "sandbox",
            "version": model.version.version,
        },
        "machines": {str(unit.machine): _machine(model, unit) for unit in principals},
        "applications": {
            name: _application(model, app) for name, app in model.applications.items()
        },
    }


def _machine(model: Model, unit: Unit) -> Json:
    return {
        "juju-status": {"current": "started" if unit.address else "pending"},
        "hostname": model.host(unit.machine),
        "dns-name": unit.address,
        "instance-id": model.host(unit.machine),
    }


def options_as_data(app: Application) -> Json:
    """Return the application's options in the shape of `juju config`."""
    declared, values = app.declared_options(), settings.options(app)
    shown: dict[str, Json] = {}
    for name, spec in sorted(declared.items()):
        about = {key: spec[key] for key in ("default", "description") if key in spec}
        source = "default" if "default" in about else "unset"
        if name in app.options:
            source = "user"
        value = {"value": values[name]} if values.get(name) is not None else {}
        shown[name] = {**about, "source": source, "type": spec["type"], **value}
    return {"application": app.name, "charm": app.charm, "settings": shown}


def _application(model: Model, app: Application) -> Json:
    units = model.app_units(app.name)
    own = [app.status]
    if app.status.name == "unknown":
        own = [_status_of(unit) for unit in units]
    # As Juju shows it
    worst = min(own, key=lambda status: _ORDER.index(status.name), default=Status())
    data: Json = {
        "charm": app.charm,
        "charm-rev": app.revision,
        "version": next((unit.version for unit in units if unit.version), ""),
        "exposed": False,
        "application-status": _status(worst),
    }
    if app.subordinate:
        data["subordinate-to"] = sorted({(unit.principal or "").split("/")[0] for unit in units})
    else:
        data["units"] = {unit.name: _unit(model, unit) for unit in units}
    return data


def _port(protocol: str, port: int | None) -> str:
    return protocol if port is None else f"{port}/{protocol}"


def _unit(model: Model, unit: Unit) -> Json:
    data: Json = {
        "workload-status": _status(_status_of(unit)),
        "juju-status": _status(unit.agent),
        "open-ports": [_port(protocol, port) for protocol, port in unit.ports],
        "public-address": unit.address,
        "leader": model.leader(unit.app) == unit.name,
        "workload-version": unit.version,
    }
    if unit.principal is None:
        data["machine"] = str(unit.machine)
    subordinates = [other for other in model.units.values() if other.principal == unit.name]
    if subordinates:
        data["subordinates"] = {other.name: _unit(model, other) for other in subordinates}
    return data


def _status(status: Status) -> Json:
    return {"current": status.name, "message": status.message}


def _status_of(unit: Unit) -> Status:
    return unit.agent if unit.agent.name == "error" else unit.status


def as_text(model: Model) -> str:
    """Return tables of applications, units (subordinates indented) and machines."""
    data = as_data(model)
    head = [
        ("Model", "Controller", "Cloud/Region", "Version", "SLA", "Timestamp", "Notes"),
        (
            model.name,
            "sandbox",
            "this machine",
            model.version.version,
            "unsupported",
            time.strftime("%H:%M:%S%z"),
            "",
        ),
    ]
    apps = [("App", "Version", "Status", "Scale", "Charm", "Channel", "Rev", "Exposed", "Message")]
    units: list[tuple[str, ...]] = [
        ("Unit", "Workload", "Agent", "Machine", "Public address", "Ports", "Message")
    ]
    machines = [("Machine", "State", "Address", "Inst id", "Base", "AZ", "Message")]
    for name, app in data["applications"].items():
        status, scale = app["application-status"], str(len(model.app_units(name)))
        row = (
            name,
            app["version"],
            status["current"],
            scale,
            app["charm"],
            "",
            str(app["charm-rev"]),
            "no",
        )
        apps.append((*row, _cut(status["message"])))
        for unit, about in app.get("units", {}).items():
            units.append(_row(unit, about))
            units += [
                _row(f"  {other}", its) for other, its in about.get("subordinates", {}).items()
            ]
    for number, machine in data["machines"].items():
        state = machine["juju-status"]["current"]
        machines.append(
            (number, state, machine["dns-name"], machine["instance-id"], "debian@12", "", "")
        )
    return "\n\n".join(text_table.aligned(table) for table in (head, apps, units, machines)) + "\n"


def _row(name: str, unit: Json) -> tuple[str, ...]:
    status, agent = unit["workload-status"], unit["juju-status"]["current"]
    where = (unit.get("machine", ""), unit["public-address"], ",".join(unit["open-ports"]))
    return (name + "*" * unit["leader"], status["current"], agent, *where, _cut(status["message"]))


def _cut(message: str) -> str:
    """Shorten a message as `juju status` does; the other formats have all of it."""
    return f"{message[:_MESSAGE_LIMIT]}..." if len(message) > _MESSAGE_LIMIT else message


def summary(model: Model) -> str:
    """Return a line such as `12 units: 11 active, 1 blocked`."""
    counts = collections.Counter(_status_of(unit).name for unit in model.units.values())
    parts = ", ".join(f"{counts[name]} {name}" for name in sorted(counts, key=_ORDER.index))
    return f"{len(model.units)} units: {parts}"
