"""How the volume is made, what of it can change, and when it is left alone."""

import dataclasses
import subprocess
import typing

import pytest
from doubles import UUID
from ops import testing
from rig import Config, Rig, clients, peers

import embedded.store
import embedded.users
import relations.peers
from slurm_ddp import juicefs, wake
from volume import format_journal, spec

URL = "redis://db:6379/1"
EXTERNAL: Config = {"metadata-url": "redis://db/1", "bucket": "https://h/b"}
OFFERING = testing.ActiveStatus("offering volume shared")
RSA = "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\ntopSecretKey\n-----END RSA PRIVATE KEY-----\n"


def test_options_become_flags_of_format(rig: Rig):
    config: Config = {
        **EXTERNAL,
        "block-size": "1M",
        "compression": "zstd",
        "capacity": 500,
        "inodes": 1000000,
        "trash-days": 0,
    }
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=config))
    assert out.unit_status == OFFERING
    (made,) = rig.world.formats
    assert set(made[1:-2]) == {
        "--no-update",
        "--storage=s3",
        "--bucket=https://h/b",
        "--block-size=1024",
        "--compress=zstd",
        "--capacity=500",
        "--inodes=1000000",
        "--trash-days=0",
    }
    assert [command[0] for command in rig.world.commands] == ["format"]  # and nothing is left to change


def test_a_program_that_is_too_old_touches_no_volume(rig: Rig):
    rig.world.program = (1, 0, 4)
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=EXTERNAL))
    assert out.unit_status == testing.BlockedStatus(
        "juicefs 1.0.4 is too old: attach 1.1 or newer: juju attach-resource juicefs-server-proxy juicefs=FILE"
    )
    assert rig.world.commands == []


def repairs(rig: Rig) -> list[str]:
    return [line.message for line in rig.ctx.juju_log if "root" in line.message or "others could" in line.message]


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [(0o777, 0o1777), (0o775, 0o1775), (0o2775, 0o3775), (0o1777, 0o1777), (0o755, 0o755), (0o700, 0o700)],
)
def test_a_root_that_others_can_write_gets_the_sticky_bit_once(rig: Rig, mode: int, wanted: int):
    rig.world.modes[URL] = mode
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=EXTERNAL))
    assert (out.unit_status, rig.world.modes[URL]) == (OFFERING, wanted)
    logged = f"volume shared: / had mode {mode:04o}, so others could replace what is in it: it has {wanted:04o} now"
    assert repairs(rig) == ([logged] if mode != wanted else [])
    rig.ctx.run(rig.ctx.on.update_status(), out)
    assert len(repairs(rig)) == (mode != wanted)


def test_only_the_leader_looks_at_the_root(rig: Rig):
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=EXTERNAL))
    rig.world.modes[URL] = 0o777
    rig.ctx.run(rig.ctx.on.update_status(), dataclasses.replace(out, leader=False))
    assert rig.world.modes[URL] == 0o777


def test_a_root_that_cannot_be_looked_at_keeps_no_volume_from_being_offered(rig: Rig):
    rig.world.sync_error = "set attr: read-only file system"
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=EXTERNAL))
    assert out.unit_status == OFFERING
    (logged,) = repairs(rig)
    assert logged.endswith("read-only file system")


def test_what_can_change_is_changed_once(rig: Rig):
    first = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=EXTERNAL))
    config: Config = {**EXTERNAL, "capacity": 10, "inodes": 20, "trash-days": 7}
    out = rig.ctx.run(rig.ctx.on.config_changed(), dataclasses.replace(first, config=config))
    assert out.unit_status == OFFERING
    assert rig.world.commands[-1] == ("config", "--capacity=10", "--inodes=20", "--trash-days=7", "--yes", URL)
    done = len(rig.world.commands)
    rig.ctx.run(rig.ctx.on.update_status(), out)
    assert len(rig.world.commands) == done
    follower = dataclasses.replace(out, leader=False, config=EXTERNAL)
    rig.ctx.run(rig.ctx.on.config_changed(), follower)
    assert len(rig.world.commands) == done  # only the leader changes a volume


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"block-size": "1M"},
            "block-size: volume shared was made with 4096K, which cannot change: set block-size=4096K",
        ),
        (
            {"compression": "lz4"},
            "compression: volume shared was made with none, which cannot change: set compression=none",
        ),
        ({"storage-type": "minio"}, "storage-type: volume shared lies in s3, not minio: set storage-type=s3"),
        (
            {"volume-name": "other"},
            "the metadata engine holds volume shared, not other: set volume-name=shared, or name another database",
        ),
    ],
)
def test_what_cannot_change_is_refused_by_name(rig: Rig, change: Config, message: str):
    first = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=EXTERNAL))
    out = rig.ctx.run(rig.ctx.on.config_changed(), dataclasses.replace(first, config={**EXTERNAL, **change}))
    assert out.unit_status == testing.BlockedStatus(message)
    assert [command[0] for command in rig.world.commands] == ["format"]


def test_an_encryption_key_goes_by_a_file_and_its_passphrase_to_the_clients(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    secret = testing.Secret({"encrypt-key": RSA, "encrypt-passphrase": "topSecret1"})
    seen: list[tuple[str, int]] = []
    genuine = rig.world.invoke

    def looking(*args: object, **kwargs: object) -> object:
        import pathlib

        for word in map(str, args):
            if word.startswith("--encrypt-rsa-key="):
                path = pathlib.Path(word.partition("=")[2])
                seen.append((path.read_text(), path.stat().st_mode & 0o777))
        return genuine(*args, **kwargs)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(juicefs, "invoke", looking)
    (client,) = clients("one")
    config: Config = {**EXTERNAL, "credentials": secret.id}
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(peers(), client, config=config, secrets=[secret]))
    assert out.unit_status == OFFERING
    assert seen == [(RSA, 0o600)]
    assert rig.world.format_env == {"JFS_RSA_PASSPHRASE": "topSecret1"}
    (own,) = (secret for secret in out.secrets if secret.owner)
    assert own.latest_content == {"encrypt-passphrase": "topSecret1"}  # the key itself is the metadata engine's
    assert "topSecret" not in repr([out.relations, out.unit_status, rig.ctx.juju_log, rig.world.commands])
    # and later it is no contradiction that the key is still in the secret
    assert rig.ctx.run(rig.ctx.on.update_status(), out).unit_status == OFFERING


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"encrypt-key": "topSecret"},
            "credentials: encrypt-key: not an RSA key in PEM with a passphrase: make one with "
            "openssl genrsa -traditional -aes256 -out key.pem 2048",
        ),
        ({"encrypt-key": RSA}, "credentials: encrypt-passphrase: required by encrypt-key"),
    ],
)
def test_an_encryption_key_that_cannot_be_used(rig: Rig, content: dict[str, str], message: str):
    secret = testing.Secret(content)
    config: Config = {**EXTERNAL, "credentials": secret.id}
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=config, secrets=[secret]))
    assert out.unit_status == testing.BlockedStatus(message)


def test_encryption_cannot_be_added(rig: Rig):
    first = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=EXTERNAL))
    secret = testing.Secret({"encrypt-key": RSA, "encrypt-passphrase": "topSecret1"})
    config: Config = {**EXTERNAL, "credentials": secret.id}
    out = rig.ctx.run(rig.ctx.on.config_changed(), dataclasses.replace(first, config=config, secrets={secret}))
    assert out.unit_status == testing.BlockedStatus(
        "credentials: encrypt-key: volume shared was made without, which cannot change: remove it from the secret"
    )


def test_the_key_that_openssl_makes_is_taken():
    argv = ["openssl", "genrsa", "-traditional", "-aes256", "-passout", "pass:x", "2048"]
    key = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    assert spec.read_credentials({"encrypt-key": key, "encrypt-passphrase": "x"})[1] == key


def test_a_volume_whose_making_was_cut_off_is_ours(rig: Rig):
    """Formatting succeeded, and then the engine went away before its UUID could be read."""
    rig.world.volumes[URL] = juicefs.Setting("shared", UUID, "s3", "https://h/b", trash_days=1)
    relation = peers(mode="external", formatting="yes")
    out = rig.ctx.run(rig.ctx.on.update_status(), rig.state(relation, config=EXTERNAL))
    assert out.unit_status == OFFERING
    assert '"formatting": null' not in out.get_relation(1).local_app_data
    assert out.get_relation(1).local_app_data["uuid"] == f'"{UUID}"'


@pytest.mark.parametrize("config", [EXTERNAL, {}], ids=["external", "embedded"])
def test_a_hook_that_is_killed_behind_the_formatting_is_made_good(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, config: Config
):
    """Juju forgets all that it pinned, the secret with the passwords too."""
    before = rig.state(config=config)
    made, invoke = rig.world.formats, juicefs.invoke

    def die(*arguments: typing.Any, **keywords: typing.Any) -> None:
        invoke(*arguments, **keywords)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(juicefs, "invoke", die)
        with pytest.raises(KeyboardInterrupt):
            rig.ctx.run(rig.ctx.on.config_changed(), before)
    assert len(made) == 1
    first = dict(rig.world.format_env)
    out = rig.ctx.run(rig.ctx.on.config_changed(), before)
    assert out.unit_status.name == "active", out.unit_status
    assert len(made) == 1
    if not config:
        (secret,) = out.secrets
        assert (secret.latest_content or {})["secret-key"] == first["SECRET_KEY"]
    rig.ctx.run(rig.ctx.on.update_status(), out)
    state = format_journal.STATE_DIR / "juicefs-server-proxy"
    assert list(state.glob("format-*")) == [], "Juju knows now"


def test_what_began_here_is_not_another_volume(rig: Rig):
    """A note of one engine says nothing of the volume in another."""
    rig.world.format_error = "Storage s3://b is not configured correctly: 403"
    rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=EXTERNAL))
    other = "redis://other/1"
    rig.world.volumes["redis://other:6379/1"] = juicefs.Setting("shared", UUID, "s3", "https://h/b", trash_days=1)
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config={**EXTERNAL, "metadata-url": other}))
    assert "was not made here" in out.unit_status.message


def test_before_anything_is_formatted_it_is_noted(rig: Rig):
    rig.world.format_error = "Storage s3://b is not configured correctly: 403"
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=EXTERNAL))
    assert out.get_relation(1).local_app_data["formatting"] == '"yes"'


def test_a_prefix_that_is_not_empty_says_what_to_do(rig: Rig):
    rig.world.format_error = "Storage s3://b/shared/ is not empty; please clean it up or pick another volume name"
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=EXTERNAL))
    assert out.unit_status == testing.BlockedStatus(
        f"juicefs format: {rig.world.format_error}: it may be another application's volume; choose another volume-name, "
        "bucket or prefix"
    )


def test_an_embedded_volume_that_nobody_has_seen_may_become_an_external_one_and_back(rig: Rig):
    embedded = rig.ctx.run(rig.ctx.on.config_changed(), rig.state())
    (secret,) = embedded.secrets
    assert rig.servers.running is not None
    out = rig.ctx.run(rig.ctx.on.config_changed(), dataclasses.replace(embedded, config=EXTERNAL))
    assert out.unit_status == OFFERING
    assert rig.servers.running is None
    assert [found for found in out.secrets if found.owner] == []
    back = rig.ctx.run(rig.ctx.on.config_changed(), dataclasses.replace(out, config={"adopt": UUID}))
    assert isinstance(back.unit_status, testing.ActiveStatus)
    (new,) = back.secrets
    assert new.latest_content != secret.latest_content


def test_an_embedded_volume_follows_its_units_address(rig: Rig):
    (client,) = clients("one")
    first = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(peers(), client))
    old = "redis://192.0.2.0:6379/1"
    rig.world.volumes["redis://192.0.2.77:6379/1"] = rig.world.volumes.pop(old)  # the same Redis, elsewhere
    network = testing.Network("filesystem", ingress_addresses=["192.0.2.77"])
    moved = dataclasses.replace(first, networks={network})
    out = rig.ctx.run(rig.ctx.on.config_changed(), moved)
    assert isinstance(out.unit_status, testing.ActiveStatus)
    assert rig.world.commands[-1] == (
        "config",
        "--bucket=192.0.2.77:2022:/data/",
        "--yes",
        "redis://192.0.2.77:6379/1",
    )
    assert "192.0.2.77" in out.get_relation(client.id).local_app_data["endpoint"]
    assert len(rig.world.formats) == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let time pass only where the charm sleeps; return what it slept."""
    slept: list[float] = []
    monkeypatch.setattr(embedded.users.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(embedded.users.time, "sleep", slept.append)
    return slept


def used(rig: Rig, *mounted: str, **config: str | int | float | bool) -> tuple[testing.State, testing.Storage]:
    """Return a unit that serves a volume to another application, whose unit Juju still lists; and its storage."""
    client = testing.Relation("filesystem", remote_app_name="one", id=10, remote_units_data={0: {"schemes": "juicefs"}})
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(peers(), client, config=config))
    rig.world.volumes[LOOPBACK] = dataclasses.replace(next(iter(rig.world.volumes.values())), clients=mounted)
    (storage,) = out.storages
    return out, storage


LOOPBACK = "redis://127.0.0.1:6379/1"
CLIENTS = ("juju-2586ad-3 at /mnt/shared", "juju-2586ad-4 at /mnt/shared")


def test_the_storage_of_a_volume_that_is_mounted_does_not_go_until_it_is_unmounted(rig: Rig, clock: list[float]):
    out, storage = used(rig, *CLIENTS)
    with pytest.raises(testing.errors.UncaughtCharmError) as caught:
        rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert str(caught.value.__cause__) == (
        "the volume is mounted by juju-2586ad-3 at /mnt/shared, juju-2586ad-4 at /mnt/shared: unmount it there with "
        "juju remove-relation juicefs-server-proxy one, and Juju's next run of this hook passes; or remove the volume "
        "under its clients: juju config juicefs-server-proxy allow-removal=true"
    )
    assert rig.servers.running is not None
    assert 20 <= sum(clock) <= 60
    # Nothing but JuiceFS's sessions changes: a unit whose hook failed gets no relation-departed
    rig.world.volumes[LOOPBACK] = dataclasses.replace(rig.world.volumes[LOOPBACK], clients=())
    again = rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert rig.servers.running is None
    assert again.unit_status == testing.MaintenanceStatus("stopped, so that the storage can go")


def test_clients_that_unmount_meanwhile_are_waited_for_without_an_error(
    rig: Rig, clock: list[float], monkeypatch: pytest.MonkeyPatch
):
    out, storage = used(rig, *CLIENTS)

    def sleep(seconds: float) -> None:
        clock.append(seconds)
        left = rig.world.volumes[LOOPBACK].clients[1:]
        rig.world.volumes[LOOPBACK] = dataclasses.replace(rig.world.volumes[LOOPBACK], clients=left)

    monkeypatch.setattr(embedded.users.time, "sleep", sleep)
    rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert rig.servers.running is None
    assert len(clock) == 2


def test_the_storage_goes_at_once_where_nobody_has_the_volume_mounted(rig: Rig, clock: list[float]):
    out, storage = used(rig)
    rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert rig.servers.running is None
    assert clock == []


def test_the_storage_goes_under_its_clients_when_the_operator_allows_it(rig: Rig, clock: list[float]):
    out, storage = used(rig, *CLIENTS, **{"allow-removal": True})
    rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert rig.servers.running is None
    assert clock == []


def test_the_storage_stays_while_nobody_can_tell_who_uses_it_and_its_servers_run(rig: Rig, clock: list[float]):
    out, storage = used(rig)
    rig.world.down.add("127.0.0.1:6379")
    with pytest.raises(testing.errors.UncaughtCharmError, match="cannot tell which clients have the volume mounted"):
        rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert rig.servers.running is not None
    rig.servers.stop("juicefs-server-proxy")  # as an earlier run of this hook did, which passed
    rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)


def test_a_read_only_mount_which_has_no_session_keeps_the_storage_until_it_is_unmounted(rig: Rig, clock: list[float]):
    out, storage = used(rig)
    rig.servers.peers = lambda up_s: ("192.0.2.7",)
    with pytest.raises(testing.errors.UncaughtCharmError) as caught:
        rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert str(caught.value.__cause__) == (
        "the volume's metadata server has connections from 192.0.2.7: unmount it there with juju remove-relation "
        "juicefs-server-proxy one, and Juju's next run of this hook passes; or remove the volume under its clients: "
        "juju config juicefs-server-proxy allow-removal=true"
    )
    assert rig.servers.running is not None
    rig.servers.peers = lambda up_s: ()
    rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert rig.servers.running is None


def test_a_metadata_server_that_is_down_is_started_and_its_clients_may_reconnect(rig: Rig, clock: list[float]):
    out, storage = used(rig)
    rig.servers.down = True
    rig.servers.peers = lambda up_s: ("192.0.2.7",) if up_s > 12 else ()
    with pytest.raises(testing.errors.UncaughtCharmError, match=r"has connections from 192\.0\.2\.7: unmount it there"):
        rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert rig.servers.running is not None
    rig.servers.down, rig.servers.peers = True, lambda up_s: ()
    clock.clear()
    rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert rig.servers.running is None
    assert 20 <= sum(clock) < 30


def test_a_metadata_server_that_does_not_start_keeps_the_storage(rig: Rig, clock: list[float]):
    out, storage = used(rig)
    rig.servers.error = embedded.store.StoreError("juicefs-metadata-x.service does not start: Bad file format")
    with pytest.raises(testing.errors.UncaughtCharmError) as caught:
        rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert str(caught.value.__cause__) == (
        "cannot tell which clients have the volume mounted (juicefs-metadata-x.service does not start: Bad file "
        "format): repair the metadata server, and Juju's next run of this hook passes; or remove the volume under its "
        "clients: juju config juicefs-server-proxy allow-removal=true"
    )
    assert rig.servers.running is not None
    willing = dataclasses.replace(out, config={"allow-removal": True})
    rig.ctx.run(rig.ctx.on.storage_detaching(storage), willing)
    assert rig.servers.running is None


def test_a_volume_that_was_never_offered_goes_although_its_server_does_not_start(rig: Rig, clock: list[float]):
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state())
    (storage,) = out.storages
    rig.servers.error = embedded.store.StoreError("juicefs-metadata-x.service does not start: Bad file format")
    rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert rig.servers.running is None


def test_without_the_peer_relation_nobody_knows_who_uses_the_storage(rig: Rig, clock: list[float]):
    out, storage = used(rig)
    alone = dataclasses.replace(out, relations=())
    with pytest.raises(testing.errors.UncaughtCharmError, match=r"cannot tell .*waiting for the peer relation"):
        rig.ctx.run(rig.ctx.on.storage_detaching(storage), alone)
    assert rig.servers.running is not None


def joined(name: str, *schemes: str) -> testing.Relation:
    data = {number: {"schemes": text} if text else {} for number, text in enumerate(schemes)}
    return testing.Relation("filesystem", remote_app_name=name, id=20, remote_units_data=data)


@pytest.fixture
def waking(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return after how many seconds the charm had itself woken, each time; so many have then passed."""
    woken: list[int] = []
    monkeypatch.setattr(wake, "later", lambda unit, charm, seconds: woken.append(seconds))
    monkeypatch.setattr(relations.peers.time, "time", lambda: 1.8e9 + sum(woken))
    return woken


@pytest.mark.parametrize(
    ("schemes", "is_blocked"),
    [((), False), (("",), True), (("nfs,cephfs",), True), (("cephfs,juicefs,lustre,nfs", ""), False)],
)
def test_a_client_that_cannot_mount_juicefs_is_named_at_every_event(
    rig: Rig, waking: list[int], schemes: tuple[str, ...], is_blocked: bool
):
    """Upstream's filesystem-client writes nothing into its databag, and ends in error."""
    client = joined("filesystem-client", *schemes)
    out = rig.ctx.run(rig.ctx.on.relation_created(client), rig.state(peers(), client))
    assert "endpoint" in out.get_relation(client.id).local_app_data
    assert isinstance(out.unit_status, testing.ActiveStatus)  # it may have just joined
    assert waking == ([60] if is_blocked else [])
    changed = ["relation_changed"] if schemes else []  # it takes a unit
    for event in ("update_status", *changed, "relation_created", "config_changed"):
        subject = (out.get_relation(client.id),) if event.startswith("relation") else ()
        out = rig.ctx.run(getattr(rig.ctx.on, event)(*subject), out)
        if is_blocked:
            assert out.unit_status == testing.BlockedStatus(
                "filesystem-client cannot mount JuiceFS: juju remove-relation juicefs-server-proxy filesystem-client, "
                "and use shared-filesystem-client"
            )
        else:
            assert isinstance(out.unit_status, testing.ActiveStatus)
    assert len(waking) == is_blocked
    gone = dataclasses.replace(out, relations={one for one in out.relations if one.id != client.id})
    out = rig.ctx.run(rig.ctx.on.update_status(), gone)
    assert isinstance(out.unit_status, testing.ActiveStatus)
    assert "silent-since" not in out.get_relation(1).local_unit_data


def test_a_unit_that_publishes_what_it_mounts_after_it_joined_is_never_blocked(rig: Rig, waking: list[int]):
    client = joined("shared-filesystem-client", "")
    out = rig.ctx.run(rig.ctx.on.relation_changed(client, remote_unit=0), rig.state(peers(), client))
    assert isinstance(out.unit_status, testing.ActiveStatus)
    mountable = dataclasses.replace(out.get_relation(client.id), remote_units_data={0: {"schemes": "juicefs"}})
    others = {one for one in out.relations if one.id != client.id}
    out = rig.ctx.run(rig.ctx.on.update_status(), dataclasses.replace(out, relations={*others, mountable}))
    assert isinstance(out.unit_status, testing.ActiveStatus)
    assert waking == [60]
