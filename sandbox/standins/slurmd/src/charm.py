"""Plays charmed-hpc's slurmd 25.11 with Debian's Slurm."""

import json
import logging

import ops
import slurmd_node
import slurmutils
from common import charm, conf, daemons, service, wire

from slurm_ddp.commands import CommandError

logger = logging.getLogger(__name__)

_ENDPOINT = "slurmctld"
_SERVICE = slurmd_node.SERVICE


class SlurmdCharm(daemons.Client):
    """A compute node. Its name is the unit's, its partition and feature are the application's.

    One that Slurm does not use is active, too.
    """

    daemon = _SERVICE

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        if not self.is_of_main:
            try:
                slurmd_node.parse(self.app.name, self.config)
            except conf.OptionsRefused as e:
                self.refuse(e)
                return
        self.observe_daemon()
        framework.observe(self.on.config_changed, self._on_config_changed)
        framework.observe(self.on.set_node_config_action, self._on_set_node_config)
        framework.observe(self.on[_ENDPOINT].relation_created, self._on_controller_created)

    @charm.refreshes
    def _on_install(self, event: ops.InstallEvent) -> None:
        self.install(event, wire.SLURMD_PORT)
        slurmd_node.set_node(
            slurmd_node.describe(self.unit.name, slurmd_node.gpus())
        )  # upstream's driver comes later
        _SERVICE.set_options(
            _SERVICE.options() | {"-Z": True, "-N": self.unit.name.replace("/", "-")}
        )

    @charm.refreshes
    def _on_config_changed(self, _: ops.ConfigChangedEvent) -> None:
        settings = self._load()
        for relation in self.model.relations[_ENDPOINT]:
            self._publish(relation, settings)

    @charm.refreshes_on_leader
    def _on_controller_created(self, event: ops.RelationCreatedEvent) -> None:
        self._publish(event.relation, self._load(event))

    @charm.refreshes
    def _on_controller_changed(self, event: ops.RelationChangedEvent) -> None:
        data = self.read_controller(event, "auth_secret_id", "controllers")
        if data is None:
            return
        settings = self._load(event)
        _SERVICE.set_controllers(data.controllers)
        initial = () if slurmd_node.exists() else (settings.state, settings.reason)
        try:
            slurmd_node.reconfigure(*initial)
        except service.SlurmError as e:
            raise self.failed("reconfigured", e) from e

    @charm.refreshes
    def _on_controller_broken(self, event: ops.RelationBrokenEvent) -> None:
        if self._stored.departing:
            return  # the node stays in Slurm
        try:
            if not self.is_of_main:  # there slurmctld deletes it when the unit departs
                slurmd_node.delete()
            _SERVICE.stop_and_disable()
            _SERVICE.set_controllers([])
        except (service.SlurmError, CommandError) as e:
            event.defer()
            raise self.failed("stopped", e) from e

    @charm.refreshes
    def _on_set_node_config(self, event: ops.ActionEvent) -> None:
        text = str(event.params.get("parameters", ""))
        try:
            custom = slurmutils.Node.from_str(text)
        except (slurmutils.ModelError, ValueError) as e:
            self._refuse(event, f"parameters {text!r} failed validation: {e}")
            return
        fixed = (
            custom.node_name,
            custom.node_addr,
            custom.node_hostname,
            custom.state,
            custom.reason,
            custom.port,
        )
        if any(value is not None for value in fixed):
            self._refuse(
                event,
                f"parameters {text!r} set what the charm sets: a name, address, state, reason or port",
            )
            return
        if event.params.get("reset", False):
            slurmd_node.set_node(slurmd_node.describe(self.unit.name, slurmd_node.gpus()))
        node = slurmd_node.node()
        node.update(custom)
        slurmd_node.set_node(node)
        if slurmd_node.exists():
            try:
                record = slurmd_node.show()
                slurmd_node.delete()
                slurmd_node.reconfigure(
                    record["state"][0].lower(), record["reason"]
                )  # a drain is another word there
            except service.SlurmError as e:
                logger.error("%s", e)
                self._refuse(event, f"the node was not registered again: {e}")
                return
        event.set_results({"accepted": True})

    def _refuse(self, event: ops.ActionEvent, message: str) -> None:
        event.fail(message)
        event.set_results({"accepted": False})

    def read_key_again(self, event: ops.SecretChangedEvent) -> None:
        """Reload slurmd; the track restarts it."""
        if self.is_of_main:
            self.reload(event)
        else:
            super().read_key_again(event)

    def _load(self, event: ops.EventBase | None = None) -> slurmd_node.Settings:
        """Return the charm's options. Raises `Stop`, and defers the event, if they are refused."""
        try:
            return slurmd_node.parse(self.app.name, self.config)
        except conf.OptionsRefused as e:
            raise self.stop_for(e, event) from e

    def _publish(self, relation: ops.Relation, settings: slurmd_node.Settings) -> None:
        if self.unit.is_leader():
            relation.data[self.app]["partition"] = json.dumps(settings.partition.dict())


if __name__ == "__main__":
    ops.main(SlurmdCharm)
