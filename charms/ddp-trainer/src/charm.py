#!/usr/bin/env python3
"""Trainer: from an action to a finished training run on Slurm."""

import collections.abc
import logging
import typing

import ops

import trainer_actions
import trainer_params
import trainer_status
from trainer_base import Log, ParameterError, Results, Settings, TrainerError

logger = logging.getLogger(__name__)

Params = typing.TypeVar("Params", bound=trainer_params.Parsed)


class DdpTrainerCharm(ops.CharmBase):
    """Submits training jobs from the login host that it is placed on."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        self._trouble = ""
        joined = self.on["juju-info"]
        for event in (
            self.on.install,
            self.on.start,
            self.on.config_changed,
            self.on.upgrade_charm,
            self.on.update_status,
            joined.relation_joined,
            joined.relation_changed,
        ):
            framework.observe(event, self._reconcile)
        framework.observe(self.on.collect_unit_status, self._on_collect_status)
        framework.observe(self.on.install_environment_action, self._on_install_environment)
        framework.observe(self.on.prepare_dataset_action, self._on_prepare_dataset)
        framework.observe(self.on.submit_ddp_action, self._on_submit_ddp)
        framework.observe(self.on.list_jobs_action, self._on_list_jobs)
        framework.observe(self.on.show_job_action, self._on_show_job)
        framework.observe(self.on.job_log_action, self._on_job_log)
        framework.observe(self.on.cancel_job_action, self._on_cancel_job)

    def _reconcile(self, _: ops.EventBase) -> None:
        """Move this unit to its desired state, whichever event woke it."""
        desired = self._desired()
        if isinstance(desired, Settings):
            self._trouble = trainer_status.ensure(desired)

    def _on_collect_status(self, event: ops.CollectStatusEvent) -> None:
        desired = self._desired()
        if isinstance(desired, ops.StatusBase):
            event.add_status(desired)
            return
        if self._trouble:
            event.add_status(ops.BlockedStatus(self._trouble))
        found = trainer_status.check(desired)
        event.add_status(ops.StatusBase.from_name(found.level, found.text))

    def _on_install_environment(self, event: ops.ActionEvent) -> None:
        self._act(event, trainer_params.InstallEnvironment, trainer_actions.install_environment)

    def _on_prepare_dataset(self, event: ops.ActionEvent) -> None:
        self._act(event, trainer_params.PrepareDataset, trainer_actions.prepare_dataset)

    def _on_submit_ddp(self, event: ops.ActionEvent) -> None:
        self._act(event, trainer_params.SubmitDdp, trainer_actions.submit_ddp)

    def _on_list_jobs(self, event: ops.ActionEvent) -> None:
        self._act(event, trainer_params.ListJobs, trainer_actions.list_jobs)

    def _on_show_job(self, event: ops.ActionEvent) -> None:
        self._act(event, trainer_params.ShowJob, trainer_actions.show_job)

    def _on_job_log(self, event: ops.ActionEvent) -> None:
        self._act(event, trainer_params.JobLog, trainer_actions.job_log)

    def _on_cancel_job(self, event: ops.ActionEvent) -> None:
        self._act(event, trainer_params.CancelJob, trainer_actions.cancel_job)

    def _act(
        self,
        event: ops.ActionEvent,
        model: type[Params],
        action: collections.abc.Callable[[Settings, Params, Log], Results],
    ) -> None:
        """Run an action on its parsed parameters; what a person can mend fails it with one line."""
        try:
            params = trainer_params.parse(model, event.params)
            desired = self._desired()
            if isinstance(desired, ops.StatusBase):
                raise TrainerError(desired.message)
            trainer_status.require(desired, event.log)
            event.set_results(action(desired, params, event.log))
        except TrainerError as e:
            logger.info("%s: %s", event.id, e)
            event.set_results(e.results)
            event.fail(str(e))

    def _desired(self) -> Settings | ops.StatusBase:
        """Return the settings this unit should work with, or the status that says why it has none."""
        try:
            config = trainer_params.parse(trainer_params.Config, self.config)
            return trainer_status.settings(config, self.charm_dir, self.unit.name)
        except ParameterError as e:
            return ops.BlockedStatus(f"fix config: {e}")


if __name__ == "__main__":
    ops.main(DdpTrainerCharm)
