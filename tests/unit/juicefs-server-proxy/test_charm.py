import dataclasses
import json
import pathlib
import typing

import pytest
import yaml
from doubles import UUID
from ops import testing
from rig import Rig, clients, peers

import embedded.store
from slurm_ddp import juicefs, wake
from slurm_ddp.commands import CommandError
from slurm_ddp.interfaces import filesystem_info as fs
from volume import target

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

ADDRESS = "192.0.2.0"  # Scenario's default network
URL = f"redis://{ADDRESS}:6379/1"
BUCKET = f"{ADDRESS}:2022:/data/"
SERVING = testing.ActiveStatus(
    "serving volume shared from this unit: 2.0 GiB of its disk used, 30.0 GiB free; for trials and small teams"
)
ENGINE = "rediss://db.example.com:6380/4"
EXTERNAL: dict[str, str | int | float | bool] = {
    "metadata-url": ENGINE,
    "bucket": "https://train.fra1.digitaloceanspaces.com",
}
CONTENT = {"meta-password": "topSecret1", "access-key": "topSecret2", "secret-key": "topSecret3"}


def endpoint(out: testing.State, relation: testing.Relation) -> fs.Juicefs:
    found = fs.parse(out.get_relation(relation.id).local_app_data["endpoint"])
    assert isinstance(found, fs.Juicefs)
    return found


def own_secret(out: testing.State) -> testing.Secret:
    (secret,) = (secret for secret in out.secrets if secret.owner == "app")
    return secret


def pinned(out: testing.State) -> dict[str, typing.Any]:
    return {key: json.loads(value) for key, value in out.get_relation(1).local_app_data.items()}


EVENTS = ["start", "config_changed", "leader_elected", "update_status", "upgrade_charm"]


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_reaches_the_same_embedded_volume(rig: Rig, event: str):
    (client,) = clients("shared-filesystem-client")
    out = rig.ctx.run(getattr(rig.ctx.on, event)(), rig.state(peers(), client))
    assert out.unit_status == SERVING
    assert rig.servers.running is not None
    assert rig.servers.running.address == ADDRESS
    assert rig.servers.running.synchronous
    assert list(rig.world.volumes) == [URL]
    assert rig.world.volumes[URL] == juicefs.Setting(
        "shared", UUID, "sftp", BUCKET, encrypted=False, capacity_gib=28
    )
    assert rig.world.format_env == {
        "REDIS_PASSWORD": own_secret(out).latest_content["meta-password"],  # pyright: ignore[reportOptionalSubscript]
        "ACCESS_KEY": "juicefs-objects",
        "SECRET_KEY": own_secret(out).latest_content["secret-key"],  # pyright: ignore[reportOptionalSubscript]
    }
    kept = {
        "mode": "embedded",
        "server": "juicefs-server-proxy/0",
        "uuid": UUID,
        "secret_id": own_secret(out).id,
    }
    assert pinned(out) == kept | {"formatting": None, "offered": "yes"}
    made = fs.Juicefs(
        "shared",
        (f"{ADDRESS}:6379",),
        "redis",
        "1",
        UUID,
        version="1.3.1",
        storage="sftp",
        bucket=BUCKET,
    )
    assert endpoint(out, client) == dataclasses.replace(
        made, secret_id=own_secret(out).id, auth_rev=1
    )
    assert own_secret(out).remote_grants == {client.id: {"shared-filesystem-client"}}
    assert out.workload_version == "1.3.1"


def test_an_embedded_volume_ends_before_its_disk_does(rig: Rig):
    def capacity_after(state: testing.State, **changes: typing.Any) -> tuple[int, testing.State]:
        out = rig.ctx.run(rig.ctx.on.update_status(), dataclasses.replace(state, **changes))
        assert isinstance(out.unit_status, testing.ActiveStatus)
        return rig.world.volumes[URL].capacity_gib, out

    capacity, out = capacity_after(rig.state())
    assert capacity == 28  # of 32 GiB 2 are taken, and a twentieth stays free
    # The volume's present content counts towards its capacity
    rig.world.volumes[URL] = dataclasses.replace(rig.world.volumes[URL], used_bytes=20 << 30)
    rig.servers.disk = embedded.store.Usage(22 << 30, 10 << 30)
    _, out = capacity_after(out)
    capacity, out = capacity_after(out)
    assert capacity == 28
    rig.servers.disk = embedded.store.Usage(27 << 30, 1000 << 30)  # a larger disk
    _, out = capacity_after(out)
    capacity, out = capacity_after(out)
    assert capacity == 1010
    # The operator's limit holds if it is the lower one
    assert capacity_after(out, config={"capacity": 40})[0] == 40
    assert capacity_after(out, config={"capacity": 4000})[0] == 1010


@pytest.mark.parametrize(("used", "free", "volume", "room"), CASES["room"])
def test_room(used: int, free: int, volume: int, room: int):
    assert embedded.store.Usage(used << 30, free << 30).room_gib(volume << 30) == room


def test_no_secret_is_anywhere_but_in_the_secret(rig: Rig):
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(peers(), *clients("one")))
    content = own_secret(out).latest_content
    assert content is not None
    assert sorted(content) == ["access-key", "meta-password", "secret-key"]
    shown = repr(
        [out.relations, out.unit_status, rig.ctx.juju_log, rig.world.formats, rig.servers.running]
    )
    for key in ("meta-password", "secret-key"):
        assert len(content[key]) >= 32
        assert (
            content[key].replace("-", "").replace("_", "").isalnum()
        )  # no character that a URL would encode
        assert content[key] not in shown


def test_the_broken_relation_loses_its_grant_and_the_others_keep_theirs(rig: Rig):
    one, other = clients("one", "other")
    first = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(peers(), one, other))
    out = rig.ctx.run(rig.ctx.on.relation_broken(first.get_relation(one.id)), first)
    assert own_secret(out).remote_grants == {other.id: {"other"}}
    assert out.unit_status == SERVING


def test_another_unit_leaves_the_volume_to_the_one_that_has_it(rig: Rig):
    secret = testing.Secret(CONTENT, owner="app", label="volume")
    data = {
        "mode": "embedded",
        "server": "juicefs-server-proxy/1",
        "uuid": UUID,
        "secret_id": secret.id,
    }
    relation = testing.PeerRelation(
        "server-peers",
        id=1,
        local_app_data={name: json.dumps(value) for name, value in data.items()},
        peers_data={1: {"address": "192.0.2.7"}},
    )
    rig.world.volumes["redis://192.0.2.7:6379/1"] = juicefs.Setting(
        "shared", UUID, "sftp", "192.0.2.7:2022:/data/"
    )
    (client,) = clients("one")
    out = rig.ctx.run(rig.ctx.on.leader_elected(), rig.state(relation, client, secrets=[secret]))
    assert rig.servers.running is None
    assert out.unit_status == testing.ActiveStatus(
        "juicefs-server-proxy/1 serves volume shared; this unit has nothing to do"
    )
    assert endpoint(out, client).hosts == (
        "192.0.2.7:6379",
    )  # the leader still is the one who offers it
    follower = rig.ctx.run(rig.ctx.on.config_changed(), dataclasses.replace(out, leader=False))
    assert follower.unit_status == out.unit_status


def test_a_server_that_left_with_the_data_is_not_replaced(rig: Rig):
    secret = testing.Secret(CONTENT, owner="app", label="volume")
    relation = peers(
        mode="embedded", server="juicefs-server-proxy/1", uuid=UUID, secret_id=secret.id
    )
    out = rig.ctx.run(rig.ctx.on.update_status(), rig.state(relation, secrets=[secret]))
    assert out.unit_status == testing.BlockedStatus(
        "deploy another application with --attach-storage: juicefs-server-proxy/1, which served the volume, was removed"
    )
    assert rig.servers.running is None
    assert rig.world.formats == []


def test_an_external_volume_is_formatted_without_its_keys(rig: Rig):
    user_secret = testing.Secret(CONTENT)
    (client,) = clients("one")
    config = EXTERNAL | {"credentials": user_secret.id, "volume-name": "train"}
    rig.world.passwords[ENGINE] = "topSecret1"
    out = rig.ctx.run(
        rig.ctx.on.config_changed(),
        rig.state(peers(), client, config=config, secrets=[user_secret]),
    )
    assert out.unit_status == testing.ActiveStatus("offering volume train")
    assert rig.servers.running is None
    assert rig.world.format_env == {
        "REDIS_PASSWORD": "topSecret1",
        "AWS_ACCESS_KEY_ID": "topSecret2",
        "AWS_SECRET_ACCESS_KEY": "topSecret3",
    }
    made = fs.Juicefs(
        "train", ("db.example.com:6380",), "redis", "4", UUID, own_secret(out).id, 1, tls=True
    )
    place = {"storage": "s3", "bucket": str(EXTERNAL["bucket"])}
    assert endpoint(out, client) == dataclasses.replace(
        made, version="1.3.1", keyless=True, **place
    )
    assert own_secret(out).latest_content == CONTENT
    assert own_secret(out).remote_grants == {client.id: {"one"}}
    assert "topSecret" not in repr(
        [out.relations, out.unit_status, rig.ctx.juju_log, rig.world.formats]
    )


def test_new_credentials_reach_the_clients(rig: Rig):
    user_secret = testing.Secret(CONTENT)
    (client,) = clients("one")
    config = EXTERNAL | {"credentials": user_secret.id}
    first = rig.ctx.run(
        rig.ctx.on.config_changed(),
        rig.state(peers(), client, config=config, secrets=[user_secret]),
    )
    new = CONTENT | {"secret-key": "topSecret4"}
    changed = dataclasses.replace(first.get_secret(id=user_secret.id), latest_content=new)
    kept = {secret for secret in first.secrets if secret.id != user_secret.id}
    out = rig.ctx.run(
        rig.ctx.on.secret_changed(changed), dataclasses.replace(first, secrets={*kept, changed})
    )
    assert own_secret(out).latest_content == new
    assert endpoint(out, client).auth_rev == 2
    assert len(rig.world.formats) == 1


def test_a_volume_that_was_made_elsewhere_is_taken_over_only_with_its_uuid(rig: Rig):
    rig.world.volumes[ENGINE] = juicefs.Setting(
        "shared", "old-uuid", "s3", str(EXTERNAL["bucket"]) + "/"
    )
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=EXTERNAL | {"trash-days": 0}))
    assert (
        "set adopt=old-uuid to take over volume shared (not made here)" in out.unit_status.message
    )
    config = EXTERNAL | {"trash-days": 0, "adopt": "old-uuid"}
    out = rig.ctx.run(rig.ctx.on.config_changed(), dataclasses.replace(out, config=config))
    assert out.unit_status == testing.ActiveStatus("offering volume shared")
    assert rig.world.formats == []
    assert pinned(out)["uuid"] == "old-uuid"
    without = rig.ctx.run(
        rig.ctx.on.config_changed(), dataclasses.replace(out, config=EXTERNAL | {"trash-days": 0})
    )
    assert without.unit_status == testing.ActiveStatus(
        "offering volume shared"
    )  # it is known from now on


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (
            None,
            f"run restore-metadata with a backup: the metadata engine lost volume shared ({UUID})",
        ),
        (
            "other",
            "set the old metadata-url, or deploy another application: the engine holds volume other",
        ),
    ],
)
def test_another_volume_than_the_one_that_was_there_is_never_touched(
    rig: Rig, there: str | None, message: str
):
    if there is not None:
        rig.world.volumes[ENGINE] = juicefs.Setting("shared", there, "s3", str(EXTERNAL["bucket"]))
    (client,) = clients("one")
    state = rig.state(peers(mode="external", uuid=UUID), client, config=EXTERNAL)
    out = rig.ctx.run(rig.ctx.on.update_status(), state)
    assert out.unit_status.name == "blocked"
    assert out.unit_status.message.startswith(message)
    assert rig.world.formats == []
    assert "endpoint" not in out.get_relation(client.id).local_app_data


@pytest.mark.parametrize(("config", "content", "message"), CASES["refused"])
def test_a_wrong_option_or_secret_is_named_and_never_quoted(
    rig: Rig, config: dict[str, typing.Any], content: dict[str, str] | None, message: str
):
    secrets = [testing.Secret(content)] if content else []
    named = {"credentials": secrets[0].id} if secrets else {}
    out = rig.ctx.run(
        rig.ctx.on.config_changed(), rig.state(config=EXTERNAL | named | config, secrets=secrets)
    )
    assert out.unit_status == testing.BlockedStatus(message)
    assert (rig.world.formats, pinned(out)) == ([], {})
    assert {secret.id for secret in out.secrets} == {secret.id for secret in secrets}
    assert "Secret" not in repr([out.unit_status, rig.ctx.juju_log])


@pytest.mark.parametrize(("mode", "config"), [("embedded", EXTERNAL), ("external", {})])
def test_a_volume_does_not_change_its_kind(rig: Rig, mode: str, config: dict[str, typing.Any]):
    secret = testing.Secret(CONTENT, owner="app", label="volume")
    relation = peers(
        mode=mode, uuid=UUID, secret_id=secret.id, server="juicefs-server-proxy/0", offered="yes"
    )
    out = rig.ctx.run(
        rig.ctx.on.config_changed(), rig.state(relation, config=config, secrets=[secret])
    )
    assert out.unit_status.message.startswith(
        f"metadata-url, bucket: this application's volume stays {mode}: "
    )
    assert own_secret(out).latest_content == CONTENT  # a wrong option does not lose the password
    assert rig.servers.running is None


def test_an_engine_that_is_down_is_waited_for_and_nothing_is_formatted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    woken: list[str] = []
    monkeypatch.setattr(wake, "later", lambda unit, charm: woken.append(unit))
    rig.world.down.add("db.example.com:6380")
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=EXTERNAL))
    problem = "metadata engine: db.example.com:6380 does not answer (connection refused)"
    assert out.unit_status == testing.WaitingStatus(problem)
    assert rig.world.formats == []
    # No event of Juju's says that an engine is there again
    assert woken == ["juicefs-server-proxy/0"]
    rig.world.down.clear()
    assert rig.ctx.run(rig.ctx.on.update_status(), out).unit_status == testing.ActiveStatus(
        "offering volume shared"
    )
    assert len(woken) == 1


@pytest.mark.parametrize(
    "error", [embedded.store.StoreError("port 6379 is taken"), CommandError("apt-get exited 100")]
)
def test_servers_that_cannot_run_are_blocked_not_in_error(rig: Rig, error: Exception):
    rig.servers.error = error
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state())
    assert out.unit_status == testing.BlockedStatus(str(error))
    rig.servers.error = None
    assert rig.ctx.run(rig.ctx.on.update_status(), out).unit_status == SERVING


def test_the_servers_stop_before_their_storage_goes_and_all_is_removed_in_the_end(rig: Rig):
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state())
    assert rig.servers.running is not None
    (storage,) = out.storages
    detached = rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert rig.servers.running is None
    assert detached.unit_status == testing.MaintenanceStatus("stopped, so that the storage can go")
    for event in (rig.ctx.on.stop(), rig.ctx.on.remove()):  # either may come alone
        rig.servers.removed.clear()
        rig.world.ensure_program(target.program_path("juicefs-server-proxy"), None)
        rig.ctx.run(event, detached)
        assert rig.servers.removed == ["juicefs-server-proxy"]
        assert not target.PROGRAM_DIR.exists()
        assert not target.CONFIG_DIR.exists()


def test_the_volume_is_published_by_address_never_by_a_machines_name(rig: Rig):
    (client,) = clients("one")
    bind = [testing.BindAddress([testing.Address("10.0.0.7")])]
    network = testing.Network("filesystem", bind, ingress_addresses=["juju-2586ad-4"])
    state = dataclasses.replace(rig.state(peers(), client), networks={network})
    out = rig.ctx.run(rig.ctx.on.config_changed(), state)
    found = endpoint(out, client)
    assert (found.hosts, found.bucket) == (("10.0.0.7:6379",), "10.0.0.7:2022:/data/")
    assert endpoint(rig.ctx.run(rig.ctx.on.update_status(), out), client).hosts == found.hosts
    nameless = testing.Network(
        "filesystem", [testing.BindAddress([])], ingress_addresses=["juju-2586ad-4"]
    )
    out = rig.ctx.run(rig.ctx.on.config_changed(), dataclasses.replace(state, networks={nameless}))
    assert out.unit_status == testing.WaitingStatus(
        "waiting for this machine to have an IP address"
    )


def network_of(*pairs: tuple[str, str]) -> testing.Network:
    """Return the binding as Juju lists it: addresses with networks, ingress addresses in order."""
    listed = [testing.Address(address, cidr=cidr) for address, cidr in pairs]
    ingress = [address for address, _ in pairs]
    return testing.Network("filesystem", [testing.BindAddress(listed)], ingress_addresses=ingress)


VIRTUAL, OWN = ("10.20.0.80", "10.20.0.80/32"), ("10.20.0.90", "10.20.0.0/24")


@pytest.mark.parametrize(
    ("addresses", "published"),
    [
        ([VIRTUAL, OWN], "10.20.0.90"),  # keepalived's comes first, and moves
        ([OWN, VIRTUAL], "10.20.0.90"),
        ([VIRTUAL], "10.20.0.80"),  # keepalived's alone, as on Google Cloud
        ([("fd00::1", "fd00::1/128"), ("fd00::2", "fd00::/64")], "fd00::2"),
    ],
)
def test_the_volume_is_published_by_the_machines_own_address(
    rig: Rig, addresses: list[tuple[str, str]], published: str
):
    (client,) = clients("one")
    state = dataclasses.replace(rig.state(peers(), client), networks={network_of(*addresses)})
    found = endpoint(rig.ctx.run(rig.ctx.on.config_changed(), state), client)
    assert fs.split_address(found.hosts[0])[0] == published


def test_the_published_address_stays_while_the_machine_has_it(rig: Rig):
    (client,) = clients("one")
    first, second = ("10.20.0.90", "10.20.0.0/24"), ("10.20.0.15", "10.20.0.0/24")
    state = dataclasses.replace(rig.state(peers(), client), networks={network_of(first)})
    out = rig.ctx.run(rig.ctx.on.config_changed(), state)
    more = dataclasses.replace(out, networks={network_of(second, first)})
    out = rig.ctx.run(rig.ctx.on.config_changed(), more)
    assert endpoint(out, client).hosts == ("10.20.0.90:6379",)
