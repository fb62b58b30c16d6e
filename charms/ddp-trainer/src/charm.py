#!/usr/bin/env python3
"""Trainer: from an action to a finished training run on Slurm."""

import contextlib
import dataclasses
import logging
import os
import pathlib

import ops

import trainer_actions
import trainer_params
import trainer_status
import trainer_token
import trainer_workspace
from slurm_ddp import wake
from trainer_base import ParameterError, Settings, TrainerError

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
        framework.observe(self.on.remove, self._withdraw)
        framework.observe(self.on.collect_unit_status, self._on_collect_status)
        for name in trainer_actions.ACTIONS:
            framework.observe(self.on[name.replace("-", "_")].action, self._on_action)

    def _reconcile(self, _: ops.EventBase) -> None:
        """Move this unit to its desired state, whichever event woke it."""
        desired = self._desired()
        if isinstance(desired, Settings):
            self._trouble = trainer_status.ensure(desired)

    def _on_collect_status(self, event: ops.CollectStatusEvent) -> None:
        if self._left:  # the unit may be gone by now, and setting its status would be an error
            return
        desired = self._desired()
        if isinstance(desired, ops.StatusBase):
            event.add_status(desired)
            return
        if self._trouble:
            event.add_status(ops.BlockedStatus(self._trouble))
        found = trainer_status.check(desired)
        if found.level == "waiting":  # for slurmctld or the mount, whose return is no event of this unit's
            wake.later(self.unit.name, self.charm_dir, _AGAIN_S)
        event.add_status(ops.StatusBase.from_name(found.level, found.text))

    def _on_relation_broken(self, event: ops.RelationBrokenEvent) -> None:
        """Let go with the principal's relation: stop and remove need not come (Juju 4.0.15)."""
        principal = os.environ.get("JUJU_PRINCIPAL_UNIT", "").partition("/")[0]
        if principal in ("", event.relation.app.name):
            self._withdraw(event)

    def _withdraw(self, _: ops.EventBase) -> None:
        self._left = True
        # Not _desired(): the token's secret may be out of reach by now. Without valid options no workspace is known.
        with contextlib.suppress(ParameterError):
            config = trainer_params.parse(trainer_params.Config, self.config)
            trainer_token.withdraw(trainer_status.settings(config, self.charm_dir, self.unit.name))

    def _on_action(self, event: ops.ActionEvent) -> None:
        """Run an action on its parsed parameters; what a person can mend fails it with one line."""
        action = trainer_actions.ACTIONS[event.handle.kind.removesuffix("_action").replace("_", "-")]
        try:
            params = trainer_params.parse(action.params, event.params)
            desired = self._desired()
            if isinstance(desired, ops.StatusBase):
                raise TrainerError(desired.message)
            with trainer_workspace.session(dataclasses.replace(desired, task=event.id)) as settings, settings.claims:
                ready = trainer_status.require(settings, event.log, asks_nodes=action.asks_nodes)
                event.set_results(action.do(ready, params, event.log))
        except TrainerError as e:
            logger.info("%s: %s", event.id, e)
            event.set_results(e.results)
            event.fail(str(e))

    def _desired(self) -> Settings | ops.StatusBase:
        """Return the settings this unit should work with, or the status that says why it has none."""
        try:
            config = trainer_params.parse(trainer_params.Config, self.config)
            token = trainer_token.parse(self._content(config.hf_token), self.app.name) if config.hf_token else ""
            found = trainer_status.settings(config, self.charm_dir, self.unit.name, token)
            return dataclasses.replace(found, attached=self._fetch_wheelhouse)
        except ParameterError as e:
            return ops.BlockedStatus(f"fix config: {e}")

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
