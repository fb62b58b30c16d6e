"""`ddp shell` on a node: the user's own shell, in the jobs' environment."""

import contextlib
import os
import pwd
import shlex
import signal
import subprocess
import sys

from ddp.node import exit_codes, session, slurm_calls, spec, srun

_SHELLS = ("/bin/bash", "/bin/sh")
# After the user's own file, which may put another Python in front
_RC = """\
[ -r ~/.bashrc ] && . ~/.bashrc
PATH={path}
PS1={mark}"$PS1"
"""


def main(spec_path: str) -> int:
    """Run a shell until the user leaves it; return 0, whatever its last command returned."""
    job = spec.load(spec.JobSpec, spec_path)
    host = os.environ["SLURMD_NODENAME"]
    try:
        ready = session.prepare(job, host)
        _unpack_elsewhere(job, spec_path)
        os.chdir(ready.folder)
    except exit_codes.FatalError as e:
        os.write(2, f"[FATAL] {host}: {e}\n".encode())
        return exit_codes.FATAL
    if job.container is not None:
        os.write(2, f"[ENV] {host}: this is the node, outside of the job's image\n".encode())

    env = ready.env
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):  # of the terminal
        signal.signal(number, lambda _number, _frame: None)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and children would
    argv, inherited = _command(env)
    subprocess.call(argv, env=env, pass_fds=inherited)
    return 0


def _unpack_elsewhere(job: spec.JobSpec, spec_path: str) -> None:
    """Unpack the environment on an allocation's other nodes, so that srun finds it there."""
    num_nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    is_of_run = "RUN_DIR" in os.environ
    if num_nodes == "1" or is_of_run or job.environment is None:
        return
    place = ("--overlap", f"--nodes={num_nodes}", "--ntasks-per-node=1", "--chdir=/")
    program = (spec.program_of(spec_path), "unpack", spec_path)
    done = slurm_calls.call("srun", *place, srun.PYTHON, "-I", "-S", "-B", *program)
    sys.stderr.write(done.stdout + done.stderr)


def _command(env: dict[str, str]) -> tuple[list[str], tuple[int, ...]]:
    """Return the command of the user's shell, and the open files that it reads."""
    shell = _shell(env)
    mark = f"(ddp {env.get('SLURM_JOB_ID', '')}) "
    if os.path.basename(shell) != "bash":
        return ["/usr/bin/env", f"PS1={mark}$ ", shell, "-i"], ()  # sh has no file for it
    text = _RC.format(path=shlex.quote(env["PATH"]), mark=shlex.quote(mark))
    file = os.memfd_create("bashrc", 0)
    os.write(file, text.encode())
    os.lseek(file, 0, os.SEEK_SET)
    return [shell, "--rcfile", f"/dev/fd/{file}", "-i"], (file,)


def _shell(env: dict[str, str]) -> str:
    """Return the shell of the account, or another one if it may not log in here."""
    own = env.get("SHELL", "")
    with contextlib.suppress(KeyError):  # the node does not know the account
        own = pwd.getpwuid(os.geteuid()).pw_shell or own
    if os.access(own, os.X_OK) and not own.endswith(("/nologin", "/false")):
        return own
    return next(path for path in _SHELLS if os.access(path, os.X_OK))
