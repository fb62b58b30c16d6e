"""The names of submitit 1.5: `from ddptrain import submitit` in place of `import submitit`.

Jobs are runs of ddp: checked before they are queued, started with torchrun's variables, listed by
`ddp list`.
"""

from ddptrain.functions.errors import FailedJobError, UncompletedJobError
from ddptrain.submitit import helpers
from ddptrain.submitit.environment import JobEnvironment
from ddptrain.submitit.executors import (
    AutoExecutor,
    DebugExecutor,
    Executor,
    LocalExecutor,
    SlurmExecutor,
)
from ddptrain.submitit.jobs import DebugJob, Job, LocalJob, SlurmJob

__all__ = [
    "AutoExecutor",
    "DebugExecutor",
    "DebugJob",
    "Executor",
    "FailedJobError",
    "Job",
    "JobEnvironment",
    "LocalExecutor",
    "LocalJob",
    "SlurmExecutor",
    "SlurmJob",
    "UncompletedJobError",
    "helpers",
]
