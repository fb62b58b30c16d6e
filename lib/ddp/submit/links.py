"""Advice on the links between nodes: exchanges of sites, if ranks would wait most of the time."""

import collections.abc
import pathlib

from ddp.options import fields, models
from ddp.prediction import baseline, step, workload
from ddp.problem import Problem
from ddp.submit import resources
from ddp.workspace.folders import Workspace

Settings = collections.abc.Mapping[str, object]  # of the payload
_NAMES = ("model", "seq_len", "batch", "grad_accum")
# A model with one of these has its own size, unlike other runs'
_OWN_SHAPE = ("layers", "heads", "width", "model_local_dir")


def measured(workspace: Workspace, request: resources.Request) -> baseline.Json | None:
    """Return the measured link between a job's nodes, or None."""
    place = _place(request)
    if place.num_nodes < 2:
        return None
    known = baseline.read(workspace)
    return baseline.nearest(known, place.num_nodes, place.world, on_gpu=place.on_gpu)


def recommend(
    workspace: Workspace,
    payload: pathlib.Path,
    request: resources.Request,
    *,
    link: baseline.Json,
    chosen: Settings,
    dataset: str | None,
) -> str:
    """Return a line that recommends exchanges, with the predicted shares, or ""."""
    if chosen.get("sync_every") or any(chosen.get(name) for name in _OWN_SHAPE):
        return ""
    place = _place(request)
    try:
        params = _as_plan(chosen, dataset)
        work = workload.describe(workspace, payload, params, on_gpu=place.on_gpu)
        rate = workload.find_rate(workspace, params, work, on_gpu=place.on_gpu)
    except Problem:  # advice must not refuse a job: perhaps no run has measured this model
        return ""
    compute_s = step.compute_seconds(work, rate, [link], on_gpu=place.on_gpu)
    options = step.choices(work, compute_s, place, link["points"])
    flags = "--gradients bf16" if chosen.get("gradients") == "bf16" else ""
    plain = next(one for one in options if one.flags == flags)
    best = step.recommended(options, plain)
    if best is None:
        return ""
    what = "the link between the nodes would leave the ranks idle"
    shares = f"{1 - plain.efficiency:.0%} of the time, and {1 - best.efficiency:.0%}"
    return f"{what} {shares} with {best.flags} (baseline of {link['created']})"


def _place(request: resources.Request) -> step.Place:
    return step.Place(request.num_nodes, request.ranks_per_node, request.gpus_per_node > 0)


def _as_plan(chosen: Settings, dataset: str | None) -> models.Plan:
    """Return the options of `plan` that belong to a training's settings. Raises ParameterError."""
    given: dict[str, object] = {"dataset": dataset} if dataset else {}
    for name in _NAMES:
        value = chosen.get(name)
        if value is not None:
            given[name.replace("_", "-")] = value
    return fields.parse(models.Plan, given)
