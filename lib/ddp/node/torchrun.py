"""torchrun's agent on a node: its command, with repairs of its log and its store."""

from ddp.node import rank_connections, spec

# torchrun forwards them, so that the ranks save
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
# torch's copy of a rank's lines breaks one that is still being written, and may lose the last
# (2.13, tail_log.py)
TAIL = """\
import os
def tail_logfile(header, file, dst, finished, interval_sec, *_, **__):
    part, over = "", False
    while not (over or os.path.exists(file)):
        over = finished.wait(interval_sec)
    with open(file if os.path.exists(file) else os.devnull, errors="replace") as lines:
        over = False
        while not over:
            over = finished.wait(interval_sec)
            for line in lines:
                part += line
                if part.endswith("\\n") or len(part) > 65536:
                    dst.write(header + part.rstrip("\\n") + "\\n")
                    part = ""
    if part:
        dst.write(header + part + "\\n")
"""
# The store listens on the job's own address; torch's own socket would listen on all of the node's
# (2.13)
STORE = """\
import socket
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as static
def make_store(address, port, size, is_master, timeout, *, make=static.TCPStore, **options):
    if is_master:
        options = {"master_listen_fd": socket.create_server((address, port), backlog=4096).detach()}
    return make(address, port, size, is_master, timeout, **options)
static.TCPStore = make_store
"""
# torchrun, which ends without a traceback when Slurm's TERM reaches it: a cancellation is not the
# program's error. Its imports do not look into the folder that the ranks start in. Its first two
# options are newer than torch 2.6
AGENT = f"""\
import sys
sys.path[:] = filter(None, sys.path)
{TAIL}
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import tail_log
tail_log.tail_logfile = tail_logfile
known = run.get_args_parser().format_help()
sys.argv[1:3] = [word for word in sys.argv[1:3] if word.partition("=")[0] in known]
{STORE}
from torch.distributed.elastic.multiprocessing.api import SignalException
try:
    run.main()
except SignalException:
    sys.exit(1)
"""


def agent(pipe: int | None = None) -> str:
    """Return the agent's program; it reports to the pipe whether the ranks connect."""
    if pipe is None:
        return AGENT
    before, run, after = AGENT.partition("try:\n")
    watch = rank_connections.AGENT.format(pipe=pipe)
    return before + watch + run + after + rank_connections.AT_END


def command(
    python: str,
    job: spec.JobSpec,
    env: dict[str, str],
    logs: str,
    *,
    pipe: int | None,
    has_instances: bool,
) -> list[str]:
    """Return the command that starts the agent of this node; the ranks' words follow it."""
    argv = [
        python,
        "-c",
        agent(pipe),
        f"--signals-to-handle={_SIGNALS}",
        "--shutdown-timeout=120",
        f"--nnodes={env['SLURM_STEP_NUM_NODES']}",
        f"--nproc-per-node={job.ranks_per_node}",
        f"--node-rank={env['SLURM_NODEID']}",
        "--rdzv-backend=static",
        f"--master-addr={env['HEAD_IP']}",
        f"--master-port={env['HEAD_PORT']}",
        f"--rdzv-id={env['RUN_ATTEMPT_ID']}",
        f"--local-addr={env['MY_IP']}",
        "--max-restarts=0",
        f"--log-dir={logs}",
        "--redirects=3",
        "--tee=3",
    ]
    if has_instances:
        argv.append("--virtual-local-rank")
    return argv
