"""Prepare a dataset: run the payload's commands in turn, in the environment, on this node."""

import os
import signal
import subprocess

from ddp.node import exit_codes, spec, spool, unpacking


def main(spec_path: str) -> int:
    """Run the job, or an element of its array, and return its exit code."""
    job = spec.load(spec.PrepareSpec, spec_path)
    env = dict(os.environ)
    host = env["SLURMD_NODENAME"]
    output = spool.Output(job.cache, env["SLURM_JOB_ID"], spool.note(host))
    env["RUN_DIR"] = job.run_dir
    env["PYTHONUNBUFFERED"] = "1"
    env["CUDA_VISIBLE_DEVICES"] = ""
    code = 0
    try:
        env["PY"], locks = unpacking.use(job.environment, host, f"{job.run_dir}/control")
        for command in job.commands:
            code = _run(job, command, env, locks)
            if code:
                break
    except (exit_codes.FatalError, OSError) as e:
        spool.write(f"[FATAL] {host}: {e}")
        code = exit_codes.FATAL
    output.close()
    return code


def _run(
    job: spec.PrepareSpec, command: tuple[str, ...], env: dict[str, str], locks: tuple[int, ...]
) -> int:
    """Run a command and return its exit code; the report of a check is kept in the run's folder."""
    argv = [env["PY"], "-m", *command]
    if job.elements:
        argv += ["--task", f"{env['SLURM_ARRAY_TASK_ID']}/{job.elements}"]
    is_check = "inspect" in command and not job.elements
    if not is_check:
        return _wait(subprocess.Popen(argv, env=env, pass_fds=locks, cwd=job.run_dir))

    report = f"{job.run_dir}/.inspection.{env['SLURM_JOB_ID']}"
    with open(report, "wb") as file:
        code = _wait(subprocess.Popen(argv, env=env, pass_fds=locks, cwd=job.run_dir, stdout=file))
    if code == 0:
        os.replace(report, f"{job.run_dir}/inspection.json")
    return code


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a command and return its exit code; forward TERM to it."""
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: process.terminate())
    code = process.wait()
    signal.signal(signal.SIGTERM, before)
    return exit_codes.exit_code(code)
