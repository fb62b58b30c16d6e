"""The mounts of a test's machine: units add and remove them, as `mounts` would see it."""

import dataclasses
import pathlib

from slurm_ddp import mounts, processes


@dataclasses.dataclass
class MachineMounts:
    """Answers for the module `mounts`."""

    table: list[mounts.Mount] = dataclasses.field(default_factory=list[mounts.Mount])
    # Instead of the truth
    looks: dict[str, mounts.Result] = dataclasses.field(default_factory=dict[str, mounts.Result])
    users_of: dict[str, list[tuple[int, str]]] = dataclasses.field(
        default_factory=dict[str, list[tuple[int, str]]]
    )
    probes: list[dict[str, object]] = dataclasses.field(default_factory=list[dict[str, object]])

    def add(self, mountpoint: str, source: str, fstype: str, *, read_only: bool = False) -> None:
        options = ("ro" if read_only else "rw", "nosuid", "nodev")
        self.table.append(
            mounts.Mount(len(self.table) + 100, "0:1", mountpoint, fstype, source, options)
        )

    def drop(self, mountpoint: str) -> None:
        self.table = [mount for mount in self.table if mount.mountpoint != mountpoint]
        self.looks.pop(mountpoint, None)

    def at(self, mountpoint: str) -> list[mounts.Mount]:
        return [mount for mount in self.table if mount.mountpoint == mountpoint]

    def users(self, mountpoint: str) -> list[tuple[int, str]]:
        return self.users_of.get(mountpoint, [])

    def probe(
        self,
        mountpoint: str,
        *,
        fstype: tuple[str, ...],
        source: tuple[str, ...],
        writable: bool,
        sticky: bool = False,
        deadline: float,
    ) -> mounts.Result:
        self.probes.append(
            {"mountpoint": mountpoint, "writable": writable, "sticky": sticky, "deadline": deadline}
        )
        here = self.at(mountpoint)
        if mountpoint in self.looks:
            return self.looks[mountpoint]
        if not here:
            return mounts.Result(mounts.State.ABSENT, f"nothing is mounted at {mountpoint}")
        if here[-1].fstype not in fstype or here[-1].source not in source:
            return mounts.Result(
                mounts.State.WRONG, f"{mountpoint} holds {here[-1].source} ({here[-1].fstype})"
            )
        if len(here) > 1:
            return mounts.Result(mounts.State.STACKED, f"{len(here)} mounts lie at {mountpoint}")
        if writable and here[0].read_only:
            return mounts.Result(mounts.State.WRONG, f"{mountpoint} is mounted read-only")
        return mounts.Result(mounts.State.RIGHT)

    def wait(
        self, mountpoint: str, *, fstype: tuple[str, ...], source: tuple[str, ...], timeout: float
    ) -> mounts.Result:
        return self.probe(mountpoint, fstype=fstype, source=source, writable=False, deadline=5)

    def clear(self, mountpoint: str, *, fstype: str, source: str) -> int:
        count = len(self.at(mountpoint))
        for mount in self.at(mountpoint):
            assert (mount.fstype, mount.source) == (fstype, source), "a mount that is not ours"
        self.drop(mountpoint)
        return count

    def install_in(self, module: object, patch: object) -> None:
        patch.setattr(processes, "users", self.users)  # type: ignore[attr-defined]
        for name in ("at", "probe", "wait", "clear"):
            patch.setattr(mounts, name, getattr(self, name))  # type: ignore[attr-defined]


def mode_of(path: pathlib.Path) -> int:
    return path.stat().st_mode & 0o7777
