"""Where the volume lies, by the options and by the relations to charmed services; and what these are asked for."""

import collections.abc
import dataclasses
import ipaddress

import ops
import pydantic

import embedded.store
from relations import services
from relations.peers import Ledger
from slurm_ddp import juicefs_access
from slurm_ddp.charm import Level, StatusError, config_errors, naming
from slurm_ddp.interfaces import filesystem_info as fs
from volume import spec
from volume.spec import Volume

ENGINES = {"postgresql": "postgres", "mysql": "mysql"}  # endpoints, and the kinds of engine behind them
STORE = "s3"


def address(network: ops.Network) -> str:
    """Return the unit's address for clients, in figures: no machine needs to know another's name.

    Raises:
        StatusError: Juju knows none.
    """
    bound = (interface.address for interface in network.interfaces)
    for found in (*network.ingress_addresses, *bound):
        if isinstance(found, (ipaddress.IPv4Address, ipaddress.IPv6Address)):
            return str(found)
    raise StatusError(Level.WAITING, "waiting for this machine to have an IP address", retry=True)


class Config(pydantic.BaseModel, frozen=True, arbitrary_types_allowed=True):
    """The options. Without an engine and a bucket, by option or relation, the volume is embedded: a unit serves it."""

    volume_name: str
    storage_type: str
    synchronous: bool
    block_size: str
    compression: str
    capacity: int
    inodes: int
    trash_days: int
    metadata_url: str = ""
    bucket: str = ""
    region: str = ""
    credentials: ops.Secret | None = None


class Sources:
    """Reads options and relations."""

    def __init__(self, charm: ops.CharmBase) -> None:
        self._app = charm.app
        self._model = charm.model
        with config_errors():
            self.config = charm.load_config(Config)

    def request(self) -> None:
        """Ask the charmed services for what the volume needs; for the leader."""
        for name in ENGINES:
            for relation in self._model.relations[name]:
                relation.data[self._app].update(services.engine_request(self.config.volume_name))
        for relation in self._model.relations[STORE]:
            relation.data[self._app].update(services.store_request(self.config.volume_name))

    def format(self) -> spec.Format:
        """Return how the volume is made. Raises `ValueError`, which names an option."""
        config = self.config
        with naming("volume-name"):
            fs.check_volume_name(config.volume_name)
        return spec.read_format(
            config.block_size, config.compression, config.capacity, config.inodes, config.trash_days
        )

    def embedded(self, ledger: Ledger) -> tuple[Volume, fs.JuicefsSecret]:
        """Return the volume that a unit serves, as large as its disk allows, and its credentials.

        Raises:
            StatusError: there is none, or not yet.
        """
        server = ledger.pinned.server
        try:
            address, room_gib, credentials = ledger.address(), ledger.room(), ledger.credentials()
        except KeyError:
            text = f"{server}, whose storage holds the volume, was removed: deploy another application"
            raise StatusError(Level.BLOCKED, text) from None
        if address is None or credentials is None:
            raise StatusError(Level.WAITING, f"waiting for {server or 'the leader'} to serve the volume")
        made = self.format()
        if room_gib is not None:
            made = dataclasses.replace(made, capacity_gib=min(made.capacity_gib or room_gib, room_gib))
        return embedded.store.volume(self.config.volume_name, address, made), credentials

    def read(self) -> tuple[Volume, fs.JuicefsSecret] | None:
        """Return the volume that is asked for, and its credentials; None for an embedded one.

        Raises:
            StatusError: something is missing or wrong.
        """
        with config_errors():
            return self._read()

    def _read(self) -> tuple[Volume, fs.JuicefsSecret] | None:
        config, made = self.config, self.format()
        content = self._content()
        engine, store = self._engine_relation(), self._relation(STORE, "bucket", config.bucket)
        if not (config.metadata_url or config.bucket or engine or store):
            if content is not None:
                raise ValueError("credentials: only used with metadata-url and bucket: set both, or reset credentials")
            return None
        if not config.metadata_url and engine is None:
            raise ValueError("metadata-url: set it too, or reset bucket for an embedded volume")
        if not config.bucket and store is None:
            raise ValueError("bucket: set it too, or reset metadata-url for an embedded volume")
        offers: list[services.Offer] = []
        user: str | None = None
        if engine is not None:
            kind = ENGINES[engine.name]
            offers.append(self._offer(engine, lambda data, reveal: services.read_engine(kind, data, reveal)))
            address = offers[-1].engine
            assert address is not None
        else:
            with naming("metadata-url"):
                address, user = juicefs_access.parse(config.metadata_url)
        storage, region = config.storage_type, config.region
        if store is not None:
            offers.append(self._offer(store, services.read_store))
            storage, bucket, region = "s3", offers[-1].bucket, region or offers[-1].region
        else:
            with naming("storage-type"):
                spec.check_storage(storage)
            with naming("bucket"):
                bucket = spec.read_bucket(storage, config.bucket)
        with naming("credentials"):
            merged = self._merged(content or {}, offers)
            secret, key = spec.read_credentials(merged, user)
            juicefs_access.check_secret(address, secret)
        volume = Volume(
            config.volume_name, address, storage, bucket, keyless=True, region=region, format=made, encrypt_key=key
        )
        return volume, secret

    def _content(self) -> dict[str, str] | None:
        if self.config.credentials is None:
            return None
        try:
            return self.config.credentials.get_content(refresh=True)
        except ops.ModelError:  # no such secret, or not for us
            raise ValueError(
                f"credentials: no access to the secret: juju grant-secret SECRET {self._app.name}"
            ) from None

    def _merged(self, content: dict[str, str], offers: list[services.Offer]) -> dict[str, str]:
        """Merge the user's credentials with those that services offer; refuse two for one thing by name."""
        merged = dict(content)
        for offer in offers:
            for key, value in offer.credentials.items():
                if key == "tls-ca":  # authorities add up
                    merged[key] = "\n".join(text for text in (merged.get(key, "").strip(), value) if text)
                elif key in content:
                    raise ValueError(f"{key}: a related charm provides it: remove it from the secret")
                else:
                    merged[key] = value
        return merged

    def _engine_relation(self) -> ops.Relation | None:
        found = [name for name in ENGINES if self._model.relations[name]]
        if len(found) > 1:
            raise ValueError(f"{', '.join(found)}: only one metadata engine is possible: remove one of the relations")
        return self._relation(found[0], "metadata-url", self.config.metadata_url) if found else None

    def _relation(self, name: str, option: str, value: str) -> ops.Relation | None:
        relation = next(iter(self._model.relations[name]), None)
        if relation is not None and value:
            raise ValueError(f"{option}: {relation.app.name} offers it too: reset the option, or remove the relation")
        return relation

    def _offer(
        self,
        relation: ops.Relation,
        read: collections.abc.Callable[[services.Databag, services.Reveal], services.Offer | None],
    ) -> services.Offer:
        name = relation.app.name
        try:
            offer = read(relation.data[relation.app], self._reveal)
        except ops.ModelError:  # the secret is not granted (yet), or went
            raise StatusError(Level.WAITING, f"waiting for {name} to grant its credentials", retry=True) from None
        except ValueError as e:
            raise ValueError(f"{relation.name}: {name} cannot be used: {e}") from e
        if offer is None:
            raise StatusError(Level.WAITING, f"waiting for {name} to answer on {relation.name}")
        return offer

    def _reveal(self, identifier: str) -> dict[str, str]:
        return self._model.get_secret(id=identifier).get_content(refresh=True)
