"""The Python of the ranks on a node: of the job's environment, of an image, or the user's own."""

import os
import shutil
import typing

from ddp.node import caches, exit_codes, spec, storage, unpacking


class Interpreter(typing.NamedTuple):
    """A Python with the open locks that keep its environment on the node's disk."""

    path: str
    locks: tuple[int, ...] = ()


def find(job: spec.JobSpec, host: str, control: str, env: dict[str, str]) -> Interpreter:
    """Find the interpreter, and set the variables that belong to it in `env`. Raises FatalError."""
    if job.container is not None:
        found = _of_image(job, job.container.image, host)
    else:
        caches.keep_local(env, job.cache)
        found = _own(job, env) if job.python else _of_environment(job, host, control, env)

    runs_others_program = not job.leaves_outcome
    if runs_others_program and _is_on_cpus(job, found.path, env):
        env.setdefault("ACCELERATE_USE_CPU", "true")  # else its ranks on CPUs train alone
    if job.payload:
        above = env.get("PYTHONPATH")
        env["PYTHONPATH"] = f"{above}:{job.payload}" if above else job.payload
    return found


def _is_on_cpus(job: spec.JobSpec, python: str, env: dict[str, str]) -> bool:
    return not job.gpus_per_node or unpacking.is_for_cpus(python, env)


def _of_image(job: spec.JobSpec, image: str, host: str) -> Interpreter:
    locks: tuple[int, ...] = ()
    if job.environment:  # the image was imported
        _, locks = unpacking.use(job.environment, host)
    found = shutil.which("python3") or shutil.which("python")
    if found is None:
        raise exit_codes.FatalError(f"{image} has no python3; use an image with torch")
    return Interpreter(found, locks)


def _own(job: spec.JobSpec, env: dict[str, str]) -> Interpreter:
    """Check the user's own interpreter, and put its folder on PATH. Raises FatalError."""
    python = job.python
    try:
        # In a virtual environment it is a link to the host's own
        storage.within(lambda: os.stat(python), storage.CALL_S)
    except OSError as e:
        why = f"{python} cannot be started ({storage.reason(e)})"
        hint = "each node needs this path, and the Python that it links to; or give python=none"
        raise exit_codes.FatalError(f"{why}; {hint}") from e
    if "PATH" not in dict(job.variables):
        env["PATH"] = f"{os.path.dirname(python)}:{env.get('PATH', os.defpath)}"
    return Interpreter(python)


def _of_environment(job: spec.JobSpec, host: str, control: str, env: dict[str, str]) -> Interpreter:
    """Unpack the job's environment, and put its programs on PATH. Raises FatalError."""
    assert job.environment is not None
    found, locks = unpacking.use(job.environment, host, control)
    programs = os.path.dirname(found)
    path = env.get("PATH")
    env["PATH"] = f"{programs}:{path}" if path else programs
    return Interpreter(found, locks)
