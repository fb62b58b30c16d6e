"""Random orders of events, with a run's jobs between them: see tests/orders.py."""

import collections.abc
import dataclasses
import pathlib
import pwd
import typing

import pytest
from cluster import Cluster
from conftest import USER
from harness import ACCOUNT, Trainer
from ops import testing

import host as host_module
import orders
from ddp.slurm import jobs
from slurm_ddp import mounts
from slurm_ddp.commands import CommandError, CommandTimeout
from slurm_ddp.slurm import nodes

SECRET = testing.Secret({"token": "hf_first"})
DOWN = mounts.Result(mounts.State.HUNG, "no answer within 5 s")


@dataclasses.dataclass
class Doubles:
    """The doubles around the charm."""

    ctx: testing.Context[typing.Any]
    cluster: Cluster
    host: dict[str, typing.Any]


class LoginHost(orders.Unit):
    """The unit on a login host, with an environment and a dataset in the workspace."""

    relations: typing.ClassVar = {
        "juju-info": testing.SubordinateRelation("juju-info", remote_app_name="sackd")
    }
    hooks: typing.ClassVar = (*orders.Unit.hooks, "secret_changed")
    actions: typing.ClassVar = {
        "submit-ddp": {"workload": "smoke", "run": "first"},
        "submit-ddp again": {"workload": "smoke", "run": "first", "resume": "auto"},
        "submit-ddp second": {"workload": "smoke", "run": "second"},
        "submit-ddp wrong": {"workload": "smoke", "run": "../first"},
        "list-runs": {},
        "show-run": {},
        "run-log": {"run": "first"},
        "cancel-run": {"run": "first"},
        "resume-run": {"run": "first"},
        "submit-ddp last": {"workload": "smoke", "run": "last"},  # only when it settles
    }

    def __init__(
        self, at: Trainer, calls: orders.Calls, clock: orders.Clock, doubles: Doubles
    ) -> None:
        state = dataclasses.replace(
            at.state(), relations=set(self.relations.values()), secrets={SECRET}
        )
        super().__init__(doubles.ctx, state, calls)
        self.at, self.clock, self.workspace = at, clock, at.workspace
        self.cluster, self.about = doubles.cluster, doubles.host
        self.config = at.config | {"hf-token": SECRET.id}
        self.replace(config=self.config)
        self.about.clear()
        self.mount()

    @classmethod
    def events(cls) -> list[str]:
        return [name for name in super().events() if not name.endswith(" last")]

    def changes(self) -> dict[str, collections.abc.Callable[[], object]]:
        cluster = self.cluster
        return {
            "slurmctld stops responding": lambda: vars(cluster).update(silent=1000),
            "slurmctld hangs": lambda: vars(cluster).update(hung=True),
            "slurmctld responds": lambda: vars(cluster).update(silent=0, hung=False),
            "slurmctld refuses": lambda: vars(cluster).update(
                submit_refusal="sbatch: error: Batch job submission failed"
            ),
            "the controller forgets its jobs": lambda: vars(cluster).update(forgets=True),
            "jobs run": lambda: self.set_states("RUNNING"),
            "jobs end": lambda: self.set_states("COMPLETED"),
            "jobs fail": lambda: self.set_states("FAILED"),
            "the workspace is not mounted": lambda: self.about.update(mount=""),
            "the mount hangs": lambda: self.about.update(probe=DOWN),
            "the workspace is mounted": self.mount,
            "apt fails": lambda: self.about.update(
                apt=CommandError("apt-get exited 100: no network")
            ),
            "apt works": lambda: self.about.pop("apt", None),
            "the token changes": lambda: self.grant({"token": "hf_second"}),
            "the token is malformed": lambda: self.grant({"tokens": "hf_second"}),
            "the token is withdrawn": lambda: self.replace(secrets=set()),
            "config without a token": lambda: self.replace(config=self.at.config),
            "config malformed": lambda: self.replace(
                config=self.config | {"torch-build": "fastest"}
            ),
            "config nobody": lambda: self.replace(config=self.config | {"submit-user": "nosuch"}),
            "config": lambda: self.replace(config=self.config),
        }

    def mount(self) -> None:
        self.about.update(mount=str(self.workspace), probe=mounts.Result(mounts.State.RIGHT))

    def grant(self, content: collections.abc.Mapping[str, str]) -> None:
        self.replace(
            secrets={
                dataclasses.replace(
                    SECRET, tracked_content=dict(content), latest_content=dict(content)
                )
            }
        )

    def set_states(self, state: str) -> None:
        for job in self.cluster.jobs:
            job.states = [(state, 0 if state != "FAILED" else 256)]

    def event(self, name: str) -> typing.Any:
        if name == "secret_changed":
            known = next(iter(self.state.secrets), None)
            return self.ctx.on.secret_changed(known) if known is not None else None
        return super().event(name)

    def settle(self) -> object:
        vars(self.cluster).update(silent=0, hung=False, submit_refusal="", forgets=False)
        self.set_states("COMPLETED")
        self.clock.passes(86400)
        self.mount()
        self.about.pop("apt", None)
        self.grant(SECRET.tracked_content)
        self.replace(config=self.config)
        for name in ("juju-info created", "juju-info joined", "config_changed", "update_status"):
            self.emit(name)
        without_jobs = self.files(".secrets")
        self.cluster.states = [("RUNNING", 0)]
        before = len(self.cluster.jobs)
        self.emit("action submit-ddp last")
        return {
            "status": self.state.unit_status,
            "folders": {path.name: oct(path.stat().st_mode) for path in self.workspace.iterdir()},
            "run": [name for name in self.files("runs/last") if not name.startswith("logs")],
            "submitted": [job.name for job in self.cluster.jobs[before:]],
            "tokens": (without_jobs, self.files(".secrets")),
            "left over": [
                name
                for name in self.files(".")
                if "/." in f"/{name}" and not name.startswith(".secrets")
            ],
        }

    def files(self, folder: str) -> list[str]:
        top = self.workspace / folder
        return sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())


@pytest.mark.timeout(7200)
def test_every_order_ends_in_the_same_state(
    ready: Trainer,
    cluster: Cluster,
    host: dict[str, typing.Any],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    calls, clock = orders.Calls(), orders.Clock(monkeypatch)
    calls.watch_files(monkeypatch)
    for module in (jobs, nodes):
        monkeypatch.setattr(module, "run", calls.watch_run(cluster.run))
    monkeypatch.setattr(
        host_module, "account", lambda name: (pwd.getpwnam if name == USER else ACCOUNT)(name)
    )
    ensure = host_module.apt.ensure_packages
    hangs = orders.raising(lambda: CommandTimeout("apt-get: no answer within 600 s"))
    monkeypatch.setattr(host_module.apt, "ensure_packages", calls.watch(ensure, fails=hangs))
    place, doubles = orders.Place(tmp_path, cluster), Doubles(ready.new_context(), cluster, host)

    def make() -> LoginHost:
        place.restore()
        clock.restart()
        return LoginHost(ready, calls, clock, doubles)

    orders.check(monkeypatch, make)
