"""A machine for the tests of workload modules: it answers the commands it knows, and fails the test on any other."""

import collections.abc
import dataclasses
import pathlib

import pytest

from slurm_ddp import apt, systemd
from slurm_ddp.commands import CommandError, Completed

Answer = collections.abc.Callable[[tuple[str, ...], str | None], "str | Completed | None"]
Modules = collections.abc.Iterable[object]


@dataclasses.dataclass
class Machine:
    """Packages, systemd units and the commands that a test adds."""

    packages: set[str] = dataclasses.field(default_factory=set[str])
    active: set[str] = dataclasses.field(default_factory=set[str])
    enabled: set[str] = dataclasses.field(default_factory=set[str])
    units: set[str] = dataclasses.field(
        default_factory=set[str]
    )  # that exist besides those in UNIT_DIR
    stamps: dict[str, str] = dataclasses.field(
        default_factory=dict[str, str]
    )  # what `systemctl show -P` prints
    broken: set[str] = dataclasses.field(default_factory=set[str])  # units that do not come up
    secrets: set[str] = dataclasses.field(default_factory=set[str])  # that no command line may hold
    calls: list[tuple[str, ...]] = dataclasses.field(default_factory=list[tuple[str, ...]])
    answers: dict[str, Answer] = dataclasses.field(default_factory=dict[str, Answer])
    on_start: collections.abc.Callable[[str], None] = lambda unit: None
    on_stop: collections.abc.Callable[[str], None] = lambda unit: None

    def take_over(
        self, monkeypatch: pytest.MonkeyPatch, modules: Modules, unit_dir: pathlib.Path
    ) -> None:
        """Let this machine answer for `modules`, and keep systemd's files in `unit_dir`."""
        for module in (*modules, apt, systemd):
            monkeypatch.setattr(module, "run", self.run)
        unit_dir.mkdir(parents=True)
        monkeypatch.setattr(systemd, "UNIT_DIR", unit_dir)

    def run(
        self,
        *argv: str | pathlib.Path,
        timeout: float = 60,
        stdin: str | None = None,
        env: collections.abc.Mapping[str, str] | None = None,
        cwd: str | pathlib.Path | None = None,
        check: bool = True,
        user: str | None = None,
        secrets: collections.abc.Iterable[str] = (),
    ) -> Completed:
        """Answer one command as slurm_ddp.commands.run does."""
        words = tuple(str(word) for word in argv)
        assert timeout > 0
        assert words[0].startswith("/"), f"{words[0]} depends on PATH"
        for secret in self.secrets:
            assert not any(secret in word for word in words), (
                f"a secret on the command line of {words[0]}"
            )
        self.calls.append(words)
        name = pathlib.Path(words[0]).name
        if name in self.answers:
            answer = self.answers[name](words[1:], stdin)
        elif name == "systemctl":
            answer = self._systemctl(*words[1:])
        elif name == "dpkg-query":
            rows = "".join(f"installed {word} 1\n" for word in words if word in self.packages)
            answer = (
                rows
                if "${Package}" in words[3]
                else "installed"
                if rows
                else Completed(1, "", "no packages found")
            )
        elif name == "apt-get":
            self.packages |= set(words[words.index("install") + 1 :])
            answer = ""
        else:
            raise AssertionError(f"this machine does not expect {' '.join(words)}")
        done = answer if isinstance(answer, Completed) else Completed(0, answer or "", "")
        if check and done.returncode != 0:
            raise CommandError(
                f"{name} exited {done.returncode}: {done.stderr}", returncode=done.returncode
            )
        return done

    def did(self, *words: str) -> int:
        """Return how many commands contained these words, one after the other."""
        return sum(
            any(call[at : at + len(words)] == words for at in range(len(call)))
            for call in self.calls
        )

    def _systemctl(self, verb: str, *words: str) -> "str | Completed | None":
        names = [word for word in words if not word.startswith("-")]
        flags = {word for word in words if word.startswith("-")}
        match verb:
            case "daemon-reload" | "reset-failed" | "try-reload-or-restart" | "reload" | "kill":
                return None
            case "is-active":
                state = (
                    "active"
                    if names[0] in self.active
                    else "failed"
                    if names[0] in self.broken
                    else "inactive"
                )
                return Completed(0 if state == "active" else 3, f"{state}\n", "")
            case "is-enabled":
                return Completed(0 if names[0] in self.enabled else 1, "", "")
            case "enable" | "disable":
                self.enabled = (
                    self.enabled | set(names) if verb == "enable" else self.enabled - set(names)
                )
                if "--now" in flags:
                    return self._systemctl("start" if verb == "enable" else "stop", *names)
                return None
            case "start" | "restart":
                self._check_exists(names[0])
                if names[0] in self.broken:
                    self.active.discard(names[0])
                    return (
                        None
                        if "--no-block" in flags
                        else Completed(1, "", f"Job for {names[0]} failed")
                    )
                if names[0] not in self.active or verb == "restart":
                    self.active.add(names[0])
                    self.on_start(names[0])
                return None
            case "stop":
                for name in set(names) & self.active:
                    self.active.discard(name)
                    self.on_stop(name)
                return None
            case "cat":
                return Completed(0 if self._exists(names[0]) else 1, "", "")
            case "show":
                return self.stamps.get(names[0], "")
            case _:
                raise AssertionError(f"this machine does not expect systemctl {verb}")

    def _exists(self, name: str) -> bool:
        return name in self.units or (systemd.UNIT_DIR / name).exists()

    def _check_exists(self, name: str) -> None:
        assert self._exists(name), f"{name} is started and does not exist"
