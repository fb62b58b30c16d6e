"""A machine for gpu-health: programs in the places of nvidia-smi, journalctl and scontrol."""

import pathlib
import stat

from smi_samples import HEALTHY, answer

from node import health as gpu_health
from node import kept

BUS = "0000:01:00.0"
LOG = "-k -b -q --no-pager -o short-unix -g NVRM: Xid"


class Scene:
    """A machine with `num` cards on the bus, whose programs give the test's answers."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        (root / "bin").mkdir()
        self.orders = root / "orders"
        (root / "others").touch()
        self.smi(answer(HEALTHY))
        self.log("")
        self.node()
        self.woken: list[str] = []  # the services that were started

    def program(self, name: str, text: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def smi(self, printed: str, code: int = 0) -> None:
        (self.root / "xml").write_text(printed)
        self.program(
            "nvidia-smi", f'[ "$*" = "-q -x" ] || exit 99; cat {self.root}/xml; exit {code}'
        )

    def log(self, printed: str, code: int = 0) -> None:
        (self.root / "log").write_text(printed)
        self.program(
            "journalctl", f"[ \"$*\" = '{LOG}' ] || exit 99; cat {self.root}/log; exit {code}"
        )

    def node(
        self,
        state: str = "IDLE+DYNAMIC_NORM",
        reason: str = "",
        gres: str = "gpu:h100:1(S:0)",
        began: str = "2026-11-20T18:00:00",
    ) -> None:
        reason = f" Reason={reason} [root@2026-11-20T18:51:55]" if reason else ""
        record = f"NodeName=n0 Arch=x86_64 CPUAlloc=0 Gres={gres} NodeAddr=n0 State={state} ThreadsPerCore=1"
        record += f" SlurmdStartTime={began}{reason}"
        (self.root / "record").write_text(f"{record}\n")
        show = f"case $* in 'show node n0 -o') exec cat {self.root}/record;; 'show nodes -o') exec cat {self.root}/record "
        self.program("scontrol", f'{show} {self.root}/others;; esac; echo "$*" >> {self.orders}')

    def check(self, *arguments: str) -> int:
        return gpu_health.main(["--act", "--node", "n0", *arguments])

    @property
    def commands(self) -> list[str]:
        """The orders given to Slurm."""
        return self.orders.read_text().splitlines() if self.orders.exists() else []


def hold() -> tuple[str, str] | None:
    """Return the node that is held for its health, and the reason."""
    return next(
        ((one.node, one.reason) for one in kept.grounds() if one.kind == "gpu-health"), None
    )
