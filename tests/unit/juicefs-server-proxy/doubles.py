"""Stand-ins for juicefs with its metadata engines, and for the servers of an embedded volume."""

import collections.abc
import dataclasses
import gzip
import json
import pathlib
import time
import typing

import embedded.store
from slurm_ddp import juicefs, juicefs_access
from slurm_ddp.commands import CommandError, Completed
from slurm_ddp.interfaces import filesystem_info as fs
from volume.target import Target

UUID = "11111111-2222-3333-4444-555555555555"
ROOT, TRASH = "jfs://VOLUME/", "jfs://VOLUME/.trash/"
_MADE_WITH = {ROOT: 0o777, TRASH: 0o555}
QUOTAS = """\
+-------+---------+---------+------+-----------+-------+-------+
|  Path |   Size  |   Used  | Use% |   Inodes  | IUsed | IUse% |
+-------+---------+---------+------+-----------+-------+-------+
| /data | 5.0 GiB | 1.6 MiB |   0% | unlimited |   314 |       |
+-------+---------+---------+------+-----------+-------+-------+
"""


class Killed(BaseException):
    """The hook's process ends here: its writes to Juju are lost, changes to the machine stay."""


@dataclasses.dataclass
class FakeJuicefs:
    """juicefs with any number of metadata engines, by URL. It refuses in the real one's words."""

    volumes: dict[str, juicefs.Setting] = dataclasses.field(
        default_factory=dict[str, juicefs.Setting]
    )
    passwords: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    down: set[str] = dataclasses.field(default_factory=set[str])
    formats: list[tuple[str, ...]] = dataclasses.field(default_factory=list[tuple[str, ...]])
    format_env: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    format_error: str = ""
    commands: list[tuple[str, ...]] = dataclasses.field(default_factory=list[tuple[str, ...]])
    environment: dict[str, str] = dataclasses.field(
        default_factory=dict[str, str]
    )  # of the last command
    # What other commands than format and config say
    answers: dict[str, "str | Exception | collections.abc.Callable[..., str]"] = dataclasses.field(
        default_factory=dict[str, "str | Exception | collections.abc.Callable[..., str]"]
    )
    # By a volume's URL and a folder in it
    modes: dict[tuple[str, str], int] = dataclasses.field(
        default_factory=dict[tuple[str, str], int]
    )
    keys: dict[str, str] = dataclasses.field(
        default_factory=dict[str, str]
    )  # that embedded volumes hold, by URL
    serving: "collections.abc.Callable[[], embedded.store.Settings | None]" = lambda: None
    trials: list[str] = dataclasses.field(
        default_factory=list[str]
    )  # volumes that were mounted for a trial
    dies_at: str = ""  # the step at which a hook is killed

    def ensure_program(self, target: pathlib.Path, resource: pathlib.Path | None) -> bool:
        was_there = target.exists()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        return not was_there

    def inspect(
        self, _program: pathlib.Path, access: juicefs_access.Access, *, timeout: float = 20
    ) -> juicefs.Setting | None:
        if access.engine.hosts[0] in self.down:
            raise juicefs.UnreachableError(
                f"{access.engine.hosts[0]} does not answer (connection refused)"
            )
        self._check_password(access)
        return self.volumes.get(access.url)

    def invoke(
        self,
        _program: pathlib.Path,
        access: juicefs_access.Access,
        *arguments: str,
        env: collections.abc.Mapping[str, str] | None = None,
        timeout: float,
    ) -> Completed:
        assert timeout > 0
        assert not any(value in argument for value in access.secrets for argument in arguments)
        self._check_password(access)
        if arguments[0] == "sync":
            self._sync(arguments[-2], arguments[-1], str((env or {})["VOLUME"]))
            return Completed(0, "", "")
        self.environment = access.environment | dict(env or {})
        self.commands.append(arguments)
        if arguments[0] in self.answers:
            answer = self.answers[arguments[0]]
            if isinstance(answer, Exception):
                raise answer
            return Completed(0, answer(*arguments) if callable(answer) else answer, "")
        own = {"format": self._format, "config": self._config, "dump": self._dump}
        done = Completed(0, own[arguments[0]](*arguments), "")
        self._die(arguments[0])
        return done

    def redis(
        self,
        *argv: object,
        stdin: str | None = None,
        env: typing.Mapping[str, str],
        timeout: float,
        **_: object,
    ) -> Completed:
        """Act as redis-cli on the volume that the unit serves."""
        served = self.serving()
        assert served is not None, "its servers run"
        assert env["REDISCLI_AUTH"] == fs.reveal(served.credentials.meta_password)
        words = [str(word) for word in argv]
        assert not any(key in word for key in self.keys.values() for word in words)
        (url,) = (url for url, volume in self.volumes.items() if volume.storage == "sftp")
        volume = self.volumes[url]
        if words[-2:] == ["GET", "setting"]:
            kept = {
                "Name": volume.name,
                "UUID": volume.uuid,
                "SecretKey": "Y2lwaGVy",
                "KeyEncrypted": True,
            }
            return Completed(
                0, json.dumps(kept | {"Bucket": volume.bucket, "AccessKey": "juicefs-objects"}), ""
            )
        assert words[-3:] == ["-x", "SET", "setting"]
        setting = json.loads(stdin or "")
        assert setting["UUID"] == volume.uuid
        assert "KeyEncrypted" not in setting, "the key is in plain until juicefs encrypts it"
        self.keys[url] = setting["SecretKey"]
        self.volumes[url] = dataclasses.replace(volume, bucket=setting["Bucket"])
        self._die("renew")
        return Completed(0, "OK\n", "")

    def mount_for_trial(self, volume: Target) -> None:
        self._open(volume.access.url)
        self.trials.append(volume.volume.name)
        self._die("trial")

    def _die(self, step: str) -> None:
        if step == self.dies_at:
            self.dies_at = ""
            raise Killed

    def _open(self, url: str) -> None:
        """Fail as juicefs does if the volume's settings hold a key that its data server rejects."""
        served, key = self.serving(), self.keys.get(url)
        if (
            served is not None
            and key is not None
            and key != fs.reveal(served.credentials.secret_key)
        ):
            raise CommandError(
                "juicefs exited 1", stderr="<FATAL>: object storage: ssh: handshake failed: EOF"
            )

    def _dump(self, *arguments: str) -> str:
        setting = {"Name": self.volumes[arguments[1]].name, "UUID": self.volumes[arguments[1]].uuid}
        pathlib.Path(arguments[-1]).write_bytes(
            gzip.compress(json.dumps({"Setting": setting}, indent=1).encode())
        )
        return ""

    def _format(self, *arguments: str) -> str:
        flags = _flags(arguments[1:-2])
        url, name = arguments[-2:]
        self.formats.append(arguments)
        self.format_env = self.environment
        if self.format_error:
            raise CommandError(
                "juicefs exited 1", stderr=f"2026/01/01 <FATAL>: {self.format_error}"
            )
        assert "no-update" in flags
        made = juicefs.Setting(
            name,
            UUID,
            flags["storage"],
            flags["bucket"],
            block_kib=int(flags.get("block-size", "4096")),
            compression=flags.get("compress", "none"),
            encrypted="encrypt-rsa-key" in flags,
            capacity_gib=int(flags.get("capacity", "0")),
            inodes=int(flags.get("inodes", "0")),
            trash_days=int(flags.get("trash-days", "0")),
        )
        self.volumes.setdefault(url, made)
        served = self.serving()
        if made.storage == "sftp" and served is not None:
            self.keys[url] = self.environment["SECRET_KEY"]
            folder = served.directory / "objects" / "data" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "juicefs_uuid").write_text(UUID)
        return ""

    def _sync(self, source: str, target: str, url: str) -> None:
        self._open(url)
        if source in _MADE_WITH:
            pathlib.Path(target).chmod(self.modes.get((url, source), _MADE_WITH[source]))
        else:
            assert target in _MADE_WITH
            self.modes[url, target] = pathlib.Path(source).stat().st_mode & 0o7777

    def _config(self, *arguments: str) -> str:
        flags = _flags(arguments[1:-1])
        assert "yes" in flags, "it would ask, and nobody answers"
        if "bucket" in flags or "session-token" in flags:
            self._open(arguments[-1])
        names = {"capacity": "capacity_gib", "inodes": "inodes", "trash-days": "trash_days"}
        changes: dict[str, typing.Any] = {
            names[flag]: int(value) for flag, value in flags.items() if flag in names
        }
        if "bucket" in flags:
            changes["bucket"] = flags["bucket"]
        self.volumes[arguments[-1]] = dataclasses.replace(self.volumes[arguments[-1]], **changes)
        return ""

    def _check_password(self, access: juicefs_access.Access) -> None:
        expected = self.passwords.get(access.url)
        if expected is not None and expected not in access.environment.values():
            raise juicefs.JuicefsError("the metadata engine refuses the user or password")


def _flags(arguments: tuple[str, ...]) -> dict[str, str]:
    parts = [argument.removeprefix("--").partition("=") for argument in arguments]
    return {name: value for name, _, value in parts}


@dataclasses.dataclass
class FakeServers:
    """The servers of an embedded volume on this machine."""

    running: embedded.store.Settings | None = None
    enabled: bool = False
    down: bool = False  # the metadata server failed, or systemd is about to start it again
    since: float = float("-inf")  # that it is up, by the monotonic clock
    peers: collections.abc.Callable[[float], tuple[str, ...]] = (
        lambda up_s: ()
    )  # that are connected after so long
    removed: list[str] = dataclasses.field(default_factory=list[str])
    error: Exception | None = None
    slow: bool = False  # they take longer than the hook
    disk: embedded.store.Usage = dataclasses.field(
        default_factory=lambda: embedded.store.Usage(2 << 30, 30 << 30)
    )

    def ensure(self, settings: embedded.store.Settings) -> bool:
        if self.error is not None:
            raise self.error
        self.enabled = True
        if self.slow:
            return False
        changed, self.running = self.running != settings, settings
        return changed

    def is_running(self, settings: embedded.store.Settings) -> bool:
        return self.running == settings

    def is_enabled(self, app: str) -> bool:
        return self.enabled

    def start_metadata(self, app: str) -> float:
        assert self.enabled, "it is started although its storage goes"
        if self.error is not None:
            raise self.error
        if self.down:
            self.down, self.since = False, time.monotonic()
        return time.monotonic() - self.since

    def connected(self) -> tuple[str, ...]:
        return self.peers(time.monotonic() - self.since)

    def usage(self, _directory: pathlib.Path) -> embedded.store.Usage:
        return self.disk

    def ensure_none(self, app: str) -> bool:
        was, self.running, self.enabled = self.running is not None, None, False
        return was

    def stop(self, app: str) -> None:
        self.running, self.enabled = None, False

    def remove(self, app: str) -> None:
        self.running, self.enabled = None, False
        self.removed.append(app)
