"""The machine under upstream's code: its files are in a folder of the test, its commands are known one by one.

The Slurm behind `scontrol` is a dictionary of nodes: what upstream's code does with the answers is the point here, what Slurm
does is tested with Slurm itself (tests/functional).
"""

import collections.abc
import json
import pathlib
import subprocess
from typing import Any

SLURMD_C = "NodeName=juju-2586ad-3 CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=7940\n"


class Host:
    """A machine with systemd, snapd and Slurm's commands."""

    def __init__(self, root: pathlib.Path) -> None:
        self.etc = root / "etc" / "slurm"
        self.default = root / "etc" / "default"
        for folder in (self.etc, self.default):
            folder.mkdir(parents=True)
        self.active: set[str] = set()
        self.restarts: list[str] = []
        self.reloads: list[str] = []
        self.nodes: dict[str, dict[str, Any]] = {}  # the controller's nodes
        self.updates: list[list[str]] = []  # of `scontrol update`
        self.is_silent = False  # the controller does not respond

    def run(
        self, argv: collections.abc.Sequence[str], *, check: bool = False, **options: object
    ) -> "subprocess.CompletedProcess[str]":
        """Stand in for subprocess.run. Fails the test on a command that is not known."""
        assert set(options) <= {"input", "capture_output", "text", "stdout", "env"}, options
        assert options.get("env") is None
        command, *rest = argv
        handler = getattr(self, f"_{command.replace('-', '_')}", None)
        assert handler is not None, f"upstream runs {argv}, which this machine does not have"
        code, out = handler(*rest)
        if check and code != 0:
            raise subprocess.CalledProcessError(code, argv, out, "error")
        return subprocess.CompletedProcess(list(argv), code, out, "")

    def _systemctl(self, verb: str, *words: str) -> tuple[int, str]:
        (unit,) = (word for word in words if word != "--quiet")
        match verb:
            case "is-active":
                return (0 if unit in self.active else 3), ""
            case "start" | "restart":
                self.active.add(unit)
                self.restarts.append(unit)
                if unit == "slurmd" and not self.is_silent:
                    self._register()
            case "stop":
                self.active.discard(unit)
            case "reload":
                self.reloads.append(unit)
            case "enable" | "disable":
                pass
            case _:
                raise AssertionError(f"systemctl {verb}")
        return 0, ""

    def _register(self) -> None:
        """A dynamic node that the controller does not know comes up idle (proc_req.c of Slurm 25.11)."""
        words = (self.default / "slurmd").read_text().split()
        self.nodes.setdefault(
            words[words.index("-N") + 1], {"state": ["IDLE", "DYNAMIC_NORM"], "reason": ""}
        )

    def _systemd_detect_virt(self, *words: str) -> tuple[int, str]:
        assert words in {("--container",), ()}
        return (1, "none\n") if words else (0, "kvm\n")

    def _slurmd(self, flag: str) -> tuple[int, str]:
        assert flag == "-C"
        return 0, SLURMD_C + "UpTime=0-00:10:00\n"

    def _snap(self, verb: str, *words: str) -> tuple[int, str]:
        assert verb in {"install", "connect", "set", "start", "info"}, (verb, words)
        return (1, "") if verb == "info" else (0, "")  # neither dcgm nor anything else is there

    def _scontrol(self, *words: str) -> tuple[int, str]:
        if self.is_silent:
            return 1, ""
        match words:
            case ("show", "node", name):
                return (0 if name in self.nodes else 1), ""
            case ("--json", "show", "node", name):
                return 0, json.dumps({"nodes": [self.nodes[name]]})
            case ("delete", target):
                del self.nodes[target.removeprefix("nodename=")]
            case ("update", target, state, *reason):
                self.updates.append([target, state, *reason])
                node = self.nodes[target.removeprefix("nodename=")]
                node["state"] = [state.removeprefix("state=").upper(), "DYNAMIC_NORM"]
                node["reason"] = reason[0].removeprefix("reason=") if reason else ""
            case ("reconfigure",):
                pass
            case ("ping", "--json"):
                return 0, json.dumps({"pings": []})
            case _:
                raise AssertionError(f"scontrol {words}")
        return 0, ""
