#!/usr/bin/env python3
"""slurm-gpu: GPUs that are right in Slurm by themselves. One charm, two seats: compute nodes and the controller."""

import ops

import compute_seat
import controller_seat
import gpu_actions
import gpu_base
import gpu_settings
import gpu_work
import registration
from slurm_ddp.interfaces import slurm_gres

COMPUTE, CONTROLLER, NODE_GRES, GRES = "compute", "controller", "node-gres", "gres"
_STATUSES = {
    gpu_base.Level.ACTIVE: ops.ActiveStatus,
    gpu_base.Level.WAITING: ops.WaitingStatus,
    gpu_base.Level.BLOCKED: ops.BlockedStatus,
}


class SlurmGpuCharm(ops.CharmBase):
    """Registers this machine's GPUs (compute seat), or merges the nodes' lines into gres.conf (controller seat)."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        self._machine: compute_seat.Machine | None = None
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
            framework.observe(event, self.reconcile)
        framework.observe(on.remove, self._on_remove)
        framework.observe(on.collect_unit_status, self._on_collect_status)
        self._actions = gpu_actions.Actions(self, self)  # held, or ops lets go of it

    def reconcile(self, event: ops.EventBase) -> None:
        """Move this unit to its desired state, whichever event woke it."""
        if self.is_compute() and not self._is_leaving(event):
            self._reconcile_compute(may_reboot=not isinstance(event, ops.ActionEvent))
        if self.is_controller() and self.unit.is_leader():
            self._reconcile_controller(event)

    def _reconcile_compute(self, *, may_reboot: bool) -> None:
        turn = gpu_work.before()
        if turn is gpu_work.Turn.REBOOT and may_reboot:
            gpu_work.rebooting()
            self.unit.reboot()
        if turn in {gpu_work.Turn.HOLD, gpu_work.Turn.REBOOT}:
            return
        if turn is gpu_work.Turn.REGISTER:
            self.look_again()
        answer = self.answer()
        offer = compute_seat.offer(self.machine, answer)
        for relation in self._relations(NODE_GRES) if offer else ():
            relation.save(offer, self.unit)
        self._progress = compute_seat.ensure(self.machine, answer, owner=self.unit.name)
        if gpu_work.after(self.machine.node, self.config, self._progress):
            self._reconcile_compute(may_reboot=may_reboot)

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
        if self.is_compute() or compute_seat.OWNER.exists():
            gpu_work.release()
        compute_seat.release(owner=self.unit.name, wishes=self._settings)
        if controller_seat.is_keeper(self.unit.name):
            controller_seat.release(owner=self.unit.name, last=self.app.planned_units() == 0)

    def _on_collect_status(self, event: ops.CollectStatusEvent) -> None:
        if self.is_compute():
            event.add_status(_status(gpu_work.verdict(self.config, self._compute_verdict)))
        if self.is_controller():
            keeps = self._view or controller_seat.view() if self.unit.is_leader() else None
            event.add_status(_status(controller_seat.verdict(keeps, related=self._has(GRES))))
        if not self.is_compute() and not self.is_controller():
            event.add_status(
                ops.BlockedStatus("integrate compute with slurmd:juju-info or controller with slurmctld:juju-info")
            )

    def _compute_verdict(self) -> gpu_base.Verdict:
        related = self._has(NODE_GRES)
        return compute_seat.verdict(self.machine, self.answer(), related=related, progress=self._progress)

    def answer(self) -> slurm_gres.ControllerGres | None:
        """Return what the controller seat said, None when there is none or it said nothing that can be read."""
        for relation in self._relations(NODE_GRES):
            return _load_answer(relation, relation.app)
        return None

    @property
    def machine(self) -> compute_seat.Machine:
        """This machine as it was when first looked at."""
        if self._machine is None:
            self._machine = compute_seat.look(self._settings)
        return self._machine

    @property
    def _settings(self) -> gpu_settings.Settings:
        return gpu_settings.Settings.of(self.config)

    def is_compute(self) -> bool:
        """Whether this unit sits on a compute node."""
        return self._has(COMPUTE)

    def is_controller(self) -> bool:
        """Whether this unit sits on the controller."""
        return self._has(CONTROLLER)

    def look_again(self) -> None:
        """Forget what `machine` was, after something changed it."""
        self._machine = None

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


def _status(verdict: gpu_base.Verdict) -> ops.StatusBase:
    return _STATUSES[verdict.level](verdict.text)


if __name__ == "__main__":  # pragma: no cover
    ops.main(SlurmGpuCharm)
