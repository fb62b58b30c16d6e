"""Each metadata engine, asked by the real juicefs with the credentials that the charms give it."""

import collections.abc
import contextlib
import dataclasses
import os
import pathlib
import subprocess
import time
import typing

import clients
import leaks
import proxies
import pytest
import servers
from ops import testing

import embedded.store
import embedded.users
from slurm_ddp import juicefs, juicefs_access, mounts
from slurm_ddp.interfaces import filesystem_info as fs


@dataclasses.dataclass(frozen=True)
class Case:
    """An engine, and how the operator names it."""

    server: servers.Server
    url: str
    content: dict[str, str]


def _redis(redis: servers.Server) -> Case:
    servers.redis_cli(redis, "-n", "1", "flushdb")
    return Case(redis, f"redis://{redis.address}/1", {"meta-password": servers.PASSWORD})


def _postgres(postgres: servers.Server) -> Case:
    url = f"postgres://{postgres.address}/{servers.postgres_database(postgres)}?sslmode=disable"
    return Case(postgres, url, {"meta-user": servers.USER, "meta-password": servers.PASSWORD})


ENGINES = [
    "redis",
    "redis-tls",
    pytest.param("sentinel", marks=pytest.mark.long),
    "mariadb",
    "postgres",
    pytest.param("postgres-tls", marks=pytest.mark.long),
]


@pytest.fixture(params=ENGINES)
def case(request: pytest.FixtureRequest, tls: servers.Certificates) -> typing.Iterator[Case]:
    """Return each engine."""
    with _engine(request.param, request, tls) as found:
        yield found


@contextlib.contextmanager
def _engine(
    name: str, request: pytest.FixtureRequest, tls: servers.Certificates
) -> collections.abc.Generator[Case]:
    """Yield an engine; those with TLS have a certificate of an authority that this machine does not know."""
    authority = {"tls-ca": tls.authority.read_text()}
    login = {"meta-password": servers.PASSWORD}
    with contextlib.ExitStack() as stack:
        match name:
            case "redis":
                yield _redis(request.getfixturevalue("redis"))
            case "redis-tls":
                server = stack.enter_context(servers.redis(tls=tls, user=servers.USER))
                yield Case(server, f"rediss://{servers.USER}@{server.address}/1", login | authority)
            case "sentinel":
                master = stack.enter_context(servers.redis())
                watcher = stack.enter_context(servers.sentinel(master))
                yield Case(master, f"redis://mymaster,{watcher.address}/1", login)
            case "mariadb":
                server = stack.enter_context(servers.mariadb())
                url = f"mysql://{servers.USER}@{server.address}/jfs"
                yield Case(server, url, {"meta-password": servers.PASSWORD})
            case "postgres":
                yield _postgres(request.getfixturevalue("postgres"))
            case _:
                server = stack.enter_context(servers.postgres(tls=tls))
                yield Case(
                    server, f"postgres://{servers.USER}@{server.address}/jfs", login | authority
                )


@pytest.fixture
def proxy(
    program: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> typing.Callable[..., proxies.Proxy]:
    """Return a function that deploys the charm on an engine and a bucket."""
    proxies.isolated(monkeypatch, tmp_path)

    def deploy(case: Case, bucket: servers.Bucket, **config: str | int) -> proxies.Proxy:
        keys = {"access-key": bucket.access_key, "secret-key": bucket.secret_key}
        # A different name for each test: they share the bucket
        name = f"v{os.urandom(6).hex()}"
        options: dict[str, typing.Any] = {
            "metadata-url": case.url,
            "bucket": bucket.url,
            "volume-name": name,
        }
        named = {key.replace("_", "-"): value for key, value in config.items()}
        return proxies.Proxy(program, tmp_path, options | named, case.content | keys)

    return deploy


def hidden(proxy: proxies.Proxy) -> list[str]:
    """List the values that must not be shown."""
    return [proxy.content["meta-password"], proxy.content["secret-key"]]


def test_a_volume_is_made_mounted_and_shown_and_no_secret_is_seen(
    case: Case,
    bucket: servers.Bucket,
    proxy: typing.Callable[..., proxies.Proxy],
    tmp_path: pathlib.Path,
):
    mine = proxy(case, bucket)
    secrets = hidden(mine)
    with leaks.watched(*secrets) as watch:
        out = mine.hook("config_changed")
        assert out.unit_status == testing.ActiveStatus(
            f"offering volume {mine.config['volume-name']}"
        )
        with clients.mounted(mine, tmp_path) as mountpoint:
            (mountpoint / "checkpoint").write_bytes(b"weights" * 100000)
            (mountpoint / "checkpoint").rename(mountpoint / "done")
            assert (mountpoint / "done").read_bytes() == b"weights" * 100000
            about = mountpoint.stat()
            assert (about.st_uid, about.st_mode & 0o7777) == (0, 0o1777)
            look = mounts.probe(mountpoint, fstype="fuse.juicefs", writable=True)
            assert look, look.detail
            assert [
                path.name for path in mountpoint.glob(".trash/*/*")
            ] == []  # of the probe, which removes for good
            for name in ("status", "fsck", "gc"):
                mine.action(name)
            assert mine.action("status")["clients"] == "1"
    assert "juicefs" in watch.programs
    assert not leaks.within(mine.shown, secrets)
    assert leaks.in_files(tmp_path, *secrets) == []
    # and again: it is there, and stays as it is
    shown = mine.action("status")
    assert shown["clients"] == "0"
    assert mine.hook().unit_status == out.unit_status
    assert mine.action("status")["uuid"] == shown["uuid"]


def test_a_root_that_others_can_write_gets_the_sticky_bit_and_a_stricter_one_stays(
    mine: proxies.Proxy, tmp_path: pathlib.Path
):
    def repairs() -> list[str]:
        return [line for line in mine.logs if "others could replace" in line]

    assert (
        len(repairs()) == 1
        and "/ had mode 0777" in repairs()[0]
        and "it has 1777 now" in repairs()[0]
    )
    for owner, mode, wanted in ((0, 0o777, 0o1777), (4242, 0o2775, 0o3775), (0, 0o755, 0o755)):
        with clients.mounted(mine, tmp_path) as mountpoint:
            (mountpoint / "a" / "b").mkdir(parents=True, exist_ok=True)  # which stay as they are
            for path in (mountpoint / "a" / "b", mountpoint / "a", mountpoint):
                path.chmod(mode)
                os.chown(path, owner, owner)
        (tmp_path / "mnt").rmdir()
        before = len(repairs())
        for _ in range(2):
            assert isinstance(mine.hook().unit_status, testing.ActiveStatus)
        assert len(repairs()) - before == (mode != wanted)
        with clients.mounted(mine, tmp_path) as mountpoint:
            found = [path.stat() for path in (mountpoint, mountpoint / "a", mountpoint / "a" / "b")]
            assert [stat.st_mode & 0o7777 for stat in found] == [wanted, mode, mode]
            assert {(stat.st_uid, stat.st_gid) for stat in found} == {(owner, owner)}
        (tmp_path / "mnt").rmdir()


def test_only_root_reads_what_was_deleted(
    case: Case, bucket: servers.Bucket, proxy: typing.Callable[..., proxies.Proxy]
):
    """A file of mode 0644 in a folder of mode 0700 is its owner's alone; so it is in the trash."""
    owner, other = 2001, 2002
    mine = proxy(case, bucket, trash_days=1)
    mine.hook("config_changed")
    with servers.folder() as place, clients.mounted(mine, place) as mountpoint:
        private = mountpoint / "private"
        private.mkdir(mode=0o700)
        os.chown(private, owner, owner)
        _does(owner, f"umask 022; cd {private} && echo mine >file && rm file")
        kept = [path for path in mountpoint.glob(".trash/*/*") if path.name.endswith("-file")]
        assert [path.read_text() for path in kept] == ["mine\n"]
        assert kept[0].stat().st_mode & 0o777 == 0o644
        for command in (f"cat {kept[0]}", f"ls {kept[0].parent}", f"ls {mountpoint}/.trash/"):
            for account in (owner, other):
                assert "Permission denied" in _does(account, command, succeeds=False)
        assert _does(other, f"chmod 755 {mountpoint}/.trash", succeeds=False)
        mine.hook()
        assert (mountpoint / ".trash").stat().st_mode & 0o7777 == 0o700


def test_without_trash_nothing_that_was_deleted_stays(mine: proxies.Proxy):
    mine.hook("config_changed")
    with servers.folder() as place, clients.mounted(mine, place) as mountpoint:
        (mountpoint / "file").write_text("mine")
        (mountpoint / "file").unlink()
        assert list(mountpoint.glob(".trash/*")) == []


def _does(uid: int, script: str, *, succeeds: bool = True) -> str:
    """Run a script under an account; return its output."""
    identity: dict[str, typing.Any] = {"user": uid, "group": uid, "extra_groups": []}
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, check=False, timeout=60, **identity
    )
    assert (done.returncode == 0) == succeeds, (
        f"{script}: {done.returncode} {done.stdout} {done.stderr}"
    )
    return done.stdout + done.stderr


def test_folders_on_the_way_to_what_is_mounted_are_looked_at_alone(
    mine: proxies.Proxy, program: pathlib.Path, tmp_path: pathlib.Path
):
    volume, secret = mine.offer
    access = juicefs_access.of(volume, secret, directory=tmp_path / "way")
    access.ensure_files()
    assert (
        juicefs.ensure_sticky(program, access, "/team/data") == "/team/data was made with mode 1777"
    )
    assert juicefs.ensure_sticky(program, access, "/team/data") == ""
    with clients.mounted(mine, tmp_path) as mountpoint:
        assert [(mountpoint / name).stat().st_mode & 0o7777 for name in ("team", "team/data")] == [
            0o755,
            0o1777,
        ]
        (mountpoint / "team").chmod(0o777)
    assert "/team had mode 0777" in juicefs.ensure_sticky(program, access, "/team")
    assert juicefs.ensure_sticky(program, access, "/team/data") == ""


def test_a_wrong_password_is_reported_and_nothing_is_formatted(
    case: Case, bucket: servers.Bucket, proxy: typing.Callable[..., proxies.Proxy]
):
    mine = proxy(case, bucket)
    mine.content["meta-password"] = "wrong: " + servers.PASSWORD
    status = mine.hook("config_changed").unit_status
    assert status == testing.BlockedStatus("the metadata engine refuses the user or password")
    assert not leaks.within(mine.shown, hidden(mine))
    out = mine.changed_secret(meta_password=servers.PASSWORD)
    assert out.unit_status == testing.ActiveStatus(f"offering volume {mine.config['volume-name']}")


@pytest.mark.parametrize("kind", [_redis, _postgres], ids=["redis", "postgres"])
def test_an_engine_that_is_away_is_waited_for_and_its_return_is_noticed(
    kind: typing.Callable[[servers.Server], Case],
    bucket: servers.Bucket,
    proxy: typing.Callable[..., proxies.Proxy],
    request: pytest.FixtureRequest,
):
    case = kind(request.getfixturevalue(kind.__name__[1:]))
    mine = proxy(case, bucket)
    case.server.stop()
    try:
        began = time.monotonic()
        out = mine.hook("config_changed")
        took = time.monotonic() - began
    finally:
        case.server.start()
    assert out.unit_status == testing.WaitingStatus(
        f"metadata engine: {case.server.address} does not answer (connection refused)"
    )
    assert took < 10
    assert mine.hook().unit_status == testing.ActiveStatus(
        f"offering volume {mine.config['volume-name']}"
    )


# Properties of every engine, tested on one


@pytest.fixture
def mine(
    redis: servers.Server, bucket: servers.Bucket, proxy: typing.Callable[..., proxies.Proxy]
) -> proxies.Proxy:
    """Return a volume that is offered."""
    found = proxy(_redis(redis), bucket)
    assert isinstance(found.hook("config_changed").unit_status, testing.ActiveStatus)
    return found


def test_a_database_that_is_too_old_is_reported(
    bucket: servers.Bucket, proxy: typing.Callable[..., proxies.Proxy], before: pathlib.Path
):
    """Debian's MariaDB is before 11.1, which juicefs 1.3 needs."""
    with servers.mariadb() as server:
        url = f"mysql://{servers.USER}@{server.address}/jfs"
        mine = proxy(Case(server, url, {"meta-password": servers.PASSWORD}), bucket)
        out = dataclasses.replace(mine, program=before).hook("config_changed")
    assert out.unit_status == testing.BlockedStatus(
        "this database is too old for this juicefs: it takes MySQL 8.0 or MariaDB 11.1, or newer"
    )


def test_an_engine_that_was_emptied_is_not_formatted_again(
    mine: proxies.Proxy, redis: servers.Server
):
    uuid = mine.action("status")["uuid"]
    servers.redis_cli(redis, "-n", "1", "flushdb")
    assert mine.hook().unit_status == testing.BlockedStatus(
        f"run restore-metadata with a backup: the metadata engine lost volume {mine.config['volume-name']} ({uuid})"
    )
    assert servers.redis_cli(redis, "-n", "1", "dbsize") == "0"


def test_an_engine_that_holds_another_volume_is_left_alone(
    mine: proxies.Proxy,
    bucket: servers.Bucket,
    proxy: typing.Callable[..., proxies.Proxy],
    redis: servers.Server,
):
    before = servers.redis_cli(redis, "-n", "1", "get", "setting")
    content = {"meta-password": servers.PASSWORD}
    other = proxy(Case(redis, str(mine.config["metadata-url"]), content), bucket)
    name = mine.config["volume-name"]
    text = f"set volume-name={name}, or use a new database: that volume is in the metadata engine"
    assert other.hook("config_changed").unit_status == testing.BlockedStatus(text)
    assert servers.redis_cli(redis, "-n", "1", "get", "setting") == before


def test_a_second_application_does_not_offer_the_same_volume_unasked(mine: proxies.Proxy):
    uuid = mine.action("status")["uuid"]
    second = dataclasses.replace(mine, app="second", state=None, logs=[])
    out = second.hook("config_changed")
    assert f"set adopt={uuid} to take over volume" in out.unit_status.message
    assert "endpoint" not in out.get_relation(10).local_app_data
    out = second.hook("config_changed", config={**out.config, "adopt": uuid})
    assert isinstance(out.unit_status, testing.ActiveStatus)
    assert second.offer[0].uuid == uuid


def test_wrong_keys_are_reported_and_right_ones_are_all_it_takes(
    redis: servers.Server, bucket: servers.Bucket, proxy: typing.Callable[..., proxies.Proxy]
):
    mine = proxy(_redis(redis), bucket)
    right = mine.content["secret-key"]
    mine.content["secret-key"] = "wrong/" + right[6:]
    with leaks.watched(servers.PASSWORD, right, mine.content["secret-key"]):
        out = mine.hook("config_changed")
        assert out.unit_status == testing.BlockedStatus(
            "juicefs format: the object store refuses the keys (SignatureDoesNotMatch)"
        )
        assert servers.redis_cli(redis, "-n", "1", "dbsize") == "0"
        out = mine.changed_secret(secret_key=right)
        assert isinstance(out.unit_status, testing.ActiveStatus)
    assert not leaks.within(mine.shown, [servers.PASSWORD, right, mine.content["secret-key"]])


def test_the_keys_of_the_bucket_are_not_in_the_engine(mine: proxies.Proxy, redis: servers.Server):
    setting = servers.redis_cli(redis, "-n", "1", "get", "setting")
    assert str(mine.config["volume-name"]) in setting
    for value in (mine.content["access-key"], mine.content["secret-key"]):
        assert value not in setting


def test_a_read_only_mount_is_known_by_its_connection_and_opens_it_again(
    proxy: typing.Callable[..., proxies.Proxy],
    redis: servers.Server,
    bucket: servers.Bucket,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    mine = proxy(_redis(redis), bucket)
    mine.hook("start")
    monkeypatch.setattr(embedded.store, "METADATA_PORT", redis.port)
    password = fs.JuicefsSecret.from_content({"meta-password": servers.PASSWORD})
    settings = embedded.store.Settings(mine.app, "127.0.0.1", tmp_path, password)
    assert embedded.users.mounted_by(settings) == ""
    connection = "the volume's metadata server has connections from 127.0.0.1"
    with clients.mounted(mine, tmp_path, is_read_only=True) as mountpoint:
        with pytest.raises(OSError, match="Read-only file system"):
            (mountpoint / "file").touch()
        assert embedded.users.mounted_by(settings) == connection
        redis.stop()
        redis.start()
        end = time.monotonic() + embedded.users.RECONNECT_S
        while embedded.users.mounted_by(settings) != connection:
            assert time.monotonic() < end, (tmp_path / "mount.log").read_text()
            time.sleep(0.5)
    assert embedded.users.mounted_by(settings) == ""


def test_blocks_are_encrypted_when_a_key_is_given(
    redis: servers.Server,
    program: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    proxies.isolated(monkeypatch, tmp_path)
    argv = ["openssl", "genrsa", "-traditional", "-aes256", "-passout", "pass:topSecret1", "2048"]
    key = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    case = _redis(redis)
    folder = tmp_path / "objects"
    place: dict[str, typing.Any] = {
        "metadata-url": case.url,
        "bucket": f"file://{folder}",
        "storage-type": "file",
    }
    config = place | {"block-size": "64K", "capacity": 2}
    content = case.content | {"encrypt-key": key, "encrypt-passphrase": "topSecret1"}
    mine = proxies.Proxy(program, tmp_path, config, content)
    with leaks.watched(servers.PASSWORD, "topSecret1", key):
        assert mine.hook("config_changed").unit_status == testing.ActiveStatus(
            "offering volume shared"
        )
        with clients.mounted(mine, tmp_path) as mountpoint:
            (mountpoint / "f").write_bytes(b"plaintext" * 20000)
            assert (mountpoint / "f").read_bytes() == b"plaintext" * 20000
    blocks = [path for path in folder.rglob("*") if path.is_file()]
    assert len(blocks) >= 2  # of 64 KiB
    assert not any(b"plaintext" in path.read_bytes() for path in blocks)
    status = mine.action("status")
    assert (status["block-size"], status["capacity-gib"]) == ("64K", "2")
    assert not leaks.within(mine.shown, [servers.PASSWORD, "topSecret1", key])
    # the private key stays with the metadata engine and in the operator's own secret
    assert "BEGIN RSA" not in repr(mine.offer[1].content())
