"""The application's memory of its volume: the peers' databag, and a secret for the credentials."""

import collections.abc
import json
import time
import typing

import ops
import pydantic

from slurm_ddp.charm import Level, StatusError
from slurm_ddp.interfaces import filesystem_info as fs
from volume import format_journal, formatting

PEERS = "server-peers"
_SILENT = "silent-since"  # the key in a unit's databag: relations whose units publish nothing, and since when


class Pinned(pydantic.BaseModel, frozen=True):
    """The peers' application databag: permanent choices of the leader. Any field may be absent."""

    mode: typing.Literal["embedded", "external"] | None = None
    server: str | None = None  # the unit whose storage holds an embedded volume
    uuid: str | None = None  # of the volume
    secret_id: str | None = None  # of the credentials
    formatting: str | None = None  # set before the volume is formatted, until its uuid is known
    offered: str | None = None  # set once the volume was offered to a client

    @property
    def may_move(self) -> bool:
        """Report whether the volume can be replaced: no client can have written to it yet."""
        return self.offered is None


class Ledger:
    """Reads for every unit, writes for the leader. Raises `StatusError` without a peer relation."""

    def __init__(self, charm: ops.CharmBase) -> None:
        relation = charm.model.get_relation(PEERS)
        if relation is None:
            raise StatusError(Level.WAITING, "waiting for the peer relation")
        self._model = charm.model
        self._unit = charm.unit
        self._app = charm.app
        self._relation = relation

    @property
    def pinned(self) -> Pinned:
        """Read the pinned settings."""
        return self._relation.load(Pinned, self._app)

    @property
    def is_server(self) -> bool:
        """Report whether this unit's storage holds the volume."""
        return self.pinned.server == self._unit.name

    def pin(self, **fields: str | None) -> None:
        """Pin some fields; the others stay."""
        pinned = Pinned.model_validate(self.pinned.model_dump() | fields)
        self._relation.save(pinned, self._app)

    def settle(self, *, embedded: bool) -> bool:
        """Pin whether the volume is embedded, then in our storage; return whether that is new."""
        mode = "embedded" if embedded else "external"
        if self.pinned.mode == mode:
            return False
        if self.pinned.mode is not None:
            format_journal.forget(self._app.name)  # the format that began was of the other kind
        self.pin(
            mode=mode, server=self._unit.name if embedded else None, uuid=None, formatting=None
        )
        return True

    def known(
        self, url: str, name: str, *, adopt: str, before: str | None = None
    ) -> formatting.Known:
        """Return the facts about volume `name` in the engine at `url`; a new one is ours from here.

        `before` is the UUID of the volume that an application of this name left in the unit's
        storage.
        """
        app, pinned = self._app.name, self.pinned
        if pinned.uuid is not None:
            format_journal.forget(app)
            return formatting.Known(pinned.uuid)
        if before is not None:
            return formatting.Known(before)

        def announce() -> None:
            self.pin(formatting="yes")
            # The pin is kept only if the hook ends
            format_journal.record(app, url, name)

        if pinned.formatting is not None or format_journal.has(app, url, name):
            return formatting.Known(None, ours=True)
        return formatting.Known(None, adopt=adopt, announce=announce)

    def publish_address(self, address: str) -> None:
        """Publish the address at which this unit serves the volume."""
        self._relation.data[self._unit]["address"] = address

    def publish_room(self, gib: int) -> None:
        """Publish the volume's total capacity in GiB; an increase by one changes nothing."""
        known = self.room()
        if known is None or not known <= gib <= known + 1:
            self._relation.data[self._unit]["room-gib"] = str(gib)

    def withdraw(self) -> None:
        """Remove this unit's published data of an embedded volume after it became external."""
        for key in ("address", "room-gib"):
            self._relation.data[self._unit].pop(key, None)

    def address(self) -> str | None:
        """Read the volume's address, or None. Raises `StatusError` if the server was removed."""
        return self._published("address")

    def room(self) -> int | None:
        """Read the volume's capacity in GiB, or None. Raises as `address` does."""
        gib = self._published("room-gib")
        return int(gib) if gib is not None else None

    def _published(self, key: str) -> str | None:
        units = {unit.name: unit for unit in (self._unit, *self._relation.units)}
        server = self.pinned.server
        if server is None:
            return None
        if server not in units:
            text = f"deploy another application with --attach-storage: {server}, which served the volume, was removed"
            raise StatusError(Level.BLOCKED, text)
        return self._relation.data[units[server]].get(key)

    def silent_s(self, relations: collections.abc.Iterable[int]) -> dict[int, float]:
        """Return for how many seconds each of these relations, by id, was in every call."""
        now, databag = time.time(), self._relation.data[self._unit]
        before = json.loads(databag.get(_SILENT, "{}"))
        since: dict[str, float] = {
            str(relation): before.get(str(relation), int(now)) for relation in relations
        }
        if since != before:
            databag[_SILENT] = json.dumps(since) if since else ""
        return {int(relation): now - then for relation, then in since.items()}

    def credentials(self) -> fs.JuicefsSecret | None:
        """Read the secret's content; None before there is a secret."""
        secret = self.secret()
        if secret is None:
            return None
        leads = self._unit.is_leader()
        return fs.JuicefsSecret.from_content(
            secret.peek_content() if leads else secret.get_content(refresh=True)
        )

    def secret(self) -> ops.Secret | None:
        """Find the secret with the credentials."""
        identifier = self.pinned.secret_id
        return self._model.get_secret(id=identifier) if identifier is not None else None

    def ensure_secret(
        self, credentials: fs.JuicefsSecret
    ) -> tuple[ops.Secret, int] | tuple[None, None]:
        """Store `credentials`; return the secret and its revision. Empty ones remove the secret."""
        secret, content = self.secret(), credentials.content()
        if not content:
            if secret is not None:
                secret.remove_all_revisions()
                self.pin(secret_id=None)
            return None, None
        if secret is None:
            text = "Credentials of the JuiceFS volume, for the charms that mount it"
            secret = self._app.add_secret(content, label="volume", description=text)
            self.pin(secret_id=secret.id)
            return secret, 1
        revision = secret.get_info().revision
        if secret.peek_content() == content:
            return secret, revision
        secret.set_content(content)
        return secret, revision + 1  # Juju makes the revision when the hook ends
