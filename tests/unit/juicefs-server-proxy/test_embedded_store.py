import dataclasses
import hashlib
import os
import pathlib
import pwd
import shutil
import socket
import subprocess
import time

import pytest

import embedded.store
import metrics
from machine import Machine
from slurm_ddp.interfaces import filesystem_info as fs
from volume import format_journal, target

PASSWORDS = {
    "meta-password": "topSecret-meta",
    "access-key": embedded.store.ACCOUNT,
    "secret-key": "topSecret-objects",
}
METADATA, OBJECTS = embedded.store.unit_names("volume")


class Store:
    """The module on a fake machine: files in a folder, accounts and attributes in memory."""

    def __init__(self, root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.storage = root / "storage"
        self.storage.mkdir(mode=0o755)
        self.machine = Machine(secrets=set(PASSWORDS.values()) - {embedded.store.ACCOUNT})
        self.machine.take_over(monkeypatch, [embedded.store], root / "units")
        self.machine.answers |= {
            "useradd": self._useradd,
            "userdel": self._userdel,
            "chpasswd": self._chpasswd,
            "openssl": self._openssl,
            "ssh-keygen": self._ssh_keygen,
            "lsattr": self._lsattr,
            "chattr": self._chattr,
            "find": self._find,
        }
        self.shadow = root / "shadow"
        self.shadow.write_text("root:*:1::::::\n")
        self.synchronous: set[str] = set()
        me = pwd.getpwuid(os.geteuid())
        self.accounts = {"redis": me}
        monkeypatch.setattr(pwd, "getpwnam", self.accounts.__getitem__)
        monkeypatch.setattr(os, "chown", lambda path, uid, gid: None)
        monkeypatch.setattr(target, "CONFIG_DIR", root / "etc")
        monkeypatch.setattr(embedded.store, "_SSHD_DROPINS", root / "sshd_config.d")
        monkeypatch.setattr(embedded.store, "_SHADOW", self.shadow)
        monkeypatch.setattr(embedded.store, "check_parents", lambda storage: None)
        self.settings = embedded.store.Settings(
            "volume", "127.0.0.1", self.storage, fs.JuicefsSecret.from_content(PASSWORDS)
        )

    @property
    def config(self) -> pathlib.Path:
        return self.root / "etc" / "volume"

    def snapshot(self) -> dict[str, tuple[int, bytes]]:
        return {
            str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
            for path in sorted(self.root.rglob("*"))
        }

    def _useradd(self, words: tuple[str, ...], _: str | None) -> None:
        assert "--system" in words
        assert words[words.index("--shell") + 1] == "/usr/sbin/nologin"
        assert words[-1] not in self.accounts
        self.accounts[words[-1]] = self.accounts["redis"]
        self.shadow.write_text(self.shadow.read_text() + f"{words[-1]}:!:1::::::\n")

    def _userdel(self, words: tuple[str, ...], _: str | None) -> None:
        del self.accounts[words[-1]]

    def _chpasswd(self, words: tuple[str, ...], stdin: str | None) -> None:
        assert words == ("-e",)
        name, _, hashed = (stdin or "").strip().partition(":")
        lines = [
            line for line in self.shadow.read_text().splitlines() if not line.startswith(f"{name}:")
        ]
        self.shadow.write_text("\n".join([*lines, f"{name}:{hashed}:1::::::"]) + "\n")

    def _openssl(self, words: tuple[str, ...], stdin: str | None) -> str:
        assert (words[0], words[1], words[-1]) == ("passwd", "-6", "-stdin")
        salt = words[words.index("-salt") + 1] if "-salt" in words else os.urandom(8).hex()
        return f"$6${salt}${hashlib.sha512(f'{salt}{stdin}'.encode()).hexdigest()}\n"

    def _ssh_keygen(self, words: tuple[str, ...], _: str | None) -> None:
        key = pathlib.Path(words[words.index("-f") + 1])
        key.write_text("key")
        key.with_name(f"{key.name}.pub").write_text("public key")

    def _lsattr(self, words: tuple[str, ...], _: str | None) -> str:
        path = pathlib.Path(words[-1])
        inherited = str(path) in self.synchronous or str(path.parent) in self.synchronous
        return f"{'--S' if inherited else '---'}-----------e------- {path}\n"

    def _chattr(self, words: tuple[str, ...], _: str | None) -> None:
        change = self.synchronous.add if words[0] == "+S" else self.synchronous.discard
        change(words[-1])

    def _find(self, words: tuple[str, ...], _: str | None) -> None:
        assert words[1:6] == ("-mindepth", "1", "-type", "d", "-exec")
        assert words[6:] in (
            ("/usr/bin/chattr", "+S", "{}", "+"),
            ("/usr/bin/chattr", "-S", "{}", "+"),
        )


@pytest.fixture
def store(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(tmp_path, monkeypatch)


def directives(path: pathlib.Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition(" ")
            found.setdefault(name, []).append(value)
    return found


def test_the_first_time_everything_is_made(store: Store):
    assert embedded.store.ensure(store.settings)
    machine = store.machine
    assert {"redis-server", "openssh-server", "iproute2"} <= machine.packages
    assert (
        machine.did("disable", "--now", "redis-server.service") == 1
    )  # the packages' own instances
    assert machine.did("disable", "--now", "ssh.service", "ssh.socket") == 1
    assert {METADATA, OBJECTS} <= machine.active & machine.enabled
    assert (store.storage / "metadata").stat().st_mode & 0o7777 == 0o700
    assert (store.storage / "objects").stat().st_mode & 0o7777 == 0o755
    assert (store.storage / "objects/data").stat().st_mode & 0o7777 == 0o700
    assert embedded.store.is_durable(store.storage)
    assert (store.config / "redis.conf").stat().st_mode & 0o7777 == 0o600
    assert all(b"topSecret" not in content for _, content in store.snapshot().values())
    assert (
        f"DenyUsers {embedded.store.ACCOUNT}\n"
        in (store.root / "sshd_config.d/50-volume.conf").read_text()
    )


def test_the_second_time_nothing_is_touched(store: Store):
    embedded.store.ensure(store.settings)
    before, calls = store.snapshot(), len(store.machine.calls)
    assert not embedded.store.ensure(store.settings)
    assert store.snapshot() == before
    reading = {"dpkg-query", "lsattr", "openssl", "systemctl is-active"}
    for call in store.machine.calls[calls:]:
        name = pathlib.Path(call[0]).name
        assert name in reading or f"{name} {call[1]}" in reading, call


def test_storage_from_another_machine_gets_the_accounts_of_this_one(store: Store):
    """The contents first: a hook that is killed in between does it again."""
    embedded.store.ensure(store.settings)
    me = store.accounts["redis"]
    store.accounts["redis"] = pwd.struct_passwd((*me[:2], 4321, 4322, *me[4:]))
    given: list[tuple[str, ...]] = []
    store.machine.answers["find"] = lambda words, _: given.append(words)
    embedded.store.ensure(store.settings)
    chown = ("-mindepth", "1", "-exec", "/usr/bin/chown", "-h", "4321:4322", "{}", "+")
    assert given == [(str(store.storage / "metadata"), *chown)]


def test_the_sftp_server_lets_one_account_into_one_folder_and_nothing_else(store: Store):
    embedded.store.ensure(store.settings)
    found = {name: values[-1] for name, values in directives(store.config / "sshd_config").items()}
    assert found["AllowUsers"] == embedded.store.ACCOUNT
    assert found["ChrootDirectory"] == str(store.storage / "objects")
    assert found["ForceCommand"].startswith("internal-sftp")
    assert found["AuthenticationMethods"] == "password"
    for name in (
        "PermitRootLogin",
        "PermitTTY",
        "PermitTunnel",
        "GatewayPorts",
        "AllowTcpForwarding",
        "UsePAM",
    ):
        assert found[name] == "no", name
    for name in ("PermitOpen", "PermitListen", "AuthorizedKeysFile"):
        assert found[name] == "none", name
    assert found["DisableForwarding"] == "yes"


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server here to ask")
def test_a_real_redis_takes_the_configuration_and_clients_cannot_administer_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(embedded.store, "METADATA_PORT", port)
    embedded.store.ensure(store.settings)
    with subprocess.Popen(
        ["redis-server", str(store.config / "redis.conf")], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            assert any("Ready to accept connections" in line for line in server.stdout)

            def ask(*words: str, password: str = "topSecret-meta") -> str:
                argv = ["redis-cli", "-p", str(port), *words]
                env = os.environ | {"REDISCLI_AUTH": password}
                done = subprocess.run(
                    argv, capture_output=True, text=True, env=env, timeout=20, check=True
                )
                return done.stdout.strip()

            assert ask("set", "x", "1") == "OK"
            assert ask("get", "x") == "1"
            assert "noeviction" in ask("config", "get", "maxmemory-policy")  # JuiceFS looks at it
            assert "redis_version" in ask("info", "server")
            assert ask("get", "x", password="wrong").startswith("NOAUTH")
            refused = (
                "flushall",
                "flushdb",
                "config set appendonly no",
                "shutdown",
                "acl list",
                "replicaof h 1",
                "save",
            )
            for words in refused:
                assert ask(*words.split()).startswith("NOPERM"), words
            assert ask("get", "x") == "1"
            used, limit = (
                metric.samples[0].value for metric in metrics.memory("topSecret-meta", {})
            )
            assert used > 1000 and limit == 0
            with pytest.raises(ValueError, match="did not report"):
                list(metrics.memory("wrong", {}))
        finally:
            server.terminate()


def test_servers_restart_when_their_settings_change(store: Store):
    embedded.store.ensure(store.settings)
    settings = dataclasses.replace(store.settings, synchronous=False)
    assert embedded.store.ensure(settings)
    assert directives(store.config / "redis.conf")["appendfsync"] == ["everysec"]
    assert not embedded.store.is_durable(store.storage)
    assert (store.machine.did("restart", METADATA), store.machine.did("restart", OBJECTS)) == (1, 0)
    assert embedded.store.ensure(dataclasses.replace(settings, address="192.0.2.9"))
    assert (store.machine.did("restart", METADATA), store.machine.did("restart", OBJECTS)) == (2, 1)
    assert directives(store.config / "redis.conf")["bind"] == ["192.0.2.9 127.0.0.1"]
    listens = directives(store.config / "sshd_config")["ListenAddress"]
    assert listens == [
        f"192.0.2.9:{embedded.store.OBJECTS_PORT}",
        f"127.0.0.1:{embedded.store.OBJECTS_PORT}",
    ]


def test_a_new_password_is_set_and_the_servers_follow(store: Store):
    embedded.store.ensure(store.settings)
    before = store.shadow.read_text()
    new = fs.JuicefsSecret.from_content(PASSWORDS | {"secret-key": "topSecret-other"})
    store.machine.secrets.add("topSecret-other")
    assert embedded.store.ensure(dataclasses.replace(store.settings, credentials=new))
    assert store.shadow.read_text() != before
    assert store.machine.did("restart", METADATA) == 0


@pytest.mark.parametrize("port", ["METADATA_PORT", "OBJECTS_PORT"])
def test_a_port_that_is_taken_is_named(store: Store, monkeypatch: pytest.MonkeyPatch, port: str):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        monkeypatch.setattr(embedded.store, port, taken)
        with pytest.raises(
            embedded.store.StoreError, match=rf"^stop what listens on port {taken}: "
        ):
            embedded.store.ensure(store.settings)


def test_running_means_active_and_listening(store: Store, monkeypatch: pytest.MonkeyPatch):
    embedded.store.ensure(store.settings)
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        monkeypatch.setattr(embedded.store, "METADATA_PORT", one.getsockname()[1])
        monkeypatch.setattr(embedded.store, "OBJECTS_PORT", other.getsockname()[1])
        assert embedded.store.is_running(store.settings)
        store.machine.active.discard(OBJECTS)
        assert not embedded.store.is_running(store.settings)
        store.machine.active.add(OBJECTS)
        other.close()
        assert not embedded.store.is_running(store.settings)


def test_servers_whose_storage_goes_start_no_more_until_there_is_storage_again(store: Store):
    embedded.store.ensure(store.settings)
    store.machine.active.discard(METADATA)  # as one that failed: its clients are still there
    assert embedded.store.is_enabled("volume")
    embedded.store.stop("volume")
    assert not (store.machine.active | store.machine.enabled) & {METADATA, OBJECTS}
    assert not embedded.store.is_enabled("volume")
    embedded.store.ensure(store.settings)
    assert {METADATA, OBJECTS} <= store.machine.active & store.machine.enabled


def test_a_metadata_server_that_is_down_is_started_and_tells_for_how_long_it_is_up(store: Store):
    embedded.store.ensure(store.settings)
    store.machine.active.discard(METADATA)
    started_us = int((time.clock_gettime(time.CLOCK_MONOTONIC) - 7) * 1e6)
    store.machine.stamps["ActiveEnterTimestampMonotonic"] = str(started_us)
    assert 7 <= embedded.store.start_metadata("volume") < 60
    assert METADATA in store.machine.active
    assert OBJECTS in store.machine.active
    done = store.machine.did("enable", "--now", METADATA)
    embedded.store.start_metadata("volume")
    assert store.machine.did("enable", "--now", METADATA) == done
    store.machine.active.discard(METADATA)
    store.machine.broken.add(METADATA)
    store.machine.answers["journalctl"] = lambda words, stdin: (
        "Bad file format reading the append only file\n"
    )
    with pytest.raises(embedded.store.StoreError, match="does not start: Bad file format"):
        embedded.store.start_metadata("volume")


def test_who_is_connected_to_the_metadata_server(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(embedded.store, "METADATA_PORT", server.getsockname()[1])
        assert embedded.store.connected() == ()
        with socket.create_connection(server.getsockname()):
            assert embedded.store.connected() == ("127.0.0.1",)
        assert embedded.store.connected() == ()


def test_a_storage_that_others_may_write_to_is_named(tmp_path: pathlib.Path):
    with pytest.raises(embedded.store.StoreError, match=r"^chown root /tmp, chmod go-w it: "):
        embedded.store.check_parents(pathlib.Path("/tmp"))
    embedded.store.check_parents(pathlib.Path("/usr/bin"))


def test_removal_leaves_the_data_and_nothing_else(store: Store):
    before = {
        name for name in store.snapshot() if "/storage" not in name and not name.endswith("/shadow")
    }
    embedded.store.ensure(store.settings)
    (store.storage / "objects/data/block").write_text("data")
    embedded.store.remove("volume")
    left = {
        name for name in store.snapshot() if "/storage" not in name and not name.endswith("/shadow")
    }
    assert left - before == {
        str(store.root / "etc"),
        str(store.root / "sshd_config.d"),
    }  # as on a real machine: /etc
    assert not store.machine.active & {METADATA, OBJECTS}
    assert embedded.store.ACCOUNT not in store.accounts
    assert (store.storage / "objects/data/block").read_text() == "data"
    embedded.store.remove("volume")  # and again


def test_passwords_are_kept_and_made_where_there_are_none(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(format_journal, "STATE_DIR", tmp_path / "state")
    fresh = embedded.store.passwords("one", None).content()
    assert embedded.store.passwords("two", None).content() != fresh
    assert embedded.store.passwords("one", None).content() == fresh, (
        "a hook that did not end gave them to the servers"
    )
    (kept,) = (tmp_path / "state" / "one").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    format_journal.forget("one")
    assert embedded.store.passwords("one", None).content() != fresh
    assert (
        embedded.store.passwords("three", fs.JuicefsSecret.from_content(fresh)).content() == fresh
    )
    partial = fs.JuicefsSecret.from_content({"meta-password": "kept"})
    assert embedded.store.passwords("three", partial).content()["meta-password"] == "kept"
    assert not (tmp_path / "state" / "three").exists()
