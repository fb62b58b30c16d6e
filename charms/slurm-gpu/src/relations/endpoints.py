"""The charm's relations: which of them concern this unit, and what is in their databags."""

import ops

from slurm_ddp import charm
from slurm_ddp.interfaces import slurm_gres

COMPUTE, CONTROLLER, NODE_GRES, GRES = "compute", "controller", "node-gres", "gres"


def relations(model: ops.Model, endpoint: str) -> list[ops.Relation]:
    """Return the relations that are not being removed, without those of other machines' principals."""
    found = [relation for relation in model.relations[endpoint] if relation.active]
    return [
        relation
        for relation in found
        if endpoint in (NODE_GRES, GRES) or charm.is_principal(relation.app.name)
    ]


def is_leaving(event: ops.EventBase, unit: ops.Unit) -> bool:
    """Whether this unit leaves its compute node, when the controller may have dropped its lines already."""
    if not isinstance(event, ops.RelationDepartedEvent):
        return False
    if event.relation.name == COMPUTE:
        return charm.is_principal(event.relation.app.name)
    return event.departing_unit == unit


def published(relation: ops.Relation, unit: ops.Unit) -> slurm_gres.NodeGres | None:
    """Read the data that a compute unit published, None before it did. Raises `ValueError` for other data."""
    return relation.load(slurm_gres.NodeGres, unit) if relation.data[unit].get("node") else None


def answer(relation: ops.Relation, app: ops.Application) -> slurm_gres.ControllerGres:
    """Read what the controller published; nothing if that cannot be read."""
    try:
        return relation.load(slurm_gres.ControllerGres, app)
    except ValueError:
        return slurm_gres.ControllerGres()
