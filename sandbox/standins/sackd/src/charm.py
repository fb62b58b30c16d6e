"""Plays charmed-hpc's sackd 25.11 with the distribution's Slurm."""

import logging

import login_node
import ops
from common import munge, wire

from slurm_ddp.run import CommandError

logger = logging.getLogger(__name__)


class SackdCharm(ops.CharmBase):
    """A login host."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        framework.observe(self.on.install, self._on_install)
        framework.observe(self.on.upgrade_charm, self._on_install)
        framework.observe(self.on["slurmctld"].relation_changed, self._on_controller_changed)
        framework.observe(self.on.update_status, self._on_controller_changed)
        framework.observe(self.on["slurmctld"].relation_broken, self._on_controller_broken)
        framework.observe(self.on.secret_changed, self._on_secret_changed)
        framework.observe(self.on.stop, self._on_controller_broken)
        framework.observe(self.on.collect_unit_status, self._on_collect_status)

    def _on_install(self, _: ops.EventBase) -> None:
        self.unit.status = ops.MaintenanceStatus("installing Slurm's commands")
        login_node.install()
        self.unit.set_workload_version(login_node.version())
        self.unit.set_ports(6818)

    def _on_controller_changed(self, _: ops.EventBase) -> None:
        controller = self._controller()
        if controller is None:
            return
        secret = self.model.get_secret(id=controller.auth_secret_id, label=wire.AUTH_LABEL)
        self.unit.status = ops.MaintenanceStatus("joining the cluster")
        try:
            login_node.join_cluster(secret.get_content(refresh=True)["key"], controller.controllers)
        except CommandError as e:
            logger.warning("%s", e)  # update-status tries again; the status says so

    def _on_controller_broken(self, _: ops.EventBase) -> None:
        login_node.leave_cluster()

    def _on_secret_changed(self, event: ops.SecretChangedEvent) -> None:
        if event.secret.label == wire.AUTH_LABEL:
            munge.ensure_key(event.secret.get_content(refresh=True)["key"])

    def _on_collect_status(self, event: ops.CollectStatusEvent) -> None:
        if self._relation() is None:
            event.add_status(ops.BlockedStatus(f"add a controller: juju integrate {self.app.name}:slurmctld slurmctld"))
        elif self._controller() is None:
            event.add_status(ops.WaitingStatus("waiting for slurmctld"))
        elif not login_node.is_running():
            event.add_status(ops.WaitingStatus("waiting for sackd to start"))
        event.add_status(ops.ActiveStatus())

    def _controller(self) -> wire.Controller | None:
        relation = self._relation()
        return wire.read_controller(relation.data[relation.app]) if relation is not None else None

    def _relation(self) -> ops.Relation | None:
        relation = self.model.get_relation("slurmctld")
        return relation if relation is not None and relation.active else None


if __name__ == "__main__":
    ops.main(SackdCharm)
