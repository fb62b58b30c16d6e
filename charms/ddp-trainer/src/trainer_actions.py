"""The charm's actions: the parameters of each and what it does."""

import collections.abc
import dataclasses
import typing

import trainer_collectives
import trainer_doctor
import trainer_environment
import trainer_forecast
import trainer_jobs
import trainer_params
import trainer_params_runs
import trainer_prepare
import trainer_runs
import trainer_submit
import trainer_sweep
from trainer_base import Log, Results, Settings


@dataclasses.dataclass(frozen=True)
class Action:
    """One action; `do` gets the settings, the parsed parameters and a way to report."""

    params: type[trainer_params.Parsed]
    do: collections.abc.Callable[[Settings, typing.Any, Log], Results]
    asks_nodes: bool = False  # whether it begins with a list of the cluster's nodes


ACTIONS = {
    "install-environment": Action(trainer_params_runs.InstallEnvironment, trainer_environment.install_environment),
    "prepare-dataset": Action(trainer_params_runs.PrepareDataset, trainer_prepare.prepare_dataset, asks_nodes=True),
    "submit-ddp": Action(trainer_params.SubmitDdp, trainer_submit.submit_ddp, asks_nodes=True),
    "submit-sweep": Action(trainer_params.SubmitSweep, trainer_sweep.submit_sweep, asks_nodes=True),
    "list-jobs": Action(trainer_params.ListJobs, trainer_jobs.list_jobs),
    "show-job": Action(trainer_params.ShowJob, trainer_sweep.show_job),
    "job-log": Action(trainer_params.JobLog, trainer_jobs.job_log),
    "list-runs": Action(trainer_params_runs.ListRuns, trainer_runs.list_runs),
    "show-run": Action(trainer_params_runs.ShowRun, trainer_runs.show_run),
    "compare-runs": Action(trainer_params_runs.CompareRuns, trainer_runs.compare_runs),
    "benchmark-collectives": Action(
        trainer_params_runs.BenchmarkCollectives, trainer_collectives.benchmark_collectives, asks_nodes=True
    ),
    "plan": Action(trainer_params_runs.Plan, trainer_forecast.plan, asks_nodes=True),
    "doctor": Action(trainer_params_runs.Doctor, trainer_doctor.doctor, asks_nodes=True),
    "resume-now": Action(trainer_params.ResumeNow, trainer_jobs.resume_now),
    "cancel-job": Action(trainer_params.CancelJob, trainer_jobs.cancel_job),
}
