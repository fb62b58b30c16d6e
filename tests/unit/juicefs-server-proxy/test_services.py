"""Charmed databases and object stores, by the content of their databags."""

import base64
import json
import pathlib

import pytest
import yaml
from ops import testing
from rig import Config, Rig, clients, peers

from slurm_ddp.interfaces import filesystem_info as fs

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())
BUCKET: Config = {"bucket": "https://train.fra1.digitaloceanspaces.com"}
PEM = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"
USER = {
    "username": "relation-68",
    "password": "topSecret1",
    "uris": "postgresql://relation-68:topSecret1@10.1.2.3:5432/shared",
}
KEYS = testing.Secret({"access-key": "topSecret2", "secret-key": "topSecret3"})


def granted(content: dict[str, str]) -> testing.Secret:
    """Return a secret of another application that ours may read."""
    return testing.Secret(content, owner=None)


def database(kind: str, **data: str) -> testing.Relation:
    """Return the relation to a database."""
    interface = {"postgresql": "postgresql_client", "mysql": "mysql_client"}[kind]
    found = {key.replace("_", "-"): value for key, value in data.items()}
    return testing.Relation(
        kind, interface, id=20, remote_app_name=f"{kind}-k", remote_app_data=found
    )


def store(**data: str) -> testing.Relation:
    """Return the relation to s3-integrator."""
    found = {key.replace("_", "-"): value for key, value in data.items()}
    return testing.Relation(
        "s3", "s3", id=30, remote_app_name="s3-integrator", remote_app_data=found
    )


def offered(out: testing.State) -> tuple[fs.Juicefs, dict[str, str]]:
    volume = fs.parse(out.get_relation(10).local_app_data["endpoint"])
    assert isinstance(volume, fs.Juicefs)
    return volume, dict(out.get_secret(id=volume.secret_id).latest_content or {})


def test_the_databases_are_asked_for_a_database_and_secrets(rig: Rig):
    relation = database("postgresql")
    out = rig.ctx.run(
        rig.ctx.on.relation_created(relation), rig.state(peers(), relation, config=BUCKET)
    )
    assert out.unit_status == testing.WaitingStatus(
        "waiting for postgresql-k to answer on postgresql"
    )
    assert out.get_relation(20).local_app_data == {
        "database": "shared",
        "requested-secrets": '["username", "password", "tls", "tls-ca", "uris"]',
        "external-node-connectivity": "true",
    }
    assert rig.world.formats == []
    follower = rig.ctx.run(
        rig.ctx.on.relation_created(relation),
        rig.state(peers(), relation, config=BUCKET, leader=False),
    )
    assert follower.get_relation(20).local_app_data == {}


@pytest.mark.parametrize("in_secret", [True, False], ids=["secrets", "plain"])
@pytest.mark.parametrize(("kind", "tls", "url"), CASES["a_database_keeps_the_metadata"])
def test_a_database_keeps_the_metadata(
    rig: Rig, kind: str, tls: dict[str, str], url: str, in_secret: bool
):
    user, transport = granted(USER), granted(tls) if tls else None
    data = {"endpoints": "10.1.2.3:5432,10.1.2.4:5432", "database": "shared", "version": "14.9"}
    secrets = [KEYS]
    if in_secret:
        data |= {"secret-user": user.id} | (
            {"secret-tls": transport.id} if transport is not None else {}
        )
        secrets += [user, *([transport] if transport is not None else [])]
    else:
        data |= USER | tls
    relation = database(kind, **data)
    (client,) = clients("one")
    config = {**BUCKET, "credentials": KEYS.id}
    out = rig.ctx.run(
        rig.ctx.on.relation_changed(relation),
        rig.state(peers(), relation, client, config=config, secrets=secrets),
    )
    assert out.unit_status == testing.ActiveStatus("offering volume shared")
    (made,) = rig.world.formats
    assert made[-2:] == (url, "shared")
    assert rig.world.format_env["META_PASSWORD"] == "topSecret1"
    volume, content = offered(out)
    assert (volume.engine, volume.hosts, volume.db) == (
        {"postgresql": "postgres", "mysql": "mysql"}[kind],
        ("10.1.2.3:5432",),
        "shared",
    )
    wanted = {"meta-user": "relation-68", "meta-password": "topSecret1"} | dict(
        KEYS.tracked_content
    )
    assert content == wanted | ({"tls-ca": PEM} if "tls-ca" in tls else {})
    ours = [out.get_relation(number).local_app_data for number in (1, 10, 20)]
    assert "topSecret" not in repr([ours, out.unit_status, rig.ctx.juju_log, rig.world.commands])


S3 = {"bucket": "train", "endpoint": "https://s3.example.com", "region": "eu-west-3"}


@pytest.mark.parametrize("in_secret", [True, False], ids=["v1", "v0"])
@pytest.mark.parametrize(("data", "bucket"), CASES["a_bucket_keeps_the_data"])
def test_a_bucket_keeps_the_data(rig: Rig, data: dict[str, str], bucket: str, in_secret: bool):
    keys = granted({"access-key": "topSecret2", "secret-key": "topSecret3"})
    relation = store(
        **data, **({"secret-extra": keys.id} if in_secret else dict(keys.tracked_content))
    )
    (client,) = clients("one")
    before = rig.state(
        peers(),
        relation,
        client,
        config={"metadata-url": "redis://h/1"},
        secrets=[keys] if in_secret else [],
    )
    out = rig.ctx.run(rig.ctx.on.relation_changed(relation), before)
    assert out.unit_status == testing.ActiveStatus("offering volume shared")
    assert out.get_relation(30).local_app_data == {
        "bucket": "shared",
        "requested-secrets": '["access-key", "secret-key"]',
        "lib-version": "1.0",
    }
    volume, content = offered(out)
    assert (volume.storage, volume.bucket, volume.region, volume.keyless) == (
        "s3",
        bucket,
        "eu-west-3",
        True,
    )
    assert content == {"access-key": "topSecret2", "secret-key": "topSecret3"}
    assert rig.world.format_env == {
        "AWS_ACCESS_KEY_ID": "topSecret2",
        "AWS_SECRET_ACCESS_KEY": "topSecret3",
        "AWS_REGION": "eu-west-3",
    }


BASE64 = base64.b64encode(PEM.encode()).decode()
DER = base64.b64encode(base64.b64decode("AAAA")).decode()


@pytest.mark.parametrize(
    "chain", [json.dumps([PEM]), PEM, json.dumps([BASE64]), json.dumps([DER]), BASE64]
)
def test_an_authority_of_the_store_reaches_the_clients(rig: Rig, chain: str):
    relation = store(**S3, access_key="a12345", secret_key="s12345", tls_ca_chain=chain)
    (client,) = clients("one")
    before = rig.state(peers(), relation, client, config={"metadata-url": "redis://h/1"})
    out = rig.ctx.run(rig.ctx.on.relation_changed(relation), before)
    assert out.unit_status == testing.ActiveStatus("offering volume shared")
    assert offered(out)[1]["tls-ca"].strip() == PEM


ENGINE = database(
    "mysql", endpoints="10.1.2.3:3306", database="shared", username="u", password="topSecret1"
)


OFFERS = {
    "mysql": ENGINE,
    "postgresql": testing.Relation("postgresql", "postgresql_client", id=21),
    "not granted": database(
        "mysql",
        endpoints="10.1.2.3:3306",
        database="shared",
        secret_user="secret:nobodygrants123456ab",
    ),
    "socket": database(
        "mysql", endpoints="file:///run/x.sock", database="d", username="u", password="topSecret"
    ),
    "s3": store(),
    "path": store(**S3, path="some/where", **dict(KEYS.tracked_content)),
    "no place": store(bucket="b", **dict(KEYS.tracked_content)),
    "no scheme": store(bucket="b", endpoint="s3.example.com", **dict(KEYS.tracked_content)),
    "no chain": store(**S3, tls_ca_chain='["%%"]', **dict(KEYS.tracked_content)),
}


@pytest.mark.parametrize(("offers", "config", "status", "message"), CASES["refused"])
def test_contradicting_relations_and_options_are_named(
    rig: Rig, offers: list[str], config: Config, status: str, message: str
):
    relations = [OFFERS[offer] for offer in offers]
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(peers(), *relations, config=config))
    assert (out.unit_status.name, out.unit_status.message) == (status, message)
    assert rig.world.formats == []
    assert "topSecret" not in repr([out.unit_status, rig.ctx.juju_log])
