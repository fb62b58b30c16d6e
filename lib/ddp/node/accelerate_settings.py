"""The variables that `accelerate launch` sets, by its own parser and launcher.

The launcher runs until it is about to start torchrun or the program; the ranks get the variables
that it has set by then. Machines, processes and GPUs are the job's.
"""

import json
import subprocess

from ddp.node import exit_codes, spec

_LAUNCH_S = 600.0  # it imports torch and accelerate
# Accelerate 1.15: multi_gpu_launcher() and deepspeed_launcher() end in torch.distributed.run.run(),
# simple_launcher() in subprocess.Popen(). patch_environment() sets each name in upper case.
PROGRAM = """\
import json, os, sys, tempfile, types
sys.path[:] = filter(None, sys.path)
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
given = json.load(sys.stdin)
from accelerate.commands import launch
from torch.distributed import run
before = dict(os.environ)
class Launched(BaseException):
    pass
def take(*_, env=None, **__):
    raise Launched(dict(os.environ if env is None else env))
run.run = take
launch.subprocess = types.SimpleNamespace(Popen=take)
words = given["words"]
with tempfile.NamedTemporaryFile("w", suffix=given["suffix"]) as file:
    file.write(given["configuration"])
    file.flush()
    if given["configuration"]:
        words.insert(0, f"--config_file={file.name}")
    args = launch.launch_command_parser().parse_args([*words, "train.py"])
    try:
        launch.launch_command(args)
    except Launched as e:
        after = e.args[0]
    else:
        sys.exit("it starts neither torchrun nor the program itself")
upper = {name.upper(): value for name, value in before.items()}
found = {}
for name, value in after.items():
    if value not in (before.get(name), upper.get(name)):
        found[name] = value
json.dump(found, answer)
answer.close()
os._exit(0)
"""
_OF_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT")


def variables(
    settings: spec.Accelerate, python: str, env: dict[str, str], *, num_ranks: int
) -> dict[str, str]:
    """Return the variables that accelerate's launcher sets for its ranks. Raises FatalError."""
    ours = [
        f"--num_machines={env['SLURM_STEP_NUM_NODES']}",
        f"--num_processes={num_ranks}",
        f"--machine_rank={env['SLURM_NODEID']}",
        f"--main_process_ip={env['HEAD_IP']}",
        "--main_process_port=0",
        "--gpu_ids=all",
        "--deepspeed_multinode_launcher=standard",
    ]
    given = {
        "words": [*settings.words, *ours],
        "configuration": settings.configuration,
        "suffix": settings.suffix,
    }
    try:
        done = subprocess.run(
            [python, "-c", PROGRAM],
            env=env,
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=_LAUNCH_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise exit_codes.FatalError(f"accelerate launch: {e}") from e
    if done.returncode != 0:
        raise exit_codes.FatalError(f"accelerate launch: {_reason(done.stderr)}")
    found: dict[str, str] = json.loads(done.stdout)
    return {name: value for name, value in found.items() if name not in _OF_TORCHRUN}


def _reason(printed: str) -> str:
    """Return why the launcher failed, by the last line that it printed."""
    lines = printed.strip().splitlines() or ["it failed and printed nothing"]
    if "No module named 'accelerate'" in lines[-1]:
        return "the job's environment lacks accelerate; add it to requirements.txt (-r)"
    return lines[-1]
