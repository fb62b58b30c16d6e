"""What the tests of every charm share."""

# pyright: reportPrivateUsage=false

import dataclasses
from typing import Any

import scenario._consistency_checker as checker
import yaml

# Scenario writes and reads charmcraft.yaml for every event, which by Python's own code is most of what a test costs
yaml.SafeLoader, yaml.SafeDumper = yaml.CSafeLoader, yaml.CSafeDumper

_check_types = checker._check_action_param_types
_NAMES: dict[type, str] = {str: "string", int: "integer", bool: "boolean"}


def _check(charm_spec: Any, action: Any, *found: list[str]) -> None:
    """Check parameters. Scenario knows none of two types: such a one is checked as of its value's type if that fits."""
    declared = charm_spec.actions[action.name] or {}
    params = {
        name: schema | _one(schema, action.params.get(name)) for name, schema in declared.get("params", {}).items()
    }
    spec = dataclasses.replace(charm_spec, actions={action.name: declared | {"params": params}})
    _check_types(spec, action, *found)


def _one(schema: dict[str, Any], value: object) -> dict[str, str]:
    if not isinstance(schema["type"], list):
        return {}
    name = _NAMES.get(type(value), "string")
    return {"type": name if name in schema["type"] else schema["type"][0]}


checker._check_action_param_types = _check
