#!/usr/bin/env python3
"""slurm-gpu: GPUs that are right in Slurm by themselves. One charm, two seats: compute nodes and the controller."""

import functools

import ops

import compute_seat
import controller_seat
import gpu_monitor
import registration
from slurm_ddp.interfaces import slurm_gres

COMPUTE, CONTROLLER, NODE_GRES, GRES = "compute", "controller", "node-gres", "gres"
_STATUSES = {
    compute_seat.Level.ACTIVE: ops.ActiveStatus,
    compute_seat.Level.WAITING: ops.WaitingStatus,
    compute_seat.Level.BLOCKED: ops.BlockedStatus,
}


class SlurmGpuCharm(ops.CharmBase):
    """Registers this machine's GPUs (compute seat), or merges the nodes' lines into gres.conf (controller seat)."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        self._progress: registration.Progress | None = None
        self._view: controller_seat.View | None = None
        on = self.on
        lifecycle = (on.install, on.start, on.config_changed, on.upgrade_charm, on.leader_elected, on.update_status)
        relations = (on[name] for name in (COMPUTE, CONTROLLER, NODE_GRES, GRES))
        joined = (
            event
            for relation in relations
            for event in (
                relation.relation_created,
                relation.relation_joined,
                relation.relation_changed,
                relation.relation_departed,
                relation.relation_broken,
            )
        )
        for event in (*lifecycle, *joined):
            framework.observe(event, self._reconcile)
        framework.observe(on.remove, self._on_remove)
        framework.observe(on.detect_action, self._on_detect)
        framework.observe(on.show_gres_action, self._on_show_gres)
        framework.observe(on.accept_gpus_action, self._on_accept_gpus)
        framework.observe(on.health_check_action, self._on_health_check)
        framework.observe(on.collect_unit_status, self._on_collect_status)

    def _reconcile(self, event: ops.EventBase) -> None:
        """Move this unit to its desired state, whichever event woke it."""
        if self._has(COMPUTE) and not self._is_leaving(event):
            self._reconcile_compute()
        if self._has(CONTROLLER) and self.unit.is_leader():
            self._reconcile_controller(event)

    def _reconcile_compute(self) -> None:
        answer = self._answer()
        offer = compute_seat.offer(self._machine, answer)
        for relation in self._relations(NODE_GRES) if offer else ():
            relation.save(offer, self.unit)
        self._progress = compute_seat.ensure(self._machine, answer, owner=self.unit.name)

    def _reconcile_controller(self, event: ops.EventBase) -> None:
        gone = event.departing_unit if isinstance(event, ops.RelationDepartedEvent) else None
        relations = self._relations(GRES)
        units = {unit.name: (relation, unit) for relation in relations for unit in relation.units if unit != gone}
        woke = event.unit.name if isinstance(event, ops.RelationEvent) and event.unit else None
        if isinstance(event, ops.UpdateStatusEvent):
            woke = controller_seat.rotating(units)
        self._view = controller_seat.sync(units, woke, lambda name: _said(*units[name]), owner=self.unit.name)
        for relation in relations:
            names = {name for name, (owner, _) in units.items() if owner is relation}
            said = _load_answer(relation, self.app)
            answer = controller_seat.answer(self._view, names, said)
            if answer != said:
                relation.save(answer, self.app)

    def _on_remove(self, _: ops.RemoveEvent) -> None:
        """Leave the machine as Slurm can use it without this charm."""
        compute_seat.release(owner=self.unit.name, aliases=self._aliases)
        if controller_seat.is_keeper(self.unit.name):
            controller_seat.release(owner=self.unit.name, last=self.app.planned_units() == 0)

    def _on_collect_status(self, event: ops.CollectStatusEvent) -> None:
        if self._has(COMPUTE):
            verdict = compute_seat.verdict(
                self._machine, self._answer(), related=self._has(NODE_GRES), progress=self._progress
            )
            event.add_status(_STATUSES[verdict.level](verdict.text))
        if self._has(CONTROLLER):
            event.add_status(self._controller_status())
        if not self._has(COMPUTE) and not self._has(CONTROLLER):
            event.add_status(
                ops.BlockedStatus("integrate compute with slurmd:juju-info or controller with slurmctld:juju-info")
            )

    def _controller_status(self) -> ops.StatusBase:
        if not self.unit.is_leader():
            return ops.ActiveStatus("standby: the leader keeps gres.conf")
        now = self._view or controller_seat.view()
        if not now.configured:
            return ops.WaitingStatus("waiting for slurmctld to be set up")
        if now.problem:
            return ops.BlockedStatus(now.problem)
        if not self._has(GRES):
            return ops.BlockedStatus("integrate gres with node-gres of the slurm-gpu on slurmd")
        if not now.live:
            return ops.WaitingStatus(
                f"waiting for slurmctld to read gres.conf{f' ({now.silent})' if now.silent else ''}"
            )
        num_nodes, num_devices = controller_seat.counts(now.book)
        return ops.ActiveStatus(f"gres.conf has {_count(num_devices, 'GPU')} on {_count(num_nodes, 'node')}")

    def _on_detect(self, event: ops.ActionEvent) -> None:
        event.set_results(compute_seat.detected(self._machine))

    def _on_show_gres(self, event: ops.ActionEvent) -> None:
        if self._has(CONTROLLER) and not self._has(COMPUTE):
            event.set_results(controller_seat.summary())
        else:
            event.set_results(compute_seat.summary(self._machine, self._answer()))

    def _on_health_check(self, event: ops.ActionEvent) -> None:
        try:
            event.set_results(gpu_monitor.check(self._machine.node))
        except gpu_monitor.MonitorError as e:
            event.fail(str(e))

    def _on_accept_gpus(self, event: ops.ActionEvent) -> None:
        try:
            compute_seat.accept(self._machine)
        except compute_seat.MachineError as e:
            event.fail(str(e))
            return
        self._reconcile(event)
        event.set_results(compute_seat.summary(self._machine, self._answer()))

    def _answer(self) -> slurm_gres.ControllerGres | None:
        """Return what the controller seat said, None when there is none or it said nothing that can be read."""
        for relation in self._relations(NODE_GRES):
            return _load_answer(relation, relation.app)
        return None

    @functools.cached_property
    def _machine(self) -> compute_seat.Machine:
        return compute_seat.look(self._aliases, str(self.config["health-check"]))

    @property
    def _aliases(self) -> str:
        return str(self.config["gpu-type-alias"])

    def _is_leaving(self, event: ops.EventBase) -> bool:
        """Whether this machine is being left, when the controller may have dropped its lines already."""
        if not isinstance(event, ops.RelationDepartedEvent):
            return False
        return event.relation.name == COMPUTE or event.departing_unit == self.unit

    def _has(self, endpoint: str) -> bool:
        return bool(self._relations(endpoint))

    def _relations(self, endpoint: str) -> list[ops.Relation]:
        """Return the relations that are not just being removed."""
        return [relation for relation in self.model.relations[endpoint] if relation.active]


def _said(relation: ops.Relation, unit: ops.Unit) -> slurm_gres.NodeGres | None:
    if not relation.data[unit].get("node"):
        return None
    try:
        return relation.load(slurm_gres.NodeGres, unit)
    except ValueError as e:
        raise controller_seat.UnreadableError(str(e)) from e


def _load_answer(relation: ops.Relation, app: ops.Application) -> slurm_gres.ControllerGres:
    try:
        return relation.load(slurm_gres.ControllerGres, app)
    except ValueError:
        return slurm_gres.ControllerGres()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


if __name__ == "__main__":  # pragma: no cover
    ops.main(SlurmGpuCharm)
