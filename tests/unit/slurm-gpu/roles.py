"""Run the compute role's hook, and the registration by itself, without Juju."""

import time

from slurm_double import Record

import settings
from maintenance import hooks
from node import compute, journals, registration, slurmd_options, slurmd_unit
from node import machine as machines
from slurm_ddp.charm import Status
from slurm_ddp.interfaces.slurm_gres import ControllerGres, NodeGres

GRES = "gpu:mock_gpu:1"
UPSTREAM = ControllerGres(autodetect="nvidia", applied=())  # its gres.conf, without lines of ours
OFF = ControllerGres(autodetect="off", applied=())


def hook(
    answer: ControllerGres | None = UPSTREAM,
    config: settings.Config | None = None,
    *,
    related: bool = True,
    published: NodeGres | None = None,
) -> Status:
    """Register the GPUs, and return the status."""
    machine = machines.look(config, answer, published)
    progress = compute.ensure(machine, owner="slurm-gpu/0")
    return compute.status(machine, related=related, progress=progress)


def offer(
    answer: ControllerGres | None = UPSTREAM,
    config: settings.Config | None = None,
    published: NodeGres | None = None,
) -> NodeGres | None:
    """Build the databag that the unit publishes."""
    return compute.offer(machines.look(config, answer, published))


def live(answer: ControllerGres = OFF, config: settings.Config | None = None) -> ControllerGres:
    """Return the answer of a controller whose slurmctld hands out the unit's lines."""
    answered = offer(answer, config)
    assert answered is not None
    return answer.model_copy(update={"applied": ("0" * 12, answered.digest)})


def maintain(stage: registration.Stage = registration.Stage.REGISTERED) -> bool:
    """Run a maintenance hook that registers the node this far; return whether it may register."""
    may_register = hooks.prepare({})
    if may_register:
        hooks.complete(machines.look(), {}, registration.Progress(stage))
    return may_register


def stamp(seconds: float) -> str:
    """Write a time as Slurm does, from now on."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


def advance(*, lines_live: bool = True, gres: str | None = GRES) -> registration.Progress:
    options = slurmd_options.read()
    assert options is not None
    return registration.advance(
        registration.Target("slurmd-0", gres, options, lines_live=lines_live)
    )


def leave() -> None:
    options = slurmd_options.read()
    assert options is not None
    registration.leave(registration.Target("slurmd-0", None, options))


def drained(reason: str, gres: str = GRES) -> Record:
    return Record(gres, flags={"DYNAMIC_NORM", "DRAIN"}, reason=reason)


def assert_no_journal() -> None:
    assert journals.NodeSnapshot.load() is None and not slurmd_unit.DRAINED_ENV.exists()
