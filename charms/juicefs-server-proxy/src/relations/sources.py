"""The volume's location, from options and charmed services, and the requests to these services."""

import collections.abc
import contextlib
import dataclasses
import functools
import ipaddress
import json
import pathlib

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

# Endpoints, and the kinds of engine behind them
ENGINES = {"postgresql": "postgres", "mysql": "mysql"}
STORE = "s3"
CLIENTS = "filesystem"  # the endpoint of those that mount the volume

_ADDRESSES = (ipaddress.IPv4Address, ipaddress.IPv6Address)

Read = collections.abc.Callable[[services.Databag, services.Reveal], services.Offer | None]


class Config(pydantic.BaseModel, frozen=True, arbitrary_types_allowed=True):
    """The options.

    Without an engine and a bucket, by option or relation, a unit serves the volume.
    """

    volume_name: str
    storage_type: str
    synchronous: bool
    allow_removal: bool
    block_size: str
    compression: str
    capacity: int
    inodes: int
    trash_days: int
    metadata_url: str = ""
    bucket: str = ""
    region: str = ""
    adopt: str = ""
    credentials: ops.Secret | None = None

    def format(self) -> spec.Format:
        """Read how the volume is made. Raises `ValueError`, which names an option."""
        with naming("volume-name"):
            fs.check_volume_name(self.volume_name)
        return spec.read_format(
            self.block_size, self.compression, self.capacity, self.inodes, self.trash_days
        )


class Sources:
    """Read options and relations.

    All functions raise `StatusError` if something is missing or wrong.
    """

    def __init__(self, charm: ops.CharmBase) -> None:
        self._app = charm.app
        self._model = charm.model
        with config_errors():
            self.config = charm.load_config(Config)

    def request(self) -> None:
        """Ask the charmed services for a database or bucket of the volume's own; for the leader."""
        name, keys = self.config.volume_name, "requested-secrets"
        engine = {"database": name.replace("-", "_"), keys: json.dumps(services.ENGINE_SECRETS)}
        engine["external-node-connectivity"] = "true"  # for clients on other machines
        store = {"bucket": name, keys: json.dumps(services.STORE_SECRETS), "lib-version": "1.0"}
        for endpoint, request in (dict.fromkeys(ENGINES, engine) | {STORE: store}).items():
            for relation in self._model.relations[endpoint]:
                relation.data[self._app].update(request)

    def program(self) -> pathlib.Path | None:
        """Fetch the juicefs that the operator attached, if any."""
        with contextlib.suppress(ops.ModelError):
            return self._model.resources.fetch("juicefs")
        return None

    def external(self, ledger: Ledger) -> tuple[Volume, fs.JuicefsSecret] | None:
        """Read the external volume of options and relations with credentials; None if embedded."""
        with config_errors():
            wanted = self._external()
        pinned, mode = ledger.pinned, "external" if wanted else "embedded"
        if pinned.mode not in (None, mode) and not pinned.may_move:
            text = f"metadata-url, bucket: this application's volume stays {pinned.mode}: deploy another application"
            raise StatusError(Level.BLOCKED, text)
        return wanted

    def served(self, ledger: Ledger) -> tuple[Volume, fs.JuicefsSecret]:
        """Read the volume that a unit serves, as large as its disk allows, and its credentials."""
        address, room_gib, credentials = ledger.address(), ledger.room(), ledger.credentials()
        if address is None or credentials is None:
            server = ledger.pinned.server or "the leader"
            raise StatusError(Level.WAITING, f"waiting for {server} to serve the volume")
        made = self.config.format()
        if room_gib is not None:
            made = dataclasses.replace(
                made, capacity_gib=min(made.capacity_gib or room_gib, room_gib)
            )
        return embedded.store.volume(self.config.volume_name, address, made), credentials

    def settings(self, ledger: Ledger) -> embedded.store.Settings:
        """Return the settings of the servers on this unit."""
        storages, credentials = self._model.storages["volume"], ledger.credentials()
        if not storages or credentials is None:
            raise StatusError(Level.WAITING, "waiting for storage and for the leader")
        address = self._address(ledger)
        directory = storages[0].location
        return embedded.store.Settings(
            self._app.name, address, directory, credentials, self.config.synchronous
        )

    def _address(self, ledger: Ledger) -> str:
        """Find this unit's address for clients, a number: machines need no name resolution.

        An address alone in its network (/32), such as keepalived's, may move to another machine and
        can come first in Juju's list; it counts only if there is no other, as on Google Cloud. A
        published address stays while the machine has it.
        """
        binding = self._model.get_binding(CLIENTS)
        assert binding is not None
        bound = binding.network.interfaces
        listed = (*binding.network.ingress_addresses, *(interface.address for interface in bound))
        found = [one for one in listed if isinstance(one, _ADDRESSES)]
        movable = {
            interface.address
            for interface in bound
            if interface.subnet is not None and interface.subnet.num_addresses == 1
        }
        fixed = [one for one in found if one not in movable]
        addresses = [str(one) for one in fixed or found]
        if not addresses:
            text = "waiting for this machine to have an IP address"
            raise StatusError(Level.WAITING, text, retry=True)
        published = ledger.address() if ledger.is_server else None
        return published if published in addresses else addresses[0]

    def _external(self) -> tuple[Volume, fs.JuicefsSecret] | None:
        """Read a volume of the user's own engine and store; return None if neither is given."""
        config = self.config
        made = config.format()
        content = self._content()
        engine = self._engine_relation()
        store = self._relation(STORE, "bucket", config.bucket)
        has_engine = bool(config.metadata_url or engine)
        has_store = bool(config.bucket or store)
        if not has_engine and not has_store:
            if content is not None:
                raise ValueError(
                    "credentials: only used with metadata-url and bucket: set both, or reset credentials"
                )
            return None
        if not has_store:
            raise ValueError("bucket: set it too, or reset metadata-url for an embedded volume")
        if not has_engine:
            raise ValueError("metadata-url: set it too, or reset bucket for an embedded volume")

        offers: list[services.Offer] = []
        address, user = self._read_engine(engine, offers)
        storage, bucket, region = self._read_store(store, offers)
        with naming("credentials"):
            secret, key = spec.read_credentials(_merged(content or {}, offers), user)
            juicefs_access.check_secret(address, secret)
        volume = Volume(
            config.volume_name,
            address,
            storage,
            bucket,
            keyless=True,
            region=region,
            format=made,
            encrypt_key=key,
        )
        return volume, secret

    def _read_engine(
        self, relation: ops.Relation | None, offers: list[services.Offer]
    ) -> tuple[juicefs_access.Engine, str | None]:
        """Read engine and user from a relation, whose offer is added, or from the option."""
        if relation is None:
            with naming("metadata-url"):
                return juicefs_access.parse(self.config.metadata_url)
        read = functools.partial(services.read_engine, ENGINES[relation.name])
        offer = self._offer(relation, read)
        assert offer.engine is not None
        offers.append(offer)
        return offer.engine, None

    def _read_store(
        self, relation: ops.Relation | None, offers: list[services.Offer]
    ) -> tuple[str, str, str]:
        """Read the store's kind, bucket and region from a relation (adds its offer) or options."""
        config = self.config
        if relation is not None:
            offer = self._offer(relation, services.read_store)
            offers.append(offer)
            return "s3", offer.bucket, config.region or offer.region
        if config.storage_type not in juicefs_access.KEYLESS_STORES:
            raise ValueError(f"storage-type: one of {', '.join(juicefs_access.KEYLESS_STORES)}")
        with naming("bucket"):
            bucket = spec.read_bucket(config.storage_type, config.bucket)
        return config.storage_type, bucket, config.region

    def _content(self) -> dict[str, str] | None:
        if self.config.credentials is None:
            return None
        try:
            return self.config.credentials.get_content(refresh=True)
        except ops.ModelError:  # no such secret, or not for us
            raise ValueError(
                f"credentials: no access: juju grant-secret SECRET {self._app.name}"
            ) from None

    def _engine_relation(self) -> ops.Relation | None:
        found = [name for name in ENGINES if self._model.relations[name]]
        if len(found) > 1:
            raise ValueError(
                f"{', '.join(found)}: only one metadata engine is possible: remove one of the relations"
            )
        return self._relation(found[0], "metadata-url", self.config.metadata_url) if found else None

    def _relation(self, name: str, option: str, value: str) -> ops.Relation | None:
        relation = next(iter(self._model.relations[name]), None)
        if relation is not None and value:
            raise ValueError(
                f"{option}: {relation.app.name} offers it too: reset the option, or remove the relation"
            )
        return relation

    def _offer(self, relation: ops.Relation, read: Read) -> services.Offer:
        app, endpoint = relation.app.name, relation.name
        try:
            offer = read(relation.data[relation.app], self._reveal)
        except ops.ModelError:  # the secret is not granted (yet), or was removed
            raise StatusError(
                Level.WAITING, f"waiting for {app} to grant its credentials", retry=True
            ) from None
        except ValueError as e:
            raise ValueError(f"{endpoint}: {app} cannot be used: {e}") from e
        if offer is None:
            raise StatusError(Level.WAITING, f"waiting for {app} to answer on {endpoint}")
        return offer

    def _reveal(self, identifier: str) -> dict[str, str]:
        return self._model.get_secret(id=identifier).get_content(refresh=True)


def _merged(content: dict[str, str], offers: list[services.Offer]) -> dict[str, str]:
    """Merge the user's credentials with the services'; refuse duplicates by name."""
    merged = dict(content)
    for key, value in (pair for offer in offers for pair in offer.credentials.items()):
        if key == "tls-ca":  # authorities add up
            merged[key] = "\n".join(text for text in (merged.get(key, "").strip(), value) if text)
        elif key in content:
            raise ValueError(f"{key}: a related charm provides it: remove it from the secret")
        else:
            merged[key] = value
    return merged
