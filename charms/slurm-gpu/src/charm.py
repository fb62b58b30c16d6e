#!/usr/bin/env python3
"""Registers GPUs in Slurm, on compute nodes (slurmd) and on the controller (slurmctld)."""

import ops

import actions
import metrics
import removal
import settings
from controller import gres_lines
from maintenance import hooks
from node import compute, kept
from node import machine as machines
from node.registration import Progress
from relations import endpoints
from relations.endpoints import COMPUTE, CONTROLLER, GRES, NODE_GRES
from slurm_ddp import exporter, wake
from slurm_ddp.charm import Level, Status, action_name, is_principal, run_action, shown
from slurm_ddp.interfaces import cos_agent

_NO_ROLE = Status(
    Level.BLOCKED, "integrate compute with slurmd:juju-info or controller with slurmctld:juju-info"
)


class SlurmGpuCharm(ops.CharmBase):
    """See the module."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        self._machine: machines.Machine | None = None
        self.progress: Progress | None = None  # how far the node came in this hook
        self._view: gres_lines.View | None = None  # of the controller, after this hook's changes
        self._left = False  # this unit may be deleted by now
        self._statuses: list[Status] = []  # of its roles, if this hook looked
        for event in (
            self.on.install,
            self.on.start,
            self.on.config_changed,
            self.on.upgrade_charm,
            self.on.leader_elected,
            self.on.update_status,
            *endpoints.events(self.on),
            *exporter.events(self.on),
        ):
            framework.observe(event, self._reconcile)
        for event in (
            self.on[COMPUTE].relation_broken,
            self.on[CONTROLLER].relation_broken,
            self.on.stop,
            self.on.remove,
        ):
            framework.observe(event, self._on_removed)
        framework.observe(self.on.collect_unit_status, self._on_collect_unit_status)
        for name in actions.ACTIONS:
            framework.observe(self.on[name].action, self._on_action)

    def _on_removed(self, event: ops.EventBase) -> None:
        """Hand the machine back to Slurm.

        Juju has been seen to delete a unit right after `relation-broken` with its principal, so
        everything happens there; `stop` and `remove` repeat it if they come.
        """
        if isinstance(event, ops.RelationBrokenEvent) and not is_principal(event.relation.app.name):
            self._note_end(event)
            self._look()
            return
        self._left = True
        config = self.load_config(settings.Config)
        removal.hand_back(self.unit.name, config, is_last=self.app.planned_units() == 0)

    def _on_action(self, event: ops.ActionEvent) -> None:
        def reconcile() -> Progress | None:
            self._machine = None
            self._reconcile(event)
            return self.progress

        unit = actions.Unit(
            self._has(COMPUTE),
            self._has(CONTROLLER),
            self.config,
            lambda: self.machine,
            reconcile,
        )
        run_action(
            actions.ACTIONS[action_name(event.handle.kind)],
            lambda: unit,
            event,
            failures=actions.FAILURES,
        )
        self._look()

    def _reconcile(self, event: ops.EventBase) -> None:
        """Move this unit to its desired state, regardless of the event."""
        self._note_end(event)
        if self._has(COMPUTE) and not endpoints.is_leaving(event, self.unit):
            self._reconcile_compute()
        if self._has(CONTROLLER) and self.unit.is_leader():
            self._reconcile_controller(event)
        self._look()
        if self._left:
            exporter.ensure_none(self.unit.name)
        else:
            exporter.follow(self, self._serve_metrics)

    def _on_collect_unit_status(self, event: ops.CollectStatusEvent) -> None:
        before = self.unit.status.message
        for status in self._statuses:
            event.add_status(ops.StatusBase.from_name(status.level, shown(status, before)))

    def _reconcile_compute(self) -> None:
        if not hooks.prepare(self.config):
            return
        self._publish()
        self.progress = compute.ensure(self.machine, owner=self.unit.name)
        self._publish()  # a Gres that is registered now may need fewer lines
        hooks.complete(self.machine, self.config, self.progress)

    def _reconcile_controller(self, event: ops.EventBase) -> None:
        units = endpoints.compute_units(self.model, event)
        first = event.unit.name if isinstance(event, ops.RelationEvent) and event.unit else None
        if isinstance(event, ops.UpdateStatusEvent):
            first = gres_lines.rotating(units)
        self._view = gres_lines.sync(
            units, first, lambda name: endpoints.published(*units[name]), owner=self.unit.name
        )
        endpoints.save_answers(self.model, self.app, units, self._view)

    def _look(self) -> None:
        """Report the status of each role.

        Schedules another look soon if Juju will send no event when a wait ends.
        """
        self._statuses = []
        if self._left:  # setting the status of a deleted unit is an error
            return
        found: list[Status] = []
        looks_again = False
        if self._has(COMPUTE):
            found.append(hooks.verdict(self.config, self._compute_status))
            awaits_drain = compute.awaits_drain(self.machine, self.progress)
            if found[-1].level == Level.WAITING or awaits_drain:
                kept.wake()
                looks_again = True
        if self._has(CONTROLLER):
            found.append(self._controller_status())
            looks_again = looks_again or found[-1].level == Level.WAITING
        if looks_again:
            wake.later(self.unit.name, self.charm_dir)
        self._statuses = found or [_NO_ROLE]

    def _compute_status(self) -> Status:
        related = self._has(NODE_GRES)
        return compute.status(self.machine, related=related, progress=self.progress)

    def _controller_status(self) -> Status:
        view = None
        if self.unit.is_leader():
            view = self._view or gres_lines.view()
        return gres_lines.status(view, related=self._has(GRES))

    def _note_end(self, event: ops.EventBase) -> None:
        """Note that Juju is deleting this unit if it just lost a relation and has no role left.

        A unit's relations end in any order when it is removed.
        """
        if isinstance(event, ops.RelationDepartedEvent | ops.RelationBrokenEvent):
            self._left = not self._has(COMPUTE) and not self._has(CONTROLLER)

    def _serve_metrics(self, unit: str, topology: cos_agent.Topology) -> dict[str, str]:
        roles = {"compute": self._has(COMPUTE), "controller": self._has(CONTROLLER)}
        return metrics.ensure(unit, topology, roles, str(self.config["health-xids"]))

    def _publish(self) -> None:
        offered = compute.offer(self.machine)
        for relation in endpoints.relations(self.model, NODE_GRES) if offered else ():
            relation.save(offered, self.unit)

    @property
    def machine(self) -> machines.Machine:
        """This machine as first seen in this hook."""
        if self._machine is None:
            answer, before = endpoints.exchanged(self.model, self.unit)
            self._machine = machines.look(self.load_config(settings.Config), answer, before)
        return self._machine

    def _has(self, endpoint: str) -> bool:
        return bool(endpoints.relations(self.model, endpoint))


if __name__ == "__main__":  # pragma: no cover
    ops.main(SlurmGpuCharm)
