"""The stand-ins behave as upstream's charms: a scenario or a test for each row of the table in sandbox/standins/README.md."""

import base64
import collections.abc
import dataclasses
import importlib.util
import json
import pathlib
import re
import sys
import types
import typing

import ops
import pytest
import yaml
from ops import testing

from slurm_ddp.run import CommandError, Completed

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STANDINS = ROOT / "sandbox" / "standins"
UPSTREAM = yaml.safe_load((ROOT / "tests" / "bundle" / "upstream.yaml").read_text())["charms"]
NAMES = ("slurmctld", "slurmd", "sackd", "slurmdbd", "slurmrestd", "mysql")

sys.path[:0] = [str(STANDINS), *(str(STANDINS / name / "src") for name in NAMES)]

import mariadb  # noqa: E402
import slurm_controller  # noqa: E402
import slurmd_node  # noqa: E402
from common import service, wire  # noqa: E402

# canonical/slurm-charms@e292de4, charms/*/charmcraft.yaml: option defaults and actions.
DEFAULTS = {
    "slurmctld": {
        "cluster-name": "",
        "default-partition": "",
        "slurm-conf-parameters": "",
        "cgroup-parameters": "",
        "email-from-name": "Charmed HPC Admin",
    },
    "slurmd": {"default-node-state": "down", "default-node-reason": "", "partition-config": ""},
    "sackd": {},
    "slurmdbd": {"slurmdbd-conf-parameters": ""},
    "slurmrestd": {},
    "mysql": {"cluster-name": None, "profile": "production", "profile-limit-memory": None},
}
ACTIONS = {
    "slurmctld": {"set-node-state": {"nodes": "string", "state": "string", "reason": "string"}},
    "slurmd": {"set-node-config": {"parameters": "string", "reset": "boolean"}},
}
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
    "features=compute"
)


class FakeHost:
    """A host's systemd, packages and Slurm's commands; any other command is an error of the test.

    Attributes:
        done: what changed something, in order.
        failing: commands that fail, written as in `done`.
        nodes: what the controller knows, name -> (base state, reason).
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
        monkeypatch.setattr(slurm_controller, "_CLUSTER_NAME", root / "checkpoint" / "clustername")
        for module in (service, slurmd_node):
            monkeypatch.setattr(module, "run", self.run)
        monkeypatch.setattr(service.apt, "ensure_packages", self.install)
        monkeypatch.setattr(service.apt, "is_installed", lambda name: name in self.installed)
        monkeypatch.setattr(service.systemd, "is_active", lambda name: name in self.active)
        monkeypatch.setattr(service.systemd, "ensure_dropin", lambda unit, *_: self.do(f"dropin {unit}"))
        monkeypatch.setattr(service.shutil, "chown", lambda path, user=None, group=None: self.own(path, user))

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
            return json.dumps({"nodes": [{"state": [*state.split("+"), "DYNAMIC_NORM"], "reason": reason}]})
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

    def groupadd(self, *arguments: str) -> str:
        self.do(f"groupadd {arguments[-1]}")
        return ""

    def useradd(self, *arguments: str) -> str:
        self.do(f"useradd {arguments[-1]}")
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


@pytest.fixture
def host(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    return FakeHost(tmp_path, monkeypatch)


def metadata(name: str) -> dict[str, typing.Any]:
    return yaml.safe_load((STANDINS / name / "charmcraft.yaml").read_text())


def charm(name: str) -> types.ModuleType:
    """Return src/charm.py of a stand-in; all of them call their module `charm`."""
    spec = importlib.util.spec_from_file_location(f"standin_{name}", STANDINS / name / "src" / "charm.py")
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

    def __init__(self, name: str, host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name, self.host, self.module = name, host, charm(name)
        declared = metadata(name)
        config, actions = declared.pop("config", None), declared.pop("actions", None)
        classes = [
            item
            for item in vars(self.module).values()
            if isinstance(item, type) and issubclass(item, ops.CharmBase) and item.__module__ == self.module.__name__
        ]
        app = "compute" if name == "slurmd" else name
        self.ctx = testing.Context(classes[0], meta=declared, config=config, actions=actions, app_name=app, unit_id=0)
        self.relations: dict[str, testing.RelationBase] = {}
        self.state = testing.State(leader=name in ("slurmctld", "slurmdbd", "mysql"))
        host.installed.add(name)
        if name in ("slurmctld", "slurmdbd"):
            monkeypatch.setattr(
                self.module.socket, "gethostname", lambda: f"juju-1234-{0 if name == 'slurmctld' else 3}"
            )
        if name == "slurmctld":
            slurm_controller.SERVICE.set_auth_key("a2V5", "1")
            self.secrets(AUTH_ID, {"key": "a2V5", "keyid": "1"}, label=wire.AUTH_LABEL, owner="app")
            self.secrets(JWT_ID, {"key": "pem"}, label=wire.JWT_LABEL, owner="app")
            self.relate("peer", testing.PeerRelation("slurmctld-peer", local_app_data={"cluster_name": '"ddp"'}))
            self.update(networks={testing.Network("slurmctld-peer", ingress_addresses=["10.0.0.5"])})
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
        others = {other for other in self.state.relations if other.endpoint != relation.endpoint or name != "peer"}
        self.update(relations={*others, relation})

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
            data = {} if values.pop("empty", False) else (CONTROLLER if name == "controller" else KEYS) | values
        elif name == "database":
            endpoint = "slurmdbd"
        elif name == "mysql":
            endpoint, data = "database", {key: DATABASE.get(key, text) for key, text in values.items()}
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
        elif kind == "action":
            self.state = self.ctx.run(self.ctx.on.action(name, params=params), self.state)
        else:
            self.state = self.ctx.run(getattr(self.ctx.on, kind.replace("-", "_"))(), self.state)
        return self.state

    def play(self, event: str | dict[str, object]) -> testing.State:
        """Run an event as a scenario writes it."""
        if isinstance(event, str):
            return self.run(event)
        return self.run(f"action {event['action']}", **{key: event[key] for key in event if key != "action"})

    def relation(self, name: str = "") -> testing.RelationBase:
        """Return a relation as it is now; the last one if it is not named."""
        return self.state.get_relation(self.relations[name or [*self.relations][-1]].id)


Make = collections.abc.Callable[[str], Standin]


@pytest.fixture
def make(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda name: Standin(name, host, monkeypatch)


# --- metadata, and the table ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_endpoints_are_upstreams(name: str):
    declared, upstream = metadata(name), UPSTREAM[name]
    for role in ("provides", "requires"):
        ours, theirs = (
            {
                endpoint: {key: facts[key] for key in ("interface", "scope", "limit") if key in facts}
                for endpoint, facts in side.get(role, {}).items()
            }
            for side in (declared, upstream)
        )
        assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
def test_options_are_upstreams(name: str):
    options = metadata(name).get("config", {}).get("options", {})
    assert {option: facts["type"] for option, facts in options.items()} == UPSTREAM[name]["options"]
    assert {option: facts.get("default") for option, facts in options.items()} == DEFAULTS[name]


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_upstreams_and_take_nothing_else(name: str):
    actions = metadata(name).get("actions", {})
    params = {
        action: {param: facts["type"] for param, facts in declared.get("params", {}).items()}
        for action, declared in actions.items()
    }
    assert params == ACTIONS.get(name, {})
    assert all(declared["additionalProperties"] is False for declared in actions.values())


def rows() -> list[list[str]]:
    """Return the rows of the table of behaviours: behaviour, source, the words at that line, test."""
    lines = (STANDINS / "README.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return [row for row in table if len(row) == 4 and row[0] != "behaviour"]


def test_each_row_of_the_table_has_its_source_and_a_test():
    assert len(rows()) > 40
    for behaviour, source, words, test in rows():
        assert re.fullmatch(r"`(charms|internal|pkg|hpc-libs)/[\w/.-]+\.py:\d+`", source), behaviour
        assert re.fullmatch(r"`.+`", words), behaviour
        name = test.strip("`").removeprefix("test_")
        assert name in SCENARIOS or callable(globals()[f"test_{name}"]), behaviour


# --- scenarios --------------------------------------------------------------------------------------------------------

SCENARIOS: dict[str, dict[str, typing.Any]] = yaml.safe_load((HERE / "standins.yaml").read_text())
CASES = {
    name + (f"-{number}" if number else ""): {key: value for key, value in one.items() if key != "cases"} | case
    for name, one in SCENARIOS.items()
    for number, case in enumerate(one.get("cases", [{}]))
}


def prepare(made: Standin, case: dict[str, typing.Any]) -> None:
    """Bring charm and host to where a scenario begins."""
    host = made.host
    made.update(config=case.get("config", {}), leader=case.get("leader", made.state.leader))
    if case.get("name") == "":
        made.relate("peer", testing.PeerRelation("slurmctld-peer"))
    if "node" in case:
        options = {"--conf": case["node"], "-Z": True, "-N": "compute-0"} if case["node"] else {}
        slurmd_node.SERVICE.set_options(options)
    for one in case.get("with", []):
        ((name, values),) = one.items() if isinstance(one, dict) else ((one, DATABASE if one == "mysql" else {}),)
        made.join(name, dict(values))
    host.nodes.update({name: tuple(node) for name, node in case.get("nodes", {}).items()})
    for event in case.get("first", []):
        made.play(event)
    for name, text in case.get("write", {}).items():
        (host.etc / name).write_text(text)
    host.active -= set(case.get("dead", []))
    host.failing.update(case.get("failing", []))
    host.is_silent = case.get("silent", False)
    host.since()


def check(made: Standin, case: dict[str, typing.Any]) -> None:
    """Compare host and unit with a scenario's end."""
    host, out = made.host, made.state
    if "done" in case:
        assert host.done == case["done"]
    if "status" in case:
        kind, _, text = case["status"].partition(": ")
        assert out.unit_status.name == kind
        assert (
            out.unit_status.message[: len(text) - 3] + "..." == text
            if text.endswith("...")
            else (out.unit_status.message == text)
        )
    if "deferred" in case:
        assert len(out.deferred) == case["deferred"]
    for name, lines in case.get("files", {}).items():
        assert lines == (host.lines(name) if (host.etc / name).exists() else None)
    for name, lines in case.get("contains", {}).items():
        assert set(lines) <= set(host.lines(name))
    for name, beginnings in case.get("absent", {}).items():
        assert not [line for line in host.lines(name) if line.startswith(tuple(beginnings))]
    for name, line in case.get("last", {}).items():
        assert host.lines(name)[-1] == line
    if "includes" in case:
        lines = [line for line in host.lines("slurm.conf") if line.startswith("include ")]
        assert sorted(lines) == sorted(f"include {name}" for name in case["includes"])
        assert lines[0] == f"include {case['includes'][0]}"
    if "options" in case:
        reset = SHORT.replace(" memspeclimit", " gres=gpu:nvidia_h200:8 memspeclimit")
        wanted = case["options"].replace("CONF", CONF).replace("SHORT", SHORT).replace("RESET", reset)
        assert host.options(made.name) == f"{made.name.upper()}_OPTIONS={wanted}"
    if "published" in case:
        wanted = {"controller": CONTROLLER, "keys": KEYS}.get(str(case["published"]), case["published"])
        assert made.relation().local_app_data == wanted
    for label in case.get("granted", []):
        assert list(out.get_secret(label=label).remote_grants) == [made.relation().id]
    for name, account in case.get("owner", {}).items():
        assert host.owners[name] == account
    for name in case.get("private", []):
        assert (host.etc / name).stat().st_mode & 0o777 == 0o600
    if "results" in case:
        assert made.ctx.action_results == case["results"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_scenario(case: dict[str, typing.Any], make: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slurmd_node, "gpus", lambda: ["gpu:nvidia_h200:8"])
    made = make(case["charm"])
    prepare(made, case)
    *events, last = case["run"]
    for event in events:
        made.play(event)
    if "error" in case:
        with pytest.raises(testing.errors.UncaughtCharmError) as error:
            made.play(last)
        assert case["error"] in str(error.value.__cause__)
    elif "fails" in case:
        with pytest.raises(testing.ActionFailed) as failed:
            made.play(last)
        assert case["fails"] in failed.value.message
    else:
        made.play(last)
    check(made, case)


# --- what the daemons have in common ----------------------------------------------------------------------------------


def test_a_daemon_is_installed_but_neither_runs_nor_starts_at_boot(host: FakeHost):
    host.active.add("slurmd")
    slurmd_node.SERVICE.install()
    assert host.done == [
        "mask --runtime slurmd",
        "install slurmd slurm-client",
        "unmask --runtime slurmd",
        "disable --now munge",
        "dropin slurmd.service",
        "stop slurmd",
        "disable slurmd",
    ]
    assert host.active == set()
    assert "* hard memlock unlimited" in (service.LIMITS).read_text().splitlines()


def test_the_options_file_is_upstreams_to_the_letter(host: FakeHost):
    path = host.defaults / "slurmd"
    path.write_text('# Additional options\n#SLURMD_OPTIONS=""\n')
    slurmd_node.set_node(slurmd_node.describe("compute", []))
    slurmd_node.set_name("compute-0")
    slurmd_node.SERVICE.set_controllers(["juju-1-0:6817", "juju-1-1:6817"])
    line = f"SLURMD_OPTIONS=--conf '{CONF}' -Z -N compute-0 --conf-server juju-1-0:6817,juju-1-1:6817\n"
    assert path.read_text() == f'# Additional options\n#SLURMD_OPTIONS=""\n{line}'


def test_options_of_others_survive(host: FakeHost):
    path = host.defaults / "slurmd"
    path.write_text("SLURMD_OPTIONS=--conf 'cpus=2 gres=gpu:h200:8' -Z -N n-0 --parameters numa_node_as_socket -vv\n")
    assert slurmd_node.SERVICE.options() == {
        "--conf": "cpus=2 gres=gpu:h200:8",
        "-Z": True,
        "-N": "n-0",
        "--parameters": "numa_node_as_socket",
        "-vv": True,
    }
    before = path.read_text().replace("SLURMD_OPTIONS=", "").strip()
    slurmd_node.SERVICE.set_options(slurmd_node.SERVICE.options())
    assert host.options("slurmd") == f"SLURMD_OPTIONS={before}"


def test_a_comment_ends_the_options(host: FakeHost):
    (host.defaults / "slurmd").write_text("SLURMD_OPTIONS=-Z -N n-0 # mine\n")
    assert slurmd_node.SERVICE.options() == {"-Z": True, "-N": "n-0"}


def test_a_key_of_auth_slurm_has_2048_bytes_and_its_file_belongs_to_the_daemon(host: FakeHost):
    first, second = service.new_auth_key(), service.new_auth_key()
    assert len(base64.b64decode(first["key"])) == 2048
    assert first != second
    daemon = slurm_controller.SERVICE
    daemon.set_auth_key("b2xk", "1")
    assert json.loads(host.text("slurm.jwks")) == {"keys": [{"alg": "HS256", "kty": "oct", "kid": "1", "k": "b2xk"}]}
    assert host.owners["slurm.jwks"] == "slurm"
    assert (host.etc / "slurm.jwks").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="is empty"):
        daemon.set_auth_key("", "1")


# --- slurmctld --------------------------------------------------------------------------------------------------------


def test_slurmctld_is_installed_stopped_and_with_its_keys_as_secrets_of_the_application(make: Make, host: FakeHost):
    slurmctld = make("slurmctld")
    (host.etc / "slurm.jwks").unlink()
    slurmctld.update(secrets=set())
    out = slurmctld.run("install")
    auth, jwt = out.get_secret(label="slurm-auth-key"), out.get_secret(label="slurm-jwt-key")
    assert (auth.owner, jwt.owner) == ("app", "app")
    assert set(auth.tracked_content) == {"key", "keyid"}
    assert jwt.tracked_content["key"].startswith("-----BEGIN RSA PRIVATE KEY-----")
    assert host.keys() == [auth.tracked_content["key"]]
    assert host.text("jwt_hs256.key") == jwt.tracked_content["key"]
    assert "restart slurmctld" not in host.done
    assert {port.port for port in out.opened_ports} == {6817, 9092}
    assert out.unit_status == testing.WaitingStatus("waiting for slurmctld to start")


def test_key_files_come_back_from_the_secrets(make: Make, host: FakeHost):
    slurmctld = make("slurmctld")
    (host.etc / "slurm.jwks").unlink()
    slurmctld.run("install")
    assert host.keys() == ["a2V5"]
    assert host.text("jwt_hs256.key") == "pem"


def test_the_clusters_name_is_latched_when_the_peer_relation_is_made(make: Make):
    slurmctld = make("slurmctld")
    slurmctld.relate("peer", testing.PeerRelation("slurmctld-peer"))
    for name, latched in (("ddp", '"ddp"'), ("other", '"ddp"')):
        slurmctld.update(config={"cluster-name": name})
        slurmctld.run("relation-created peer")
        assert slurmctld.relation("peer").local_app_data["cluster_name"] == latched
    unnamed = make("slurmctld")
    unnamed.relate("peer", testing.PeerRelation("slurmctld-peer"))
    unnamed.run("relation-created peer")
    assert json.loads(unnamed.relation("peer").local_app_data["cluster_name"]).startswith("charmed-hpc-")


def test_the_default_partition_moves_at_config_changed(make: Make, host: FakeHost):
    slurmctld = make("slurmctld")
    slurmctld.update(config={"default-partition": "one"})
    slurmctld.run("start")
    for app in ("one", "two"):
        slurmctld.join("partition", {"app": app})
    for app in ("one", "two"):
        slurmctld.run(f"relation-changed {app}")
    slurmctld.update(config={"default-partition": "two"})
    slurmctld.run("config-changed")
    assert "default=False" in host.lines("slurm.conf.one")[1]
    assert "default=True" in host.lines("slurm.conf.two")[1]
    slurmctld.update(config={"default-partition": "gone"})
    slurmctld.run("config-changed")
    assert "default=False" in host.lines("slurm.conf.two")[1]


def test_a_cluster_that_ran_alone_takes_the_id_that_slurmdbd_gives_it(make: Make):
    slurmctld = make("slurmctld")
    slurmctld.join("database", {"hostname": '"10.0.0.7"'})
    slurmctld.run("start")
    name = typing.cast(typing.Any, slurm_controller)._CLUSTER_NAME
    name.write_text("ddp|415")
    slurmctld.run("relation-changed")
    assert not name.exists()
    name.write_text("ddp|351")
    slurmctld.run("relation-changed")
    assert name.read_text() == "ddp|351"


def test_slurmrestd_waits_for_slurmdbd_but_gets_the_settings_at_any_restart(make: Make):
    slurmctld = make("slurmctld")
    slurmctld.join("database", {})
    slurmctld.join("slurmrestd", {})
    slurmctld.run("start")
    assert slurmctld.run("relation-created").unit_status == testing.WaitingStatus("waiting for slurmdbd")
    assert slurmctld.relation().local_app_data == {}
    slurmctld.update(deferred=[])
    slurmctld.run("config-changed")
    data = slurmctld.relation().local_app_data
    assert json.loads(data["auth_secret_id"]) == AUTH_ID
    settings = json.loads(data["slurmconfig"])
    assert settings["slurm.conf"]["clustername"] == "ddp"
    assert {"slurm.conf.accounting", "slurm.conf.profiling", "slurm.conf.overrides"} < set(settings)


# --- slurmd, slurmdbd, slurmrestd -------------------------------------------------------------------------------------


def test_memory_for_the_system_is_at_most_half(host: FakeHost, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "slurmd", lambda _: "NodeName=vm CPUs=1 RealMemory=900\nUpTime=0-00:01:00")
    node = slurmd_node.describe("compute", ["gpu:tesla_t4:1"])
    assert str(node) == "cpus=1 realmemory=900 memspeclimit=450 gres=gpu:tesla_t4:1 features=compute"


def test_a_machine_that_wants_a_reboot_gets_it_before_slurmd_is_installed(
    make: Make, host: FakeHost, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    slurmd, required = make("slurmd"), tmp_path / "reboot-required"
    required.touch()
    monkeypatch.setattr(slurmd.module, "_REBOOT_REQUIRED", required)
    monkeypatch.setattr(ops.Unit, "reboot", lambda _, now: host.do(f"reboot now={now}"))
    slurmd.run("install")
    assert (host.done[0], host.done[-1]) == ("reboot now=True", "reboot now=False")


def test_gpus_are_counted_by_model(monkeypatch: pytest.MonkeyPatch):
    class Nvml:
        NVMLError = RuntimeError
        names: typing.ClassVar = ["NVIDIA  L40S", "Tesla T4", "NVIDIA L40S"]

        def nvmlInit(self) -> None: ...  # noqa: N802
        def nvmlShutdown(self) -> None: ...  # noqa: N802
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            return 3

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
            return index

        def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
            return self.names[handle]

    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", typing.cast(typing.Any, nvml))
    assert slurmd_node.gpus() == ["gpu:nvidia_l40s:2", "gpu:tesla_t4:1"]
    monkeypatch.setattr(Nvml, "nvmlInit", lambda self: (_ for _ in ()).throw(RuntimeError("no driver")))
    assert slurmd_node.gpus() == []


def test_a_database_that_moves_is_not_followed(make: Make, host: FakeHost):
    slurmdbd = make("slurmdbd")
    slurmdbd.join("keys", {})
    slurmdbd.join("mysql", DATABASE)
    for event in ("config-changed", "relation-changed keys", "relation-changed mysql"):
        slurmdbd.run(event)
    host.since()
    data = {"secret-user": DATABASE_ID, "endpoints": "10.0.0.10:3306"}
    moved = dataclasses.replace(slurmdbd.relation("mysql"), remote_app_data=data)
    others = {relation for relation in slurmdbd.state.relations if relation.id != moved.id}
    slurmdbd.update(relations={*others, moved})
    slurmdbd.run("relation-changed mysql")
    assert host.done == []
    assert "storagehost=10.0.0.9" in host.lines("slurmdbd.conf")


def test_slurmrestd_runs_as_an_account_of_its_own_on_port_6820(
    make: Make, host: FakeHost, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    slurmrestd = make("slurmrestd")
    monkeypatch.setattr(slurmrestd.module, "run", host.run)
    monkeypatch.setattr(slurmrestd.module, "_UNIT", tmp_path / "slurmrestd.service")
    monkeypatch.setattr(slurmrestd.module.systemd, "daemon_reload", lambda: None)
    out = slurmrestd.run("install")
    assert {"groupadd slurmrestd", "useradd slurmrestd"} <= set(host.done)
    unit = (tmp_path / "slurmrestd.service").read_text()
    assert "ExecStart=/usr/sbin/slurmrestd $SLURMRESTD_OPTIONS -vv 0.0.0.0:6820" in unit
    assert 'Environment="SLURM_JWT=daemon"' in unit
    assert {port.port for port in out.opened_ports} == {6820}


# --- mysql ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wants_secret", [True, False])
def test_mysql_makes_a_database_once_and_publishes_where_it_is(
    make: Make, monkeypatch: pytest.MonkeyPatch, wants_secret: bool
):
    made, done = make("mysql"), list[tuple[str, ...]]()
    monkeypatch.setattr(mariadb, "create", lambda *arguments: done.append(("create", *arguments)))
    monkeypatch.setattr(mariadb, "drop_user", lambda *arguments: done.append(("drop", *arguments)))
    monkeypatch.setattr(mariadb, "version", lambda: "10.11.18")
    monkeypatch.setattr(mariadb, "is_running", lambda: True)
    asked = {"database": "slurm_acct_db"} | ({"requested-secrets": '["username"]'} if wants_secret else {})
    made.relate("slurmdbd", testing.Relation("database", remote_app_name="slurmdbd", remote_app_data=asked, id=4))
    made.update(networks={testing.Network("database", ingress_addresses=["10.0.0.9"])})
    out = made.run("relation-changed")
    given = made.relation().local_app_data
    assert (given["endpoints"], given["database"]) == ("10.0.0.9:3306", "slurm_acct_db")
    content = given
    if wants_secret:
        secret = out.get_secret(id=given["secret-user"])
        assert secret.remote_grants == {4: {"slurmdbd"}}
        assert "password" not in given
        content = secret.tracked_content
    assert done == [("create", "slurm_acct_db", "relation-4", content["password"])]
    made.run("relation-changed")
    assert len(done) == 1
    made.run("relation-broken")
    assert done[-1] == ("drop", "relation-4")


def test_sql_goes_over_standard_input_and_names_are_checked(monkeypatch: pytest.MonkeyPatch):
    texts: list[str] = []

    def run(*argv: str, stdin: str, secrets: tuple[str, ...]) -> Completed:
        assert argv == ("/usr/bin/mariadb", "--batch", "--skip-column-names")
        assert "pw" not in argv
        texts.append(stdin)
        return Completed(0, "10.11.18-MariaDB-0+deb12u1\n", "")

    monkeypatch.setattr(mariadb, "run", run)
    mariadb.create("slurm_acct_db", "relation-4", "pw")
    assert "GRANT ALL PRIVILEGES ON `slurm_acct_db`.* TO 'relation-4'@'%';" in texts[0]
    assert mariadb.version() == "10.11.18"
    with pytest.raises(ValueError, match="is no name"):
        mariadb.create("x`; DROP", "relation-4", "pw")
