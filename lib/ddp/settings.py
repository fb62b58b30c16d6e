"""The settings of all commands: workspace, builds, tracking, and how remedies are rendered."""

import dataclasses
import pathlib

from ddp.host.waits import Wait
from ddp.problem import Render, plain
from ddp.workspace.folders import Workspace


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of every command."""

    workspace: Workspace
    gid: int
    payload: pathlib.Path  # the jobs' program: the package ddptrain and its locked requirements
    torch_build: str  # auto, cpu or cuda
    torch_index: str  # an additional package index for torch; may be empty
    torch_version: str = ""  # empty: the one that slurm-ddp pins
    mlflow_uri: str = ""  # a server's URI, or a path; empty: no MLflow
    tensorboard: bool = False
    wandb: bool = False
    transformers: bool = False  # whether the environment holds it, for fine-tuning
    accept_oci_risk: bool = False  # images may start by the OCI runtime of a Slurm without its fix
    contact: str = ""  # whom people ask for an account; empty: the operator
    wheelhouse: pathlib.Path | None = None  # the wheels that the operator attached to the charm
    token: str = dataclasses.field(default="", repr=False)  # Hugging Face's; empty: jobs get none
    takes_any_script: bool = False  # a user's own command runs scripts outside the workspace, too
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
