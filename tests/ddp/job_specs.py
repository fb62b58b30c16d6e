"""Specifications of jobs for tests."""

import dataclasses
import pathlib
import typing

from ddp.node import spec


def make(folder: pathlib.Path, **more: typing.Any) -> spec.JobSpec:
    """Return a job of one node and one rank whose run is `folder`."""
    job = spec.JobSpec(
        run=folder.name,
        job_dir=str(folder),
        workspace=str(folder.parents[1]),
        cache=str(folder.parents[1] / "cache"),
        command=(spec.Word("train.py"),),
        resume="auto",
        leaves_outcome=False,
        ranks_per_node=1,
        gpus_per_node=0,
        variables=(("FOO", "bar"),),
        fabric="auto",
        fabrics=(),
        environment=None,
        container=None,
        max_requeues=10,
        max_restarts=0,
        nodelist=(),
        exclude=(),
        reservation="",
        is_sweep=False,
        token_path="",
        metrics=(),
        workdir=str(folder),
    )
    return dataclasses.replace(job, **more)


def job_files(job: spec.JobSpec) -> dict[str, str]:
    """Return the files of a run by name: the job's specification."""
    return {"program/job.json": spec.dump(job)}
