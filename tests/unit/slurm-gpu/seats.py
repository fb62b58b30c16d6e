"""What one hook of the compute seat runs, without Juju."""

import settings as gpu_settings
from node import compute as compute_seat
from node import registration
from slurm_ddp.interfaces.slurm_gres import ControllerGres, NodeGres

UPSTREAM = ControllerGres(autodetect="nvidia", applied=())  # its gres.conf, without lines of ours
OFF = ControllerGres(autodetect="off", applied=())


def ensure(
    machine: compute_seat.Machine, answer: ControllerGres | None = UPSTREAM, published: NodeGres | None = None
) -> registration.Progress | None:
    """Register the GPUs of the machine."""
    return compute_seat.ensure(machine, compute_seat.offer(machine, published), answer, owner="slurm-gpu/0")


def hook(
    answer: ControllerGres | None = UPSTREAM,
    settings: gpu_settings.Settings | None = None,
    *,
    related: bool = True,
    published: NodeGres | None = None,
) -> compute_seat.Verdict:
    """Register the GPUs, and return the status."""
    machine = compute_seat.look(settings, answer)
    progress = ensure(machine, answer, published)
    return verdict(machine, answer, related=related, progress=progress)


def verdict(
    machine: compute_seat.Machine,
    answer: ControllerGres | None = UPSTREAM,
    *,
    related: bool = True,
    progress: registration.Progress | None = None,
) -> compute_seat.Verdict:
    """Return the status of the node."""
    offered = compute_seat.offer(machine, None)
    return compute_seat.verdict(machine, offered, answer, related=related, progress=progress)


def offer(
    answer: ControllerGres | None = UPSTREAM,
    settings: gpu_settings.Settings | None = None,
    published: NodeGres | None = None,
) -> NodeGres | None:
    """Return what the unit publishes."""
    return compute_seat.offer(compute_seat.look(settings, answer), published)


def live(answer: ControllerGres = OFF, settings: gpu_settings.Settings | None = None) -> ControllerGres:
    """Return the answer of a controller whose slurmctld hands out what the unit publishes."""
    said = offer(answer, settings)
    assert said is not None
    return answer.model_copy(update={"applied": ("0" * 12, said.digest)})


def summary(machine: compute_seat.Machine, answer: ControllerGres | None = UPSTREAM) -> dict[str, str]:
    """Return what the action show-gres does."""
    return compute_seat.summary(machine, compute_seat.offer(machine, None), answer)
