"""An operator's settings: options, secrets and actions, checked as Juju's controller does."""

import collections.abc
import contextlib
import typing

from sandbox import bundle as bundles
from sandbox import values as yaml_values
from sandbox.model import enqueue
from sandbox.store import Application, Event, Model, SandboxError, Secret, Unit, new_id

Json = dict[str, typing.Any]
_READ: dict[str, collections.abc.Callable[[str], object]] = {
    "boolean": lambda text: {"true": True, "false": False}[text.lower()],
    "int": int,
    "float": float,
}


def set_options(
    model: Model,
    app: Application,
    values: collections.abc.Mapping[str, str],
    *,
    reset: collections.abc.Collection[str] = (),
) -> None:
    """Set options from text, and reset others, as `juju config APP --reset a,b key=value`."""
    declared = app.declared_options()
    if both := values.keys() & set(reset):
        raise SandboxError(f"{app.name}: {min(both)} is both set and reset")
    if unknown := set(reset) - declared.keys():
        raise SandboxError(
            f"{app.name}: no option {min(unknown)!r} (there are: {', '.join(sorted(declared))})"
        )
    parsed: Json = {}
    for name, text in values.items():
        value: object = text  # one that does not fit stays a text, and is refused
        with contextlib.suppress(KeyError, ValueError):
            value = _READ[declared[name]["type"]](text)
        if problem := bundles.option_problem(name, value, declared):
            raise SandboxError(f"{app.name}: {problem}")
        parsed[name] = find_secret(model, text).id if declared[name]["type"] == "secret" else value
    replace_options(
        model,
        app,
        {name: value for name, value in app.options.items() if name not in reset} | parsed,
    )


def replace_options(model: Model, app: Application, values: Json) -> None:
    """Replace an application's options; on a change its units get config-changed."""
    before = options(app)
    app.options = values
    if options(app) != before:
        for unit in model.app_units(app.name):
            if not unit.dying:
                enqueue(model, unit, "config-changed")


def options(app: Application) -> Json:
    """Return the options with their defaults, without the unset ones, as a hook sees them."""
    declared = app.declared_options()
    defaults = {
        name: spec["default"] for name, spec in declared.items() if spec.get("default") is not None
    }
    return defaults | app.options


def _param(text: str, schema: Json) -> object:
    """Read a value as YAML; a whole float is an integer (gojsonschema, isFloat64AnInteger)."""
    found = yaml_values.parse(text)
    if schema.get("type") != "integer" or not isinstance(found, float):
        return found
    return int(found) if abs(found) < 1 << 53 and found.is_integer() else found


def action_params(app: Application, action: str, values: collections.abc.Mapping[str, str]) -> Json:
    """Parse an action's parameters, and check them as the controller does.

    Raises:
        SandboxError: an unknown action, an unknown parameter or a value of another type, by name.
    """
    actions = app.section("actions")
    if action not in actions:
        there_are = ", ".join(sorted(actions)) or "none"
        raise SandboxError(f"{app.name} has no action {action!r} (there are: {there_are})")
    spec: Json = actions[action] or {}
    properties: dict[str, Json] = spec.get("params") or {}
    if not spec.get("additionalProperties", False):
        _refuse_unknown(action, values, properties)

    params = {name: schema["default"] for name, schema in properties.items() if "default" in schema}
    for name, text in values.items():
        try:
            params[name] = _param(text, properties[name])
        except SandboxError as e:
            raise SandboxError(f"{action}: parameter {name!r}: {e}"[:300]) from e
    _validate(action, params, properties, spec.get("required", []))
    return params


def _refuse_unknown(
    action: str, values: collections.abc.Mapping[str, str], properties: dict[str, Json]
) -> None:
    """Raise SandboxError for the first parameter that the action does not declare."""
    unknown = sorted(values.keys() - properties)
    if unknown:
        known = ", ".join(sorted(properties)) or "none"
        raise SandboxError(f"{action}: unknown parameter {unknown[0]!r} (there are: {known})")


def _validate(action: str, params: Json, properties: dict[str, Json], required: list[str]) -> None:
    """Raise SandboxError for the first parameter that the action's schema refuses."""
    import jsonschema  # noqa: PLC0415 - a third of the start of every other command

    schema: Json = {"type": "object", "properties": properties, "required": required}
    # Draft 4 as in Juju: 1.0 is not an integer
    validator: typing.Any = jsonschema.Draft4Validator(schema)
    for error in validator.iter_errors(params):
        where = f"parameter {error.path[0]!r}: " if error.path else ""
        raise SandboxError(f"{action}: {where}{error.message}"[:300])


def request_action(
    model: Model, unit: Unit, action: str, values: collections.abc.Mapping[str, str]
) -> Event:
    """Queue an action. Raises `SandboxError` if the controller would refuse it."""
    app = model.applications[unit.app]
    params = action_params(app, action, values)
    is_parallel = bool((app.section("actions")[action] or {}).get("parallel", False))
    task = model.next_task + 1  # Juju counts the operation, too
    model.next_task += 2
    described = {
        "name": action,
        "id": str(task),
        "params": params,
        "parallel": is_parallel and model.version.honours_parallel,
    }
    event = enqueue(model, unit, "action", action=described)
    assert event is not None
    return event


def cancel_task(model: Model, task: str) -> bool:
    """Cancel a task; return whether this Juju can. Raises `SandboxError` for an unknown task."""
    for unit in model.units.values():
        for event in unit.events:
            if event.action is None or event.action["id"] != task:
                continue
            if event is unit.executing and not model.version.cancels_running:
                return False
            event.action["cancelled"] = True
            return True
    raise SandboxError(f'task "{task}" not found')


def find_secret(model: Model, name: str) -> Secret:
    """Return a user's secret by name or id."""
    for secret in model.secrets.values():
        by_id = secret.id.removeprefix("secret:") == name.removeprefix("secret:")
        if by_id or (secret.name == name and secret.owner == "user"):
            return secret
    raise SandboxError(
        f"secret {name!r} not found: ./sandboxctl add-secret NAME key=value makes one"
    )


def add_secret(model: Model, name: str, content: dict[str, str]) -> Secret:
    """Add a user's secret."""
    if any(secret.name == name for secret in model.secrets.values()):
        raise SandboxError(f"secret {name!r} exists already: ./sandboxctl update-secret changes it")
    secret = Secret(id=f"secret:{new_id()}", owner="user", name=name, contents={1: content})
    model.secrets[secret.id] = secret
    return secret


def update_secret(model: Model, name: str, content: dict[str, str]) -> None:
    """Give a user's secret a new revision; equal content makes none."""
    secret = find_secret(model, name)
    if secret.contents[secret.latest] != content:
        new_revision(model, secret, content)


def grant_secret(model: Model, name: str, app: Application) -> None:
    """Let an application read a user's secret; its units see it from their next event on."""
    secret = find_secret(model, name)
    if app.name not in secret.granted_apps:
        secret.granted_apps.append(app.name)
        if secret.id in options(app).values():
            for unit in model.app_units(app.name):
                enqueue(model, unit, "config-changed")


def can_read(model: Model, secret: Secret, unit: Unit) -> bool:
    """Return whether `unit` may read `secret`: as its owner, or by a grant."""
    if (
        secret.owner in (f"application:{unit.app}", f"unit:{unit.name}")
        or unit.app in secret.granted_apps
    ):
        return True
    grants = [
        grantees for relation, grantees in secret.grants.items() if relation in model.relations
    ]
    return any(unit.app in grantees or unit.name in grantees for grantees in grants)


def can_change(model: Model, secret: Secret, unit: Unit) -> bool:
    """Return whether `unit` may change `secret`: its own or, as leader, its application's."""
    leads = secret.owner == f"application:{unit.app}" and model.leader(unit.app) == unit.name
    return leads or secret.owner == f"unit:{unit.name}"


def new_revision(model: Model, secret: Secret, content: dict[str, str]) -> None:
    """Add a revision; units that track an older one get secret-changed."""
    secret.latest += 1
    secret.contents[secret.latest] = content
    for name, revision in secret.tracked.items():
        unit = model.units.get(name)
        if (
            unit
            and revision < secret.latest
            and can_read(model, secret, unit)
            and not can_change(model, secret, unit)
        ):
            enqueue(model, unit, "secret-changed", secret=secret.id)
