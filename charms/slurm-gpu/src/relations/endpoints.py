"""The charm's relations that concern this unit, and the data in their databags."""

import contextlib

import ops

from controller import gres_lines
from slurm_ddp import charm
from slurm_ddp.interfaces import slurm_gres

COMPUTE, CONTROLLER, NODE_GRES, GRES = "compute", "controller", "node-gres", "gres"

Units = dict[str, tuple[ops.Relation, ops.Unit]]  # by the unit's name


def events(on: ops.CharmEvents) -> list[ops.BoundEvent]:
    """List the events of the relations after which the unit looks again."""
    found: list[ops.BoundEvent] = []
    for name in (COMPUTE, CONTROLLER, NODE_GRES, GRES):
        end = on[name]
        found += [end.relation_created, end.relation_joined]
        found += [end.relation_changed, end.relation_departed]
    return [*found, on[NODE_GRES].relation_broken, on[GRES].relation_broken]


def relations(model: ops.Model, endpoint: str) -> list[ops.Relation]:
    """Return the relations that stay, without other machines' principals."""
    found = [relation for relation in model.relations[endpoint] if relation.active]
    return [
        relation
        for relation in found
        if endpoint in (NODE_GRES, GRES) or charm.is_principal(relation.app.name)
    ]


def is_leaving(event: ops.EventBase, unit: ops.Unit) -> bool:
    """Whether this unit leaves its compute node.

    The controller may have dropped its lines already.
    """
    if not isinstance(event, ops.RelationDepartedEvent):
        return False
    if event.relation.name == COMPUTE:
        return charm.is_principal(event.relation.app.name)
    return event.departing_unit == unit


def published(relation: ops.Relation, unit: ops.Unit) -> slurm_gres.NodeGres | None:
    """Return the data that a compute unit published, None before it did.

    Raises `ValueError` for other data.
    """
    return relation.load(slurm_gres.NodeGres, unit) if relation.data[unit].get("node") else None


def answer(relation: ops.Relation, app: ops.Application) -> slurm_gres.ControllerGres:
    """Read the controller's published data; empty if it is unreadable."""
    try:
        return relation.load(slurm_gres.ControllerGres, app)
    except ValueError:
        return slurm_gres.ControllerGres()


def exchanged(
    model: ops.Model, unit: ops.Unit
) -> tuple[slurm_gres.ControllerGres | None, slurm_gres.NodeGres | None]:
    """Return the data published by the controller and by this compute unit, or None."""
    controllers = None
    own = None
    for relation in relations(model, NODE_GRES):
        controllers = answer(relation, relation.app)
        with contextlib.suppress(ValueError):
            own = published(relation, unit)
    return controllers, own


def compute_units(model: ops.Model, event: ops.EventBase) -> Units:
    """List the compute units that are related to the controller, without one that is departing."""
    departing = event.departing_unit if isinstance(event, ops.RelationDepartedEvent) else None
    found: Units = {}
    for relation in relations(model, GRES):
        for unit in relation.units:
            if unit != departing:
                found[unit.name] = (relation, unit)
    return found


def save_answers(
    model: ops.Model, app: ops.Application, units: Units, view: gres_lines.View
) -> None:
    """Publish the controller's answer to the nodes of each relation, if it changed."""
    for relation in relations(model, GRES):
        names = {name for name, (owner, _) in units.items() if owner is relation}
        before = answer(relation, app)
        now = gres_lines.answer(view, names, before)
        if now != before:
            relation.save(now, app)
