"""`make demo`: bring the bundle up, train a model on two nodes, show the result and next steps."""

import collections.abc
import contextlib
import pathlib
import time
import typing

import click

from sandbox import bundle as bundles
from sandbox import image, session
from sandbox.engine import Engine
from sandbox.hosts import Hosts
from sandbox.store import Model, SandboxError

TRAINING = {
    "nodes": "2",
    "wait": "true",
    "args": "--steps 30 --epoch-steps 10 --batch 8",  # enough to see the loss fall
}
RESULTS = "state nodes ranks first-loss loss tokens-per-second checkpoint curve run-dir log".split()
LOGIN, NODES, MOUNTPOINT = "sackd/0", ("slurmd/0", "slurmd/1"), "/mnt/shared"
_STORE = f"{MOUNTPOINT}/environments"

NEXT = """\
Try next:
  ./sandboxctl status                                   every unit and its status
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


@contextlib.contextmanager
def _phase(seconds: dict[str, float], name: str) -> collections.abc.Generator[None]:
    """Announce and time one part of the demo."""
    click.secho(f"\n== {name}", err=True, bold=True)
    begin = time.monotonic()
    yield
    seconds[name] = time.monotonic() - begin


def run(engine: Engine, bundle: bundles.Bundle) -> str:
    """Deploy, train, and return the demo's last lines.

    Raises:
        SandboxError: the bundle does not become active, or an action failed.
    """

    def act(action: str, **params: str) -> dict[str, typing.Any]:
        outcome = engine.act("trainer/0", action, params)
        if outcome["failure"] is not None:
            raise SandboxError(f"{action}: {outcome['failure']}")
        return outcome["results"]

    seconds: dict[str, float] = {}
    with _phase(seconds, "deploy the bundle"):
        session.deploy(engine, bundle)
    with _phase(seconds, "install the training environment"):
        offer_environment(engine.hosts, engine.model)
        made = act("install-environment")
        keep_environment(engine.hosts, engine.model, made["environment"])
    with _phase(seconds, "prepare a dataset"):
        act(
            "prepare-dataset", elements="2"
        )  # on both nodes, which unpack the environment in the meantime
    with _phase(seconds, "train on two nodes"):
        result = act("submit-ddp", **TRAINING)
    return summarise(engine.hosts, engine.model, result, seconds)


def offer_environment(hosts: Hosts, model: Model) -> None:
    """Put an earlier demo's environment into the workspace; the trainer uses it if it matches."""
    script = f"""cd {image.GUEST_ENVIRONMENTS}
ls *.json >/dev/null 2>&1 || exit 0
mkdir -p {_STORE}
for file in *.tar.zst *.json; do  # the manifest last: it makes the archive valid
  [ -e {_STORE}/$file ] || cp $file {_STORE}/
done
"""
    hosts.get(model.host_of(LOGIN)).run(
        ["/sbin/runuser", "-u", "ubuntu", "--", "sh", "-ec", script], timeout=300
    )


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


def summarise(
    hosts: Hosts, model: Model, result: dict[str, typing.Any], seconds: dict[str, float]
) -> str:
    """Return the demo's last lines: nodes, mounts, the job's result and the next commands."""

    def output(unit: str, *argv: str) -> str:
        return hosts.get(model.host_of(unit)).run(list(argv), timeout=30).stdout.strip()

    mounts = "\n".join(
        f"  {unit:<10}{output(unit, 'findmnt', '-no', 'SOURCE,FSTYPE,TARGET', MOUNTPOINT)}"
        for unit in (LOGIN, *NODES)
    )
    listed = output(LOGIN, "sinfo", "-N", "-o", "%12N %10P %10T %5c %G").splitlines()
    nodes = "\n".join(f"  {line}" for line in listed)
    outcome = "\n".join(f"  {key:<20}{result[key]}" for key in RESULTS if key in result)
    times = "\n".join(
        f"  {name:<34}{s:7.1f} s"
        for name, s in (seconds | {"in all": sum(seconds.values())}).items()
    )
    return (
        f"\nSlurm (sinfo):\n{nodes}\n"
        f"\nThe shared filesystem:\n{mounts}\n"
        f"\nJob {result['job-id']} trained a model on two nodes:\n{outcome}\n"
        f"\nTime:\n{times}\n"
        f"\n{NEXT}"
    )
