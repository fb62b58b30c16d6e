#!/usr/bin/env python3
"""Trainer: actions that submit and observe training runs on Slurm, each done by the program ddp."""

import contextlib
import logging
import pathlib

import ops

import host
import idle_check
import machine_lock
import metrics
import program
import secret_token
from ddp.actions import verbs
from ddp.options import fields
from ddp.problem import ParameterError
from slurm_ddp import exporter, wake
from slurm_ddp.charm import Level, Status, StatusError, action_name, is_principal, shown
from slurm_ddp.interfaces import cos_agent

logger = logging.getLogger(__name__)


class DdpTrainerCharm(ops.CharmBase):
    """Submits training jobs from the login host that it is placed on."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        self._status: Status | None = None  # of this hook, if it looked
        joined = self.on["juju-info"]
        for event in (
            self.on.install,
            self.on.start,
            self.on.config_changed,
            self.on.upgrade_charm,
            self.on.leader_elected,
            self.on.update_status,
            self.on.secret_changed,
            joined.relation_joined,
            joined.relation_changed,
        ):
            framework.observe(event, self._reconcile)
        for event in exporter.events(self.on):
            framework.observe(event, self._observe)
        framework.observe(joined.relation_broken, self._on_juju_info_relation_broken)
        framework.observe(self.on.stop, self._on_stop)
        framework.observe(self.on.remove, self._on_removed)
        framework.observe(self.on.collect_unit_status, self._on_collect_unit_status)
        for name in verbs.ACTIONS:
            framework.observe(self.on[name.replace("-", "_")].action, self._on_action)

    def _observe(self, _: ops.EventBase) -> None:
        """Serve metrics while a collector is related."""

        def serve(unit: str, topology: cos_agent.Topology) -> dict[str, str]:
            config, _ = self._desired()
            return metrics.ensure(unit, topology, config.submit_user, host.settings(config, unit))

        exporter.follow(self, serve)

    def _on_juju_info_relation_broken(self, event: ops.RelationBrokenEvent) -> None:
        """Leave when the principal's relation ends: Juju 4.0.15 may skip stop and remove."""
        if is_principal(event.relation.app.name):
            self._on_removed(event)

    def _on_stop(self, _: ops.EventBase) -> None:
        """Remove the token's files, as the account that owns them in the workspace."""
        # Not _desired(): the token's secret may be out of reach by now. Without valid options no
        # workspace is known.
        with contextlib.suppress(ParameterError):
            config = fields.parse(host.Config, self.config)
            host.account(config.submit_user)
            try:
                host.ask(config, self.unit.name, "sync-tokens", timeout_s=30)  # without one
            except program.ProgramError as e:
                logger.warning(
                    "files with the token may be left in %s/.secrets: %s", config.workspace, e
                )

    def _on_removed(self, event: ops.EventBase) -> None:
        """Remove everything from this machine; report nothing: Juju may have deleted the unit."""
        self._on_stop(event)
        program.remove()
        idle_check.ensure_none(self.unit.name)
        exporter.ensure_none(self.unit.name)

    def _on_action(self, event: ops.ActionEvent) -> None:
        """Pass the action to the program; an error fails it with one line."""
        action = action_name(event.handle.kind)
        try:
            fields.parse(verbs.ACTIONS[action].options, event.params)
            config, token = self._desired()
        except (ParameterError, StatusError) as e:
            event.fail(str(e))
            return
        try:
            answer = self._ask(action, event, config, token)
        except program.ProgramError as e:
            event.fail(str(e))
            return
        event.set_results(answer.results)
        if answer.error:
            logger.info("%s: %s", event.id, answer.error)
            event.fail(answer.error)
        self._status = self._check(config)

    def _reconcile(self, event: ops.EventBase) -> None:
        """Move this unit to its desired state, regardless of the event."""
        try:
            config, token = self._desired()
            problem = host.ensure(config, self.unit.name, self.charm_dir, token)
            self._status = Status(Level.BLOCKED, problem) if problem else self._check(config)
            settings = host.settings(config, self.unit.name)
            is_wanted = config.check_idle_nodes and self.unit.is_leader()
            idle_check.follow(self.unit.name, config.submit_user, settings, is_wanted=is_wanted)
        except StatusError as e:
            self._status = e.status
        if self._status.level == Level.WAITING:
            # slurmctld or the mount: their return triggers no event here
            wake.later(self.unit.name, self.charm_dir)
        self._observe(event)

    def _on_collect_unit_status(self, event: ops.CollectStatusEvent) -> None:
        if self._status is not None:
            text = shown(self._status, self.unit.status.message)
            event.add_status(ops.StatusBase.from_name(self._status.level, text))

    def _desired(self) -> tuple[host.Config, str]:
        """Return the options and the Hugging Face token.

        Raises StatusError with the wrong option.
        """
        token = ""
        try:
            config = fields.parse(host.Config, self.config)
            if config.hf_token:
                token = secret_token.parse(self._content(config.hf_token), self.app.name)
            host.account(config.submit_user)
        except ParameterError as e:
            raise StatusError(Level.BLOCKED, f"fix config: {_without_value(e)}") from e
        return config, token

    def _check(self, config: host.Config) -> Status:
        """Ask the program for the unit's status."""
        try:
            answer = host.ask(config, self.unit.name, "check")
        except program.ProgramError as e:
            return Status(Level.BLOCKED, str(e))
        if answer.error:
            return Status(Level.WAITING, answer.error)
        return Status(Level(answer.results["level"]), answer.results["text"])

    def _ask(
        self, action: str, event: ops.ActionEvent, config: host.Config, token: str
    ) -> program.Answer:
        """Run an action in the program. Raises program.ProgramError."""
        holds_machine = machine_lock.is_held_by(self.unit.name, event.id)
        request = {
            "do": action,
            "params": dict(event.params),
            "config": host.settings(config, self.unit.name),
            "unit": self.unit.name,
            "task": event.id,
            "holds-machine": holds_machine,
            "token": token,
            "wheelhouse": host.share(self._fetch_wheelhouse()),
        }
        user = "root" if verbs.ACTIONS[action].is_operators else config.submit_user
        with machine_lock.named_waiters(event.log, is_held=holds_machine) as log:
            return program.ask(user, request, log)

    def _content(self, identifier: str) -> dict[str, str] | None:
        """Return a secret's newest content, or None if this application cannot read it."""
        try:
            return self.model.get_secret(id=identifier).get_content(refresh=True)
        except ops.ModelError:
            return None

    def _fetch_wheelhouse(self) -> pathlib.Path | None:
        with contextlib.suppress(ops.ModelError):  # none was attached
            return self.model.resources.fetch("wheelhouse")
        return None


def _without_value(error: ParameterError) -> str:
    """Leave the value out of the line: it may be long, or hold a password."""
    before, _, allowed = str(error).partition(" is not allowed; ")
    if not allowed:
        return before
    return f"{before.partition(': ')[0]}: {allowed}"


if __name__ == "__main__":
    ops.main(DdpTrainerCharm)
