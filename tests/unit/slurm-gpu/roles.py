"""What one hook of the compute role runs, without Juju."""

import time

import settings
from maintenance import hooks
from node import compute, registration
from node import machine as machines
from slurm_ddp.charm import Status
from slurm_ddp.interfaces.slurm_gres import ControllerGres, NodeGres

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
    """Return the answer of a controller whose slurmctld hands out what the unit publishes."""
    answered = offer(answer, config)
    assert answered is not None
    return answer.model_copy(update={"applied": ("0" * 12, answered.digest)})


def maintain(stage: registration.Stage = registration.Stage.REGISTERED) -> bool:
    """Run a hook of the maintenance that registers the node as far as this; return whether it may be registered."""
    may_register = hooks.prepare({})
    if may_register:
        hooks.complete(machines.look(), {}, registration.Progress(stage))
    return may_register


def stamp(seconds: float) -> str:
    """Write a time as Slurm does, from now on."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
