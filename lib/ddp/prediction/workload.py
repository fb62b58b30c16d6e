"""A rank's computation in a step, and its rate."""

import dataclasses
import pathlib
import runpy
import types

from ddp.options import models
from ddp.problem import Command, ParameterError, Problem
from ddp.run import folder
from ddp.workspace import checks, folders
from ddp.workspace.folders import Workspace


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work of every rank in a step."""

    model: str  # "" if only the number of its parameters is given
    parameters: int
    seq_len: int
    tokens: int  # of one rank and one forward pass
    accumulate: int  # forward passes in a step
    layers: int = 0  # 0 if only the number of parameters is given
    width: int = 0
    vocab: int = 0


@dataclasses.dataclass(frozen=True)
class Rate:
    """The tokens per second of one rank, as a run measured them."""

    tokens_per_second: float
    source: str
    world: int = 1  # ranks of the run,
    num_nodes: int = 1  # that exchanged all gradients over their network
    step_tokens: int = 1  # of a rank and a forward pass in it
    accumulate: int = 1


def describe(
    workspace: Workspace, payload: pathlib.Path, params: models.Plan, *, on_gpu: bool
) -> Workload:
    """Describe the payload's step, with its own defaults for options that are not given."""
    seq_len = params.seq_len or (1024 if on_gpu else 128)
    batch = params.batch or (32 if on_gpu else 16)
    tokens = batch * seq_len
    if params.parameters is not None:
        return Workload("", params.parameters, seq_len, tokens, params.grad_accum)

    model = params.model or ("gpt2" if on_gpu else "tiny")
    source = payload / "ddptrain" / "shapes.py"
    shapes = types.SimpleNamespace(**runpy.run_path(str(source)))
    vocab = shapes.padded(_vocabulary(workspace, params.dataset, on_gpu=on_gpu))
    layers, heads, width = shapes.SIZES[model]
    parameters = shapes.count(shapes.Shape(layers, heads, width, seq_len, vocab))
    return Workload(model, parameters, seq_len, tokens, params.grad_accum, layers, width, vocab)


def find_rate(workspace: Workspace, params: models.Plan, work: Workload, *, on_gpu: bool) -> Rate:
    """Return the rate of one rank, and its source. Raises ParameterError."""
    if params.tokens_per_second is not None:
        return Rate(float(params.tokens_per_second), "as given", step_tokens=work.tokens)
    wanted = (work.model, work.seq_len, on_gpu)
    same: list[folder.Json] = []
    for run in workspace.do(folder.measured_rates, timeout_s=60, runs=workspace.runs):
        if (run["model"], run["seq_len"], run["on_gpu"]) == wanted:
            same.append(run)
    if not same:
        device = "GPU" if on_gpu else "rank"
        how = f"give that of one {device}, or train it"
        raise ParameterError("tokens-per-second", f"no run has measured this model; {how}")
    # The rate of several ranks includes their communication
    best = min(same, key=lambda run: (run["world_size"], -run["tokens_per_second"]))
    world = best["world_size"]
    is_exchanging = bool(best["sync_every"])  # its ranks hardly wait
    return Rate(
        best["tokens_per_second"] / world,
        f"measured by the run {best['run']}, ranks: {world}",
        world,
        1 if is_exchanging else best["nodes"] or 1,
        (best["batch"] or 1) * work.seq_len,
        best["grad_accum"] or 1,
    )


def _vocabulary(workspace: Workspace, dataset: str | None, *, on_gpu: bool) -> int:
    if dataset is None:
        return 50257 if on_gpu else 257  # gpt2's and the byte tokenizer's
    path = dataset
    if "/" not in dataset:
        path = workspace.look().datasets.get(dataset, str(workspace.datasets / dataset))
    checks.check_inside(workspace, "dataset", path, kinds=("folder",))
    try:
        return int(workspace.read_json(f"{path}/dataset.json")["tokenizer"]["vocab"])
    except (folders.MissingError, KeyError, TypeError, ValueError) as e:
        text = f"dataset: {path} has no dataset.json with a vocabulary"
        raise Problem(text, remedy=Command("prepare")) from e
