"""The versions of Juju that the sandbox plays. A model keeps the version of its first deployment.

Sources: docs/reference/sandbox.md.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Juju:
    """One version of Juju."""

    version: str  # as hooks and `juju status` have it
    honours_parallel: bool  # actions with `parallel: true`, and execs, take no machine lock
    cancels_running: bool  # `cancel-task` ends a task that runs
    gives_arch: bool  # an application with units gets arch=amd64, and a bundle without it differs from the model


VERSIONS = {
    "3.6": Juju("3.6.8", honours_parallel=True, cancels_running=True, gives_arch=False),
    "4": Juju("4.0.15", honours_parallel=False, cancels_running=False, gives_arch=True),
}
DEFAULT = "3.6"
