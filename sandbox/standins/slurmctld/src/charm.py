"""Plays charmed-hpc's slurmctld 25.11 with the distribution's Slurm."""

import json
import logging
import re
import secrets
import socket
import uuid

import ops
import slurm_controller
from common import munge, scontrol, wire

logger = logging.getLogger(__name__)

_PEER = "slurmctld-peer"
_NOT_PLAYED = ("slurmdbd", "slurmrestd", "influxdb", "oci-runtime", "smtp", "cos-agent", "mount")


class SlurmctldCharm(ops.CharmBase):
    """The controller."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        framework.observe(self.on.install, self._on_install)
        framework.observe(self.on.upgrade_charm, self._on_install)
        for event in (self.on.start, self.on.config_changed, self.on.leader_elected, self.on.update_status):
            framework.observe(event, self._reconcile)
        for endpoint in (_PEER, "slurmd", "sackd"):
            relation = self.on[endpoint]
            framework.observe(relation.relation_created, self._reconcile)
            framework.observe(relation.relation_changed, self._reconcile)
        framework.observe(self.on["slurmd"].relation_broken, self._reconcile)
        framework.observe(self.on.stop, self._on_stop)
        framework.observe(self.on.rotate_auth_key_action, self._on_rotate_auth_key)
        framework.observe(self.on.rotate_jwt_key_action, self._on_rotate_jwt_key)
        framework.observe(self.on.show_current_config_action, self._on_show_current_config)
        framework.observe(self.on.set_node_state_action, self._on_set_node_state)
        framework.observe(self.on.collect_unit_status, self._on_collect_status)

    def _on_install(self, _: ops.EventBase) -> None:
        self.unit.status = ops.MaintenanceStatus("installing slurmctld")
        slurm_controller.install()
        self.unit.set_workload_version(slurm_controller.version())
        self.unit.set_ports(wire.PORT)

    def _reconcile(self, _: ops.EventBase) -> None:
        settings = self._desired()
        if isinstance(settings, ops.StatusBase):
            return  # _on_collect_status reports it
        secret = self._auth_secret()
        try:
            slurm_controller.ensure(settings, secret.peek_content()["key"])
        except slurm_controller.ControllerError as e:
            logger.warning("%s", e)
            return
        self._publish(secret)

    def _publish(self, secret: ops.Secret) -> None:
        """Tell nodes and login hosts where the controller is; it answers by now."""
        identifier = secret.get_info().id
        data = wire.controller_databag(f"secret:{identifier.split(':')[-1]}", [f"{socket.gethostname()}:{wire.PORT}"])
        for endpoint in ("slurmd", "sackd"):
            for relation in self.model.relations[endpoint]:
                if relation.active:
                    secret.grant(relation)
                    relation.data[self.app].update(data)

    def _on_stop(self, _: ops.StopEvent) -> None:
        slurm_controller.stop()

    def _on_rotate_auth_key(self, event: ops.ActionEvent) -> None:
        settings = self._desired()
        if isinstance(settings, ops.StatusBase):
            event.fail(settings.message)
            return
        content = {"key": munge.new_key(), "keyid": str(uuid.uuid4())}
        self._auth_secret().set_content(content)
        try:
            slurm_controller.ensure(settings, content["key"])
        except slurm_controller.ControllerError as e:
            event.fail(str(e))

    def _on_rotate_jwt_key(self, event: ops.ActionEvent) -> None:
        event.fail("the sandbox plays neither slurmdbd nor slurmrestd, so there is no JWT key")

    def _on_show_current_config(self, event: ops.ActionEvent) -> None:
        if not slurm_controller.is_running():
            event.fail("slurmctld does not run yet")
            return
        event.set_results({"slurm.conf": slurm_controller.current_config()})

    def _on_set_node_state(self, event: ops.ActionEvent) -> None:
        nodes, state = str(event.params["nodes"]), str(event.params["state"])
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.,\[\]-]*", nodes):
            event.fail(f"nodes: {nodes!r} is not a host list such as slurmd-[0-3]")
            return
        try:
            scontrol.update_node(nodes, state, str(event.params.get("reason", "")))
        except scontrol.SlurmError as e:
            event.fail(str(e))

    def _on_collect_status(self, event: ops.CollectStatusEvent) -> None:
        for endpoint in _NOT_PLAYED:
            if any(relation.active for relation in self.model.relations[endpoint]):
                event.add_status(ops.BlockedStatus(f"the sandbox does not play the relation {endpoint}: remove it"))
        settings = self._desired()
        if isinstance(settings, ops.StatusBase):
            event.add_status(settings)
        elif not slurm_controller.is_configured():
            event.add_status(ops.WaitingStatus("waiting to start slurmctld"))
        elif not slurm_controller.is_running():
            event.add_status(
                ops.BlockedStatus("slurmctld does not start: check slurm-conf-parameters and the debug log")
            )
        event.add_status(ops.ActiveStatus())

    def _desired(self) -> slurm_controller.Settings | ops.StatusBase:
        """Return what the controller should run with, or the status that says why there is nothing to run."""
        if not self.unit.is_leader():
            return ops.BlockedStatus("the sandbox plays one slurmctld unit only: remove this one")
        peer = self.model.get_relation(_PEER)
        if peer is None:
            return ops.WaitingStatus("waiting for the peer relation")
        given: dict[str, dict[str, str]] = {}
        for option in ("slurm-conf-parameters", "cgroup-parameters"):
            try:
                given[option] = wire.parse_lines(str(self.config[option]))
            except ValueError as e:
                return ops.BlockedStatus(f"fix config: {option}: {e}")
        if not re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9_-]{0,39})?", str(self.config["cluster-name"])):
            return ops.BlockedStatus("fix config: cluster-name takes letters, digits, - and _, at most 40")
        partitions = [
            wire.read_partition(relation.data[relation.app])
            for relation in self.model.relations["slurmd"]
            if relation.active
        ]
        if not any(partitions):
            return ops.WaitingStatus("waiting for slurmd: slurmctld does not start without a partition")
        return slurm_controller.Settings(
            cluster_name=self._cluster_name(peer),
            host=socket.gethostname(),
            partitions=tuple(sorted(filter(None, partitions), key=lambda partition: str(partition["partitionname"]))),
            default_partition=str(self.config["default-partition"]),
            overrides=given["slurm-conf-parameters"],
            cgroup=given["cgroup-parameters"],
        )

    def _cluster_name(self, peer: ops.Relation) -> str:
        """Return the name that the cluster has had since it first started."""
        data = peer.data[self.app]
        if "cluster_name" not in data:
            name = str(self.config["cluster-name"]) or f"charmed-hpc-{secrets.token_hex(2)}"
            data["cluster_name"] = json.dumps(name)
        return json.loads(data["cluster_name"])

    def _auth_secret(self) -> ops.Secret:
        try:
            return self.model.get_secret(label=wire.AUTH_LABEL)
        except ops.SecretNotFoundError:
            content = {"key": munge.new_key(), "keyid": str(uuid.uuid4())}
            return self.app.add_secret(content, label=wire.AUTH_LABEL, description="key of the Slurm cluster")


if __name__ == "__main__":
    ops.main(SlurmctldCharm)
