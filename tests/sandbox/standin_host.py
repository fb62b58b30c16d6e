"""A stand-in's charm under Scenario, on a host whose systemd, packages and Slurm are played."""

import collections.abc
import dataclasses
import importlib.util
import json
import pathlib
import shutil
import types
import typing

import ops
import pytest
import slurm_controller
import slurmd_node
import yaml
from common import service, wire
from ops import testing

from slurm_ddp.commands import CommandError, Completed

STANDINS = pathlib.Path(__file__).resolve().parents[2] / "sandbox" / "standins"
NAMES = ("cephfs-server-proxy", "slurmctld", "slurmd", "sackd", "slurmdbd", "slurmrestd", "mysql")

AUTH_ID, JWT_ID = "secret:cvq4d2nmp25c77uodvq0", "secret:d0i1k2nmp25c77uodvqg"
# The databag that slurmctld writes, as read on a deployment of upstream (the identifiers are examples).
CONTROLLER = {
    "auth_key": '""',
    "auth_key_id": '""',
    "auth_secret_id": f'"{AUTH_ID}"',
    "controllers": '["10.0.0.5:6817"]',
    "jwt_key": '""',
    "jwt_secret_id": '""',
    "slurmconfig": "{}",
}
SLURMD_C = (
    "NodeName=vm CPUs=224 Boards=1 SocketsPerBoard=2 CoresPerSocket=56 ThreadsPerCore=2 RealMemory=2063937 "
    "Gres=gpu:nvidia_h200:8\nFound gpu:nvidia_h200:8 with Autodetect=nvidia\nUpTime=0-01:00:00\n"
)
CONF = (
    "cpus=224 boards=1 socketsperboard=2 corespersocket=56 threadspercore=2 realmemory=2063937  memspeclimit=1024 "
    "features=compute cpuspeclist="
) + ",".join(map(str, range(112, 224)))


class FakeHost:
    """A host's systemd, packages and Slurm's commands; any other command is an error of the test.

    Attributes:
        done: the changes, in order.
        failing: commands that fail, written as in `done`.
        nodes: the controller's nodes, name -> (base state, reason).
        is_silent: the controller does not answer.
        owners: the account that each file was given to.
    """

    def __init__(self, root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.etc, self.defaults = root / "slurm", root / "default"
        self.done: list[str] = []
        self.failing: set[str] = set()
        self.active: set[str] = set()
        self.installed: set[str] = set()
        self.nodes: dict[str, tuple[str, str]] = {}
        self.is_silent: bool | str = False  # or `until restart NAME`
        self.owners: dict[str, str] = {}
        for folder in (self.etc, self.defaults, root / "checkpoint"):
            folder.mkdir()
        for name in NAMES[:-1]:
            (self.defaults / name).write_text("")
        monkeypatch.setattr(service, "ETC", self.etc)
        monkeypatch.setattr(service, "VAR", root)
        monkeypatch.setattr(service, "DEFAULTS", self.defaults)
        monkeypatch.setattr(service, "LIMITS", root / "limits")
        monkeypatch.setattr(
            slurm_controller, "_CLUSTER_NAMES", (root / "checkpoint" / "clustername",)
        )
        for module in (service, slurmd_node):
            monkeypatch.setattr(module, "run", self.run)
        monkeypatch.setattr(service.apt, "ensure_packages", self.install)
        monkeypatch.setattr(service.apt, "is_installed", lambda name: name in self.installed)
        monkeypatch.setattr(service.systemd, "is_active", lambda name: name in self.active)
        monkeypatch.setattr(
            service.systemd, "ensure_dropin", lambda unit, *_: self.do(f"dropin {unit}")
        )
        monkeypatch.setattr(
            service.shutil, "chown", lambda path, user=None, group=None: self.own(path, user)
        )

    def own(self, path: pathlib.Path, user: object) -> None:
        self.owners[pathlib.Path(path).name.removeprefix(".").removesuffix(".swp")] = str(user)

    def do(self, what: str) -> None:
        self.done.append(what)
        if what in self.failing:
            raise CommandError(f"{what} exited 1")

    def install(self, names: collections.abc.Sequence[str]) -> None:
        self.do(f"install {' '.join(names)}")
        self.installed.update(names)

    def run(self, *argv: str, check: bool = True, **_: object) -> Completed:
        command, *arguments = argv
        output = getattr(self, pathlib.Path(command).name.replace("-", "_"))(*arguments)
        if output is None and check:
            raise CommandError(f"{pathlib.Path(command).name} exited 1")
        return Completed(1 if output is None else 0, output or "", "")

    def systemctl(self, verb: str, *arguments: str) -> str:
        *flags, unit = arguments
        self.do(" ".join([verb, *flags, unit]))
        assert verb in ("mask", "unmask", "stop", "disable", "enable", "restart", "reload"), verb
        if verb == "restart":
            self.active.add(unit)
            self.is_silent = self.is_silent and self.is_silent != f"until restart {unit}"
        elif verb == "stop":
            self.active.discard(unit)
        return ""

    def scontrol(self, *arguments: str) -> str | None:
        name = arguments[-1]
        if self.is_silent:
            return None
        if arguments[:2] == ("show", "node"):
            return "" if name in self.nodes else None
        if arguments[:3] == ("--json", "show", "node"):
            state, reason = self.nodes[name]
            return json.dumps(
                {"nodes": [{"state": [*state.split("+"), "DYNAMIC_NORM"], "reason": reason}]}
            )
        if arguments == ("ping", "--json"):
            ping = {"hostname": "juju-1234-0", "pinged": "UP", "mode": "primary"}
            return json.dumps({"pings": [ping]})
        assert arguments[0] in ("update", "delete", "reconfigure"), arguments
        self.do(f"scontrol {' '.join(arguments)}")
        return ""

    def slurmd(self, option: str) -> str:
        assert option == "-C"
        return SLURMD_C

    def dpkg_query(self, *arguments: str) -> str:
        assert arguments[:2] == ("--show", "--showformat=${Version}")
        return "24.11.5-4+deb13u1"

    def openssl(self, *arguments: str) -> str:
        assert arguments == ("genrsa", "-traditional", "2048")
        self.done.append("genrsa")
        return f"-----BEGIN RSA PRIVATE KEY-----\n{len(self.done)}\n-----END RSA PRIVATE KEY-----\n"

    def systemd_sysusers(self, *arguments: str) -> str:
        self.do(f"systemd-sysusers {arguments[-1]}")
        return ""

    def cp(self, option: str, source: str, target: str) -> str:
        assert option == "--archive"
        self.do(f"cp {pathlib.Path(source).name}")
        shutil.copytree(source, target)
        return ""

    def text(self, name: str) -> str:
        return (self.etc / name).read_text()

    def lines(self, name: str) -> list[str]:
        return self.text(name).splitlines()

    def options(self, name: str) -> str:
        return (self.defaults / name).read_text().strip()

    def keys(self) -> list[str]:
        return [entry["k"] for entry in json.loads(self.text("slurm.jwks"))["keys"]]

    def since(self) -> list[str]:
        """List the commands since the last call."""
        done, self.done = self.done, []
        return done


def metadata(name: str) -> dict[str, typing.Any]:
    return yaml.safe_load((STANDINS / name / "charmcraft.yaml").read_text())


def charm(name: str) -> types.ModuleType:
    """Return src/charm.py of a stand-in; all of them call their module `charm`."""
    spec = importlib.util.spec_from_file_location(
        f"standin_{name}", STANDINS / name / "src" / "charm.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SHORT = CONF.replace("  ", " ")
DATABASE_ID = "secret:d1i1k2nmp25c77uodvqg"
DATABASE = {"secret-user": DATABASE_ID, "endpoints": "10.0.0.9:3306,10.0.0.8:3306"}
KEYS = CONTROLLER | {"controllers": "[]", "jwt_secret_id": f'"{JWT_ID}"'}


class Standin:
    """A charm under Scenario, with a state that each event changes."""

    def __init__(
        self, name: str, host: FakeHost, monkeypatch: pytest.MonkeyPatch, base: str = "ubuntu@24.04"
    ) -> None:
        self.name, self.host, self.module = name, host, charm(name)
        root = host.etc.parent / "charm"
        root.mkdir(exist_ok=True)
        (root / "base").write_text(base)
        declared = metadata(name)
        config, actions = declared.pop("config", None), declared.pop("actions", None)
        classes = [
            item
            for item in vars(self.module).values()
            if isinstance(item, type)
            and issubclass(item, ops.CharmBase)
            and item.__module__ == self.module.__name__
        ]
        app = "compute" if name == "slurmd" else name
        self.ctx = testing.Context(
            classes[0],
            meta=declared,
            config=config,
            actions=actions,
            app_name=app,
            unit_id=0,
            charm_root=root,
        )
        self.relations: dict[str, testing.RelationBase] = {}
        self.state = testing.State(leader=name in ("slurmctld", "slurmdbd", "mysql"))
        host.installed.add(name)
        if name in ("slurmctld", "slurmdbd"):
            monkeypatch.setattr(
                self.module.socket,
                "gethostname",
                lambda: f"juju-1234-{0 if name == 'slurmctld' else 3}",
            )
        if name == "slurmctld":
            slurm_controller.SERVICE.set_auth_key("a2V5", "1")
            self.secrets(AUTH_ID, {"key": "a2V5", "keyid": "1"}, label=wire.AUTH_LABEL, owner="app")
            self.secrets(JWT_ID, {"key": "pem"}, label=wire.JWT_LABEL, owner="app")
            self.relate(
                "peer",
                testing.PeerRelation("slurmctld-peer", local_app_data={"cluster_name": '"ddp"'}),
            )
            self.update(
                networks={testing.Network("slurmctld-peer", ingress_addresses=["10.0.0.5"])}
            )
        else:
            self.secrets(AUTH_ID, {"key": "a2V5", "keyid": "1"})
        if name == "slurmd":
            slurmd_node.SERVICE.set_options({"--conf": CONF, "-Z": True, "-N": "compute-0"})
        if name == "slurmdbd":
            self.secrets(JWT_ID, {"key": "pem"})
            self.secrets(DATABASE_ID, {"username": "relation-4", "password": "pw"})
            self.relate("peer", testing.PeerRelation("slurmdbd-peer"))
            self.update(networks={testing.Network("slurmdbd-peer", ingress_addresses=["10.0.0.7"])})

    def update(self, **fields: typing.Any) -> None:
        self.state = dataclasses.replace(self.state, **fields)

    def secrets(self, identifier: str, content: dict[str, str], **rest: typing.Any) -> None:
        self.update(secrets={*self.state.secrets, testing.Secret(content, id=identifier, **rest)})

    def relate(self, name: str, relation: testing.RelationBase) -> None:
        self.relations[name] = relation
        others = {
            other
            for other in self.state.relations
            if other.endpoint != relation.endpoint or name != "peer"
        }
        self.update(relations={*others, relation})

    def share(self, data: dict[str, str], **fields: typing.Any) -> None:
        """Replace the application's data in the peer relation, and other fields of it."""
        self.relate(
            "peer", dataclasses.replace(self.relation("peer"), local_app_data=data, **fields)
        )

    def join(self, name: str, values: dict[str, typing.Any]) -> None:
        """Relate the charm as a scenario writes it."""
        app, endpoint = values.pop("app", ""), name
        data: dict[str, typing.Any] = values
        if name == "partition":
            sent = values.pop("sent", True)
            app, endpoint = app or "compute", "slurmd"
            described = {"partitionname": app, "nodes": [app]} | values
            data = {"partition": json.dumps(described)} if sent else {}
            name = app if app != "compute" else name
        elif name in ("controller", "keys"):
            app, endpoint = app or "slurmctld", "slurmctld"
            data = (
                {}
                if values.pop("empty", False)
                else (CONTROLLER if name == "controller" else KEYS) | values
            )
        elif name == "database":
            endpoint = "slurmdbd"
        elif name == "mysql":
            endpoint, data = (
                "database",
                {key: DATABASE.get(key, text) for key, text in values.items()},
            )
        relation = testing.Relation(endpoint, remote_app_name=app or endpoint, remote_app_data=data)
        self.relate(name, relation)

    def run(self, event: str, **params: object) -> testing.State:
        """Run `start`, `relation-changed` of the last relation, `relation-changed NAME`, or an action."""
        kind, _, name = event.partition(" ")
        if kind.startswith("relation-"):
            relation = self.relation(name)
            make: typing.Any = getattr(self.ctx.on, kind.replace("-", "_"))
            leaves = {"remote_unit": 0, "departing_unit": 0} if kind == "relation-departed" else {}
            self.state = self.ctx.run(make(relation, **leaves), self.state)
        elif kind == "secret-changed":  # the key of auth/slurm gets a new revision
            (secret,) = (one for one in self.state.secrets if one.label == wire.AUTH_LABEL)
            new = dataclasses.replace(secret, latest_content={"key": "bmV3", "keyid": "2"})
            self.update(secrets={*(self.state.secrets - {secret}), new})
            self.state = self.ctx.run(self.ctx.on.secret_changed(new), self.state)
        elif kind == "action":
            self.state = self.ctx.run(self.ctx.on.action(name, params=params), self.state)
        else:
            self.state = self.ctx.run(getattr(self.ctx.on, kind.replace("-", "_"))(), self.state)
        return self.state

    def play(self, event: str | dict[str, object]) -> testing.State:
        """Run an event as a scenario writes it."""
        if isinstance(event, str):
            return self.run(event)
        return self.run(
            f"action {event['action']}", **{key: event[key] for key in event if key != "action"}
        )

    def relation(self, name: str = "") -> testing.RelationBase:
        """Return a relation as it is now; the last one if it is not named."""
        return self.state.get_relation(self.relations[name or [*self.relations][-1]].id)
