"""A job as Slurm started it: its specification, its ids and its folders."""

import dataclasses

from ddp.node import spec


@dataclasses.dataclass(frozen=True)
class StartedJob:
    """One start of a job; an element of a sweep's array is a job with a run of its own."""

    spec: spec.JobSpec
    spec_path: str
    host: str  # the node of the batch script
    job_id: str
    slurm_id: str  # for commands: the id of an array's last task stands for all of its tasks
    array: tuple[str, str] | None  # ids of a sweep's array and of this task
    run_dir: str
    nodelist: str  # as Slurm writes it
    partition: str
    num_allocated: int  # nodes, spare ones included
    restarts: int  # how often it was requeued
    end: float  # of its time limit, in seconds since 1970

    @property
    def control(self) -> str:
        """The folder for files that the job and its submitter exchange."""
        return f"{self.run_dir}/control"

    @property
    def program(self) -> str:
        """The archive of this program."""
        return spec.program_of(self.spec_path)

    @property
    def num_nodes(self) -> int:
        """The number of nodes with ranks."""
        return self.spec.nodes or self.num_allocated

    def attempt_id(self, restarts_here: int) -> str:
        """Return an attempt's name, such as 12.r1t2, by the restarts in this start of the job."""
        name = f"{self.job_id}.r{self.restarts}"
        return f"{name}t{restarts_here}" if restarts_here else name


def read(job: spec.JobSpec, spec_path: str, env: dict[str, str]) -> StartedJob:
    """Return the job of this batch script by Slurm's variables."""
    job_id = env["SLURM_JOB_ID"]
    slurm_id = job_id
    run_dir = job.job_dir
    array = None
    if job.is_sweep:
        array = (env["SLURM_ARRAY_JOB_ID"], env["SLURM_ARRAY_TASK_ID"])
        slurm_id = "_".join(array)
        run_dir = f"{job.job_dir}-{array[1]}"
    return StartedJob(
        spec=job,
        spec_path=spec_path,
        host=env["SLURMD_NODENAME"],
        job_id=job_id,
        slurm_id=slurm_id,
        array=array,
        run_dir=run_dir,
        nodelist=env["SLURM_JOB_NODELIST"],
        partition=env["SLURM_JOB_PARTITION"],
        num_allocated=int(env["SLURM_JOB_NUM_NODES"]),
        restarts=int(env.get("SLURM_RESTART_COUNT") or 0),
        end=float(env.get("SLURM_JOB_END_TIME") or "inf"),
    )
