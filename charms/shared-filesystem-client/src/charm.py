#!/usr/bin/env python3
"""Mounts a shared filesystem on the machine of the charm that this one accompanies."""

import contextlib
import logging
import pathlib

import ops
import pydantic

import mount_actions
import mount_plans
import mount_settings
import mounter
from mount_settings import Level, TroubleError, Verdict
from slurm_ddp import readiness
from slurm_ddp.interfaces import filesystem_info as fs
from slurm_ddp.interfaces import mount_info

_log = logging.getLogger(__name__)
_STATUSES = {
    Level.ACTIVE: ops.ActiveStatus,
    Level.MAINTENANCE: ops.MaintenanceStatus,
    Level.WAITING: ops.WaitingStatus,
    Level.BLOCKED: ops.BlockedStatus,
}


class SharedFilesystemClientCharm(ops.CharmBase):
    """See the module."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        ends = (self.on["filesystem"], self.on["mount"])
        self._verdict: Verdict | None = None  # of this hook, if it looked
        for event in (
            self.on.install,
            self.on.start,
            self.on.config_changed,
            self.on.update_status,
            self.on.upgrade_charm,
            self.on.secret_changed,
            *(event for end in ends for event in (end.relation_created, end.relation_changed, end.relation_broken)),
        ):
            framework.observe(event, self._reconcile)
        framework.observe(self.on.stop, self._on_stop)
        framework.observe(self.on.remove, self._on_stop)
        framework.observe(self.on.collect_unit_status, self._on_collect_unit_status)
        for name in mount_actions.ACTIONS:
            framework.observe(self.on[name].action, self._on_action)

    def _reconcile(self, _: ops.EventBase) -> None:
        """Move this machine to the desired state, whichever event woke the charm, and tell those who wait for it."""
        mountpoint = None
        try:
            with mount_plans.explained(self.app.name):
                plan = self._plan()
                mountpoint = plan.wish.mountpoint
                if not mounter.is_mounted(plan):
                    self.unit.status = ops.MaintenanceStatus(f"mounting {plan.source} at {plan.wish.mountpoint}")
                self._verdict = mount_plans.judge(plan, mounter.ensure(plan, unit=self.unit.name))
        except TroubleError as e:
            self._verdict = e.verdict
        mounted = self._verdict.level == Level.ACTIVE
        readiness.tell(self.unit.name, ready=mounted, mountpoint=mountpoint, detail=self._verdict.text)
        for relation in self.model.relations["mount"]:
            relation.data[self.unit].update(mount_info.answer(mounted=mounted))

    def _on_stop(self, _: ops.EventBase) -> None:
        self._remove()
        readiness.withdraw(self.unit.name)
        self._verdict = Verdict(Level.MAINTENANCE, "unmounted")

    def _on_collect_unit_status(self, event: ops.CollectStatusEvent) -> None:
        if self._verdict is not None:
            event.add_status(_STATUSES[self._verdict.level](self._verdict.text))

    def _on_action(self, event: ops.ActionEvent) -> None:
        name = event.handle.kind.removesuffix("_action").replace("_", "-")
        try:
            with mount_plans.explained(self.app.name):
                plan = self._plan()
                event.set_results(mount_actions.run_action(name, plan, event.params, event.log, self.unit.name))
        except (TroubleError, mount_actions.ActionError) as e:
            event.fail(str(e))

    def _plan(self) -> mounter.Plan:
        """Return the mount that should be here."""
        relation = self.model.get_relation("filesystem")
        if relation is None:
            self._remove()
            text = f"nothing to mount: juju integrate {self.app.name}:filesystem PROVIDER:filesystem"
            raise TroubleError(Level.BLOCKED, text)
        try:
            config = self.load_config(mount_settings.Config)
        except pydantic.ValidationError as e:
            raise mount_settings.config_error(e) from e
        requests = [(one.app.name, one.data[one.app]) for one in self.model.relations["mount"]]
        wish = mount_settings.wish(self.app.name, config, requests)
        offer = mount_plans.Offer(
            provider=relation.app.name,
            uri=relation.data[relation.app].get(fs.KEY),
            read_secret=self._read_secret,
            fetch_program=self._fetch_program,
        )
        plan, version = mount_plans.draw(offer, wish, config)
        if version:
            self.unit.set_workload_version(version)
        return plan

    def _remove(self) -> None:
        kept = mount_plans.remove(self.app.name, unit=self.unit.name)
        if kept:
            _log.warning("%s", kept)

    def _read_secret(self, identifier: str) -> dict[str, str]:
        try:
            return self.model.get_secret(id=identifier).get_content(refresh=True)
        except ops.ModelError as e:
            raise mount_plans.SecretsError from e

    def _fetch_program(self) -> pathlib.Path | None:
        with contextlib.suppress(ops.ModelError):  # none was attached
            return self.model.resources.fetch("juicefs")
        return None


if __name__ == "__main__":
    ops.main(SharedFilesystemClientCharm)
