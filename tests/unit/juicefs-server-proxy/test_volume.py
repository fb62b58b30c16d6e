"""How the volume is made, what of it can change, and when it is left alone."""

import dataclasses
import pathlib
import typing

import doubles
import pytest
import yaml
from ops import testing
from rig import Config, Rig, clients, peers

import embedded.store
import embedded.users
import relations.peers
from slurm_ddp import juicefs, wake
from volume import format_journal

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

URL = "redis://db:6379/1"
EXTERNAL: Config = {"metadata-url": "redis://db/1", "bucket": "https://h/b"}
OFFERING = testing.ActiveStatus("offering volume shared")
RSA = "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\ntopSecretKey\n-----END RSA PRIVATE KEY-----\n"


def repairs(rig: Rig) -> list[str]:
    return [
        line.message
        for line in rig.ctx.juju_log
        if "root" in line.message or "others could" in line.message
    ]


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        (0o777, 0o1777),
        (0o775, 0o1775),
        (0o2775, 0o3775),
        (0o1777, 0o1777),
        (0o755, 0o755),
        (0o700, 0o700),
    ],
)
def test_a_root_that_others_can_write_gets_the_sticky_bit_once(rig: Rig, mode: int, wanted: int):
    rig.world.modes[URL, doubles.ROOT] = mode
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=EXTERNAL))
    assert (out.unit_status, rig.world.modes[URL, doubles.ROOT]) == (OFFERING, wanted)
    logged = f"volume shared: / had mode {mode:04o}, so others could replace what is in it: it has {wanted:04o} now"
    assert repairs(rig) == ([logged] if mode != wanted else [])
    rig.ctx.run(rig.ctx.on.update_status(), out)
    assert len(repairs(rig)) == (mode != wanted)


def test_a_volumes_trash_is_closed_to_all_but_root_whoever_made_the_volume(rig: Rig):
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(config=EXTERNAL))
    assert (out.unit_status, rig.world.modes[URL, doubles.TRASH]) == (OFFERING, 0o700)
    rig.world.modes[URL, doubles.TRASH] = (
        0o555  # as a metadata engine restored from an old backup has it
    )
    rig.ctx.run(rig.ctx.on.update_status(), out)
    assert rig.world.modes[URL, doubles.TRASH] == 0o700


def test_an_encryption_key_goes_by_a_file_and_its_passphrase_to_the_clients(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    secret = testing.Secret({"encrypt-key": RSA, "encrypt-passphrase": "topSecret1"})
    seen: list[tuple[str, int]] = []

    def invoke(*args: typing.Any, **kwargs: typing.Any) -> object:
        for path in (
            pathlib.Path(str(word)[18:])
            for word in args
            if str(word).startswith("--encrypt-rsa-key=")
        ):
            seen.append((path.read_text(), path.stat().st_mode & 0o777))
        return rig.world.invoke(*args, **kwargs)

    monkeypatch.setattr(juicefs, "invoke", invoke)
    (client,) = clients("one")
    config: Config = {**EXTERNAL, "credentials": secret.id}
    out = rig.ctx.run(
        rig.ctx.on.config_changed(), rig.state(peers(), client, config=config, secrets=[secret])
    )
    assert out.unit_status == OFFERING
    assert seen == [(RSA, 0o600)]
    assert rig.world.format_env == {"JFS_RSA_PASSPHRASE": "topSecret1"}
    (own,) = (secret for secret in out.secrets if secret.owner)
    assert own.latest_content == {
        "encrypt-passphrase": "topSecret1"
    }  # the key itself is the metadata engine's
    assert "topSecret" not in repr(
        [out.relations, out.unit_status, rig.ctx.juju_log, rig.world.commands]
    )
    # later, the key in the secret is still not a contradiction
    assert rig.ctx.run(rig.ctx.on.update_status(), out).unit_status == OFFERING


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let time pass only when the charm sleeps; return its sleeps."""
    slept: list[float] = []
    monkeypatch.setattr(embedded.users.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(embedded.users.time, "sleep", slept.append)
    return slept


def used(
    rig: Rig, *mounted: str, **config: str | int | float | bool
) -> tuple[testing.State, testing.Storage]:
    """Return a unit whose volume has a client that Juju still lists, and its storage."""
    client = testing.Relation(
        "filesystem", remote_app_name="one", id=10, remote_units_data={0: {"schemes": "juicefs"}}
    )
    out = rig.ctx.run(rig.ctx.on.config_changed(), rig.state(peers(), client, config=config))
    rig.world.volumes[LOOPBACK] = dataclasses.replace(
        next(iter(rig.world.volumes.values())), clients=mounted
    )
    (storage,) = out.storages
    return out, storage


LOOPBACK = "redis://127.0.0.1:6379/1"
CLIENTS = ("juju-2586ad-3 at /mnt/shared", "juju-2586ad-4 at /mnt/shared")


@pytest.mark.parametrize(
    ("problem", "remedy"),
    CASES[
        "the_storage_of_a_volume_that_may_be_mounted_stays_until_it_is_not_or_the_operator_allows_it"
    ],
)
@pytest.mark.cut
def test_the_storage_of_a_volume_that_may_be_mounted_stays_until_it_is_not_or_the_operator_allows_it(
    rig: Rig, clock: list[float], problem: str, remedy: str
):
    app, is_mounted = "juicefs-server-proxy", problem.startswith("the volume is mounted")
    out, storage = used(rig, *(CLIENTS if is_mounted else ()))
    rig.servers.peers = lambda up_s: ("192.0.2.7",) if "connections" in problem else ()
    rig.world.down |= {"127.0.0.1:6379"} if "6379" in problem else set()
    rig.servers.error = (
        embedded.store.StoreError("Redis does not start") if "Redis" in problem else None
    )
    state = dataclasses.replace(out, relations=()) if "peer relation" in problem else out
    with pytest.raises(testing.errors.UncaughtCharmError) as caught:
        rig.ctx.run(rig.ctx.on.storage_detaching(storage), state)
    refused = str(caught.value.__cause__)
    assert refused.startswith(problem)
    assert f": {remedy.format(app=app)}" in refused
    assert refused.endswith(
        f"to remove the volume under its clients: juju config {app} allow-removal=true"
    )
    assert rig.servers.running is not None
    assert 20 <= sum(clock) <= 60 or remedy == "resolve that"
    clock.clear()
    willing = dataclasses.replace(state, config={"allow-removal": True})
    rig.ctx.run(rig.ctx.on.storage_detaching(storage), willing)
    assert (rig.servers.running, clock) == (None, [])


@pytest.mark.cut
def test_nothing_but_the_sessions_of_clients_has_to_change(rig: Rig, clock: list[float]):
    """A unit whose hook failed gets no relation-departed."""
    out, storage = used(rig, *CLIENTS)
    with pytest.raises(testing.errors.UncaughtCharmError):
        rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    clock.clear()
    rig.world.volumes[LOOPBACK] = dataclasses.replace(rig.world.volumes[LOOPBACK], clients=())
    again = rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert again.unit_status == testing.MaintenanceStatus("stopped, so that the storage can go")
    assert (rig.servers.running, clock) == (None, [])


def test_a_metadata_server_that_is_down_is_started_and_its_clients_may_reconnect(
    rig: Rig, clock: list[float]
):
    out, storage = used(rig)
    rig.servers.down = True
    rig.servers.peers = lambda up_s: ("192.0.2.7",) if up_s > 12 else ()
    with pytest.raises(
        testing.errors.UncaughtCharmError,
        match=r"has connections from 192\.0\.2\.7: unmount it there",
    ):
        rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert rig.servers.running is not None
    rig.servers.down, rig.servers.peers = True, lambda up_s: ()
    clock.clear()
    rig.ctx.run(rig.ctx.on.storage_detaching(storage), out)
    assert rig.servers.running is None
    assert 20 <= sum(clock) < 30


@pytest.fixture
def waking(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the seconds of each wake-up that the charm scheduled; they have then passed."""
    woken: list[int] = []
    monkeypatch.setattr(
        wake, "later", lambda unit, charm, seconds=wake.LOOK_AGAIN_S: woken.append(seconds)
    )
    monkeypatch.setattr(relations.peers.time, "time", lambda: 1.8e9 + sum(woken))
    return woken


@pytest.mark.parametrize(
    ("schemes", "is_blocked"),
    [((), False), (("",), True), (("nfs,cephfs",), True), (("cephfs,juicefs", ""), False)],
)
def test_a_client_that_cannot_mount_juicefs_is_named_at_every_event(
    rig: Rig, waking: list[int], schemes: tuple[str, ...], is_blocked: bool
):
    """Upstream's filesystem-client writes nothing into its databag, and ends in error."""
    bags = {number: {"schemes": text} if text else {} for number, text in enumerate(schemes)}
    client = testing.Relation(
        "filesystem", remote_app_name="filesystem-client", id=20, remote_units_data=bags
    )
    out = rig.ctx.run(rig.ctx.on.relation_created(client), rig.state(peers(), client))
    assert "endpoint" in out.get_relation(client.id).local_app_data
    assert isinstance(out.unit_status, testing.ActiveStatus)  # it may have just joined
    for _ in range(2):
        out = rig.ctx.run(rig.ctx.on.update_status(), out)
        assert out.unit_status.name == ("blocked" if is_blocked else "active")
        remedy = "juju remove-relation juicefs-server-proxy filesystem-client"
        text = f"{remedy}: it cannot mount JuiceFS; use shared-filesystem-client"
        assert (text == out.unit_status.message) is is_blocked
    assert waking == ([60] if is_blocked else [])
    gone = dataclasses.replace(out, relations={one for one in out.relations if one.id != client.id})
    out = rig.ctx.run(rig.ctx.on.update_status(), gone)
    assert isinstance(out.unit_status, testing.ActiveStatus)
    assert "silent-since" not in out.get_relation(1).local_unit_data
