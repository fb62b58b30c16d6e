"""The charm's actions: a handler for each name. A handler returns the results, or raises one of `REFUSALS`."""

import collections.abc
import typing

import ops

from controller import gres_lines
from driver import plan as driver_plan
from driver import state as driver_state
from driver import upgrade as driver_upgrade
from maintenance import hold as gpu_hold
from maintenance import reset as gpu_tasks
from node import compute, registration
from node import health_check as gpu_monitor
from node import machine as machines
from slurm_ddp.interfaces import slurm_gres
from slurm_ddp.run import CommandError
from slurm_ddp.slurm import nodes

Results = dict[str, str]

# What fails an action with one line and no traceback.
REFUSALS = (
    compute.MachineError,
    ValueError,
    gpu_monitor.MonitorError,
    driver_state.DriverError,
    gpu_hold.HoldError,
    gpu_tasks.TaskError,
    nodes.NodeError,
    CommandError,
)


class Seat(typing.Protocol):
    """What a handler may use of the charm."""

    @property
    def machine(self) -> machines.Machine:
        """This machine as it was at the start of the hook, or at the last `reconcile`."""
        ...

    @property
    def config(self) -> collections.abc.Mapping[str, typing.Any]:
        """The options."""
        ...

    def answer(self) -> slurm_gres.ControllerGres | None:
        """Return what the controller seat published."""
        ...

    def published(self) -> slurm_gres.NodeGres | None:
        """Return what this unit published for the controller."""
        ...

    @property
    def progress(self) -> registration.Progress | None:
        """How far the last `reconcile` brought the node."""
        ...

    def is_compute(self) -> bool:
        """Whether this unit sits on a compute node."""
        ...

    def is_controller(self) -> bool:
        """Whether this unit sits on the controller."""
        ...

    def look_again(self) -> None:
        """Forget what `machine` was, after something changed it."""
        ...

    def reconcile(self, event: ops.EventBase) -> None:
        """Move this unit to its desired state."""
        ...


Handler = collections.abc.Callable[[Seat, ops.ActionEvent], Results]


def detect(seat: Seat, _: ops.ActionEvent) -> Results:
    """Show the GPUs."""
    return compute.detected(seat.machine)


def show_gres(seat: Seat, _: ops.ActionEvent) -> Results:
    """Show what this seat wrote down, and what Slurm made of it."""
    if seat.is_controller() and not seat.is_compute():
        return gres_lines.summary()
    return _summary(seat)


def health_check(seat: Seat, event: ops.ActionEvent) -> Results:
    """Look at the GPUs now."""
    _need_compute(seat)
    config = seat.machine.config
    config.check()
    return gpu_monitor.check(
        seat.machine.node, dcgm=bool(event.params.get("dcgm", config.health_dcgm)), xids=config.health_xids
    )


def accept_gpus(seat: Seat, event: ops.ActionEvent) -> Results:
    """Take the cards that are here now for all that the node should have."""
    _need_compute(seat)
    compute.accept(seat.machine)
    seat.reconcile(event)
    progress = seat.progress
    if progress is not None and progress.stage in {registration.Stage.FAILED, registration.Stage.INVALID}:
        raise compute.MachineError(f"the node is not registered: {progress.detail}; see journalctl -u slurmd")
    return _summary(seat)


def _summary(seat: Seat) -> Results:
    offered = compute.offer(seat.machine, seat.published())
    return compute.summary(seat.machine, offered, seat.answer())


def upgrade_driver(seat: Seat, event: ops.ActionEvent) -> Results:
    """Change the driver."""
    _need_compute(seat)
    others = [name for name in ("branch", "version") if name in event.params]
    if event.params.get("cancel") and others:
        raise gpu_tasks.TaskError(f"{others[0]} contradicts cancel=true, which installs nothing: leave one of them out")
    if event.params.get("cancel"):
        said = driver_upgrade.cancel()
        seat.look_again()
        seat.reconcile(event)
        return {"result": "cancelled", "detail": said}
    wanted = driver_plan.spec(seat.config)
    branch, version = event.params.get("branch"), event.params.get("version")
    wanted = driver_plan.narrowed(wanted, branch, version, driver_upgrade.present())
    most = gpu_tasks.MOST_PATIENCE_S
    patience_s = gpu_tasks.seconds("drain-timeout", event.params.get("drain-timeout", 24 * 3600), most)

    def go_on() -> None:
        seat.look_again()
        seat.reconcile(event)

    return gpu_tasks.upgrade(wanted, seat.machine.node, patience_s, _asked(event), go_on)


def reset_gpu(seat: Seat, event: ops.ActionEvent) -> Results:
    """Reset a card."""
    return _on_cards(seat, event, lambda node, asked: gpu_tasks.reset(event.params["gpu"], node, asked))


def set_mig(seat: Seat, event: ops.ActionEvent) -> Results:
    """Give a card a MIG layout."""
    gpu, profiles = event.params["gpu"], event.params["profiles"]
    return _on_cards(seat, event, lambda node, asked: gpu_tasks.set_mig(gpu, profiles, node, asked))


def _on_cards(
    seat: Seat, event: ops.ActionEvent, task: collections.abc.Callable[[str | None, gpu_tasks.Asked], Results]
) -> Results:
    """Do it, and register the node anew, however it ended."""
    _need_compute(seat)
    asked = _asked(event)
    node = seat.machine.node
    try:
        results = task(node, asked)
    finally:
        if gpu_hold.Hold.load() is not None:
            seat.look_again()
            seat.reconcile(event)
    held = gpu_hold.Hold.load()
    if held is not None:
        results.setdefault("detail", f"{held.node} stays drained until it is registered anew; show-gres tells")
    return results


def _need_compute(seat: Seat) -> None:
    if not seat.is_compute():
        raise gpu_tasks.TaskError("this unit has no node's GPUs: run it on a unit that is integrated with slurmd")


def _asked(event: ops.ActionEvent) -> gpu_tasks.Asked:
    wait_s = gpu_tasks.seconds("wait", event.params.get("wait", 600), gpu_tasks.MOST_WAIT_S)
    return gpu_tasks.Asked(wait_s, event.log)


HANDLERS: dict[str, Handler] = {
    "detect": detect,
    "show-gres": show_gres,
    "health-check": health_check,
    "accept-gpus": accept_gpus,
    "upgrade-driver": upgrade_driver,
    "reset-gpu": reset_gpu,
    "set-mig": set_mig,
}


class Actions(ops.Object):
    """Observes every action of `HANDLERS`."""

    def __init__(self, charm: ops.CharmBase, seat: Seat) -> None:
        super().__init__(charm, "actions")
        self._seat = seat
        for name in HANDLERS:
            charm.framework.observe(charm.on[name].action, self._on_action)

    def _on_action(self, event: ops.ActionEvent) -> None:
        handler = HANDLERS[event.handle.kind.removesuffix("_action").replace("_", "-")]
        try:
            event.set_results(handler(self._seat, event))
        except REFUSALS as e:
            event.fail(str(e))
