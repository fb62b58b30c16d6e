"""`make demo`: the bundle up, a model trained on two nodes, the result shown, and what to try next."""

import collections.abc
import contextlib
import pathlib
import time
import typing

import click

from sandbox import image
from sandbox.hosts import Hosts
from sandbox.store import Model

TRAINING = {
    "nodes": "2",
    "wait": "true",
    "env": "OMP_NUM_THREADS=1",  # the two nodes share this machine's cores: threads of both would wait for each other
    "args": "--steps 100 --epoch-steps 25",  # enough to see the loss fall
}
LOGIN, NODES, MOUNTPOINT = "sackd/0", ("slurmd/0", "slurmd/1"), "/mnt/shared"
_STORE = f"{MOUNTPOINT}/environments"

NEXT = """\
Try next:
  ./sandboxctl status                                   every unit, and what it says
  ./sandboxctl run trainer/0 submit-ddp workload=smoke nodes=2 wait=true
  ./sandboxctl run trainer/0 list-runs
  ./sandboxctl run trainer/0 run-log
  ./sandboxctl ssh sackd/0 ddp list                     ddp is there for every account; ddp --help lists it all
  ./sandboxctl ssh sackd/0 ddp show                     the newest run: settings, metrics, the loss curve
  ./sandboxctl ssh sackd/0 ddp submit -N 2 --wait smoke
  ./sandboxctl exec sackd/0 -- sinfo -N -o '%N %T %G'
  ./sandboxctl reboot slurmd/0                          mounts and GPUs come back by themselves
  ./sandboxctl ssh sackd/0                              a shell on the login node
  make down                                             remove everything\
"""


class Phases:
    """How long each part of the demo took."""

    def __init__(self) -> None:
        self.took: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> collections.abc.Generator[None]:
        """Announce and time one part."""
        click.secho(f"\n== {name}", err=True, bold=True)
        begin = time.monotonic()
        yield
        self.took.append((name, time.monotonic() - begin))

    def text(self) -> str:
        """Return one line per part and the sum."""
        rows = [*self.took, ("in all", sum(took for _, took in self.took))]
        return "\n".join(f"  {name:<34}{took:7.1f} s" for name, took in rows)


def offer_environment(hosts: Hosts, model: Model) -> None:
    """Put the environment of an earlier demo into the workspace: if it is what the trainer would make, it is used."""
    script = f"""cd {image.GUEST_ENVIRONMENTS}
ls *.json >/dev/null 2>&1 || exit 0
mkdir -p {_STORE}
for file in *.tar.zst *.json; do  # the manifest last: it makes the archive valid
  [ -e {_STORE}/$file ] || cp $file {_STORE}/
done
"""
    hosts.get(model.host_of(LOGIN)).run(["sh", "-ec", script], timeout=300, user="ubuntu")


def keep_environment(hosts: Hosts, model: Model, archive: str) -> None:
    """Keep an environment that the trainer stored for the next demo, in place of the one before."""
    name = pathlib.PurePath(archive).name.removesuffix(".tar.zst")
    script = f"""cd {image.GUEST_ENVIRONMENTS}
[ ! -e {name}.json ] || exit 0
rm -f *.json *.tar.zst .new
cp {archive} {name}.tar.zst
cp {_STORE}/{name}.json .new
mv .new {name}.json
"""
    hosts.get(model.host_of(LOGIN)).run(["sh", "-ec", script], timeout=300)


def show(hosts: Hosts, model: Model, result: dict[str, typing.Any], phases: Phases) -> str:
    """Return the demo's last lines: nodes, mounts, the job's result and the next commands."""

    def on(unit: str, *argv: str) -> str:
        return hosts.get(model.host_of(unit)).run(list(argv), timeout=30).stdout.strip()

    mounts = "\n".join(
        f"  {unit:<10}{on(unit, 'findmnt', '-no', 'SOURCE,FSTYPE,TARGET', MOUNTPOINT)}" for unit in (LOGIN, *NODES)
    )
    keys = (
        "state",
        "nodes",
        "ranks",
        "first-loss",
        "loss",
        "tokens-per-second",
        "checkpoint",
        "curve",
        "run-dir",
        "log",
    )
    outcome = "\n".join(f"  {key:<20}{result[key]}" for key in keys if key in result)
    return (
        f"\nSlurm (sinfo):\n{_indent(on(LOGIN, 'sinfo', '-N', '-o', '%N %P %T %c %G'))}\n"
        f"\nThe shared filesystem:\n{mounts}\n"
        f"\nJob {result['job-id']} trained a model on two nodes:\n{outcome}\n"
        f"\nTime:\n{phases.text()}\n"
        f"\n{NEXT}"
    )


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
