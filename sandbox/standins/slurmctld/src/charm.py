"""Plays charmed-hpc's slurmctld 25.11 with Debian's Slurm."""

import collections.abc
import dataclasses
import json
import secrets
import socket
import uuid

import ops
import slurm_controller
import slurmutils
from common import charm, conf, daemons, service, wire

from slurm_ddp.interfaces import mount_info

_PEER = "slurmctld-peer"
_SERVICE = slurm_controller.SERVICE
_NO_STATE = "several controllers need a shared filesystem: relate mount"


class _ControllersChanged(ops.EventBase):
    """Controllers joined or left; if deferred, it does not depend on later restart signals."""


class _Events(ops.CharmEvents):
    controllers_changed = ops.EventSource(_ControllersChanged)


class SlurmctldCharm(daemons.Daemon):
    """The controller."""

    on = _Events()  # pyright: ignore
    daemon = _SERVICE

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        if not self.is_of_main:
            try:
                self._overrides()
            except conf.OptionsRefused as e:
                self.refuse(e)
                return
        self._stored.set_default(restart_signal="")
        self.observe_daemon()
        framework.observe(self.on.leader_elected, self._on_leader_elected)
        framework.observe(self.on.start, self._on_start)
        framework.observe(self.on.config_changed, self._on_config_changed)
        framework.observe(self.on[_PEER].relation_created, self._on_peer_created)
        framework.observe(self.on[_PEER].relation_changed, self._on_peer_changed)
        framework.observe(self.on[_PEER].relation_departed, self._on_peer_departed)
        framework.observe(self.on.controllers_changed, self._on_controllers_changed)
        framework.observe(self.on["mount"].relation_created, self._on_mount_created)
        framework.observe(self.on["mount"].relation_changed, self._on_mount_changed)
        framework.observe(self.on["sackd"].relation_created, self._on_sackd_created)
        framework.observe(self.on["slurmd"].relation_changed, self._on_slurmd_changed)
        if self.is_of_main:
            framework.observe(self.on["slurmd"].relation_departed, self._on_slurmd_departed)
        framework.observe(self.on["slurmd"].relation_broken, self._on_slurmd_broken)
        framework.observe(self.on["slurmdbd"].relation_created, self._on_slurmdbd_created)
        framework.observe(self.on["slurmdbd"].relation_changed, self._on_slurmdbd_changed)
        framework.observe(self.on["slurmdbd"].relation_broken, self._on_slurmdbd_broken)
        framework.observe(self.on["slurmrestd"].relation_created, self._on_slurmrestd_created)
        framework.observe(self.on.rotate_auth_key_action, self._on_rotate_auth_key)
        for endpoint in ("slurmd", "slurmdbd"):
            framework.observe(self.on[endpoint].relation_departed, self.note_departing)

    @charm.refreshes
    def _on_install(self, event: ops.InstallEvent) -> None:
        self.install(event, wire.SLURMCTLD_PORT, 9092)
        if self.unit.is_leader():
            self._ensure_keys()

    def _ensure_keys(self) -> None:
        """Make the secrets that do not exist, and the key files from those that do."""
        jwt = self._secret_content(wire.JWT_LABEL, service.new_jwt_key)
        if not _SERVICE.jwt_key_path.exists():
            _SERVICE.set_jwt_key(jwt["key"])
        auth = self._secret_content(wire.AUTH_LABEL, service.new_auth_key)
        if not _SERVICE.auth_key_path.exists():
            _SERVICE.set_auth_key(auth["key"], auth["keyid"])

    def _secret_content(
        self, label: str, new: collections.abc.Callable[[], dict[str, str]]
    ) -> dict[str, str]:
        try:
            return self.model.get_secret(label=label).get_content(refresh=True)
        except ops.SecretNotFoundError:
            content = new()
            self.app.add_secret(content, label=label)
            return content

    @charm.refreshes
    def _on_leader_elected(self, event: ops.LeaderElectedEvent) -> None:
        charm.wait_unless(event, self._has_state(), _NO_STATE)
        self._wait_for_config(event)
        if self.model.relations["mount"]:
            self._refresh_controllers()

    @charm.refreshes
    def _on_start(self, event: ops.StartEvent) -> None:
        charm.wait_unless(event, self._has_state(), _NO_STATE, ops.BlockedStatus)
        charm.wait_unless(event, bool(self._cluster_name()), "waiting for the cluster's name")
        if self.unit.is_leader():
            slurm_controller.write_once(self._cluster_name(), self._hosts)
        else:
            self._wait_for_config(event)
            charm.wait_unless(
                event,
                self._host in slurm_controller.hosts(),
                f"waiting for {self._host} in slurm.conf",
            )
        _SERVICE.enable_and_restart()

    @charm.refreshes
    def _on_config_changed(self, _: ops.ConfigChangedEvent) -> None:
        overrides = self._load()
        if self.unit.is_leader():
            slurm_controller.write_options(overrides)
        self._reconfigure()

    def _on_peer_created(self, event: ops.RelationCreatedEvent) -> None:
        event.relation.data[self.unit]["hostname"] = json.dumps(self._host)
        if self.unit.is_leader() and not self._cluster_name():
            name = self.config["cluster-name"] or f"charmed-hpc-{secrets.token_urlsafe(3)}"
            event.relation.data[self.app]["cluster_name"] = json.dumps(name)

    @charm.refreshes
    def _on_peer_changed(self, event: ops.RelationChangedEvent) -> None:
        signal = event.relation.data[self.app].get("restart_signal", "")
        if signal != self._stored.restart_signal:
            self._stored.restart_signal = signal
            if not self.unit.is_leader():
                self.on.start.emit()
        elif self.unit.is_leader() and self._sees_all(event.relation):
            self.on.controllers_changed.emit()

    def _on_peer_departed(self, event: ops.RelationDepartedEvent) -> None:
        if (
            self.unit.is_leader()
            and self._sees_all(event.relation)
            and event.departing_unit != self.unit
        ):
            self.on.controllers_changed.emit()

    @charm.refreshes
    def _on_controllers_changed(self, event: _ControllersChanged) -> None:
        self._wait_for_config(event)
        self._refresh_controllers()

    @charm.refreshes_on_leader
    def _on_mount_created(self, event: ops.RelationCreatedEvent) -> None:
        request = mount_info.MountRequest(mountpoint=str(slurm_controller.SHARED))
        event.relation.save(request, self.app, encoder=json.dumps)

    @charm.refreshes
    def _on_mount_changed(self, event: ops.RelationChangedEvent) -> None:
        if event.unit is None or event.relation.data[event.unit].get(mount_info.MOUNTED) != "true":
            return
        if self.unit.is_leader():
            self._wait_for_config(event)
        slurm_controller.share_settings(is_leader=self.unit.is_leader())
        if self.unit.is_leader():
            slurm_controller.share_state()
        self.on.start.emit()

    @charm.refreshes_on_leader
    def _on_sackd_created(self, event: ops.RelationCreatedEvent) -> None:
        self._wait_for_daemon(event)
        self._publish(event.relation, wire.ControllerData(controllers=self._controllers))

    @charm.refreshes_on_leader
    def _on_slurmd_changed(self, event: ops.RelationChangedEvent) -> None:
        if not event.relation.data[event.relation.app]:
            return
        partitions = [relation for relation in self.model.relations["slurmd"] if relation.active]
        named = [relation for relation in partitions if "partition" in relation.data[relation.app]]
        charm.wait_unless(event, len(named) == len(partitions), "waiting for a partition")
        self._wait_for_daemon(event)
        self._load(event)
        slurm_controller.set_partition(
            _partition(event.relation), str(self.config["default-partition"])
        )
        self._publish(event.relation, wire.ControllerData(controllers=self._controllers))
        self._reconfigure()

    @charm.refreshes_on_leader
    def _on_slurmd_departed(self, event: ops.RelationDepartedEvent) -> None:
        """Delete the node of a unit that leaves, alone or with its relation."""
        if event.departing_unit is None:
            return
        self._load(event)
        node = event.departing_unit.name.replace("/", "-")
        try:
            service.scontrol("delete", f"nodename={node}")
        except service.SlurmError as e:
            event.defer()
            status = f"{node} was not deleted from Slurm; see juju debug-log: {e}"
            raise charm.Stop(ops.BlockedStatus(status)) from e
        self._reconfigure()

    @charm.refreshes_on_leader
    def _on_slurmd_broken(self, event: ops.RelationBrokenEvent) -> None:
        if self._stored.departing:
            return
        slurm_controller.remove_partition(str(_partition(event.relation).partition_name))
        self._reconfigure()

    @charm.refreshes_on_leader
    def _on_slurmdbd_created(self, event: ops.RelationCreatedEvent) -> None:
        self._publish(
            event.relation, wire.ControllerData(jwt_secret_id=self._secret_id(wire.JWT_LABEL))
        )

    @charm.refreshes_on_leader
    def _on_slurmdbd_changed(self, event: ops.RelationChangedEvent) -> None:
        if not event.relation.data[event.relation.app]:
            return
        self._wait_for_database(event)
        self._wait_for_config(event)
        slurm_controller.set_accounting(
            json.loads(event.relation.data[event.relation.app]["hostname"])
        )
        self._reconfigure()

    @charm.refreshes_on_leader
    def _on_slurmdbd_broken(self, _: ops.RelationBrokenEvent) -> None:
        if self._stored.departing:
            return
        slurm_controller.unset_accounting()
        self._reconfigure()

    @charm.refreshes_on_leader
    def _on_slurmrestd_created(self, event: ops.RelationCreatedEvent) -> None:
        self._wait_for_config(event)
        self._wait_for_database(event)
        self._wait_for_daemon(event)
        self._publish(
            event.relation, wire.ControllerData(slurmconfig=slurm_controller.all_settings())
        )

    @charm.refreshes
    def _on_secret_changed(self, event: ops.SecretChangedEvent) -> None:
        if event.secret.label in (wire.AUTH_LABEL, wire.JWT_LABEL):
            event.secret.get_content(refresh=True)

    @charm.refreshes
    def _on_rotate_auth_key(self, event: ops.ActionEvent) -> None:
        """Add a key and publish it; the old one stays known, since secret-remove is never sent."""
        if not self.unit.is_leader():
            event.fail("only the leader rotates the auth key")
            return
        content = service.new_auth_key()
        _SERVICE.add_auth_key(content["key"], content["keyid"])
        self._reconfigure()
        self.model.get_secret(label=wire.AUTH_LABEL).set_content(content)

    # --- shared by the handlers -----------------------------------------------------------------

    def check(self) -> ops.StatusBase:
        """Return the reason why the controller does not work, or the report of `scontrol ping`."""
        if not _SERVICE.is_installed():
            return ops.BlockedStatus("slurmctld is not installed")
        if not self._has_state():
            return ops.BlockedStatus(_NO_STATE)
        if not self._cluster_name():
            return ops.WaitingStatus("waiting for the cluster's name")
        if not _SERVICE.is_active():
            return ops.WaitingStatus("waiting for slurmctld to start")
        return ops.ActiveStatus(slurm_controller.controller_status(socket.gethostname()))

    def _overrides(self) -> slurmutils.SlurmConfig:
        return slurm_controller.parse(str(self.config["slurm-conf-parameters"]))

    def _load(self, event: ops.EventBase | None = None) -> slurmutils.SlurmConfig:
        """Return the option's settings; if they are refused, defer the event and raise `Stop`."""
        try:
            return self._overrides()
        except conf.OptionsRefused as e:
            raise self.stop_for(e, event) from e

    def _reconfigure(self) -> None:
        """Restart slurmctld if it runs, and give slurmrestd the new settings. Raises `Stop`."""
        if not (_SERVICE.is_installed() and self._cluster_name() and _SERVICE.is_active()):
            return
        try:
            _SERVICE.reconfigure()
            self._signal_restart()
            service.scontrol("reconfigure")
        except service.SlurmError as e:
            raise self.failed("reconfigured", e) from e
        if self.unit.is_leader():
            for relation in self.model.relations["slurmrestd"]:
                self._publish(
                    relation, wire.ControllerData(slurmconfig=slurm_controller.all_settings())
                )

    def _signal_restart(self) -> None:
        """Restart the other controllers: `scontrol reconfigure` does not reread SlurmctldHost."""
        if self.unit.is_leader() and (peer := self.model.get_relation(_PEER)):
            peer.data[self.app]["restart_signal"] = json.dumps(str(uuid.uuid4()))

    def _refresh_controllers(self) -> None:
        """Write the controllers to slurm.conf and to those who ask them, and restart."""
        with slurm_controller.slurm_conf().edit() as config:
            config.slurmctld_host = self._hosts
        for relation in (*self.model.relations["sackd"], *self.model.relations["slurmd"]):
            self._publish(relation, wire.ControllerData(controllers=self._controllers))
        self._reconfigure()

    def _publish(self, relation: ops.Relation, data: wire.ControllerData) -> None:
        """Grant `data`'s secrets to the relation and publish it there; older fields are removed."""
        data = dataclasses.replace(data, auth_secret_id=self._secret_id(wire.AUTH_LABEL))
        for identifier in filter(None, (data.auth_secret_id, data.jwt_secret_id)):
            self.model.get_secret(id=identifier).grant(relation)
        relation.save(data, self.app, encoder=json.dumps)

    def _secret_id(self, label: str) -> str:
        return self.model.get_secret(label=label).get_info().id

    def _cluster_name(self) -> str:
        """Return the cluster's name, fixed when the peer relation was made; "" before."""
        peer = self.model.get_relation(_PEER)
        return json.loads(peer.data[self.app].get("cluster_name", '""')) if peer else ""

    def _has_state(self) -> bool:
        """Check whether slurmctld finds its state: a leader without `mount` has it on its disk."""
        return (
            self.unit.is_leader() and not self.model.relations["mount"]
        ) or slurm_controller.SHARED.is_mount()

    def _sees_all(self, peer: ops.Relation) -> bool:
        return len(peer.units) == self.app.planned_units() - 1

    @property
    def _host(self) -> str:
        """This controller as SlurmctldHost has it."""
        binding = self.model.get_binding(_PEER)
        assert binding is not None
        return f"{socket.gethostname()}({binding.network.ingress_address})"

    @property
    def _hosts(self) -> list[str]:
        """The controllers, the primary first: slurm.conf's that still exist, then new ones."""
        peer = self.model.get_relation(_PEER)
        present = {self._host}
        if peer is not None:
            written = (peer.data[unit].get("hostname") for unit in peer.units)
            present |= {json.loads(host) for host in written if host}
        known = slurm_controller.hosts()
        return [host for host in known if host in present] + sorted(present - set(known))

    @property
    def _controllers(self) -> list[str]:
        addresses = [host.partition("(")[2].rstrip(")") for host in self._hosts]
        return [f"{address}:{wire.SLURMCTLD_PORT}" for address in addresses]

    def _wait_for_config(self, event: ops.EventBase) -> None:
        charm.wait_unless(
            event, slurm_controller.slurm_conf().path.exists(), "waiting for slurm.conf"
        )

    def _wait_for_daemon(self, event: ops.EventBase) -> None:
        charm.wait_unless(event, _SERVICE.is_active(), "waiting for slurmctld to start")

    def _wait_for_database(self, event: ops.EventBase) -> None:
        relations = [relation for relation in self.model.relations["slurmdbd"] if relation.active]
        ready = bool(relations) and all(
            "hostname" in relation.data[relation.app] for relation in relations
        )
        charm.wait_unless(event, ready, "waiting for slurmdbd")


def _partition(relation: ops.Relation) -> slurmutils.Partition:
    """Return the partition that slurmd's leader published."""
    return slurmutils.Partition.from_dict(json.loads(relation.data[relation.app]["partition"]))


if __name__ == "__main__":
    ops.main(SlurmctldCharm)
