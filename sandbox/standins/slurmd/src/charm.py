"""Plays charmed-hpc's slurmd 25.11 with Debian's Slurm."""

import logging
import pathlib

import ops
import slurmd_node
import slurmutils
from common import charm, service, wire

from slurm_ddp.run import CommandError

logger = logging.getLogger(__name__)

_ENDPOINT = "slurmctld"
_REBOOT_REQUIRED = pathlib.Path("/var/run/reboot-required")
_SERVICE = slurmd_node.SERVICE


class SlurmdCharm(charm.Standin):
    """A compute node. Its name is the unit's, its partition and feature are the application's."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        try:
            self._settings = slurmd_node.parse(self.app.name, self.config)
        except slurmd_node.OptionsRefused as e:
            logger.error("%s", e)
            self.refuse(e.reasons)
            return
        framework.observe(self.on.install, self._on_install)
        framework.observe(self.on.config_changed, self._on_config_changed)
        framework.observe(self.on.update_status, self._on_update_status)
        framework.observe(self.on.secret_changed, self._on_secret_changed)
        framework.observe(self.on.set_node_config_action, self._on_set_node_config)
        relation = self.on[_ENDPOINT]
        framework.observe(relation.relation_created, self._on_controller_created)
        framework.observe(relation.relation_changed, self._on_controller_changed)
        framework.observe(relation.relation_departed, self.note_departing)
        framework.observe(relation.relation_broken, self._on_controller_broken)

    @charm.refreshes
    def _on_install(self, event: ops.InstallEvent) -> None:
        self._reboot_if_required(now=True)
        self.unit.status = ops.MaintenanceStatus("installing slurmd")
        try:
            _SERVICE.install()
        except CommandError as e:
            logger.error("%s", e)
            event.defer()
            raise charm.Stop(ops.BlockedStatus(f"slurmd was not installed: {e}")) from e
        # Upstream's driver comes after this, so NVML reports nothing yet.
        slurmd_node.set_node(slurmd_node.describe(self.app.name, gpus=[]))
        slurmd_node.set_name(self.unit.name.replace("/", "-"))
        self.unit.open_port("tcp", wire.SLURMD_PORT)
        self.unit.set_workload_version(_SERVICE.version())
        self._reboot_if_required(now=False)

    def _reboot_if_required(self, *, now: bool) -> None:
        if _REBOOT_REQUIRED.exists():
            self.unit.reboot(now)

    @charm.refreshes
    def _on_config_changed(self, _: ops.ConfigChangedEvent) -> None:
        for relation in self.model.relations[_ENDPOINT]:
            self._publish(relation)

    @charm.refreshes
    def _on_update_status(self, _: ops.UpdateStatusEvent) -> None:
        """Look at the status only: what died is not started."""

    @charm.leader_only
    @charm.refreshes
    def _on_controller_created(self, event: ops.RelationCreatedEvent) -> None:
        self._block_unless_installed(event)
        self._publish(event.relation)

    @charm.refreshes
    def _on_controller_changed(self, event: ops.RelationChangedEvent) -> None:
        if not event.relation.data[event.relation.app]:
            return
        ready = wire.controller_ready(self.model, _ENDPOINT, "auth_secret_id", "controllers")
        charm.wait_unless(event, ready, "waiting for slurmctld")
        self._block_unless_installed(event)
        data = wire.read_controller(self, event.relation)
        _SERVICE.set_auth_key(data.auth_key, data.auth_key_id)
        _SERVICE.set_controllers(data.controllers)
        is_new = not slurmd_node.exists()
        try:
            if is_new:
                slurmd_node.reconfigure(self._settings.state, self._settings.reason)
            else:
                slurmd_node.reconfigure()
        except service.SlurmError as e:
            logger.error("%s", e)
            raise charm.Stop(ops.BlockedStatus(f"slurmd was not reconfigured; see juju debug-log: {e}"[:200])) from e

    @charm.refreshes
    def _on_controller_broken(self, event: ops.RelationBrokenEvent) -> None:
        if self.is_departing:
            return  # the node stays in Slurm
        self._block_unless_installed(event)
        try:
            slurmd_node.delete()
            _SERVICE.stop_and_disable()
            _SERVICE.forget_controllers()
        except (service.SlurmError, CommandError) as e:
            logger.error("%s", e)
            event.defer()
            raise charm.Stop(ops.BlockedStatus(f"slurmd was not stopped; see juju debug-log: {e}"[:200])) from e

    @charm.refreshes
    def _on_secret_changed(self, event: ops.SecretChangedEvent) -> None:
        self._block_unless_installed(event)
        if event.secret.label != wire.AUTH_LABEL:
            return
        content = event.secret.get_content(refresh=True)
        _SERVICE.set_auth_key(content["key"], content["keyid"])
        service.systemctl("restart", _SERVICE.name)

    @charm.refreshes
    def _on_set_node_config(self, event: ops.ActionEvent) -> None:
        text = str(event.params.get("parameters", ""))
        try:
            custom = slurmutils.Node.from_str(text)
        except (slurmutils.ModelError, ValueError) as e:
            self._refuse(event, f"parameters {text!r} failed validation: {e}")
            return
        fixed = (custom.node_name, custom.node_addr, custom.node_hostname, custom.state, custom.reason, custom.port)
        if any(value is not None for value in fixed):
            self._refuse(event, f"parameters {text!r} set what the charm sets: a name, address, state, reason or port")
            return
        if event.params.get("reset", False):
            slurmd_node.set_node(slurmd_node.describe(self.app.name, slurmd_node.gpus()))
        node = slurmd_node.node()
        node.update(custom)
        slurmd_node.set_node(node)
        if slurmd_node.exists():
            try:
                record = slurmd_node.show()
                slurmd_node.delete()
                slurmd_node.reconfigure(record["state"][0].lower(), record["reason"])  # a drain is another word there
            except service.SlurmError as e:
                logger.error("%s", e)
                self._refuse(event, f"the node was not registered anew: {e}")
                return
        event.set_results({"accepted": True})

    def _refuse(self, event: ops.ActionEvent, message: str) -> None:
        event.fail(message)
        event.set_results({"accepted": False})

    def check(self) -> ops.StatusBase:
        """Return what keeps slurmd from running. A node that Slurm does not use is active, too."""
        if not _SERVICE.is_installed():
            return ops.BlockedStatus("slurmd is not installed")
        if not self.model.relations[_ENDPOINT]:
            return ops.BlockedStatus(f"add a controller: juju integrate {self.app.name}:slurmctld slurmctld")
        if not _SERVICE.is_active():
            return ops.WaitingStatus("waiting for slurmd to start")
        return ops.ActiveStatus()

    def _publish(self, relation: ops.Relation) -> None:
        if self.unit.is_leader():
            wire.publish_partition(self, relation, self._settings.partition)

    def _block_unless_installed(self, event: ops.EventBase) -> None:
        charm.block_unless(event, _SERVICE.is_installed(), "slurmd is not installed")


if __name__ == "__main__":
    ops.main(SlurmdCharm)
