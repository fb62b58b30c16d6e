"""The application's volume as this unit sees it: its servers, its offers, the actions' target."""

import functools

import ops

import embedded.store
import embedded.takeover
import embedded.users
from relations.peers import Ledger
from relations.sources import CLIENTS, Sources
from slurm_ddp import juicefs, wake
from slurm_ddp.charm import Level, Status, StatusError, shown
from slurm_ddp.interfaces import filesystem_info as fs
from volume import formatting
from volume.target import Target, open_target, program_path

_SILENT_S = 60  # for a client of ours that has joined: its first hook may need its machine's lock


class Application:
    """The application. Functions raise `StatusError`, or errors that the charm turns into one."""

    def __init__(self, charm: ops.CharmBase) -> None:
        self._charm, self._ledger = charm, Ledger(charm)
        self._clients = charm.model.relations[CLIENTS]
        self.name, self.leads = charm.unit.name, charm.unit.is_leader()

    @functools.cached_property
    def _sources(self) -> Sources:
        return Sources(self._charm)

    @property
    def uuid(self) -> str | None:
        """The volume's UUID; None before it is formatted."""
        return self._ledger.pinned.uuid

    def pin(self, uuid: str, /) -> None:
        """Keep the UUID of a volume that was restored."""
        self._ledger.pin(uuid=uuid)

    def reconcile(self) -> Status:
        """Serve the volume if it is ours, offer it as leader, and return the unit's status."""
        settings = self._serve()
        if self.leads:
            self._offer(settings)
        target, setting = self.verify()
        if not self.leads:
            self._prove(settings, target, setting)
        name, pinned = target.volume.name, self._ledger.pinned
        if settings is not None:
            usage = embedded.store.usage(settings.directory)
            self._ledger.publish_room(usage.room_gib(setting.used_bytes))
            text = f"serving volume {name} from this unit: {usage.summary()}; for trials and small teams"
        elif pinned.mode == "external":
            text = f"offering volume {name}"
        else:
            text = f"{pinned.server} serves volume {name}; this unit has nothing to do"
        return self._unable() or Status(Level.ACTIVE, text)

    def target(self) -> Target:
        """Open the volume that should be there, without a look at it."""
        source = self._sources.external(self._ledger)
        if source is None:
            self._require_servers()
            source = self._sources.served(self._ledger)
        return open_target(self._charm.app.name, *source)

    def _require_servers(self) -> None:
        """Raise `StatusError` if this unit serves the volume, and its servers do not run yet."""
        if not self._ledger.is_server:
            return
        if not embedded.store.is_running(self._sources.settings(self._ledger)):
            raise StatusError(Level.MAINTENANCE, "starting the servers of the volume")

    def verify(self) -> tuple[Target, juicefs.Setting]:
        """Look at the volume without changing anything."""
        target, uuid = self.target(), self.uuid
        if uuid is None:
            raise StatusError(Level.WAITING, "waiting for the leader to format the volume")
        return target, formatting.ensure_formatted(target, formatting.Known(uuid))

    def storage(self) -> dict[str, str]:
        """Describe this unit's disk, if it holds the volume."""
        ledger = self._ledger
        return (
            embedded.store.describe(self._sources.settings(ledger).directory)
            if ledger.is_server
            else {}
        )

    def await_unmounted(self) -> None:
        """Wait until no client has the volume mounted, unless it was never offered."""
        if not self._ledger.pinned.may_move:
            clients = [relation.app.name for relation in self._clients]
            embedded.users.await_none(
                self._sources.settings(self._ledger), clients, self._show_progress
            )

    def revoke(self, relation: ops.Relation) -> None:
        """Take the credentials back from a client that left."""
        secret = self._ledger.secret()
        if secret is not None and self.leads:
            secret.revoke(relation)

    def _serve(self) -> embedded.store.Settings | None:
        """Settle the volume's settings as leader, install juicefs, serve our own volume."""
        app, ledger, sources = self._charm.app.name, self._ledger, self._sources
        if self.leads:
            sources.request()
        is_embedded = sources.external(ledger) is None
        is_new = self.leads and ledger.settle(embedded=is_embedded)
        if ledger.pinned.mode == "external":
            embedded.store.ensure_none(app)
            ledger.withdraw()
        program = program_path(app)
        juicefs.ensure_program(program, sources.program())
        self._charm.unit.set_workload_version(juicefs.text(juicefs.version(program)))
        if is_embedded and self.leads:
            known = None if is_new else ledger.credentials()
            ledger.ensure_secret(embedded.store.passwords(app, known))
        if not is_embedded or not ledger.is_server:
            return None
        settings = sources.settings(ledger)
        if not embedded.store.is_running(settings):
            self._show_progress("starting the servers of the volume")
        embedded.store.ensure(settings)
        ledger.publish_address(settings.address)
        if ledger.pinned.uuid is None:
            ledger.publish_room(embedded.store.usage(settings.directory).room_gib(0))
        return settings

    def _offer(self, settings: embedded.store.Settings | None) -> None:
        """Format the volume if necessary, apply its options, offer it to related applications."""
        ledger, target, adopt = self._ledger, self.target(), self._sources.config.adopt
        known = ledger.known(
            target.access.url, target.volume.name, adopt=adopt, before=self._left_here(settings)
        )
        setting = formatting.ensure_formatted(target, known)
        self._prove(settings, target, setting)
        # Data in a volume that was taken over counts towards its capacity
        if settings is not None:
            ledger.publish_room(
                embedded.store.usage(settings.directory).room_gib(setting.used_bytes)
            )
            target = self.target()
        ledger.pin(uuid=setting.uuid, formatting=None)
        formatting.ensure_options(target, setting)
        formatting.ensure_private_trash(target)
        secret, revision = ledger.ensure_secret(target.credentials)
        uri = formatting.published(target, setting, (secret.id if secret else None, revision)).uri()
        for relation in self._clients:
            if secret is not None:
                secret.grant(relation)
            relation.data[self._charm.app][fs.KEY] = uri
        if self._clients:
            ledger.pin(offered="yes")

    def _left_here(self, settings: embedded.store.Settings | None) -> str | None:
        """Return the UUID of a volume that a namesake application left in the unit's storage."""
        owner = embedded.takeover.owner(settings.directory) if settings is not None else None
        return (
            owner.uuid if owner is not None and owner.application == self._charm.app.name else None
        )

    def _prove(
        self, settings: embedded.store.Settings | None, target: Target, setting: juicefs.Setting
    ) -> None:
        """Check that clients can open the volume; if this unit stores it, renew its keys."""
        if settings is not None:
            embedded.takeover.ensure(target, setting, settings.directory, self._show_progress)
        formatting.ensure_sticky_root(target)

    def _unable(self) -> Status | None:
        """Name a related application if no unit of it publishes that it can mount JuiceFS.

        Upstream's filesystem-client writes nothing into its databag and fails its hook over a
        scheme that it does not know. A client of ours that has just joined has a minute to publish;
        after that this unit looks again by itself.
        """
        silent: dict[int, str] = {}
        for relation in self._clients:
            can_mount = any(fs.mounts_juicefs(relation.data[unit]) for unit in relation.units)
            if relation.units and not can_mount:
                silent[relation.id] = relation.app.name
        silent_s = self._ledger.silent_s(silent)
        if any(seconds < _SILENT_S for seconds in silent_s.values()):
            wake.later(self.name, self._charm.charm_dir, _SILENT_S)
        for relation, client in silent.items():
            if silent_s[relation] >= _SILENT_S:
                remedy = f"juju remove-relation {self._charm.app.name} {client}"
                return Status(
                    Level.BLOCKED,
                    f"{remedy}: it cannot mount JuiceFS; use shared-filesystem-client",
                )
        return None

    def _show_progress(self, text: str) -> None:
        self._charm.unit.status = ops.MaintenanceStatus(shown(Status(Level.MAINTENANCE, text)))
