"""A mounter that only pretends, and the charm that uses it."""

import dataclasses
import pathlib
import typing

import yaml
from ops import testing

import mount_plan
from charm import SharedFilesystemClientCharm
from scripts import keeper
from slurm_ddp import juicefs_access, mounts
from slurm_ddp.interfaces import filesystem_info as fs

CHARM_ROOT = pathlib.Path(__file__).resolve().parents[3] / "charms" / "shared-filesystem-client"
RIGHT = mounts.Result(mounts.State.RIGHT)


@dataclasses.dataclass
class FakeMounter:
    """Mounts in memory."""

    mounted: mount_plan.Plan | None = None
    units: set[str] = dataclasses.field(default_factory=set[str])
    look: mounts.Result = RIGHT  # the probe's result once it is mounted
    error: Exception | None = None
    waits: bool = False
    changes: int = 0
    fuse_error: Exception | None = None
    program_error: Exception | None = None
    seen: keeper.Health = dataclasses.field(default_factory=keeper.Health)
    remounts: int = 0
    wakes: dict[str, list[str]] = dataclasses.field(default_factory=dict[str, list[str]])
    resources: list[pathlib.Path | None] = dataclasses.field(
        default_factory=list[pathlib.Path | None]
    )

    looked_at: list[str] = dataclasses.field(default_factory=list[str])
    sticky_error: Exception | None = None

    def ensure(self, plan: mount_plan.Plan) -> mounts.Result:
        if self.error is not None:
            raise self.error
        self.units.add(plan.spec.wanted_by)
        if self.mounted != plan:
            self.changes += 1
            self.mounted = plan
        return self.probe(plan)

    def probe(self, plan: mount_plan.Plan) -> mounts.Result:
        if self.mounted is None:
            return mounts.Result(
                mounts.State.ABSENT, f"nothing is mounted at {plan.spec.mountpoint}"
            )
        return self.look

    def at(self, path: str) -> list[mounts.Mount]:
        mount = mounts.Mount(1, "0:1", path, "fuse.juicefs", "x", ("rw", "nosuid"))
        return [mount] if self.mounted is not None else []

    def pending(self, plan: mount_plan.Plan) -> bool:
        return self.waits

    def reason(self, plan: mount_plan.Plan) -> str:
        return "the metadata engine refuses the user or password"

    def remount(self, plan: mount_plan.Plan) -> mounts.Result:
        self.remounts += 1
        return self.ensure(plan)

    def remove(self, app: str, *, unit: str) -> None:
        self.units.discard(unit)
        self.mounted = None

    def load_all(self) -> dict[str, keeper.Watch]:
        fstypes = self.mounted.fstypes if self.mounted is not None else ()
        return {"other": keeper.Watch("other", "/other", "other.service", fstypes)}

    def proven(self, app: str) -> str | None:
        return (
            self.mounted.spec.mountpoint if self.seen.works and self.mounted is not None else None
        )

    def wake_once_right(self, app: str, unit: str, command: list[str]) -> None:
        self.wakes[unit] = command

    def health(self, app: str) -> keeper.Health:
        return self.seen

    def metrics_port(self, app: str, wanted: int) -> int:
        return wanted or 9567

    def check_fuse(self, _name: str) -> None:
        if self.fuse_error is not None:
            raise self.fuse_error

    def ensure_sticky(
        self, _program: pathlib.Path, _access: juicefs_access.Access, folder: str
    ) -> str:
        self.looked_at.append(folder)
        if self.sticky_error is not None:
            raise self.sticky_error
        return f"{folder} had mode 0777" if self.mounted is None else ""

    def ensure_program(self, _target: pathlib.Path, resource: pathlib.Path | None) -> bool:
        if self.program_error is not None:
            raise self.program_error
        self.resources.append(resource)
        return False


@dataclasses.dataclass
class Site:
    """The charm in its context, with its doubles."""

    ctx: testing.Context[SharedFilesystemClientCharm]
    mounter: FakeMounter
    program: testing.Resource

    @property
    def plan(self) -> mount_plan.Plan:
        """The plan that is mounted; fails the test if there is none."""
        assert self.mounter.mounted is not None
        return self.mounter.mounted

    def state(
        self,
        *relations: testing.RelationBase,
        config: typing.Mapping[str, str | int | float | bool] | None = None,
        secrets: typing.Iterable[testing.Secret] = (),
    ) -> testing.State:
        """Return a state next to a slurmd, with `mountpoint` set unless `config` is given."""
        return testing.State(
            relations={*relations, beside()},
            config=dict({"mountpoint": "/mnt/shared"} if config is None else config),
            secrets=set(secrets),
            resources={self.program},
        )


def context(principal: str | None = None) -> testing.Context[SharedFilesystemClientCharm]:
    """Return a context of the charm with its real metadata."""
    meta = yaml.safe_load((CHARM_ROOT / "charmcraft.yaml").read_text())
    return testing.Context(
        SharedFilesystemClientCharm, meta=meta, juju_version="3.6.8", principal_unit=principal
    )


def beside(app: str = "slurmd", number: int = 99) -> testing.SubordinateRelation:
    """Return the relation with the charm whose machine it is."""
    return testing.SubordinateRelation("juju-info", id=number, remote_app_name=app)


def offer(filesystem: fs.Juicefs | str | None) -> testing.Relation:
    """Return the relation with a provider that offers `filesystem`."""
    uri = filesystem if isinstance(filesystem, str) or filesystem is None else filesystem.uri()
    data = {} if uri is None else {fs.KEY: uri}
    return testing.Relation("filesystem", id=1, remote_app_name="proxy", remote_app_data=data)


def volume(secret: testing.Secret | None = None) -> fs.Juicefs:
    """Return a volume, whose credentials are in `secret`."""
    place: dict[str, typing.Any] = {
        "storage": "sftp",
        "bucket": "10.0.0.5:2022:/data/",
        "version": "1.3.1",
    }
    named: dict[str, typing.Any] = (
        {"secret_id": secret.id, "auth_rev": 1} if secret is not None else {}
    )
    return fs.Juicefs(
        "shared",
        ("10.0.0.5:6379",),
        "redis",
        "1",
        "11111111-2222-3333-4444-555555555555",
        **named,
        **place,
    )
