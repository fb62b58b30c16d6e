#!/usr/bin/env python3
"""Mounts a shared filesystem on the machine of the charm that this one accompanies."""

import contextlib
import logging
import pathlib

import ops

import accounts
import logins
import metrics
import mount_plan
from mount import actions, judge, mounter, plans, watching
from scripts import keeper
from slurm_ddp import exporter, mounts, readiness, wake
from slurm_ddp.charm import (
    Level,
    Status,
    StatusError,
    action_name,
    config_errors,
    is_principal,
    run_action,
    shown,
)
from slurm_ddp.commands import CommandError
from slurm_ddp.interfaces import filesystem_info as fs
from slurm_ddp.interfaces import mount_info

logger = logging.getLogger(__name__)


class SharedFilesystemClientCharm(ops.CharmBase):
    """See the module."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        ends = (self.on["filesystem"], self.on["mount"])
        self._status: Status | None = None  # of this hook, if it looked
        for event in (
            self.on.install,
            self.on.start,
            self.on.config_changed,
            self.on.update_status,
            self.on.upgrade_charm,
            self.on.secret_changed,
            self.on["juju-info"].relation_created,
            self.on["juju-info"].relation_broken,
            *(
                event
                for end in ends
                for event in (end.relation_created, end.relation_changed, end.relation_broken)
            ),
        ):
            framework.observe(event, self._reconcile)
        for event in exporter.events(self.on):
            framework.observe(event, self._observe)
        for event in (self.on.stop, self.on.remove):  # either may never come
            framework.observe(event, self._on_removed)
        framework.observe(self.on.collect_unit_status, self._on_collect_unit_status)
        for name in actions.ACTIONS:
            framework.observe(self.on[name].action, self._on_action)

    def _observe(self, _: ops.EventBase) -> None:
        """Serve metrics while a collector is related."""
        exporter.follow(self, metrics.ensure)

    def _on_removed(self, _: ops.EventBase) -> None:
        """Remove everything from this machine; report nothing: Juju may have deleted the unit."""
        self._unmount()
        readiness.withdraw(self.unit.name)
        exporter.ensure_none(self.unit.name)

    def _on_action(self, event: ops.ActionEvent) -> None:
        action = actions.ACTIONS[action_name(event.handle.kind)]
        within = judge.explained(self.app.name)
        run_action(action, lambda: self._desired(None), event, within=within)

    def _reconcile(self, event: ops.EventBase) -> None:
        """Move this machine to the desired state, regardless of the event, and report it."""
        if not self._beside("juju-info") and not self._beside("mount"):
            self._on_removed(event)
            return
        for relation in self.model.relations["filesystem"]:
            relation.data[self.unit][fs.SCHEMES_KEY] = fs.SCHEMES

        mountpoint = None
        retries = False
        try:
            with judge.explained(self.app.name):
                plan = self._desired(self._fetch_program)
                mountpoint = plan.spec.mountpoint
                self._status = self._mount(plan)
        except StatusError as e:
            self._status = e.status
            retries = e.retry
        if self.model.get_relation("filesystem") is None:
            self._unmount()

        is_mounted = self._status.level == Level.ACTIVE
        self._tell(event, mountpoint, self._status)
        if mountpoint is not None:  # the keeper sees before Juju that the mount works again
            command = [] if is_mounted else wake.command(self.unit.name, self.charm_dir)
            watching.wake_once_right(self.app.name, self.unit.name, command)
        elif retries:
            wake.later(self.unit.name, self.charm_dir)
        self._observe(event)

    def _on_collect_unit_status(self, event: ops.CollectStatusEvent) -> None:
        if self._status is not None:
            text = shown(self._status, self.unit.status.message)
            event.add_status(ops.StatusBase.from_name(self._status.level, text))

    def _desired(self, fetch_program: plans.Fetch | None) -> mount_plan.Plan:
        """Plan the mount; without `fetch_program`, for the installed program."""
        relation = self.model.get_relation("filesystem")
        if relation is None:
            text = (
                f"nothing to mount: juju integrate {self.app.name}:filesystem PROVIDER:filesystem"
            )
            raise StatusError(Level.BLOCKED, text)
        with config_errors():
            config = self.load_config(mount_plan.Config)
        requests = [(one.app.name, one.data[one.app]) for one in self._beside("mount")]
        spec = plans.spec(self.unit.name, config, requests)
        provider, uri = relation.app.name, relation.data[relation.app].get(fs.KEY)

        def read_secret(identifier: str) -> dict[str, str]:
            try:
                return self.model.get_secret(id=identifier).get_content(refresh=True)
            except ops.ModelError as e:  # it is not granted (yet), or was removed
                raise StatusError(
                    Level.WAITING, f"waiting for {provider} to grant its credentials", retry=True
                ) from e

        return plans.draw(spec, provider, uri, read_secret=read_secret, fetch_program=fetch_program)

    def _mount(self, plan: mount_plan.Plan) -> Status:
        """Mount as planned; return the status."""
        if not mounts.at(plan.spec.mountpoint):
            status = Status(Level.MAINTENANCE, f"mounting {plan.source} at {plan.spec.mountpoint}")
            self.unit.status = ops.MaintenanceStatus(shown(status))
        if plan.version:
            self.unit.set_workload_version(plan.version)
        accounts.ensure(self.app.name, plan.spec.separate_accounts)
        found = mounter.ensure(plan)
        if found.was_open is not None:
            logger.warning("%s: %s", plan.spec.mountpoint, keeper.made_sticky(found.was_open))
        if found and (problem := logins.ensure(plan.spec, watching.node_name())):
            return Status(Level.ACTIVE, problem)
        return judge.judge(plan, found)

    def _tell(self, event: ops.EventBase, mountpoint: str | None, status: Status) -> None:
        """Report to jobs and to related charms whether the mount works."""
        is_mounted = status.level == Level.ACTIVE
        # What keeps a new plan from being drawn keeps no job from a mount that works
        proven = watching.proven(self.app.name) if mountpoint is None else None
        is_last = isinstance(event, ops.RelationBrokenEvent) and event.relation.name == "filesystem"
        if is_last:  # of this unit's hooks, perhaps: a file left behind would keep the node drained
            readiness.withdraw(self.unit.name)
        else:
            readiness.tell(
                self.unit.name,
                ready=is_mounted or proven is not None,
                mountpoint=mountpoint or proven,
                detail=status.text,
            )
        for relation in self._beside("mount"):
            relation.data[self.unit].update(mount_info.answer(mounted=is_mounted))

    def _unmount(self) -> None:
        try:
            plans.remove(self.app.name, unit=self.unit.name)
        except CommandError as e:
            # A hook that fails would keep the unit from going; the next one tries again
            logger.warning("%s", e)

    def _beside(self, endpoint: str) -> list[ops.Relation]:
        """List the relations of a container-scoped endpoint to this unit's principal."""
        return [
            relation
            for relation in self.model.relations[endpoint]
            if is_principal(relation.app.name)
        ]

    def _fetch_program(self) -> pathlib.Path | None:
        with contextlib.suppress(ops.ModelError):  # none was attached
            return self.model.resources.fetch("juicefs")
        return None


if __name__ == "__main__":
    ops.main(SharedFilesystemClientCharm)
