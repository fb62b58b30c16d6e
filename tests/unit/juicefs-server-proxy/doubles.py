"""Stand-ins for what the charm works on: juicefs with its metadata engines, and the servers of an embedded volume."""

import collections.abc
import dataclasses
import pathlib

import embedded_store
from slurm_ddp import juicefs
from slurm_ddp.interfaces import filesystem_info as fs
from slurm_ddp.run import CommandError

UUID = "11111111-2222-3333-4444-555555555555"


@dataclasses.dataclass
class FakeJuicefs:
    """juicefs with any number of metadata engines, by URL. What a real one would refuse, it refuses in the same words."""

    volumes: dict[str, juicefs.Setting] = dataclasses.field(default_factory=dict[str, juicefs.Setting])
    passwords: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    down: set[str] = dataclasses.field(default_factory=set[str])
    program: tuple[int, int, int] = (1, 3, 1)
    installed: list[pathlib.Path | None] = dataclasses.field(default_factory=list[pathlib.Path | None])
    formats: list[tuple[str, ...]] = dataclasses.field(default_factory=list[tuple[str, ...]])
    format_env: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    format_error: str = ""
    install_error: juicefs.JuicefsError | None = None

    def ensure_program(self, _target: pathlib.Path, resource: pathlib.Path | None) -> bool:
        if self.install_error is not None:
            raise self.install_error
        self.installed.append(resource)
        return len(self.installed) == 1

    def version(self, _program: pathlib.Path) -> tuple[int, int, int]:
        return self.program

    def inspect(
        self, _program: pathlib.Path, engine: juicefs.Engine, secret: fs.JuicefsSecret, *, timeout: float = 20
    ) -> juicefs.Setting | None:
        if engine.hosts[0] in self.down:
            raise juicefs.UnreachableError(f"{engine.hosts[0]} does not answer (connection refused)")
        self._check_password(engine.url(secret.meta_user), secret)
        return self.volumes.get(engine.url(secret.meta_user))

    def invoke(
        self,
        _program: pathlib.Path,
        *arguments: str,
        secret: fs.JuicefsSecret,
        env: collections.abc.Mapping[str, str] | None = None,
        timeout: float,
    ) -> str:
        assert arguments[0] == "format", "no other command may change a volume"
        assert not any(value in argument for value in secret.values() for argument in arguments)
        parts = [argument.removeprefix("--").partition("=") for argument in arguments[1:-2]]
        flags = {name: value for name, _, value in parts}
        url, name = arguments[-2:]
        self._check_password(url, secret)
        self.formats.append(arguments)
        self.format_env = dict(env or {})
        if self.format_error:
            raise CommandError("juicefs exited 1", stderr=f"2026/01/01 <FATAL>: {self.format_error}")
        assert "no-update" in flags
        self.volumes.setdefault(url, juicefs.Setting(name, UUID, flags["storage"], flags["bucket"], 0))
        return ""

    def _check_password(self, url: str, secret: fs.JuicefsSecret) -> None:
        expected = self.passwords.get(url)
        if expected is not None and fs.reveal(secret.meta_password) != expected:
            raise juicefs.JuicefsError("the metadata engine refuses the user or password")


@dataclasses.dataclass
class FakeServers:
    """The servers of an embedded volume on this machine."""

    running: embedded_store.Settings | None = None
    ensured: int = 0
    removed: list[str] = dataclasses.field(default_factory=list[str])
    error: Exception | None = None
    slow: bool = False  # they take longer than the hook

    def ensure(self, settings: embedded_store.Settings) -> bool:
        if self.error is not None:
            raise self.error
        self.ensured += 1
        if self.slow:
            return False
        changed, self.running = self.running != settings, settings
        return changed

    def is_running(self, settings: embedded_store.Settings) -> bool:
        return self.running == settings

    def stop(self, app: str) -> None:
        self.running = None

    def remove(self, app: str) -> None:
        self.running = None
        self.removed.append(app)

    def remove_program(self, app: str) -> None:
        self.removed.append(f"program of {app}")
