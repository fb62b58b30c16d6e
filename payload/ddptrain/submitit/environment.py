"""A function's view of its job, from the variables that torchrun and Slurm set."""

import os
import pathlib
import socket


class JobEnvironment:
    """The job that this process is a rank of."""

    @property
    def job_id(self) -> str:
        """Slurm's id of the job, such as 40 or 40_3."""
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        if array:
            return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        return os.environ.get("SLURM_JOB_ID", "local")

    @property
    def hostname(self) -> str:
        """The name of this node."""
        return os.environ.get("SLURMD_NODENAME") or socket.gethostname()

    @property
    def num_tasks(self) -> int:
        """The number of ranks."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return int(os.environ.get("NNODES", "1"))

    @property
    def node(self) -> int:
        """The number of this node."""
        return int(os.environ.get("NODE_RANK", "0"))

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return int(os.environ.get("RANK", "0"))

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def folder(self) -> pathlib.Path:
        """The run's folder."""
        return pathlib.Path(os.environ["RUN_DIR"])

    def __repr__(self) -> str:
        where = f"job_id={self.job_id}, hostname={self.hostname}"
        return f"JobEnvironment({where}, global_rank={self.global_rank}({self.num_tasks}))"
