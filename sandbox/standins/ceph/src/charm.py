"""Play a Ceph cluster outside of the model; its operator uses `ceph` on its machine."""

import ceph_cluster
import ops


class CephCharm(ops.CharmBase):
    """The cluster."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        for event in (self.on.install, self.on.start):
            framework.observe(event, self._ensure)
        framework.observe(self.on.collect_unit_status, self._on_collect_status)

    def _ensure(self, _: ops.EventBase) -> None:
        self.unit.status = ops.MaintenanceStatus("installing Ceph")
        binding = self.model.get_binding("juju-info")
        assert binding is not None
        ceph_cluster.create(str(binding.network.bind_address))

    def _on_collect_status(self, event: ops.CollectStatusEvent) -> None:
        if problem := ceph_cluster.problem():
            event.add_status(ops.WaitingStatus(problem))
        event.add_status(ops.ActiveStatus("cephfs is up"))


if __name__ == "__main__":
    ops.main(CephCharm)
