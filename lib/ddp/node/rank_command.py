"""The command of the ranks, as torchrun takes it: a script, a module, or any program.

With the launcher `node` there is one rank on each node, which may start ranks of its own.
"""

import os
import shutil

from ddp.node import exit_codes, spec

# A launcher within a rank would take these for its own: with the agent's store the ranks of torch's
# spawn() wait forever (2.13), and composer starts as many ranks as LOCAL_WORLD_SIZE
_OF_TORCHRUN = (
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)
_MODULE = ("-m", "--module")
_NO_PYTHON = "--no-python"
_HEAD_BYTES = 1024


def of(job: spec.JobSpec, python: str, words: list[str], env: dict[str, str]) -> list[str]:
    """Return torchrun's words for a job's command. Raises FatalError."""
    if job.launcher == "node":
        return [_NO_PYTHON, *_without_torchrun(env), *_program(job, python, words, env)]
    if not job.is_command:
        return words
    path = _find(words[0], env)
    if _is_python(path):  # whichever interpreter its first line names
        return [path, *words[1:]]
    return [_NO_PYTHON, path, *words[1:]]


def num_launched(job: spec.JobSpec) -> int:
    """Return how many ranks a node has, with those that the launcher `node` leaves to a program."""
    if job.launcher == "node":
        return job.gpus_per_node or 1
    return job.ranks_per_node


def _without_torchrun(env: dict[str, str]) -> list[str]:
    """Return the words that start a program with its own port, because torchrun's is taken."""
    words = ["/usr/bin/env"]
    for name in _OF_TORCHRUN:
        words += ["-u", name]
    return [*words, f"MASTER_PORT={env['PROGRAM_PORT']}"]


def _program(job: spec.JobSpec, python: str, words: list[str], env: dict[str, str]) -> list[str]:
    """Return the command of a program that torchrun does not start with Python."""
    first, *rest = words
    if job.is_command:
        return [_find(first, env), *rest]
    if first in _MODULE:
        return [python, "-u", "-m", *rest]
    if _is_python(first):
        return [python, "-u", first, *rest]
    return words if os.access(first, os.X_OK) else ["bash", *words]


def _find(name: str, env: dict[str, str]) -> str:
    """Return the path of a command on the environment's PATH. Raises FatalError."""
    path = shutil.which(name, path=env.get("PATH"))
    if path is None:
        hint = "add its package to requirements.txt (-r), or give the path of a script"
        raise exit_codes.FatalError(f"{name} is not a command of the job's environment; {hint}")
    return path


def _is_python(path: str) -> bool:
    """Return whether a program is a Python script, by its name or its first lines."""
    if path.endswith(".py"):
        return True
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    first, _, second = head.partition(b"\n")
    # A script of a relocatable environment starts in sh, and is Python behind that
    is_relocatable = first == b"#!/bin/sh" and second.startswith(b"'''exec'")
    return is_relocatable or (first.startswith(b"#!") and b"python" in first)
