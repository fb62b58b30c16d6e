"""Plays charmed-hpc's slurmd 25.11 with the distribution's Slurm."""

import logging

import ops
import slurmd_node
from common import munge, scontrol, wire

import slurmd_options

logger = logging.getLogger(__name__)


class SlurmdCharm(ops.CharmBase):
    """A compute node. Its name is the unit's, its partition and feature are the application's."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        framework.observe(self.on.install, self._on_install)
        framework.observe(self.on.upgrade_charm, self._on_install)
        framework.observe(self.on.config_changed, self._on_config_changed)
        framework.observe(self.on.leader_elected, self._on_config_changed)
        relation = self.on["slurmctld"]
        framework.observe(relation.relation_created, self._on_config_changed)
        framework.observe(relation.relation_changed, self._on_controller_changed)
        framework.observe(relation.relation_broken, self._on_controller_broken)
        framework.observe(self.on.update_status, self._on_update_status)
        framework.observe(self.on.secret_changed, self._on_secret_changed)
        framework.observe(self.on.stop, self._on_stop)
        framework.observe(self.on.set_node_config_action, self._on_set_node_config)
        framework.observe(self.on.collect_unit_status, self._on_collect_status)

    def _on_install(self, _: ops.EventBase) -> None:
        self.unit.status = ops.MaintenanceStatus("installing slurmd")
        slurmd_node.install(self._node, self.app.name)
        self.unit.set_workload_version(slurmd_node.version())
        self.unit.set_ports(6818)

    def _on_config_changed(self, _: ops.EventBase) -> None:
        relation = self._relation()
        if relation is None or not self.unit.is_leader() or self._config_errors():
            return
        options = wire.parse_pairs(str(self.config["partition-config"]))
        relation.data[self.app].update(wire.partition_databag(self.app.name, options))

    def _on_controller_changed(self, event: ops.RelationChangedEvent) -> None:
        self._on_config_changed(event)
        self._join()  # upstream restarts slurmd whenever this relation changes, too

    def _on_update_status(self, _: ops.UpdateStatusEvent) -> None:
        if not slurmd_node.is_running():
            self._join()

    def _join(self) -> None:
        controller = self._controller()
        if controller is None or self._config_errors():
            return
        self.unit.status = ops.MaintenanceStatus("joining the cluster")
        state, reason = str(self.config["default-node-state"]), str(self.config["default-node-reason"])
        try:
            slurmd_node.join_cluster(self._node, self._key(controller), controller.controllers, state, reason)
        except scontrol.SlurmError as e:
            logger.warning("%s: %s", self._node, e)  # update-status tries again; the status says so

    def _on_controller_broken(self, _: ops.RelationBrokenEvent) -> None:
        slurmd_node.leave_cluster(self._node)

    def _on_secret_changed(self, event: ops.SecretChangedEvent) -> None:
        controller = self._controller()
        if controller is None or event.secret.label != wire.AUTH_LABEL:
            return
        munge.ensure_key(event.secret.get_content(refresh=True)["key"])
        slurmd_node.restart()

    def _on_stop(self, _: ops.StopEvent) -> None:
        slurmd_node.leave_cluster(self._node)

    def _on_set_node_config(self, event: ops.ActionEvent) -> None:
        try:
            parameters = slurmd_options.parse_parameters(str(event.params.get("parameters", "")))
            conf = slurmd_node.configure(
                self._node, self.app.name, parameters, reset=bool(event.params.get("reset", False))
            )
        except ValueError as e:
            event.fail(f"parameters: {e}")
        except scontrol.SlurmError as e:
            event.fail(str(e))
        else:
            event.set_results({"node": self._node, "parameters": conf})

    def _on_collect_status(self, event: ops.CollectStatusEvent) -> None:
        for error in self._config_errors():
            event.add_status(ops.BlockedStatus(error))
        if self._relation() is None:
            event.add_status(ops.BlockedStatus(f"add a controller: juju integrate {self.app.name}:slurmctld slurmctld"))
        elif self._controller() is None:
            event.add_status(ops.WaitingStatus("waiting for slurmctld"))
        elif not slurmd_node.is_running():
            event.add_status(ops.WaitingStatus("waiting for slurmd to start"))
        event.add_status(ops.ActiveStatus())

    def _config_errors(self) -> list[str]:
        errors: list[str] = []
        if self.config["default-node-state"] not in ("down", "idle"):
            errors.append("fix config: default-node-state must be down or idle")
        try:
            names = {key.lower() for key in wire.parse_pairs(str(self.config["partition-config"]))}
            if names & {"partitionname", "nodes"}:
                errors.append("fix config: partition-config cannot set PartitionName or Nodes")
        except ValueError as e:
            errors.append(f"fix config: partition-config: {e}")
        return errors

    def _controller(self) -> wire.Controller | None:
        relation = self._relation()
        return wire.read_controller(relation.data[relation.app]) if relation is not None else None

    def _relation(self) -> ops.Relation | None:
        relation = self.model.get_relation("slurmctld")
        return relation if relation is not None and relation.active else None

    def _key(self, controller: wire.Controller) -> str:
        secret = self.model.get_secret(id=controller.auth_secret_id, label=wire.AUTH_LABEL)
        return secret.get_content(refresh=True)["key"]

    @property
    def _node(self) -> str:
        return self.unit.name.replace("/", "-")


if __name__ == "__main__":
    ops.main(SlurmdCharm)
