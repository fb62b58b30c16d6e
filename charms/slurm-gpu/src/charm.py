#!/usr/bin/env python3
"""slurm-gpu: GPUs that are right in Slurm by themselves. One charm, two seats: compute nodes and the controller."""

import ops

import actions
import gpu_base
import settings as gpu_settings
from controller import gres_lines as controller_seat
from driver import upgrade
from maintenance import work
from node import compute as compute_seat
from node import registration
from relations import gres as endpoints
from relations.gres import COMPUTE, CONTROLLER, GRES, NODE_GRES
from slurm_ddp.charm import action_name, run_action
from slurm_ddp.interfaces import slurm_gres


class SlurmGpuCharm(ops.CharmBase):
    """Registers this machine's GPUs (compute seat), or merges the nodes' lines into gres.conf (controller seat)."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        self._machine: compute_seat.Machine | None = None
        self.progress: registration.Progress | None = None  # how far the node came in this hook
        self._view: controller_seat.View | None = None
        self._left = False
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
            )
        )
        broken = (on[name].relation_broken for name in (NODE_GRES, GRES))
        for event in (*lifecycle, *joined, *broken):
            framework.observe(event, self.reconcile)
        for event in (on[COMPUTE].relation_broken, on[CONTROLLER].relation_broken, on.stop, on.remove):
            framework.observe(event, self._on_leave)
        framework.observe(on.collect_unit_status, self._on_collect_status)
        for name in actions.ACTIONS:
            framework.observe(on[name].action, self._on_action)

    def reconcile(self, event: ops.EventBase) -> None:
        """Move this unit to its desired state, whichever event woke it."""
        self._note_end(event)
        if self.is_compute() and not endpoints.is_leaving(event, self.unit):
            self._reconcile_compute(may_reboot=not isinstance(event, ops.ActionEvent))
        if self.is_controller() and self.unit.is_leader():
            self._reconcile_controller(event)
        if isinstance(event, ops.UpgradeCharmEvent):
            work.renew_watch()

    def _reconcile_compute(self, *, may_reboot: bool) -> None:
        pending = work.resume_pending()
        if pending is work.Pending.REBOOT and may_reboot:
            upgrade.count_reboot()
            self.unit.reboot()
        if pending in {work.Pending.WAIT, work.Pending.REBOOT}:
            return
        if pending is work.Pending.REGISTER:
            self._machine = None
        self._publish()
        offered = compute_seat.offer(self.machine, self.published())
        self.progress = compute_seat.ensure(self.machine, offered, self.answer(), owner=self.unit.name)
        self._publish()  # a Gres that is registered now may need fewer lines
        if work.complete_pending(self.machine.node, self.config, self.progress):
            self._reconcile_compute(may_reboot=may_reboot)

    def _reconcile_controller(self, event: ops.EventBase) -> None:
        gone = event.departing_unit if isinstance(event, ops.RelationDepartedEvent) else None
        relations = self._relations(GRES)
        units = {unit.name: (relation, unit) for relation in relations for unit in relation.units if unit != gone}
        woke = event.unit.name if isinstance(event, ops.RelationEvent) and event.unit else None
        if isinstance(event, ops.UpdateStatusEvent):
            woke = controller_seat.rotating(units)
        self._view = controller_seat.sync(
            units, woke, lambda name: endpoints.published(*units[name]), owner=self.unit.name
        )
        for relation in relations:
            names = {name for name, (owner, _) in units.items() if owner is relation}
            said = endpoints.answer(relation, self.app)
            answer = controller_seat.answer(self._view, names, said)
            if answer != said:
                relation.save(answer, self.app)

    def _publish(self) -> None:
        offered = compute_seat.offer(self.machine, self.published())
        for relation in self._relations(NODE_GRES) if offered else ():
            relation.save(offered, self.unit)

    def _on_leave(self, event: ops.EventBase) -> None:
        """Leave the machine as Slurm can use it without this charm.

        Juju was seen to delete a unit right behind `relation-broken` with its principal, so what is to be done is done
        there; `stop` and `remove` do it again where they come.
        """
        if isinstance(event, ops.RelationBrokenEvent) and not endpoints.is_principals(event.relation):
            self._note_end(event)
            return
        self._left = True
        if self.is_compute() or compute_seat.OWNER.exists() or work.is_watching():
            work.release()
        compute_seat.release(owner=self.unit.name, wishes=self._settings)
        if controller_seat.is_keeper(self.unit.name):
            controller_seat.release(owner=self.unit.name, last=self.app.planned_units() == 0)

    def _note_end(self, event: ops.EventBase) -> None:
        """Take a unit that loses a relation and has no seat any more for one that Juju is deleting.

        The relations of a unit that leaves end in any order.
        """
        if isinstance(event, ops.RelationDepartedEvent | ops.RelationBrokenEvent):
            self._left = not self.is_compute() and not self.is_controller()

    def _on_collect_status(self, event: ops.CollectStatusEvent) -> None:
        if self._left:  # the unit may be gone by now, and setting its status would be an error
            return
        if self.is_compute():
            verdict = work.verdict(self.config, self._compute_verdict)
            waits = compute_seat.awaits_drain(self.machine, self.progress)
            work.note(self.unit.name, verdict, self.machine.node, waits=waits)
            event.add_status(ops.StatusBase.from_name(verdict.level, verdict.text))
        if self.is_controller():
            keeps = self._view or controller_seat.view() if self.unit.is_leader() else None
            verdict = controller_seat.verdict(keeps, related=self._has(GRES))
            work.note(self.unit.name, verdict)
            event.add_status(ops.StatusBase.from_name(verdict.level, verdict.text))
        if not self.is_compute() and not self.is_controller():
            event.add_status(
                ops.BlockedStatus("integrate compute with slurmd:juju-info or controller with slurmctld:juju-info")
            )

    def _on_action(self, event: ops.ActionEvent) -> None:
        def reconcile() -> registration.Progress | None:
            self._machine = None
            self.reconcile(event)
            return self.progress

        roles = self.is_compute(), self.is_controller()
        unit = actions.Unit(*roles, self.config, lambda: self.machine, self.published, self.answer, reconcile)
        run_action(actions.ACTIONS[action_name(event.handle.kind)], lambda: unit, event, failures=actions.FAILURES)

    def _compute_verdict(self) -> gpu_base.Verdict:
        related = self._has(NODE_GRES)
        offered = compute_seat.offer(self.machine, self.published())
        return compute_seat.verdict(self.machine, offered, self.answer(), related=related, progress=self.progress)

    def answer(self) -> slurm_gres.ControllerGres | None:
        """Return what the controller seat said, None when there is none or it said nothing that can be read."""
        for relation in self._relations(NODE_GRES):
            return endpoints.answer(relation, relation.app)
        return None

    def published(self) -> slurm_gres.NodeGres | None:
        """Return what this unit published for the controller, None when that is nothing."""
        for relation in self._relations(NODE_GRES):
            try:
                return endpoints.published(relation, self.unit)
            except controller_seat.UnreadableError:
                return None
        return None

    @property
    def machine(self) -> compute_seat.Machine:
        """This machine as it was when first looked at."""
        if self._machine is None:
            self._machine = compute_seat.look(self._settings, self.answer())
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

    def _has(self, endpoint: str) -> bool:
        return bool(self._relations(endpoint))

    def _relations(self, endpoint: str) -> list[ops.Relation]:
        return endpoints.relations(self.model, endpoint)


if __name__ == "__main__":  # pragma: no cover
    ops.main(SlurmGpuCharm)
