"""The charm's actions: parameters in, results out."""

import collections.abc
import dataclasses
import typing

import pydantic

from controller import gres_lines
from driver import plan, state
from driver.state import DriverError
from maintenance import layouts, reset, upgrade
from node import compute, health_timer, kept, registration
from node.machine import Machine
from slurm_ddp import apt
from slurm_ddp.charm import Action, ActionError, Log, Parameters, Results
from slurm_ddp.commands import CommandError
from slurm_ddp.slurm import nodes

# What fails an action with one line and no traceback.
FAILURES = (DriverError, kept.KeptError, nodes.NodeError, apt.AptError, CommandError)
_Wait = typing.Annotated[int, pydantic.Field(ge=0, le=3600)]  # seconds


@dataclasses.dataclass(frozen=True)
class Unit:
    """The unit that an action runs on, with access to its machine."""

    is_compute: bool
    is_controller: bool
    config: collections.abc.Mapping[str, typing.Any]
    machine: collections.abc.Callable[[], Machine]
    # Looks at the machine again, registers it
    reconcile: collections.abc.Callable[[], registration.Progress | None]

    def node(self) -> str | None:
        """Return the name of this machine's node. Raises `ActionError` if there is none."""
        if not self.is_compute:
            raise ActionError(
                "this unit has no node's GPUs: run it on a unit that is integrated with slurmd"
            )
        return self.machine().node


class _UpgradeDriver(Parameters, frozen=True):
    branch: str | None = None
    version: str | None = None
    drain: bool = False
    wait: _Wait = 600


class _ResetGpu(Parameters, frozen=True):
    gpu: str
    wait: _Wait = 600


class _SetMig(_ResetGpu, frozen=True):
    profiles: str


def _show_gres(unit: Unit, _: Parameters, _log: Log) -> Results:
    return (
        gres_lines.summary()
        if unit.is_controller and not unit.is_compute
        else compute.summary(unit.machine())
    )


def _health_check(unit: Unit, _: Parameters, _log: Log) -> Results:
    node, config = unit.node(), unit.machine().config
    if config.problem:
        raise ActionError(config.problem)
    reset.check_smi()
    return health_timer.check(node, xids=config.health_xids)


def _accept_gpus(unit: Unit, _: Parameters, _log: Log) -> Results:
    unit.node()
    compute.accept(unit.machine())
    progress = unit.reconcile()
    if progress is not None and progress.stage in {
        registration.Stage.FAILED,
        registration.Stage.INVALID,
    }:
        raise ActionError(
            f"the node is not registered: {progress.detail}; see journalctl -u slurmd"
        )
    return compute.summary(unit.machine())


def _upgrade_driver(unit: Unit, wanted: _UpgradeDriver, log: Log) -> Results:
    def run(node: str | None) -> Results:
        spec = plan.narrowed(
            plan.spec(unit.config), wanted.branch, wanted.version, state.look().branch
        )
        return upgrade.upgrade(spec, node, wanted.wait, log, drain=wanted.drain)

    return _on_cards(unit, run)


def _reset_gpu(unit: Unit, wanted: _ResetGpu, log: Log) -> Results:
    return _on_cards(unit, lambda node: reset.reset(wanted.gpu, node, wanted.wait, log))


def _set_mig(unit: Unit, wanted: _SetMig, log: Log) -> Results:
    return _on_cards(
        unit, lambda node: layouts.set_layout(wanted.gpu, wanted.profiles, node, wanted.wait, log)
    )


def _on_cards(unit: Unit, run: collections.abc.Callable[[str | None], Results]) -> Results:
    """Run the action, then register the node again, even after an error."""
    node = unit.node()
    try:
        results = run(node)
    finally:
        if kept.maintenance() is not None:
            unit.reconcile()
    held = kept.maintenance()
    if held is not None:
        results.setdefault(
            "detail", f"{held.node} stays drained until it is registered again: see show-gres"
        )
    return results


ACTIONS: dict[str, Action[Unit]] = {
    "detect": Action(Parameters, lambda unit, _, _log: compute.detected(unit.machine())),
    "show-gres": Action(Parameters, _show_gres),
    "health-check": Action(Parameters, _health_check),
    "accept-gpus": Action(Parameters, _accept_gpus),
    "upgrade-driver": Action(_UpgradeDriver, _upgrade_driver),
    "reset-gpu": Action(_ResetGpu, _reset_gpu),
    "set-mig": Action(_SetMig, _set_mig),
}
