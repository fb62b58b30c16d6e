#!/usr/bin/env python3
"""Trainer: from an action to a finished training run on Slurm. What the actions do is the program ddp's."""

import contextlib
import logging
import os
import pathlib

import ops

import host
import program
import secret_token
from ddp import verbs
from ddp.base import ParameterError
from ddp.options import fields
from slurm_ddp import wake

_AGAIN_S = 20

logger = logging.getLogger(__name__)


class DdpTrainerCharm(ops.CharmBase):
    """Submits training jobs from the login host that it is placed on."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        self._trouble = ""
        self._left = False
        joined = self.on["juju-info"]
        for event in (
            self.on.install,
            self.on.start,
            self.on.config_changed,
            self.on.upgrade_charm,
            self.on.update_status,
            self.on.secret_changed,
            joined.relation_joined,
            joined.relation_changed,
        ):
            framework.observe(event, self._reconcile)
        framework.observe(joined.relation_broken, self._on_relation_broken)
        framework.observe(self.on.stop, self._withdraw)
        framework.observe(self.on.remove, self._on_remove)
        framework.observe(self.on.collect_unit_status, self._on_collect_status)
        for name in verbs.ACTIONS:
            framework.observe(self.on[name.replace("-", "_")].action, self._on_action)

    def _reconcile(self, _: ops.EventBase) -> None:
        """Move this unit to its desired state, whichever event woke it."""
        desired = self._desired()
        if isinstance(desired, tuple):
            config, token = desired
            self._trouble = host.ensure(config, self.unit.name, self.charm_dir, token)

    def _on_collect_status(self, event: ops.CollectStatusEvent) -> None:
        if self._left:  # the unit may be removed by now, and setting its status would be an error
            return
        desired = self._desired()
        if isinstance(desired, ops.StatusBase):
            event.add_status(desired)
            return
        if self._trouble:
            event.add_status(ops.BlockedStatus(self._trouble))
            return
        try:
            answer = host.ask(desired[0], self.unit.name, "check")
            found = answer.results if not answer.error else {"level": "waiting", "text": answer.error}
        except program.ProgramError as e:
            found = {"level": "blocked", "text": str(e)}
        if found["level"] == "waiting":  # for slurmctld or the mount, whose return is no event of this unit's
            wake.later(self.unit.name, self.charm_dir, _AGAIN_S)
        event.add_status(ops.StatusBase.from_name(found["level"], found["text"]))

    def _on_relation_broken(self, event: ops.RelationBrokenEvent) -> None:
        """Let go with the principal's relation: stop and remove need not come (Juju 4.0.15)."""
        principal = os.environ.get("JUJU_PRINCIPAL_UNIT", "").partition("/")[0]
        if principal in ("", event.relation.app.name):
            self._on_remove(event)

    def _on_remove(self, event: ops.EventBase) -> None:
        self._withdraw(event)
        program.remove()

    def _withdraw(self, _: ops.EventBase) -> None:
        self._left = True
        # Not _desired(): the token's secret may be out of reach by now. Without valid options no workspace is known.
        with contextlib.suppress(ParameterError):
            config = fields.parse(fields.Config, self.config)
            host.account(config.submit_user)
            try:
                host.ask(config, self.unit.name, "withdraw", timeout_s=30)
            except program.ProgramError as e:
                logger.warning("files with the token may be left in %s/.secrets: %s", config.workspace, e)

    def _on_action(self, event: ops.ActionEvent) -> None:
        """Have the program do it with the action's parameters; an error fails the action with its one line."""
        action = event.handle.kind.removesuffix("_action").replace("_", "-")
        try:
            fields.parse(verbs.ACTIONS[action].params, event.params)
        except ParameterError as e:
            event.fail(str(e))
            return
        desired = self._desired()
        if isinstance(desired, ops.StatusBase):
            event.fail(desired.message)
            return
        config, token = desired
        if not host.has_packages():
            event.log(f"installing {' '.join(host.PACKAGES)}")
            if problem := host.install_packages():
                event.fail(problem)
                return
        request = {
            "do": action,
            "params": dict(event.params),
            "config": host.settings(config, self.unit.name),
            "unit": self.unit.name,
            "task": event.id,
            "token": token,
            "wheelhouse": host.share(self._fetch_wheelhouse()),
        }
        try:
            answer = program.ask(config.submit_user, request, event.log)
        except program.ProgramError as e:
            event.fail(str(e))
            return
        event.set_results(answer.results)
        if answer.error:
            logger.info("%s: %s", event.id, answer.error)
            event.fail(answer.error)

    def _desired(self) -> tuple[fields.Config, str] | ops.StatusBase:
        """Return the options and the Hugging Face token, or the status that says what is wrong with them."""
        try:
            config = fields.parse(fields.Config, self.config)
            token = secret_token.parse(self._content(config.hf_token), self.app.name) if config.hf_token else ""
            host.account(config.submit_user)
        except ParameterError as e:
            return ops.BlockedStatus(f"fix config: {e}")
        return config, token

    def _content(self, identifier: str) -> dict[str, str] | None:
        """Return a secret's newest content, or None where this application cannot read it."""
        try:
            return self.model.get_secret(id=identifier).get_content(refresh=True)
        except ops.ModelError:
            return None

    def _fetch_wheelhouse(self) -> pathlib.Path | None:
        with contextlib.suppress(ops.ModelError):  # none was attached
            return self.model.resources.fetch("wheelhouse")
        return None


if __name__ == "__main__":
    ops.main(DdpTrainerCharm)
