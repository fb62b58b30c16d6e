"""The tensors of a checkpoint: of a live model, and read into it."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import functools
import pathlib
import typing
import warnings

import torch
from torch import Tensor, nn

from ddptrain.checkpoint import stored
from ddptrain.ground import files

DCP = "dcp"  # the folder of weights and moments, and the name of their format

State = dict[str, typing.Any]  # nested; its leaves are tensors


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the live tensors of a model and its optimiser, as saved; tied weights appear once.

    The names follow torch.distributed.checkpoint.state_dict.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    moments: State = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments[names[parameter]] = optimizer.state[parameter]
    return {"model": weights_of(module), "optimizer": {"state": moments}}


def weights_of(module: nn.Module) -> State:
    """Return the live weights of a model by name; tied ones appear once."""
    weights: State = {}
    places: set[object] = set()
    for name, tensor in module.state_dict().items():  # tied ones share their memory
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape
        if place not in places:
            places.add(place)
            weights[name] = tensor
    return weights


def leaves(state: State) -> list[Tensor]:
    """Return the tensors of nested dictionaries, in order."""
    found: list[Tensor] = []
    for value in state.values():
        if isinstance(value, dict):
            found += leaves(value)
        else:
            found.append(value.detach())
    return found


def replaced(state: State, copies: collections.abc.Iterator[Tensor]) -> State:
    """Return the same nested dictionaries with other tensors, taken in order."""
    found: State = {}
    for key, value in state.items():
        found[key] = replaced(value, copies) if isinstance(value, dict) else next(copies)
    return found


def read_into(path: pathlib.Path, state: State) -> None:
    """Copy a checkpoint's tensors into `state`, without the help of other processes."""
    from torch.distributed import checkpoint as dcp

    with plain_errors():
        files.retried(lambda: dcp.load(state, checkpoint_id=str(path / DCP), no_dist=True))


def restore(found: stored.Checkpoint, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint into a model and its optimiser, which has its state tensors already.

    Learning rate, decay and the like stay as they are set.
    """
    if found.meta["format"] == DCP:
        with _naming_a_newer_torch(found):
            read_into(found.path, state_of(module, optimizer))
        return
    groups = [dict(group) for group in optimizer.param_groups]
    for group in groups:
        del group["params"]
    for what, part in (("model", module), ("optimizer", optimizer)):
        path = found.path / "rank-0000" / f"{what}.pt"
        load = functools.partial(torch.load, path, map_location="cpu", mmap=True, weights_only=True)
        part.load_state_dict(files.retried(load))
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update(settings)


def restore_weights(found: stored.Checkpoint, module: nn.Module) -> None:
    """Give a model alone the values of a checkpoint."""
    if found.meta["format"] == DCP:
        with _naming_a_newer_torch(found):
            read_into(found.path, {"model": weights_of(module)})
        return
    path = found.path / "rank-0000" / "model.pt"
    load = functools.partial(torch.load, path, map_location="cpu", mmap=True, weights_only=True)
    module.load_state_dict(files.retried(load))


@contextlib.contextmanager
def _naming_a_newer_torch(found: stored.Checkpoint) -> collections.abc.Iterator[None]:
    """Name the torch that wrote an unreadable checkpoint: 2.13 fails at the metadata of 2.15."""
    made_by = str(found.meta.get("torch", ""))
    try:
        yield
    except AssertionError as e:
        if made_by in ("", torch.__version__):
            raise
        text = f"torch {torch.__version__} cannot read it: torch {made_by} wrote it"
        remedy = "use that one, or a newer one"
        raise stored.CheckpointError(f"{found.path}: {text}; {remedy}") from e


@contextlib.contextmanager
def plain_errors(
    met: collections.abc.Callable[[], BaseException | None] = lambda: None,
) -> collections.abc.Iterator[None]:
    """Raise the error that torch's distributed checkpoint met.

    Not its wrapper, a BaseException, nor the one that torch.save raises instead. `met` returns the
    error behind the one that torch noted, if it is known.
    """
    from torch.distributed.checkpoint import api

    warnings.filterwarnings(
        "ignore", "torch.distributed is disabled, unavailable", UserWarning
    )  # of no_dist, too
    try:
        yield
    except api.CheckpointException as e:
        first, _ = next(iter(e.failures.values()))
        refused = met() or first
        if isinstance(refused, Exception):
            raise refused from e
        raise stored.CheckpointError(str(refused)) from e
