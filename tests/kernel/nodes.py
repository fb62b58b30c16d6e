"""A guest with the charm's code in it, as a compute node that mounts."""

import collections.abc
import dataclasses
import json
import pathlib
import time
import typing

import guest as machines

HERE = pathlib.Path(__file__).parent
DRIVER = "/opt/mount_driver.py"
Health = dict[str, typing.Any]  # health.json, which the keeper leaves


@dataclasses.dataclass
class Node:
    """A machine that runs the charm's code, its units under systemd and the keeper's timer."""

    guest: machines.Guest

    def prepare(self) -> None:
        """Bring the charm."""
        self.guest.put(
            {
                "/opt/charm/src": machines.CHARM / "src",
                "/opt/charm/lib": machines.REPOSITORY / "lib",
                DRIVER: HERE / "mount_driver.py",
            }
        )

    def ask(self, **asked: typing.Any) -> dict[str, typing.Any]:
        """Run a request in the charm's code; return its answer."""
        found = json.loads(self.guest.talk(DRIVER, json.dumps(asked)))
        assert found.get("level") != "error", found["text"]
        return found

    def health(self, app: str) -> Health:
        """Read the result of the keeper's last pass; empty before the first."""
        shown = self.guest.run("/bin/cat", f"/var/lib/slurm-ddp/{app}/health.json", check=False)
        return json.loads(shown.out) if shown.code == 0 else {}

    def now(self) -> float:
        """Return the guest's clock, in seconds since 1970."""
        return float(self.guest.run("/bin/date", "+%s.%N").out)

    def until(
        self, app: str, wanted: collections.abc.Callable[[Health], bool], since: float
    ) -> Health:
        """Wait for a keeper's pass after `since` with the wanted result; return the result."""
        end = time.monotonic() + machines.PATIENCE_S
        while True:
            found = self.health(app)
            if found.get("checked", 0.0) > since and wanted(found):
                return found
            assert time.monotonic() < end, found
            time.sleep(0.5)

    def mounts(self, path: str) -> list[str]:
        """Return the lines of the kernel's table for mounts exactly there."""
        lines = self.guest.run("/bin/cat", "/proc/self/mountinfo").out.splitlines()
        return [line for line in lines if line.split()[4] == path]


def is_right(found: Health) -> bool:
    """Tell whether the pass left the mount right."""
    return found["state"] == "right"
