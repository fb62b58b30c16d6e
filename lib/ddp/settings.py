"""The settings of every command: who runs it, where the workspace is, and how remedies are rendered."""

import dataclasses
import pathlib

from ddp.host.locks import Claims
from ddp.host.waits import Wait
from ddp.problem import Render, plain

USERS = "users"  # in the workspace: a folder for each user but the trainer's account


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of every command."""

    unit: str  # the trainer's unit, for the commands that an operator types; empty on a cluster without charms
    workspace: pathlib.Path  # the folder on the shared filesystem
    user: str  # the account that this process runs as, which owns its runs and submits the jobs
    uid: int
    gid: int
    payload: (
        pathlib.Path
    )  # the program of the jobs: the package ddptrain and its locked requirements
    torch_build: str  # auto, cpu or cuda
    torch_index: str  # an additional package index for torch; may be empty
    mlflow_uri: str = ""  # a server's URI, or a path; empty: no MLflow
    tensorboard: bool = False
    wandb: bool = False
    transformers: bool = False  # whether the environment holds it, for fine-tuning
    account: str = (
        ""  # the trainer's account, whose environments and datasets all users share; empty: none
    )
    wheelhouse: pathlib.Path | None = None  # the wheels that the operator attached to the charm
    token: str = dataclasses.field(default="", repr=False)  # Hugging Face's; empty: jobs get none
    takes_any_script: bool = (
        False  # a user's own command runs scripts from outside the workspace, too
    )
    claims: Claims = dataclasses.field(default_factory=Claims, repr=False, compare=False)
    wait: Wait = dataclasses.field(default_factory=Wait, repr=False, compare=False)
    render: Render = dataclasses.field(
        default=plain, repr=False, compare=False
    )  # remedies in the front end's words

    @property
    def extras(self) -> tuple[str, ...]:
        """The payload's folders whose locked packages are installed in addition."""
        wanted = {
            "tracking": bool(self.mlflow_uri) or self.tensorboard or self.wandb,
            "tuning": self.transformers,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    @property
    def folder(self) -> pathlib.Path:
        """The folder of this user's own runs, datasets and environments."""
        is_shared = self.account in ("", self.user)
        return self.workspace if is_shared else self.workspace / USERS / self.user

    @property
    def folders(self) -> tuple[pathlib.Path, ...]:
        """The folders whose datasets and environments this user uses, the own first."""
        return tuple(dict.fromkeys((self.folder, self.workspace)))

    @property
    def runs(self) -> pathlib.Path:
        """The folder of the runs."""
        return self.folder / "runs"

    @property
    def datasets(self) -> pathlib.Path:
        """The folder of the user's own datasets."""
        return self.folder / "datasets"

    @property
    def environments(self) -> pathlib.Path:
        """The folder of the user's own environments' archives."""
        return self.folder / "environments"

    @property
    def baselines(self) -> pathlib.Path:
        """The folder of this user's measurements of the cluster."""
        return self.folder / "baselines"

    @property
    def node_cache(self) -> pathlib.Path:
        """The folder on each node's own disk to which the user's environments are unpacked."""
        return pathlib.Path(f"/var/tmp/slurm-ddp-{self.uid}")  # noqa: S108 - owner and mode are checked before use
