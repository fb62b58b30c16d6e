"""Random event orders on the leader, embedded or external: see tests/orders.py."""

import collections.abc
import dataclasses
import gzip
import json
import pathlib
import typing

import pytest
from doubles import QUOTAS, UUID
from ops import testing
from rig import Rig, clients, peers

import embedded.store
import orders
from embedded.users import RemovalRefusedError
from slurm_ddp import juicefs
from slurm_ddp.commands import CommandError, CommandTimeout
from slurm_ddp.interfaces import filesystem_info as fs

HOST = "192.0.2.0:6379"  # Scenario's default network
USERS_SECRET = testing.Secret(
    {"meta-password": "topSecret1", "access-key": "topSecret2", "secret-key": "topSecret3"}
)
CONFIGS: dict[str, dict[str, str | int | float | bool]] = {
    "embedded": {},
    "external": {
        "metadata-url": "rediss://db.example.com:6380/4",
        "bucket": "https://train.fra1.digitaloceanspaces.com",
        "credentials": USERS_SECRET.id,
    },
}
STORAGE = testing.Storage("volume")


class Volume(orders.Unit):
    """The unit, whose volume is of one kind."""

    relations: typing.ClassVar = {
        "server-peers": peers(),
        "filesystem": clients("shared-filesystem-client")[0],
        "s3": testing.Relation("s3", remote_app_name="s3-integrator", remote_units_data={0: {}}),
        "postgresql": testing.Relation(
            "postgresql", remote_app_name="postgresql", remote_units_data={0: {}}
        ),
    }
    actions: typing.ClassVar = {
        "status": {},
        "fsck": {},
        "gc": {"delete": True},
        "backup-metadata": {},
        "restore-metadata": {"uuid": UUID, "file": "/nowhere/backup"},
        "set-quota": {"path": "/data", "capacity": 5},
        "list-quotas": {},
        "export-kubernetes": {},
    }
    hooks: typing.ClassVar = (
        *orders.Unit.hooks,
        "secret_changed",
        "storage_attached",
        "storage_detaching",
    )
    refusals: typing.ClassVar = (RemovalRefusedError,)

    def __init__(self, rig: Rig, calls: orders.Calls, place: orders.Place, kind: str) -> None:
        state = rig.state(peers(), config=CONFIGS[kind], secrets=[USERS_SECRET])
        super().__init__(rig.ctx, dataclasses.replace(state, storages={STORAGE}), calls)
        self.rig, self.place, self.kind = rig, place, kind
        self.has_died = self.has_forgotten = False

    @classmethod
    def events(cls) -> list[str]:
        return [name for name in super().events() if name != "server-peers broken"]

    def changes(self) -> dict[str, collections.abc.Callable[[], object]]:
        world, servers = self.rig.world, self.rig.servers
        return {
            "the engine stops responding": lambda: world.down.add("db.example.com:6380"),
            "the engine responds": world.down.clear,
            "the servers are slow": lambda: vars(servers).update(slow=True),
            "the servers stopped": lambda: vars(servers).update(running=None, down=True),
            "a client connects": lambda: vars(servers).update(peers=lambda _: ("10.0.0.9",)),
            "clients disconnect": lambda: vars(servers).update(peers=lambda _: ()),
            "the disk fills": lambda: vars(servers).update(
                disk=embedded.store.Usage(31 << 30, 1 << 30)
            ),
            "the disk has room": lambda: vars(servers).update(
                disk=embedded.store.Usage(2 << 30, 30 << 30)
            ),
            "format fails": lambda: vars(world).update(format_error="the bucket is not empty"),
            "format works": lambda: vars(world).update(format_error=""),
            "another unit leads": lambda: self.replace(leader=False),
            "the secret is withdrawn": lambda: self.replace(
                secrets=self.state.secrets - {USERS_SECRET}
            ),
            "a secret malformed": lambda: self.grant({"meta-passwd": "one"}),
            "the secret is granted": lambda: self.grant(USERS_SECRET.tracked_content),
            "s3 answers": lambda: self.write(
                "s3", remote_app_data={"bucket": "train", "access-key": "k", "secret-key": "s"}
            ),
            "config": self.configure(**CONFIGS[self.kind]),
            "config of the other kind": self.configure_otherwise,
            "config capacity": self.configure(**CONFIGS[self.kind], capacity=20),
            "config removal": self.configure(**CONFIGS[self.kind], **{"allow-removal": True}),
            "config malformed": self.configure(
                **{"metadata-url": "db.example.com", "bucket": "train"}
            ),
        }

    def configure(self, **config: typing.Any) -> collections.abc.Callable[[], None]:
        return lambda: self.replace(config=config)

    def configure_otherwise(self) -> None:
        """Ask for a volume of the other kind, which the charm allows until it offered one."""
        if (
            self.relation("filesystem") is None
            and "offered" not in self.relation("server-peers").local_app_data
        ):
            self.replace(
                config=next(config for kind, config in CONFIGS.items() if kind != self.kind)
            )

    def grant(self, content: collections.abc.Mapping[str, str]) -> None:
        others = {secret for secret in self.state.secrets if secret.id != USERS_SECRET.id}
        self.replace(
            secrets={
                *others,
                dataclasses.replace(
                    USERS_SECRET, tracked_content=dict(content), latest_content=dict(content)
                ),
            }
        )

    def event(self, name: str) -> typing.Any:
        if name == "filesystem created" and self.state.config.get("bucket") != CONFIGS[
            self.kind
        ].get("bucket"):
            return None
        if name == "filesystem broken" and not any(
            secret.remote_grants for secret in self.state.secrets
        ):
            return (
                None  # Scenario, unlike Juju, fails when a secret is revoked that was not granted
            )
        if name == "secret_changed":
            known = [secret for secret in self.state.secrets if secret.id == USERS_SECRET.id]
            return self.ctx.on.secret_changed(known[0]) if known else None
        if name == "storage_attached" and not self.state.storages:
            self.replace(storages={STORAGE})
        if name.startswith("storage_"):
            storage = next(iter(self.state.storages), None)
            return getattr(self.ctx.on, name)(storage) if storage is not None else None
        return super().event(name)

    def take(self, step: orders.Step) -> None:
        super().take(step)
        self.has_died |= step.fault == "dies"
        self.has_forgotten |= self.has_died and step.what in {"stop", "remove"}

    def ended(self, name: str) -> None:
        super().ended(name)
        if name == "storage_detaching":
            self.replace(storages=set())

    def settle(self) -> object:
        world, servers = self.rig.world, self.rig.servers
        world.down.clear()
        world.format_error, servers.slow, servers.down = "", False, False
        servers.peers, servers.disk = lambda _: (), embedded.store.Usage(2 << 30, 30 << 30)
        self.grant(USERS_SECRET.tracked_content)
        self.replace(config=CONFIGS[self.kind])
        ends = ("s3 broken", "postgresql broken", "storage_attached", "leader_elected")
        for name in (*ends, "filesystem created", "filesystem changed", "update_status"):
            self.emit(name)
        if "adopt=" in self.state.unit_status.message:
            assert self.has_forgotten, (
                "it ended before it had noted a volume that it formatted, or it has no reason"
            )
            for more in ({"adopt": UUID}, {}):
                self.replace(config=CONFIGS[self.kind] | more)
                self.emit("config_changed")
            self.emit("update_status")
        relation, pinned = self.relation("filesystem"), self.relation("server-peers")
        offered = fs.parse(relation.local_app_data["endpoint"])
        assert isinstance(offered, fs.Juicefs)
        (secret,) = (secret for secret in self.state.secrets if secret.owner == "app")
        assert offered.secret_id == secret.id
        running, content = servers.running, secret.latest_content or {}
        if running is not None:
            assert running.credentials.content() == content
        return {
            "status": self.state.unit_status,
            "offered": dataclasses.replace(offered, secret_id=None, auth_rev=None),
            "granted": list(secret.remote_grants.values()),
            "secret": sorted(content) if running is not None else content,
            "pinned": {
                key: value for key, value in pinned.local_app_data.items() if key != "secret_id"
            },
            "unit": {
                key: running and pinned.local_unit_data.get(key) for key in ("address", "room-gib")
            },
            "servers": (
                running and dataclasses.replace(running, credentials=fs.JuicefsSecret()),
                servers.enabled,
            ),
            "volumes": {
                url: volume for url, volume in world.volumes.items() if offered.hosts[0] in url
            },
            "modes": {
                place: mode for place, mode in world.modes.items() if offered.hosts[0] in place[0]
            },
            "files": self.place.files(
                "backups/*", "*/kubernetes/*", "*/reports/*", "storage/volume/*"
            ),
        }


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_order_ends_in_the_same_state(
    rig: Rig, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    orders.Clock(monkeypatch)
    calls = orders.Calls()
    calls.watch_files(monkeypatch)
    world, servers = rig.world, rig.servers

    def serve(settings: embedded.store.Settings) -> bool:
        changed = embedded_ensure(settings)
        if servers.running is not None:  # Redis takes its password from now on
            world.passwords[f"redis://{HOST}/1"] = settings.credentials.content()["meta-password"]
        return changed

    def reach(
        function: collections.abc.Callable[..., typing.Any],
    ) -> collections.abc.Callable[..., typing.Any]:
        def reached(
            program: pathlib.Path, access: typing.Any, *args: typing.Any, **named: typing.Any
        ) -> typing.Any:
            if servers.running is None and access.engine.hosts[0] in (HOST, "127.0.0.1:6379"):
                raise juicefs.UnreachableError(f"{HOST} does not answer (connection refused)")
            return function(program, access, *args, **named)

        return reached

    embedded_ensure = servers.ensure
    failed = CommandError("juicefs exited 1", returncode=1, stderr="<FATAL>: it failed")
    command = {"fails": orders.raising(lambda: failed)}
    command["hangs"] = orders.raising(lambda: CommandTimeout("juicefs: no answer within 60 s"))
    offline = orders.raising(lambda: juicefs.DownloadError("github.com does not answer"))
    silent = orders.raising(lambda: juicefs.UnreachableError("nothing answers"))
    stopped = orders.raising(lambda: CommandError("systemctl exited 1: it failed"))
    for module, name, double, faults in (
        (juicefs, "ensure_program", world.ensure_program, {"fails": offline}),
        (juicefs, "inspect", reach(world.inspect), {"fails": silent}),
        (juicefs, "invoke", reach(world.invoke), command),
        (embedded.store, "ensure", serve, {"fails": stopped}),
        (embedded.store, "ensure_none", servers.ensure_none, {"fails": stopped}),
        (embedded.store, "remove", servers.remove, {"fails": stopped}),
        (embedded.store, "stop", servers.stop, {}),
    ):
        monkeypatch.setattr(module, name, calls.watch(double, **faults))
    backup = gzip.compress(
        json.dumps({"Setting": {"Name": "shared", "UUID": UUID}}, indent=1).encode()
    )
    world.answers |= {
        "fsck": "<INFO>: Used by 3 slices (12 bytes)\n",
        "gc": "<INFO>: scanned 5 objects, 4 valid, 1 leaked (4 bytes)\n",
        "dump": lambda *arguments: str(pathlib.Path(arguments[-1]).write_bytes(backup)),
        "quota": QUOTAS,
    }
    place = orders.Place(tmp_path, world, servers)

    def make() -> Volume:
        place.restore()
        return Volume(rig, calls, place, kind)

    orders.check(monkeypatch, make)
