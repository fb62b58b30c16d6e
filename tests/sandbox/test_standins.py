"""The stand-ins behave as upstream's charms: one test for each row of the table in sandbox/standins/README.md."""

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

ROOT = pathlib.Path(__file__).resolve().parents[2]
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
    "slurmctld": {
        "rotate-auth-key": {},
        "rotate-jwt-key": {},
        "show-current-config": {},
        "set-node-state": {"nodes": "string", "state": "string", "reason": "string"},
    },
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
        self.is_silent = False
        self.owners: dict[str, str] = {}
        self.files_at_restart: dict[str, str] = {}
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
            self.files_at_restart = {path.name: path.read_text() for path in self.etc.iterdir()}
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


@dataclasses.dataclass
class Standin:
    """A charm under Scenario."""

    ctx: testing.Context[ops.CharmBase]
    module: types.ModuleType

    def run(self, event: object, state: testing.State) -> testing.State:
        return self.ctx.run(typing.cast(typing.Any, event), state)

    def fails(self, event: object, state: testing.State) -> BaseException:
        """Read the cause of a hook error."""
        with pytest.raises(testing.errors.UncaughtCharmError) as error:
            self.run(event, state)
        assert error.value.__cause__ is not None
        return error.value.__cause__


def standin(name: str, app: str) -> Standin:
    module, declared = charm(name), metadata(name)
    config, actions = declared.pop("config", None), declared.pop("actions", None)
    classes = [
        item
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, ops.CharmBase) and item.__module__ == module.__name__
    ]
    context = testing.Context(classes[0], meta=declared, config=config, actions=actions, app_name=app, unit_id=0)
    return Standin(context, module)


def auth_secret(key: str = "a2V5", **rest: typing.Any) -> testing.Secret:
    return testing.Secret({"key": key, "keyid": "1"}, id=AUTH_ID, **rest)


def rotated(label: str = wire.AUTH_LABEL) -> testing.Secret:
    return testing.Secret(
        {"key": "b2xk", "keyid": "1"}, latest_content={"key": "bmV3", "keyid": "2"}, id=AUTH_ID, label=label
    )


def controller(**changes: str) -> testing.Relation:
    return testing.Relation("slurmctld", remote_app_name="slurmctld", remote_app_data=CONTROLLER | changes)


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


def test_each_row_of_the_table_has_its_source_and_a_test_of_this_file():
    assert len(rows()) > 40
    for behaviour, source, words, test in rows():
        assert re.fullmatch(r"`(charms|internal|pkg|hpc-libs)/[\w/.-]+\.py:\d+`", source), behaviour
        assert re.fullmatch(r"`.+`", words), behaviour
        assert callable(globals()[test.strip("`")]), behaviour


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


def test_keys_of_auth_slurm_are_added_and_the_newest_kept(host: FakeHost):
    daemon = slurm_controller.SERVICE
    with pytest.raises(service.SlurmError, match="holds no key"):
        daemon.keep_newest_auth_key()
    daemon.set_auth_key("b2xk", "1")
    daemon.add_auth_key("bmV3", "2")
    assert json.loads(host.text("slurm.jwks")) == {
        "keys": [
            {"alg": "HS256", "kty": "oct", "kid": "1", "k": "b2xk"},
            {"alg": "HS256", "kty": "oct", "kid": "2", "k": "bmV3"},
        ]
    }
    daemon.keep_newest_auth_key()
    assert host.keys() == ["bmV3"]
    assert host.owners["slurm.jwks"] == "slurm"
    assert (host.etc / "slurm.jwks").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="is empty"):
        daemon.set_auth_key("", "1")


def test_a_fresh_key_has_2048_bytes():
    first, second = service.new_auth_key(), service.new_auth_key()
    assert len(base64.b64decode(first["key"])) == 2048
    assert first != second


# --- slurmctld --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Slurmctld(Standin):
    """The controller's charm, with a peer relation and the secrets of an install."""

    peer: testing.PeerRelation

    def state(self, *relations: testing.RelationBase, **rest: typing.Any) -> testing.State:
        secrets = {
            testing.Secret({"key": "a2V5", "keyid": "1"}, id=AUTH_ID, label=wire.AUTH_LABEL, owner="app"),
            testing.Secret({"key": "pem"}, id=JWT_ID, label=wire.JWT_LABEL, owner="app"),
        }
        network = testing.Network("slurmctld-peer", ingress_addresses=["10.0.0.5"])
        fields: dict[str, typing.Any] = {"leader": True, "secrets": secrets, "networks": {network}}
        return testing.State(relations={self.peer, *relations}, **(fields | rest))

    def started(self, host: FakeHost, *relations: testing.RelationBase, **rest: typing.Any) -> testing.State:
        """Return the state after install's and start's effects on the host."""
        state = self.state(*relations, **rest)
        self.run(self.ctx.on.start(), state)
        host.since()
        return state


@pytest.fixture
def slurmctld(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Slurmctld:
    made = standin("slurmctld", "slurmctld")
    monkeypatch.setattr(made.module.socket, "gethostname", lambda: "juju-1234-0")
    host.installed.add("slurmctld")
    slurm_controller.SERVICE.set_auth_key("a2V5", "1")
    peer = testing.PeerRelation("slurmctld-peer", local_app_data={"cluster_name": '"ddp"'})
    return Slurmctld(made.ctx, made.module, peer)


def partition(app: str = "compute", **options: object) -> testing.Relation:
    data = {"partitionname": app, "nodes": [app]} | options
    return testing.Relation("slurmd", remote_app_name=app, remote_app_data={"partition": json.dumps(data)})


RESTARTED = ["enable slurmctld", "restart slurmctld", "scontrol reconfigure"]


def test_slurmctld_is_installed_stopped_and_with_its_keys_as_secrets_of_the_application(
    slurmctld: Slurmctld, host: FakeHost
):
    (host.etc / "slurm.jwks").unlink()
    out = slurmctld.run(slurmctld.ctx.on.install(), slurmctld.state(secrets=set()))
    auth, jwt = out.get_secret(label="slurm-auth-key"), out.get_secret(label="slurm-jwt-key")
    assert (auth.owner, jwt.owner) == ("app", "app")
    assert set(auth.tracked_content) == {"key", "keyid"}
    assert jwt.tracked_content["key"].startswith("-----BEGIN RSA PRIVATE KEY-----")
    assert host.keys() == [auth.tracked_content["key"]]
    assert host.text("jwt_hs256.key") == jwt.tracked_content["key"]
    assert "restart slurmctld" not in host.done
    assert {port.port for port in out.opened_ports} == {6817, 9092}
    assert out.unit_status == testing.WaitingStatus("waiting for slurmctld to start")


def test_key_files_come_back_from_the_secrets(slurmctld: Slurmctld, host: FakeHost):
    (host.etc / "slurm.jwks").unlink()
    slurmctld.run(slurmctld.ctx.on.install(), slurmctld.state())
    assert host.keys() == ["a2V5"]
    assert host.text("jwt_hs256.key") == "pem"


def test_the_clusters_name_is_latched_when_the_peer_relation_is_made(slurmctld: Slurmctld):
    peer = testing.PeerRelation("slurmctld-peer")
    slurmctld.peer = peer
    out = slurmctld.run(slurmctld.ctx.on.relation_created(peer), slurmctld.state(config={"cluster-name": "ddp"}))
    assert out.get_relation(peer.id).local_app_data["cluster_name"] == '"ddp"'
    again = dataclasses.replace(out, config={"cluster-name": "other"})
    out = slurmctld.run(slurmctld.ctx.on.relation_created(out.get_relation(peer.id)), again)
    assert out.get_relation(peer.id).local_app_data["cluster_name"] == '"ddp"'
    out = slurmctld.run(slurmctld.ctx.on.relation_created(peer), slurmctld.state())
    assert json.loads(out.get_relation(peer.id).local_app_data["cluster_name"]).startswith("charmed-hpc-")


def test_slurmctld_starts_at_start_without_a_partition_or_accounting(slurmctld: Slurmctld, host: FakeHost):
    out = slurmctld.run(slurmctld.ctx.on.start(), slurmctld.state())
    assert host.done == ["enable slurmctld", "restart slurmctld"]
    lines = host.lines("slurm.conf")
    for line in (
        "clustername=ddp",
        "slurmctldhost=juju-1234-0(10.0.0.5)",
        "authtype=auth/slurm",
        "credtype=cred/slurm",
        "authalttypes=auth/jwt",
        "grestypes=gpu",
        "maxnodecount=65533",
        "proctracktype=proctrack/cgroup",
        "taskplugin=task/cgroup,task/affinity",
        "selecttype=select/cons_tres",
        "selecttypeparameters=cr_cpu_memory",
        "slurmctldparameters=enable_configless",
        'rebootprogram="/usr/sbin/reboot --reboot"',
    ):
        assert line in lines
    for absent in ("returntoservice", "killwait", "prolog", "epilog", "accounting", "defmem", "mpidefault", "metrics"):
        assert not any(line.startswith(absent) for line in lines)
    includes = ["slurm.conf.accounting", "slurm.conf.profiling", "slurm.conf.overrides"]
    assert [line.removeprefix("include ") for line in lines if line.startswith("include")] == includes
    assert [host.text(name) for name in includes] == ["\n"] * 3
    assert out.unit_status == testing.ActiveStatus("primary - UP")


def test_slurm_conf_is_written_once(slurmctld: Slurmctld, host: FakeHost):
    state = slurmctld.started(host)
    before = host.text("slurm.conf").replace("65533", "7")
    (host.etc / "slurm.conf").write_text(before)
    slurmctld.run(slurmctld.ctx.on.start(), state)
    assert host.text("slurm.conf") == before
    assert host.done == ["enable slurmctld", "restart slurmctld"]


def test_gres_conf_is_written_only_where_there_is_none(slurmctld: Slurmctld, host: FakeHost):
    state = slurmctld.started(host)
    assert host.text("gres.conf") == "autodetect=nvidia\n"
    (host.etc / "gres.conf").write_text("NodeName=n Name=gpu File=/dev/nvidia0\n")
    for event in (slurmctld.ctx.on.start(), slurmctld.ctx.on.config_changed()):
        slurmctld.run(event, state)
        assert host.text("gres.conf") == "NodeName=n Name=gpu File=/dev/nvidia0\n"


def test_start_waits_for_the_clusters_name(slurmctld: Slurmctld, host: FakeHost):
    slurmctld.peer = testing.PeerRelation("slurmctld-peer")
    out = slurmctld.run(slurmctld.ctx.on.start(), slurmctld.state())
    assert out.unit_status == testing.WaitingStatus("waiting for the cluster's name")
    assert len(out.deferred) == 1
    assert host.done == []


def test_a_slurm_conf_that_slurmctld_refuses_is_a_hook_error_at_start(slurmctld: Slurmctld, host: FakeHost):
    host.failing.add("restart slurmctld")
    options = {"slurm-conf-parameters": "AccountingStorageTRES=gres/gpu"}
    state = slurmctld.run(slurmctld.ctx.on.config_changed(), slurmctld.state(config=options))
    assert host.lines("slurm.conf.overrides") == ["accountingstoragetres=gres/gpu"]
    assert isinstance(slurmctld.fails(slurmctld.ctx.on.start(), state), CommandError)
    assert host.lines("slurm.conf.overrides") == ["accountingstoragetres=gres/gpu"]


def test_config_changed_restarts_and_reconfigures_though_nothing_changed(slurmctld: Slurmctld, host: FakeHost):
    state = slurmctld.started(host)
    for _ in range(2):
        slurmctld.run(slurmctld.ctx.on.config_changed(), state)
        assert host.since() == RESTARTED


def test_nothing_is_restarted_while_slurmctld_does_not_run(slurmctld: Slurmctld, host: FakeHost):
    state = slurmctld.started(host)
    host.active.clear()
    out = slurmctld.run(slurmctld.ctx.on.config_changed(), state)
    assert host.done == []
    assert out.unit_status == testing.WaitingStatus("waiting for slurmctld to start")


@pytest.mark.parametrize("command", ["restart slurmctld", "scontrol reconfigure"])
def test_a_restart_that_fails_in_config_changed_is_blocked_and_not_tried_again(
    slurmctld: Slurmctld, host: FakeHost, command: str
):
    state = slurmctld.started(host)
    host.failing.add(command)
    out = slurmctld.run(slurmctld.ctx.on.config_changed(), state)
    assert isinstance(out.unit_status, testing.BlockedStatus)
    assert out.unit_status.message.startswith("slurmctld was not reconfigured")
    assert out.deferred == []


def test_overrides_come_last_so_that_the_last_of_duplicates_wins(slurmctld: Slurmctld, host: FakeHost):
    relation = partition()
    state = slurmctld.started(host, relation, config={"slurm-conf-parameters": "GresTypes=gpu,shard\nMaxNodeCount=4"})
    slurmctld.run(slurmctld.ctx.on.config_changed(), state)
    slurmctld.run(slurmctld.ctx.on.relation_changed(relation), state)
    assert host.lines("slurm.conf.overrides") == ["grestypes=gpu,shard", "maxnodecount=4"]
    lines = host.lines("slurm.conf")
    assert {"grestypes=gpu", "maxnodecount=65533"} <= set(lines)
    assert lines[-1] == "include slurm.conf.overrides"


def test_cgroup_conf_is_written_at_each_config_changed(slurmctld: Slurmctld, host: FakeHost):
    state = slurmctld.started(host, config={"cgroup-parameters": "ConstrainDevices=no\nAllowedRAMSpace=90"})
    slurmctld.run(slurmctld.ctx.on.config_changed(), state)
    assert host.lines("cgroup.conf") == [
        "constraincores=yes",
        "constraindevices=no",
        "constrainramspace=yes",
        "constrainswapspace=yes",
        "signalchildrenprocesses=yes",
        "allowedramspace=90",
    ]


@pytest.mark.parametrize(
    "parameters",
    [
        "PreemptMode=REQUEUE,GANG",
        "SchedulerParameters=requeue_delay=5",
        "NoSuchKey=1",
        "HealthCheckProgram=/x HealthCheckInterval=300\nHealthCheckInterval=5x",
        "KillOnBadExit=yes",
        "words",
        "MaxNodeCount=1\nMaxNodeCount=2",
    ],
)
def test_a_refused_option_leaves_a_charm_that_observes_nothing(slurmctld: Slurmctld, host: FakeHost, parameters: str):
    state = slurmctld.started(host, relation := partition())
    refused = dataclasses.replace(state, config={"slurm-conf-parameters": parameters})
    for event in (
        slurmctld.ctx.on.config_changed(),
        slurmctld.ctx.on.relation_changed(relation),
        slurmctld.ctx.on.update_status(),
        slurmctld.ctx.on.start(),
        slurmctld.ctx.on.action("set-node-state", params={"nodes": "n", "state": "idle"}),
    ):
        out = slurmctld.run(event, refused)
        text = "fix config: slurm-conf-parameters; see juju debug-log. Until then no event is handled"
        assert out.unit_status == testing.BlockedStatus(text)
    assert host.done == []


def test_both_refused_options_are_named(slurmctld: Slurmctld):
    state = slurmctld.state(config={"slurm-conf-parameters": "x", "cgroup-parameters": "=1"})
    out = slurmctld.run(slurmctld.ctx.on.config_changed(), state)
    assert "cgroup-parameters, slurm-conf-parameters" in out.unit_status.message


def test_configless_cannot_be_switched_off_by_slurmctld_parameters(slurmctld: Slurmctld, host: FakeHost):
    state = slurmctld.started(host, config={"slurm-conf-parameters": "SlurmctldParameters=idle_on_node_suspend"})
    slurmctld.run(slurmctld.ctx.on.config_changed(), state)
    assert host.lines("slurm.conf.overrides") == ["slurmctldparameters=idle_on_node_suspend,enable_configless"]


def test_a_partition_is_included_first_published_and_slurmctld_restarted_at_each_change(
    slurmctld: Slurmctld, host: FakeHost
):
    relation = partition(defaulttime="45:00")
    state = slurmctld.started(host, relation, config={"default-partition": "compute"})
    out = state
    for _ in range(2):
        out = slurmctld.run(slurmctld.ctx.on.relation_changed(relation), state)
        assert host.since() == RESTARTED
        assert host.lines("slurm.conf.compute") == [
            "nodeset=compute feature=compute",
            "partitionname=compute nodes=compute defaulttime=45:00 default=True",
        ]
        includes = [line for line in host.lines("slurm.conf") if line.startswith("include")]
        assert includes[0] == "include slurm.conf.compute"
        assert len(includes) == 4
    assert out.get_relation(relation.id).local_app_data == CONTROLLER
    assert out.get_secret(label=wire.AUTH_LABEL).remote_grants == {relation.id: {"compute"}}


def test_a_partition_waits_until_slurmctld_runs_and_every_application_sent_one(slurmctld: Slurmctld, host: FakeHost):
    relation = partition()
    state = slurmctld.state(relation)
    out = slurmctld.run(slurmctld.ctx.on.relation_changed(relation), state)
    assert out.unit_status == testing.WaitingStatus("waiting for slurmctld to start")
    assert len(out.deferred) == 1
    other = testing.Relation("slurmd", remote_app_name="other")
    state = slurmctld.started(host, relation, other)
    waiting = slurmctld.run(slurmctld.ctx.on.relation_changed(relation), state)
    assert waiting.unit_status == testing.WaitingStatus("waiting for a partition")
    assert waiting.get_relation(relation.id).local_app_data == {}
    started = dataclasses.replace(out, relations=slurmctld.state(relation).relations)
    out = slurmctld.run(slurmctld.ctx.on.update_status(), started)  # the deferred event runs before this one
    assert out.get_relation(relation.id).local_app_data == CONTROLLER
    assert out.deferred == []


def test_the_default_partition_moves_at_config_changed(slurmctld: Slurmctld, host: FakeHost):
    one, two = partition("one"), partition("two")
    state = slurmctld.started(host, one, two, config={"default-partition": "one"})
    for relation in (one, two):
        slurmctld.run(slurmctld.ctx.on.relation_changed(relation), state)
    slurmctld.run(slurmctld.ctx.on.config_changed(), dataclasses.replace(state, config={"default-partition": "two"}))
    assert "default=False" in host.lines("slurm.conf.one")[1]
    assert "default=True" in host.lines("slurm.conf.two")[1]
    slurmctld.run(slurmctld.ctx.on.config_changed(), dataclasses.replace(state, config={"default-partition": "gone"}))
    assert "default=False" in host.lines("slurm.conf.two")[1]


def test_a_removed_partition_leaves_slurm_conf(slurmctld: Slurmctld, host: FakeHost):
    relation = partition()
    state = slurmctld.started(host, relation)
    slurmctld.run(slurmctld.ctx.on.relation_changed(relation), state)
    host.since()
    slurmctld.run(slurmctld.ctx.on.relation_broken(relation), state)
    assert not (host.etc / "slurm.conf.compute").exists()
    assert "include slurm.conf.compute" not in host.lines("slurm.conf")
    assert host.done == RESTARTED


def test_login_hosts_get_a_controller_that_runs(slurmctld: Slurmctld, host: FakeHost):
    relation = testing.Relation("sackd", remote_app_name="sackd")
    out = slurmctld.run(slurmctld.ctx.on.relation_created(relation), slurmctld.state(relation))
    assert out.unit_status == testing.WaitingStatus("waiting for slurmctld to start")
    assert len(out.deferred) == 1
    state = slurmctld.started(host, relation)
    out = slurmctld.run(slurmctld.ctx.on.relation_created(relation), state)
    assert out.get_relation(relation.id).local_app_data == CONTROLLER
    assert out.get_secret(label=wire.AUTH_LABEL).remote_grants == {relation.id: {"sackd"}}
    assert host.done == []


def database(**data: str) -> testing.Relation:
    return testing.Relation("slurmdbd", remote_app_name="slurmdbd", remote_app_data=data)


def test_slurmdbd_gets_both_keys_as_soon_as_it_is_related(slurmctld: Slurmctld):
    relation = database()
    out = slurmctld.run(slurmctld.ctx.on.relation_created(relation), slurmctld.state(relation))
    expected = CONTROLLER | {"controllers": "[]", "jwt_secret_id": f'"{JWT_ID}"'}
    assert out.get_relation(relation.id).local_app_data == expected
    for label in (wire.AUTH_LABEL, wire.JWT_LABEL):
        assert out.get_secret(label=label).remote_grants == {relation.id: {"slurmdbd"}}


def test_accounting_is_on_only_while_slurmdbd_is_related(slurmctld: Slurmctld, host: FakeHost):
    relation = database(hostname='"10.0.0.7"')
    state = slurmctld.started(host, relation)
    slurmctld.run(slurmctld.ctx.on.relation_changed(relation), state)
    accounting = [
        "accountingstoragehost=10.0.0.7",
        "accountingstorageport=6819",
        "accountingstoragetype=accounting_storage/slurmdbd",
    ]
    assert host.lines("slurm.conf.accounting") == accounting
    assert host.files_at_restart["slurm.conf.accounting"].splitlines() == accounting
    assert host.since() == RESTARTED
    slurmctld.run(slurmctld.ctx.on.relation_broken(relation), state)
    assert host.text("slurm.conf.accounting") == "\n"
    assert "include slurm.conf.profiling" not in host.lines("slurm.conf")
    assert host.since() == RESTARTED


def test_a_cluster_that_ran_alone_takes_the_id_that_slurmdbd_gives_it(slurmctld: Slurmctld, host: FakeHost):
    relation = database(hostname='"10.0.0.7"')
    state = slurmctld.started(host, relation)
    name = typing.cast(typing.Any, slurm_controller)._CLUSTER_NAME
    name.write_text("ddp|415")
    slurmctld.run(slurmctld.ctx.on.relation_changed(relation), state)
    assert not name.exists()
    name.write_text("ddp|351")
    slurmctld.run(slurmctld.ctx.on.relation_changed(relation), state)
    assert name.read_text() == "ddp|351"


def test_slurmrestd_waits_for_slurmdbd_but_gets_the_settings_at_any_restart(slurmctld: Slurmctld, host: FakeHost):
    relation = testing.Relation("slurmrestd", remote_app_name="slurmrestd")
    state = slurmctld.started(host, relation, database())
    out = slurmctld.run(slurmctld.ctx.on.relation_created(relation), state)
    assert out.unit_status == testing.WaitingStatus("waiting for slurmdbd")
    assert out.get_relation(relation.id).local_app_data == {}
    out = slurmctld.run(slurmctld.ctx.on.config_changed(), state)
    data = out.get_relation(relation.id).local_app_data
    assert json.loads(data["auth_secret_id"]) == AUTH_ID
    settings = json.loads(data["slurmconfig"])
    assert settings["slurm.conf"]["clustername"] == "ddp"
    assert {"slurm.conf.accounting", "slurm.conf.profiling", "slurm.conf.overrides"} < set(settings)


def test_a_new_key_is_valid_here_before_it_is_published(slurmctld: Slurmctld, host: FakeHost):
    state = slurmctld.started(host)
    out = slurmctld.run(slurmctld.ctx.on.action("rotate-auth-key"), state)
    latest = out.get_secret(label=wire.AUTH_LABEL).latest_content
    assert latest is not None
    assert host.keys() == ["a2V5", latest["key"]]
    assert json.loads(host.files_at_restart["slurm.jwks"]) == json.loads(host.text("slurm.jwks"))
    assert host.done == RESTARTED
    assert out.unit_status == testing.WaitingStatus("waiting for all units to take the new key")


def test_a_new_key_that_slurmctld_cannot_use_is_not_published(slurmctld: Slurmctld, host: FakeHost):
    state = slurmctld.started(host)
    host.failing.add("restart slurmctld")
    out = slurmctld.run(slurmctld.ctx.on.action("rotate-auth-key"), state)
    assert out.get_secret(label=wire.AUTH_LABEL).latest_content == {"key": "a2V5", "keyid": "1"}
    assert isinstance(out.unit_status, testing.BlockedStatus)


def test_a_new_jwt_key_replaces_the_old_one(slurmctld: Slurmctld, host: FakeHost):
    out = slurmctld.run(slurmctld.ctx.on.action("rotate-jwt-key"), slurmctld.started(host))
    latest = out.get_secret(label=wire.JWT_LABEL).latest_content
    assert latest is not None
    assert host.text("jwt_hs256.key") == latest["key"] != "pem"
    assert host.done == ["genrsa", *RESTARTED]


def test_the_old_key_goes_when_no_unit_uses_it_any_more(slurmctld: Slurmctld, host: FakeHost):
    state = slurmctld.started(host)
    for name in ("_tracked_revision", "_latest_revision"):
        object.__setattr__(state.get_secret(id=AUTH_ID), name, 2)
    slurm_controller.SERVICE.add_auth_key("bmV3", "2")
    out = slurmctld.run(slurmctld.ctx.on.secret_remove(state.get_secret(id=AUTH_ID), revision=1), state)
    assert host.keys() == ["bmV3"]
    assert host.done == RESTARTED
    assert slurmctld.ctx.removed_secret_revisions == [1]
    assert out.unit_status == testing.ActiveStatus("primary - UP")


def test_an_old_jwt_key_is_not_looked_after(slurmctld: Slurmctld, host: FakeHost):
    state = slurmctld.started(host)
    slurmctld.run(slurmctld.ctx.on.secret_remove(state.get_secret(id=JWT_ID), revision=1), state)
    assert slurmctld.ctx.removed_secret_revisions == []
    assert host.done == []


def test_show_current_config_shows_slurm_conf_without_what_it_includes(slurmctld: Slurmctld, host: FakeHost):
    state = slurmctld.started(host, config={"slurm-conf-parameters": "MessageTimeout=30"})
    slurmctld.run(slurmctld.ctx.on.config_changed(), state)
    slurmctld.run(slurmctld.ctx.on.action("show-current-config"), state)
    shown = (slurmctld.ctx.action_results or {})["slurm.conf"]
    assert shown == host.text("slurm.conf").strip()
    assert "messagetimeout" not in shown


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ("drain", "bad fan", "state=drain reason='bad fan'"),
        ("down", "", "state=down reason='n/a'"),
        ("idle", "ignored", "state=idle"),
    ],
)
def test_set_node_state_puts_quotes_into_the_reason(
    slurmctld: Slurmctld, host: FakeHost, state: str, reason: str, words: str
):
    params = {"nodes": "compute-[0-3]", "state": state, "reason": reason}
    slurmctld.run(slurmctld.ctx.on.action("set-node-state", params=params), slurmctld.state())
    assert host.done == [f"scontrol update nodename=compute-[0-3] {words}"]


def test_set_node_state_fails_in_slurms_words(slurmctld: Slurmctld, host: FakeHost):
    host.is_silent = True
    with pytest.raises(testing.ActionFailed) as failed:
        slurmctld.run(
            slurmctld.ctx.on.action("set-node-state", params={"nodes": "n", "state": "idle"}), slurmctld.state()
        )
    assert failed.value.message == "scontrol update nodename=n state=idle: scontrol exited 1"


def test_update_status_looks_only(slurmctld: Slurmctld, host: FakeHost):
    state = slurmctld.started(host)
    host.active.clear()
    out = slurmctld.run(slurmctld.ctx.on.update_status(), state)
    assert host.done == []
    assert out.unit_status == testing.WaitingStatus("waiting for slurmctld to start")


@pytest.mark.parametrize("endpoint", ["influxdb", "oci-runtime", "smtp", "cos-agent"])
def test_slurmctld_names_the_relation_that_is_not_played(slurmctld: Slurmctld, host: FakeHost, endpoint: str):
    state = slurmctld.started(host, testing.Relation(endpoint))
    out = slurmctld.run(slurmctld.ctx.on.update_status(), state)
    assert out.unit_status == testing.BlockedStatus(f"the sandbox does not play the relation {endpoint}: remove it")


def test_a_second_controller_is_refused(slurmctld: Slurmctld):
    out = slurmctld.run(slurmctld.ctx.on.update_status(), slurmctld.state(leader=False))
    assert out.unit_status == testing.BlockedStatus("the sandbox plays one slurmctld unit only: remove this one")


# --- slurmd -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def slurmd(host: FakeHost, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Standin:
    made = standin("slurmd", "compute")
    monkeypatch.setattr(made.module, "_REBOOT_REQUIRED", tmp_path / "reboot-required")
    host.installed.add("slurmd")
    slurmd_node.SERVICE.set_options({"--conf": CONF, "-Z": True, "-N": "compute-0"})
    return made


REGISTERED = ["enable slurmd", "restart slurmd"]


def joined(**rest: typing.Any) -> tuple[testing.Relation, testing.State]:
    relation = controller()
    fields: dict[str, typing.Any] = {"secrets": {auth_secret()}}
    return relation, testing.State(relations={relation}, **(fields | rest))


def test_slurmd_describes_the_machine_once_at_install_without_gpus(slurmd: Standin, host: FakeHost):
    (host.defaults / "slurmd").write_text("")
    out = slurmd.run(slurmd.ctx.on.install(), testing.State())
    assert host.options("slurmd") == f"SLURMD_OPTIONS=--conf '{CONF}' -Z -N compute-0"
    assert {port.port for port in out.opened_ports} == {6818}
    assert out.unit_status == testing.BlockedStatus("add a controller: juju integrate compute:slurmctld slurmctld")


def test_memory_for_the_system_is_at_most_half(host: FakeHost, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "slurmd", lambda _: "NodeName=vm CPUs=1 RealMemory=900\nUpTime=0-00:01:00")
    node = slurmd_node.describe("compute", ["gpu:tesla_t4:1"])
    assert str(node) == "cpus=1 realmemory=900 memspeclimit=450 gres=gpu:tesla_t4:1 features=compute"


def test_a_machine_that_wants_a_reboot_gets_it_before_slurmd_is_installed(
    slurmd: Standin, host: FakeHost, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ops.Unit, "reboot", lambda _, now: host.do(f"reboot now={now}"))
    slurmd.module._REBOOT_REQUIRED.write_text("")
    slurmd.run(slurmd.ctx.on.install(), testing.State())
    assert (host.done[0], host.done[-1]) == ("reboot now=True", "reboot now=False")


def test_the_leader_publishes_the_partition_under_the_applications_name(slurmd: Standin):
    relation = testing.Relation("slurmctld", remote_app_name="slurmctld")
    options = {"partition-config": "MaxTime=10 State=up PartitionName=x Nodes=ALL"}
    state = testing.State(leader=True, relations={relation}, config=options)
    for event in (slurmd.ctx.on.relation_created(relation), slurmd.ctx.on.config_changed()):
        out = slurmd.run(event, state)
        published = json.loads(out.get_relation(relation.id).local_app_data["partition"])
        assert published == {"maxtime": 10, "state": "up", "partitionname": "compute", "nodes": ["compute"]}
    out = slurmd.run(slurmd.ctx.on.config_changed(), dataclasses.replace(state, leader=False))
    assert out.get_relation(relation.id).local_app_data == {}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"default-node-state": "drain"}, "default-node-state"),
        ({"partition-config": "MaxTime"}, "partition-config"),
        ({"partition-config": "Default=YES"}, "partition-config"),
        ({"default-node-state": "x", "partition-config": "NoSuchKey=1"}, "default-node-state, partition-config"),
    ],
)
def test_a_slurmd_with_a_refused_option_observes_nothing(
    slurmd: Standin, host: FakeHost, options: dict[str, str], names: str
):
    relation, state = joined(config=options, leader=True)
    for event in (slurmd.ctx.on.relation_changed(relation), slurmd.ctx.on.config_changed()):
        out = slurmd.run(event, state)
        text = f"fix config: {names}; see juju debug-log. Until then no event is handled"
        assert out.unit_status == testing.BlockedStatus(text)
        assert out.get_relation(relation.id).local_app_data == {}
    assert host.done == []


@pytest.mark.parametrize("change", [{"auth_secret_id": '""'}, {"controllers": "[]"}])
def test_slurmd_defers_until_the_controller_is_ready(slurmd: Standin, host: FakeHost, change: dict[str, str]):
    relation = controller(**change)
    out = slurmd.run(slurmd.ctx.on.relation_changed(relation), testing.State(relations={relation}))
    assert out.unit_status == testing.WaitingStatus("waiting for slurmctld")
    assert len(out.deferred) == 1
    assert host.done == []


@pytest.mark.parametrize(
    ("options", "update"),
    [
        ({}, "scontrol update nodename=compute-0 state=down reason='n/a'"),
        ({"default-node-reason": "burn in"}, "scontrol update nodename=compute-0 state=down reason='burn in'"),
        ({"default-node-state": "idle", "default-node-reason": "x"}, "scontrol update nodename=compute-0 state=idle"),
    ],
)
def test_a_new_node_gets_its_state_right_after_the_restart(
    slurmd: Standin, host: FakeHost, options: dict[str, str], update: str
):
    relation, state = joined(config=options)
    out = slurmd.run(slurmd.ctx.on.relation_changed(relation), state)
    assert host.done == [*REGISTERED, update]  # nobody waits for the node's registration
    assert host.options("slurmd").endswith("--conf-server 10.0.0.5:6817")
    assert host.keys() == ["a2V5"]
    assert host.owners["slurm.jwks"] == "root"
    assert out.unit_status == testing.ActiveStatus()


def test_a_known_node_keeps_its_state_but_slurmd_restarts_at_each_change(slurmd: Standin, host: FakeHost):
    host.nodes["compute-0"] = ("IDLE+DRAIN", "bad fan")
    relation, state = joined(config={"default-node-state": "idle"})
    for _ in range(2):
        slurmd.run(slurmd.ctx.on.relation_changed(relation), state)
        assert host.since() == REGISTERED


def test_a_silent_controller_counts_as_a_new_node_and_idle_ends_a_drain(
    slurmd: Standin, host: FakeHost, monkeypatch: pytest.MonkeyPatch
):
    host.nodes["compute-0"] = ("IDLE+DRAIN", "bad fan")
    relation, state = joined(config={"default-node-state": "idle"})
    host.is_silent = True
    monkeypatch.setattr(host, "systemctl", lambda verb, unit: answer(verb))

    def answer(verb: str) -> str:  # the controller is back by the time slurmd was restarted
        host.is_silent = host.is_silent and verb != "restart"
        return ""

    slurmd.run(slurmd.ctx.on.relation_changed(relation), state)
    assert host.done == ["scontrol update nodename=compute-0 state=idle"]


@pytest.mark.parametrize("command", ["restart slurmd", "scontrol update nodename=compute-0 state=down reason='n/a'"])
def test_a_slurmd_that_cannot_be_reconfigured_is_blocked_and_not_tried_again(
    slurmd: Standin, host: FakeHost, command: str
):
    host.failing.add(command)
    relation, state = joined()
    out = slurmd.run(slurmd.ctx.on.relation_changed(relation), state)
    assert isinstance(out.unit_status, testing.BlockedStatus)
    assert out.deferred == []


def test_update_status_of_slurmd_looks_only(slurmd: Standin, host: FakeHost):
    _, state = joined()
    out = slurmd.run(slurmd.ctx.on.update_status(), state)
    assert out.unit_status == testing.WaitingStatus("waiting for slurmd to start")
    assert host.done == []


def test_a_removed_relation_deletes_the_node_and_stops_slurmd(slurmd: Standin, host: FakeHost):
    relation, state = joined()
    slurmd.run(slurmd.ctx.on.relation_changed(relation), state)
    host.since()
    out = slurmd.run(slurmd.ctx.on.relation_broken(relation), state)
    assert host.done == ["scontrol delete nodename=compute-0", "stop slurmd", "disable slurmd"]
    assert host.options("slurmd") == f"SLURMD_OPTIONS=--conf '{CONF}' -Z -N compute-0"
    assert out.unit_status == testing.BlockedStatus("add a controller: juju integrate compute:slurmctld slurmctld")


def test_a_node_with_jobs_is_not_deleted_and_the_unit_blocks(slurmd: Standin, host: FakeHost):
    relation, state = joined()
    host.failing.add("scontrol delete nodename=compute-0")
    out = slurmd.run(slurmd.ctx.on.relation_broken(relation), state)
    assert isinstance(out.unit_status, testing.BlockedStatus)
    assert len(out.deferred) == 1
    assert "stop slurmd" not in host.done


def test_a_removed_unit_leaves_its_node_in_slurm(slurmd: Standin, host: FakeHost):
    # Scenario lets units of the other application leave only: here that carries this one's name.
    relation = testing.Relation("slurmctld", remote_app_name="compute", remote_app_data=CONTROLLER)
    state = testing.State(relations={relation}, secrets={auth_secret()})
    departed = slurmd.ctx.on.relation_departed(relation, remote_unit=0, departing_unit=0)
    out = slurmd.run(departed, state)
    slurmd.run(slurmd.ctx.on.relation_broken(out.get_relation(relation.id)), out)
    assert host.done == []


def test_slurmd_restarts_with_a_rotated_key(slurmd: Standin, host: FakeHost):
    secret = rotated()
    state = testing.State(relations={controller()}, secrets={secret})
    slurmd.run(slurmd.ctx.on.secret_changed(secret), state)
    assert host.keys() == ["bmV3"]
    assert host.done == ["restart slurmd"]
    host.failing.add("restart slurmd")
    assert isinstance(slurmd.fails(slurmd.ctx.on.secret_changed(secret), state), CommandError)


def test_another_secret_changes_nothing(slurmd: Standin, host: FakeHost):
    secret = rotated("other")
    slurmd.run(slurmd.ctx.on.secret_changed(secret), testing.State(relations={controller()}, secrets={secret}))
    assert host.done == []


def configure(slurmd: Standin, **params: object) -> dict[str, object]:
    slurmd.run(slurmd.ctx.on.action("set-node-config", params=params), testing.State())
    return dict(slurmd.ctx.action_results or {})


def test_set_node_config_of_an_unknown_node_changes_the_options_only(slurmd: Standin, host: FakeHost):
    assert configure(slurmd, parameters="Weight=5 Gres=gpu:h200:8") == {"accepted": True}
    assert host.options("slurmd").endswith("features=compute weight=5 gres=gpu:h200:8' -Z -N compute-0")
    assert host.done == []


@pytest.mark.parametrize(
    ("known", "update"),
    [
        (("IDLE+DRAIN", "bad fan"), "state=idle"),
        (("IDLE+DRAIN+INVALID_REG", "x"), "state=idle"),
        (("DOWN", "'n/a'"), "state=down reason='n/a'"),
        (("DOWN", "bad fan"), "state=down reason='bad fan'"),
        (("DOWN", ""), "state=down reason='n/a'"),
    ],
)
def test_set_node_config_registers_the_node_anew_in_its_base_state(
    slurmd: Standin, host: FakeHost, known: tuple[str, str], update: str
):
    host.nodes["compute-0"] = known
    assert configure(slurmd, parameters="weight=5") == {"accepted": True}
    assert host.done == [
        "scontrol delete nodename=compute-0",
        *REGISTERED,
        f"scontrol update nodename=compute-0 {update}",
    ]
    assert host.options("slurmd").startswith(f"SLURMD_OPTIONS=--conf '{CONF.replace('  ', ' ')} weight=5'")


def test_set_node_config_fails_where_slurmd_has_not_registered_yet(slurmd: Standin, host: FakeHost):
    host.nodes["compute-0"] = ("IDLE", "")
    host.failing.add("scontrol update nodename=compute-0 state=idle")
    with pytest.raises(testing.ActionFailed) as failed:
        configure(slurmd, parameters="weight=5")
    assert "the node was not registered anew" in failed.value.message
    assert slurmd.ctx.action_results == {"accepted": False}
    assert "weight=5" in host.options("slurmd")


def test_set_node_config_reset_asks_nvml(slurmd: Standin, host: FakeHost, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slurmd_node, "gpus", lambda: ["gpu:nvidia_h200:8"])
    configure(slurmd, parameters="", reset=True)
    assert "gres=gpu:nvidia_h200:8 memspeclimit=1024" in host.options("slurmd")


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


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("state=idle", "failed validation"),
        ("state=down", "set what the charm sets"),
        ("NodeName=x", "set what the charm sets"),
        ("Port=1", "set what the charm sets"),
        ("topology=a", "unrecognized configuration field `topology`"),
        ("weight", "failed validation"),
        ("weight=heavy", "failed validation"),
    ],
)
def test_set_node_config_refuses_what_slurmutils_or_upstream_refuses(
    slurmd: Standin, host: FakeHost, parameters: str, words: str
):
    before = host.options("slurmd")
    with pytest.raises(testing.ActionFailed) as failed:
        configure(slurmd, parameters=parameters)
    assert words in failed.value.message
    assert slurmd.ctx.action_results == {"accepted": False}
    assert host.options("slurmd") == before


def test_set_node_config_breaks_on_options_that_slurmutils_does_not_know(slurmd: Standin, host: FakeHost):
    slurmd_node.SERVICE.set_options({"--conf": "cpus=1 extra=x", "-Z": True, "-N": "compute-0"})
    error = slurmd.fails(slurmd.ctx.on.action("set-node-config", params={"parameters": "weight=5"}), testing.State())
    assert "unrecognized configuration field `extra`" in str(error)


# --- sackd ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sackd(host: FakeHost) -> Standin:
    host.installed.add("sackd")
    return standin("sackd", "sackd")


def test_sackd_restarts_at_each_change_and_stops_with_the_relation(sackd: Standin, host: FakeHost):
    relation, state = joined()
    out = state
    for _ in range(2):
        out = sackd.run(sackd.ctx.on.relation_changed(relation), state)
        assert host.since() == ["enable sackd", "restart sackd"]
    assert host.options("sackd") == "SACKD_OPTIONS=--conf-server 10.0.0.5:6817"
    assert host.owners["slurm.jwks"] == "slurm"
    assert out.unit_status == testing.ActiveStatus()
    out = sackd.run(sackd.ctx.on.relation_broken(relation), state)
    assert host.since() == ["stop sackd", "disable sackd"]
    assert host.options("sackd") == "SACKD_OPTIONS="
    assert out.unit_status == testing.BlockedStatus("add a controller: juju integrate sackd:slurmctld slurmctld")


def test_a_sackd_that_does_not_start_is_a_hook_error(sackd: Standin, host: FakeHost):
    host.failing.add("restart sackd")
    relation, state = joined()
    assert isinstance(sackd.fails(sackd.ctx.on.relation_changed(relation), state), CommandError)


def test_sackd_reloads_a_rotated_key_and_defers_where_that_fails(sackd: Standin, host: FakeHost):
    secret = rotated()
    state = testing.State(relations={controller()}, secrets={secret})
    sackd.run(sackd.ctx.on.secret_changed(secret), state)
    assert host.keys() == ["bmV3"]
    assert host.done == ["reload sackd"]
    host.failing.add("reload sackd")
    out = sackd.run(sackd.ctx.on.secret_changed(secret), state)
    assert isinstance(out.unit_status, testing.BlockedStatus)
    assert len(out.deferred) == 1


# --- slurmdbd ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Slurmdbd(Standin):
    """The accounting daemon's charm between its two relations."""

    to_controller: testing.Relation
    to_database: testing.Relation

    def state(self, **rest: typing.Any) -> testing.State:
        secrets = {
            auth_secret(),
            testing.Secret({"key": "pem"}, id=JWT_ID),
            testing.Secret({"username": "relation-4", "password": "pw"}, id="secret:d1i1k2nmp25c77uodvqg"),
        }
        network = testing.Network("slurmdbd-peer", ingress_addresses=["10.0.0.7"])
        relations = {testing.PeerRelation("slurmdbd-peer"), self.to_controller, self.to_database}
        fields: dict[str, typing.Any] = {
            "leader": True,
            "relations": relations,
            "secrets": secrets,
            "networks": {network},
        }
        return testing.State(**(fields | rest))

    def start(self) -> testing.State:
        """Return the state after all that slurmdbd needs was there, the database last."""
        self.run(self.ctx.on.config_changed(), self.state())
        out = self.run(self.ctx.on.relation_changed(self.to_controller), self.state())
        return self.run(self.ctx.on.relation_changed(out.get_relation(self.to_database.id)), out)


@pytest.fixture
def slurmdbd(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Slurmdbd:
    made = standin("slurmdbd", "slurmdbd")
    monkeypatch.setattr(made.module.socket, "gethostname", lambda: "juju-1234-3")
    host.installed.add("slurmdbd")
    keys = CONTROLLER | {"controllers": "[]", "jwt_secret_id": f'"{JWT_ID}"'}
    database = {"secret-user": "secret:d1i1k2nmp25c77uodvqg", "endpoints": "10.0.0.9:3306,10.0.0.8:3306"}
    return Slurmdbd(
        made.ctx,
        made.module,
        testing.Relation("slurmctld", remote_app_name="slurmctld", remote_app_data=keys),
        testing.Relation("database", remote_app_name="mysql", remote_app_data=database),
    )


def test_slurmdbd_asks_for_its_database_with_credentials_in_a_secret(slurmdbd: Slurmdbd):
    out = slurmdbd.run(slurmdbd.ctx.on.relation_created(slurmdbd.to_database), slurmdbd.state())
    asked = out.get_relation(slurmdbd.to_database.id).local_app_data
    assert asked["database"] == "slurm_acct_db"
    assert {"username", "password"} <= set(json.loads(asked["requested-secrets"]))


def test_slurmdbd_starts_with_controller_and_database_and_publishes_its_host(slurmdbd: Slurmdbd, host: FakeHost):
    waiting = slurmdbd.run(slurmdbd.ctx.on.config_changed(), slurmdbd.state())
    assert waiting.unit_status == testing.WaitingStatus("waiting for slurmdbd to start")
    assert host.done == []
    out = slurmdbd.start()
    assert host.done[-2:] == ["enable slurmdbd", "restart slurmdbd"]
    assert set(host.lines("slurmdbd.conf")) == {
        f"authaltparameters=jwt_key={host.etc}/jwt_hs256.key",
        "authalttypes=auth/jwt",
        "authtype=auth/slurm",
        "dbdaddr=10.0.0.7",
        "dbdhost=juju-1234-3",
        "dbdport=6819",
        "logfile=/var/log/slurm/slurmdbd.log",
        "pidfile=/var/run/slurmdbd/slurmdbd.pid",
        "plugindir=/usr/lib/x86_64-linux-gnu/slurm-wlm",
        "slurmuser=slurm",
        "storagetype=accounting_storage/mysql",
        "storageuser=relation-4",
        "storagepass=pw",
        "storageloc=slurm_acct_db",
        "storagehost=10.0.0.9",
        "storageport=3306",
    }
    assert (host.etc / "slurmdbd.conf").stat().st_mode & 0o777 == 0o600
    assert host.text("jwt_hs256.key") == "pem"
    assert out.get_relation(slurmdbd.to_controller.id).local_app_data == {"hostname": '"10.0.0.7"'}
    assert out.unit_status == testing.ActiveStatus()


def test_an_operators_slurmdbd_settings_win(slurmdbd: Slurmdbd, host: FakeHost):
    out = slurmdbd.start()
    options = {"slurmdbd-conf-parameters": "StorageHost=10.9.9.9\nDebugLevel=debug"}
    slurmdbd.run(slurmdbd.ctx.on.config_changed(), dataclasses.replace(out, config=options))
    assert {"debuglevel=debug"} <= set(host.lines("slurmdbd.conf"))
    refused = dataclasses.replace(out, config={"slurmdbd-conf-parameters": "NoSuchKey=1"})
    host.since()
    out = slurmdbd.run(slurmdbd.ctx.on.config_changed(), refused)
    assert host.done == []
    assert "slurmdbd-conf-parameters" in out.unit_status.message


def test_a_database_without_endpoints_is_a_hook_error(slurmdbd: Slurmdbd):
    secret = {"secret-user": "secret:d1i1k2nmp25c77uodvqg"}
    slurmdbd.to_database = testing.Relation("database", remote_app_name="mysql", remote_app_data=secret)
    error = slurmdbd.fails(slurmdbd.ctx.on.relation_changed(slurmdbd.to_database), slurmdbd.state())
    assert isinstance(error, ValueError)


def test_a_database_that_moves_is_not_followed(slurmdbd: Slurmdbd, host: FakeHost):
    out = slurmdbd.start()
    host.since()
    data = {"secret-user": "secret:d1i1k2nmp25c77uodvqg", "endpoints": "10.0.0.10:3306"}
    moved = dataclasses.replace(out.get_relation(slurmdbd.to_database.id), remote_app_data=data)
    others = {relation for relation in out.relations if relation.id != moved.id}
    slurmdbd.run(slurmdbd.ctx.on.relation_changed(moved), dataclasses.replace(out, relations={*others, moved}))
    assert host.done == []
    assert "storagehost=10.0.0.9" in host.lines("slurmdbd.conf")


def test_a_slurmdbd_that_does_not_start_is_blocked(slurmdbd: Slurmdbd, host: FakeHost):
    host.failing.add("restart slurmdbd")
    out = slurmdbd.start()
    assert isinstance(out.unit_status, testing.BlockedStatus)
    assert out.get_relation(slurmdbd.to_controller.id).local_app_data == {}


def test_slurmdbd_restarts_with_rotated_keys(slurmdbd: Slurmdbd, host: FakeHost):
    for label, name in ((wire.AUTH_LABEL, "slurm.jwks"), (wire.JWT_LABEL, "jwt_hs256.key")):
        secret = rotated(label)
        slurmdbd.run(slurmdbd.ctx.on.secret_changed(secret), testing.State(leader=True, secrets={secret}))
        assert "bmV3" in host.text(name)
        assert host.since() == ["restart slurmdbd"]


def test_a_second_slurmdbd_is_refused(slurmdbd: Slurmdbd, host: FakeHost):
    out = slurmdbd.run(slurmdbd.ctx.on.install(), slurmdbd.state(leader=False))
    assert out.unit_status == testing.BlockedStatus("slurmdbd has one unit only: remove this one")
    assert host.done == []


# --- slurmrestd -------------------------------------------------------------------------------------------------------


@pytest.fixture
def slurmrestd(host: FakeHost, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Standin:
    made = standin("slurmrestd", "slurmrestd")
    host.installed.add("slurmrestd")
    monkeypatch.setattr(made.module, "run", host.run)
    monkeypatch.setattr(made.module, "_UNIT", tmp_path / "slurmrestd.service")
    monkeypatch.setattr(made.module.systemd, "daemon_reload", lambda: None)
    return made


def test_slurmrestd_runs_as_an_account_of_its_own_on_port_6820(slurmrestd: Standin, host: FakeHost):
    out = slurmrestd.run(slurmrestd.ctx.on.install(), testing.State())
    assert {"groupadd slurmrestd", "useradd slurmrestd"} <= set(host.done)
    unit = slurmrestd.module._UNIT.read_text()
    assert "ExecStart=/usr/sbin/slurmrestd $SLURMRESTD_OPTIONS -vv 0.0.0.0:6820" in unit
    assert 'Environment="SLURM_JWT=daemon"' in unit
    assert {port.port for port in out.opened_ports} == {6820}


def test_slurmrestd_writes_the_settings_it_gets_and_restarts(slurmrestd: Standin, host: FakeHost):
    settings = {
        "slurm.conf": {"clustername": "ddp", "include": ["slurm.conf.x"]},
        "slurm.conf.x": {"messagetimeout": 3},
    }
    relation = controller(controllers="[]", slurmconfig=json.dumps(settings))
    state = testing.State(relations={relation}, secrets={auth_secret()})
    out = slurmrestd.run(slurmrestd.ctx.on.relation_changed(relation), state)
    assert host.lines("slurm.conf") == ["clustername=ddp", "include slurm.conf.x"]
    assert host.lines("slurm.conf.x") == ["messagetimeout=3"]
    assert host.owners["slurm.conf"] == host.owners["slurm.jwks"] == "slurmrestd"
    assert host.done == ["enable slurmrestd", "restart slurmrestd"]
    assert out.unit_status == testing.ActiveStatus()
    slurmrestd.run(slurmrestd.ctx.on.relation_broken(relation), state)
    assert host.done[-2:] == ["stop slurmrestd", "disable slurmrestd"]


def test_slurmrestd_restarts_with_a_rotated_key(slurmrestd: Standin, host: FakeHost):
    secret = rotated()
    slurmrestd.run(slurmrestd.ctx.on.secret_changed(secret), testing.State(secrets={secret}))
    assert host.done == ["restart slurmrestd"]


# --- mysql ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mysql(monkeypatch: pytest.MonkeyPatch) -> tuple[Standin, list[tuple[str, ...]]]:
    made, done = standin("mysql", "mysql"), list[tuple[str, ...]]()
    monkeypatch.setattr(mariadb, "create", lambda *arguments: done.append(("create", *arguments)))
    monkeypatch.setattr(mariadb, "drop_user", lambda *arguments: done.append(("drop", *arguments)))
    monkeypatch.setattr(mariadb, "version", lambda: "10.11.18")
    monkeypatch.setattr(mariadb, "is_running", lambda: True)
    return made, done


@pytest.mark.parametrize("wants_secret", [True, False])
def test_mysql_makes_a_database_once_and_publishes_where_it_is(
    mysql: tuple[Standin, list[tuple[str, ...]]], wants_secret: bool
):
    made, done = mysql
    asked = {"database": "slurm_acct_db"} | ({"requested-secrets": '["username"]'} if wants_secret else {})
    relation = testing.Relation("database", remote_app_name="slurmdbd", remote_app_data=asked, id=4)
    network = testing.Network("database", ingress_addresses=["10.0.0.9"])
    state = testing.State(leader=True, relations={relation}, networks={network})
    out = made.run(made.ctx.on.relation_changed(relation), state)
    given = out.get_relation(4).local_app_data
    assert (given["endpoints"], given["database"]) == ("10.0.0.9:3306", "slurm_acct_db")
    if wants_secret:
        secret = out.get_secret(id=given["secret-user"])
        assert secret.remote_grants == {4: {"slurmdbd"}}
        content = secret.tracked_content
        assert "password" not in given
    else:
        content = given
    assert done == [("create", "slurm_acct_db", "relation-4", content["password"])]
    made.run(made.ctx.on.relation_changed(out.get_relation(4)), out)
    assert len(done) == 1
    made.run(made.ctx.on.relation_broken(out.get_relation(4)), out)
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
