"""The stand-ins for upstream's Slurm charms keep upstream's contract: metadata, relation data, files, actions."""

import base64
import dataclasses
import importlib.util
import json
import pathlib
import sys
import types
import typing

import ops
import pytest
import yaml
from ops import testing

from slurm_ddp.run import Completed

ROOT = pathlib.Path(__file__).resolve().parents[2]
STANDINS = ROOT / "sandbox" / "standins"
UPSTREAM = yaml.safe_load((ROOT / "tests" / "bundle" / "upstream.yaml").read_text())["charms"]
NAMES = ("slurmctld", "slurmd", "sackd")

sys.path[:0] = [str(STANDINS), *(str(STANDINS / name / "src") for name in NAMES)]

import login_node  # noqa: E402
import slurm_controller  # noqa: E402
import slurmd_node  # noqa: E402
from common import munge, scontrol, wire  # noqa: E402

import slurmd_options  # noqa: E402

# canonical/slurm-charms@0188dc1, charms/*/charmcraft.yaml: option defaults and actions.
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
}
ACTIONS = {
    "slurmctld": {
        "rotate-auth-key": {},
        "rotate-jwt-key": {},
        "show-current-config": {},
        "set-node-state": {"nodes": "string", "state": "string", "reason": "string"},
    },
    "slurmd": {"set-node-config": {"parameters": "string", "reset": "boolean"}},
    "sackd": {},
}
# The databag that slurmctld writes, as read on a deployment of upstream (the identifiers are examples).
CONTROLLER = {
    "auth_key": '""',
    "auth_key_id": '""',
    "auth_secret_id": '"secret:cvq4d2nmp25c77uodvq0"',
    "controllers": '["juju-1234-0:6817"]',
    "jwt_key": '""',
    "jwt_secret_id": '""',
    "slurmconfig": "{}",
}
SLURMD_C = (
    "NodeName=vm CPUs=224 Boards=1 SocketsPerBoard=2 CoresPerSocket=56 ThreadsPerCore=2 RealMemory=2063937\n"
    "UpTime=0-01:00:00\n"
)
CONF = (
    "cpus=224 boards=1 socketsperboard=2 corespersocket=56 threadspercore=2 realmemory=2063937  memspeclimit=1024 "
    "features=compute"
)


def metadata(name: str) -> dict[str, typing.Any]:
    return yaml.safe_load((STANDINS / name / "charmcraft.yaml").read_text())


def charm(name: str) -> types.ModuleType:
    """Return src/charm.py of a stand-in; all three call their module `charm`."""
    spec = importlib.util.spec_from_file_location(f"standin_{name}", STANDINS / name / "src" / "charm.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def context(module: types.ModuleType, name: str, app: str) -> testing.Context[ops.CharmBase]:
    declared = metadata(name)
    config, actions = declared.pop("config", None), declared.pop("actions", None)
    classes = [item for item in vars(module).values() if isinstance(item, type) and issubclass(item, ops.CharmBase)]
    return testing.Context(classes[0], meta=declared, config=config, actions=actions, app_name=app, unit_id=0)


# --- metadata ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_endpoints_are_upstreams(name: str):
    declared, upstream = metadata(name), UPSTREAM[name]
    for role in ("provides", "requires"):
        ours = {
            endpoint: {key: facts[key] for key in ("interface", "scope", "limit") if key in facts}
            for endpoint, facts in declared.get(role, {}).items()
        }
        theirs = {
            endpoint: {key: facts[key] for key in ("interface", "scope", "limit") if key in facts}
            for endpoint, facts in upstream.get(role, {}).items()
        }
        assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
def test_options_are_upstreams(name: str):
    options = metadata(name).get("config", {}).get("options", {})
    assert {option: facts["type"] for option, facts in options.items()} == UPSTREAM[name]["options"]
    assert {option: facts["default"] for option, facts in options.items()} == DEFAULTS[name]


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_upstreams_and_take_nothing_else(name: str):
    actions = metadata(name).get("actions", {})
    params = {
        action: {param: facts["type"] for param, facts in declared.get("params", {}).items()}
        for action, declared in actions.items()
    }
    assert params == ACTIONS[name]
    assert all(declared["additionalProperties"] is False for declared in actions.values())


# --- what crosses the relations ---------------------------------------------------------------------------------------


def test_the_controllers_databag_has_every_key_in_json():
    assert wire.controller_databag("secret:cvq4d2nmp25c77uodvq0", ["juju-1234-0:6817"]) == CONTROLLER


def test_the_controllers_databag_reads_back():
    assert wire.read_controller(CONTROLLER) == wire.Controller("secret:cvq4d2nmp25c77uodvq0", ("juju-1234-0:6817",))


@pytest.mark.parametrize(
    "change", [{"auth_secret_id": '""'}, {"controllers": "[]"}, {"controllers": "{"}, {"auth_secret_id": "bare"}]
)
def test_a_controller_that_is_not_ready_is_none(change: dict[str, str]):
    assert wire.read_controller(CONTROLLER | change) is None
    assert wire.read_controller({}) is None


def test_the_partition_has_upstreams_form():
    databag = wire.partition_databag("compute", {"DefaultTime": "45:00"})
    assert databag == {"partition": '{"partitionname": "compute", "nodes": ["compute"], "defaulttime": "45:00"}'}


@pytest.mark.parametrize("text", ["", "null", "[1]", "{", '{"nodes": ["compute"]}'])
def test_a_partition_that_cannot_be_read_is_none(text: str):
    assert wire.read_partition({"partition": text} if text else {}) is None


# --- /etc/default/slurmd ----------------------------------------------------------------------------------------------


def test_the_options_file_is_upstreams_to_the_letter(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slurmd_node, "run", lambda *argv, **_: Completed(0, SLURMD_C, ""))
    path = tmp_path / "slurmd"
    path.write_text('# Additional options\n#SLURMD_OPTIONS=""\n')

    slurmd_options.save({"--conf": slurmd_node.detect("compute"), "-Z": True, "-N": "compute-0"}, path)
    slurmd_options.save(slurmd_options.load(path) | {"--conf-server": "juju-1-0:6817"}, path)

    line = f"SLURMD_OPTIONS=--conf '{CONF}' -Z -N compute-0 --conf-server juju-1-0:6817\n"
    assert path.read_text() == f'# Additional options\n#SLURMD_OPTIONS=""\n{line}'
    assert slurmd_options.save(slurmd_options.load(path), path) is False


def test_options_of_others_survive(tmp_path: pathlib.Path):
    path = tmp_path / "slurmd"
    path.write_text("SLURMD_OPTIONS=--conf 'cpus=2 gres=gpu:h200:8' -Z -N n-0 --parameters numa_node_as_socket -vv\n")
    options = slurmd_options.load(path)
    assert options == {
        "--conf": "cpus=2 gres=gpu:h200:8",
        "-Z": True,
        "-N": "n-0",
        "--parameters": "numa_node_as_socket",
        "-vv": True,
    }
    assert slurmd_options.save(options, path) is False


def test_a_comment_ends_the_options_as_for_python_dotenv(tmp_path: pathlib.Path):
    path = tmp_path / "slurmd"
    path.write_text("SLURMD_OPTIONS=-Z -N n-0 # mine\n")
    assert slurmd_options.load(path) == {"-Z": True, "-N": "n-0"}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("state=idle", "state cannot be set"),
        ("NodeName=x", "nodename cannot be set"),
        ("Port=1", "port cannot be set"),
        ("topology=a", "topology is not an option of a node"),
        ("Feature=a", "feature is not an option of a node"),
        ("weight", "'weight' is not of the form key=value"),
        ("weight=", "'weight=' is not of the form key=value"),
    ],
)
def test_node_options_that_upstream_refuses(parameters: str, message: str):
    with pytest.raises(ValueError) as error:
        slurmd_options.parse_parameters(parameters)
    assert str(error.value) == message


def test_node_options_that_upstream_takes():
    assert slurmd_options.parse_parameters("Gres=gpu:h200:4,shard:32 weight=5") == {
        "gres": "gpu:h200:4,shard:32",
        "weight": "5",
    }


# --- slurmd -----------------------------------------------------------------------------------------------------------


class FakeNode:
    """The node's workload: what was asked of it, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.running = False
        self.error: Exception | None = None

    def install(self, name: str, app: str) -> None:
        self.calls.append(("install", name, app))

    def join_cluster(self, *arguments: object) -> None:
        if self.error:
            raise self.error
        self.calls.append(("join", *arguments))
        self.running = True

    def leave_cluster(self, name: str) -> None:
        self.calls.append(("leave", name))
        self.running = False

    def configure(self, name: str, app: str, parameters: dict[str, str], *, reset: bool) -> str:
        if self.error:
            raise self.error
        self.calls.append(("configure", name, app, parameters, reset))
        return "cpus=2"

    def restart(self) -> None:
        self.calls.append(("restart",))

    def is_running(self) -> bool:
        return self.running

    def version(self) -> str:
        return "22.05.8"


@dataclasses.dataclass
class FakeMunge:
    """Munge's key as it was set last."""

    key: str | None = None

    def ensure_key(self, key: str) -> bool:
        changed, self.key = key != self.key, key
        return changed

    def new_key(self) -> str:
        return munge.new_key()


@dataclasses.dataclass
class Slurmd:
    """The charm with its doubles."""

    ctx: testing.Context[ops.CharmBase]
    node: FakeNode
    munge: FakeMunge


@pytest.fixture
def slurmd(monkeypatch: pytest.MonkeyPatch) -> Slurmd:
    module, node, key = charm("slurmd"), FakeNode(), FakeMunge()
    monkeypatch.setattr(module, "slurmd_node", node)
    monkeypatch.setattr(module, "munge", key)
    return Slurmd(ctx=context(module, "slurmd", "compute"), node=node, munge=key)


def auth_secret(key: str = "a2V5") -> testing.Secret:
    return testing.Secret({"key": key, "keyid": "1"}, id="secret:cvq4d2nmp25c77uodvq0")


def controller_relation(**changes: str) -> testing.Relation:
    return testing.Relation("slurmctld", remote_app_name="slurmctld", remote_app_data=CONTROLLER | changes)


def test_slurmd_installs_a_node_named_after_the_unit(slurmd: Slurmd):
    out = slurmd.ctx.run(slurmd.ctx.on.install(), testing.State())
    assert slurmd.node.calls == [("install", "compute-0", "compute")]
    assert out.workload_version == "22.05.8"
    assert out.unit_status == testing.BlockedStatus("add a controller: juju integrate compute:slurmctld slurmctld")


def test_slurmd_joins_and_its_leader_publishes_the_partition(slurmd: Slurmd):
    relation = controller_relation()
    state = testing.State(
        leader=True,
        relations={relation},
        secrets={auth_secret()},
        config={"default-node-state": "idle", "default-node-reason": "new", "partition-config": "MaxTime=10 State=UP"},
    )
    out = slurmd.ctx.run(slurmd.ctx.on.relation_changed(relation), state)
    assert slurmd.node.calls == [("join", "compute-0", "a2V5", ("juju-1234-0:6817",), "idle", "new")]
    partition = {"partitionname": "compute", "nodes": ["compute"], "maxtime": "10", "state": "UP"}
    assert json.loads(out.get_relation(relation.id).local_app_data["partition"]) == partition
    assert out.unit_status == testing.ActiveStatus()


def test_new_nodes_are_down_unless_configured(slurmd: Slurmd):
    relation = controller_relation()
    slurmd.ctx.run(
        slurmd.ctx.on.relation_changed(relation), testing.State(relations={relation}, secrets={auth_secret()})
    )
    assert slurmd.node.calls[0][-2:] == ("down", "")


def test_slurmd_waits_for_a_controller_that_is_not_ready(slurmd: Slurmd):
    relation = controller_relation(controllers="[]")
    out = slurmd.ctx.run(slurmd.ctx.on.relation_changed(relation), testing.State(relations={relation}))
    assert slurmd.node.calls == []
    assert out.unit_status == testing.WaitingStatus("waiting for slurmctld")


def test_slurmd_tries_again_when_the_controller_was_silent(slurmd: Slurmd):
    relation = controller_relation()
    state = testing.State(relations={relation}, secrets={auth_secret()})
    slurmd.node.error = scontrol.SlurmError("no configuration from juju-1234-0:6817: slurmd exited 1")
    out = slurmd.ctx.run(slurmd.ctx.on.relation_changed(relation), state)
    assert out.unit_status == testing.WaitingStatus("waiting for slurmd to start")
    slurmd.node.error = None
    out = slurmd.ctx.run(slurmd.ctx.on.update_status(), out)
    assert out.unit_status == testing.ActiveStatus()
    calls = list(slurmd.node.calls)
    slurmd.ctx.run(slurmd.ctx.on.update_status(), out)
    assert slurmd.node.calls == calls  # one that runs is left alone


def test_slurmd_leaves_with_the_relation(slurmd: Slurmd):
    relation = controller_relation()
    slurmd.node.running = True
    out = slurmd.ctx.run(
        slurmd.ctx.on.relation_broken(relation), testing.State(relations={relation}, secrets={auth_secret()})
    )
    assert slurmd.node.calls == [("leave", "compute-0")]
    assert out.unit_status == testing.BlockedStatus("add a controller: juju integrate compute:slurmctld slurmctld")


def test_slurmd_follows_a_rotated_key(slurmd: Slurmd):
    secret = testing.Secret(
        {"key": "b2xk"}, latest_content={"key": "bmV3"}, id="secret:cvq4d2nmp25c77uodvq0", label=wire.AUTH_LABEL
    )
    slurmd.node.running = True
    slurmd.ctx.run(
        slurmd.ctx.on.secret_changed(secret), testing.State(relations={controller_relation()}, secrets={secret})
    )
    assert slurmd.munge.key == "bmV3"
    assert slurmd.node.calls == [("restart",)]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"default-node-state": "drain"}, "fix config: default-node-state must be down or idle"),
        ({"partition-config": "MaxTime"}, "fix config: partition-config: 'MaxTime' is not of the form key=value"),
        ({"partition-config": "Nodes=ALL"}, "fix config: partition-config cannot set PartitionName or Nodes"),
    ],
)
def test_slurmd_says_which_option_is_wrong_and_does_nothing(slurmd: Slurmd, config: dict[str, str], text: str):
    relation = controller_relation()
    state = testing.State(leader=True, relations={relation}, secrets={auth_secret()}, config=config)
    out = slurmd.ctx.run(slurmd.ctx.on.relation_changed(relation), state)
    assert out.unit_status == testing.BlockedStatus(text)
    assert slurmd.node.calls == []
    assert "partition" not in out.get_relation(relation.id).local_app_data


def test_set_node_config_answers_with_what_is_set(slurmd: Slurmd):
    event = slurmd.ctx.on.action("set-node-config", params={"parameters": "Weight=5", "reset": True})
    slurmd.ctx.run(event, testing.State())
    assert slurmd.node.calls == [("configure", "compute-0", "compute", {"weight": "5"}, True)]
    assert slurmd.ctx.action_results == {"node": "compute-0", "parameters": "cpus=2"}


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ("state=idle", None, "parameters: state cannot be set"),
        ("weight=5", scontrol.SlurmError("scontrol exited 1: nodes are busy"), "scontrol exited 1: nodes are busy"),
    ],
)
def test_set_node_config_fails_in_one_line(slurmd: Slurmd, parameters: str, error: Exception | None, message: str):
    slurmd.node.error = error
    with pytest.raises(testing.ActionFailed) as failed:
        slurmd.ctx.run(slurmd.ctx.on.action("set-node-config", params={"parameters": parameters}), testing.State())
    assert failed.value.message == message


class FakeSlurm:
    """The commands that slurmd_node runs, with a controller that knows the nodes in `nodes`."""

    def __init__(self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes: dict[str, str] = {}
        self.done: list[str] = []
        self.running = False
        self.options = tmp_path / "slurmd"
        monkeypatch.setattr(slurmd_node, "run", self.run)
        monkeypatch.setattr(slurmd_node.munge, "ensure_key", lambda key: self.done.append(f"key {key}"))
        monkeypatch.setattr(slurmd_node.systemd, "restart", self.restart)
        monkeypatch.setattr(slurmd_node.systemd, "is_active", lambda _: self.running)
        monkeypatch.setattr(slurmd_node.systemd, "stop", lambda _: setattr(self, "running", False))
        monkeypatch.setattr(slurmd_options, "PATH", self.options)
        monkeypatch.setattr(slurmd_options.load, "__defaults__", (self.options,))
        monkeypatch.setattr(slurmd_options.save, "__defaults__", (self.options,))
        for name in ("node_state", "wait_for_node", "update_node", "delete_node"):
            monkeypatch.setattr(slurmd_node.scontrol, name, getattr(self, name))

    def run(self, *argv: str, **_: object) -> Completed:
        if argv == ("/usr/sbin/slurmd", "-C"):
            return Completed(0, SLURMD_C, "")
        if argv[:2] == ("/usr/sbin/slurmd", "-G"):
            self.done.append(f"fetch {argv[-1]}")
            return Completed(0, "", "")
        assert argv[:2] in (("/usr/bin/systemctl", "enable"), ("/usr/bin/systemctl", "disable")), argv
        return Completed(0, "", "")

    def restart(self, unit: str) -> None:
        self.done.append("restart")
        self.running = True
        name = str(slurmd_options.load(self.options)["-N"])
        self.nodes.setdefault(name, "IDLE+DYNAMIC_NORM")

    def node_state(self, name: str) -> str | None:
        return self.nodes.get(name)

    def wait_for_node(self, name: str) -> None:
        assert name in self.nodes

    def update_node(self, name: str, state: str, reason: str = "") -> None:
        self.done.append(f"update {name} {state} {reason}".strip())
        self.nodes[name] = state.upper()

    def delete_node(self, name: str) -> None:
        self.done.append(f"delete {name}")
        del self.nodes[name]


@pytest.fixture
def slurm(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path, monkeypatch)
    slurmd_options.save({"--conf": CONF, "-Z": True, "-N": "compute-0"}, fake.options)
    return fake


def test_a_node_that_the_controller_does_not_know_gets_the_configured_state(slurm: FakeSlurm):
    slurmd_node.join_cluster("compute-0", "a2V5", ("h:6817",), "down", "")
    assert slurm.done == ["key a2V5", "fetch h:6817", "restart", "update compute-0 down New node."]
    assert slurmd_options.load(slurm.options)["--conf-server"] == "h:6817"


def test_a_node_that_the_controller_knows_keeps_its_state(slurm: FakeSlurm):
    slurm.nodes["compute-0"] = "IDLE+DRAIN+DYNAMIC_NORM"
    slurmd_node.join_cluster("compute-0", "a2V5", ("h:6817",), "down", "")
    assert slurm.nodes["compute-0"] == "IDLE+DRAIN+DYNAMIC_NORM"
    assert slurm.done == ["key a2V5", "fetch h:6817", "restart"]


def test_set_node_config_deletes_restarts_and_sets_the_base_state(slurm: FakeSlurm):
    slurm.running = True
    slurm.nodes["compute-0"] = "DOWN+DRAIN+DYNAMIC_NORM"
    conf = slurmd_node.configure("compute-0", "compute", {"gres": "gpu:h200:8"}, reset=False)
    assert conf == CONF.replace("  ", " ") + " gres=gpu:h200:8"
    assert slurm.done == ["delete compute-0", "restart", "update compute-0 down set-node-config"]
    assert slurmd_options.load(slurm.options)["--conf"] == conf


def test_set_node_config_leaves_a_state_alone_that_is_right_already(slurm: FakeSlurm):
    slurm.running = True
    slurm.nodes["compute-0"] = "IDLE+DYNAMIC_NORM"
    slurmd_node.configure("compute-0", "compute", {"weight": "5"}, reset=False)
    assert slurm.done == ["delete compute-0", "restart"]


def test_reset_detects_anew(slurm: FakeSlurm):
    slurmd_options.save(slurmd_options.load(slurm.options) | {"--conf": "cpus=1 gres=gpu:x:1"}, slurm.options)
    assert slurmd_node.configure("compute-0", "compute", {}, reset=True) == CONF
    assert slurm.done == []  # it is not registered: nothing to delete, nothing to restart


def test_a_node_leaves_by_deleting_itself_while_slurmd_still_runs(slurm: FakeSlurm):
    slurmd_node.join_cluster("compute-0", "a2V5", ("h:6817",), "idle", "")
    slurmd_node.leave_cluster("compute-0")
    assert slurm.nodes == {}
    assert not slurm.running
    assert "--conf-server" not in slurmd_options.load(slurm.options)


# --- sackd ------------------------------------------------------------------------------------------------------------


class FakeLogin:
    """The login host's workload."""

    def __init__(self) -> None:
        self.joined: tuple[object, ...] | None = None

    def install(self) -> None: ...

    def version(self) -> str:
        return "22.05.8"

    def join_cluster(self, *arguments: object) -> None:
        self.joined = arguments

    def leave_cluster(self) -> None:
        self.joined = None

    def is_running(self) -> bool:
        return self.joined is not None


@dataclasses.dataclass
class Sackd:
    """The charm with its doubles."""

    ctx: testing.Context[ops.CharmBase]
    login: FakeLogin
    munge: FakeMunge


@pytest.fixture
def sackd(monkeypatch: pytest.MonkeyPatch) -> Sackd:
    module, login, key = charm("sackd"), FakeLogin(), FakeMunge()
    monkeypatch.setattr(module, "login_node", login)
    monkeypatch.setattr(module, "munge", key)
    return Sackd(ctx=context(module, "sackd", "sackd"), login=login, munge=key)


def test_sackd_joins_and_leaves(sackd: Sackd):
    relation = controller_relation()
    state = testing.State(relations={relation}, secrets={auth_secret()})
    out = sackd.ctx.run(sackd.ctx.on.relation_changed(relation), state)
    assert sackd.login.joined == ("a2V5", ("juju-1234-0:6817",))
    assert out.unit_status == testing.ActiveStatus()
    out = sackd.ctx.run(sackd.ctx.on.relation_broken(relation), out)
    assert sackd.login.joined is None
    assert out.unit_status == testing.BlockedStatus("add a controller: juju integrate sackd:slurmctld slurmctld")


def test_sackd_follows_a_rotated_key(sackd: Sackd):
    secret = testing.Secret(
        {"key": "b2xk"}, latest_content={"key": "bmV3"}, id="secret:cvq4d2nmp25c77uodvq0", label=wire.AUTH_LABEL
    )
    sackd.ctx.run(sackd.ctx.on.secret_changed(secret), testing.State(secrets={secret}))
    assert sackd.munge.key == "bmV3"


def test_sackds_service_is_fed_from_its_options(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(login_node, "_DEFAULTS", tmp_path / "sackd")
    monkeypatch.setattr(login_node.munge, "ensure_key", lambda key: False)
    monkeypatch.setattr(login_node, "run", lambda *argv, **_: Completed(0, "", ""))
    monkeypatch.setattr(login_node, "is_running", lambda: True)
    restarts: list[str] = []
    monkeypatch.setattr(login_node.systemd, "restart", restarts.append)
    login_node.join_cluster("a2V5", ("h:6817", "i:6817"))
    login_node.join_cluster("a2V5", ("h:6817", "i:6817"))
    assert (tmp_path / "sackd").read_text() == "SACKD_OPTIONS=--conf-server h:6817,i:6817\n"
    assert restarts == ["sackd.service"]  # the second time nothing changed


@pytest.mark.parametrize(("known", "package"), [(0, "sackd"), (100, "slurmd")])
def test_slurms_own_sackd_runs_where_the_distribution_has_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, known: int, package: str
):
    monkeypatch.setattr(login_node, "_PROGRAM", tmp_path / "sackd")
    monkeypatch.setattr(login_node, "run", lambda *argv, **_: Completed(known if "sackd" in argv else 0, "", ""))
    installed: list[str] = []
    monkeypatch.setattr(login_node.apt, "ensure_packages", installed.extend)
    units: list[str] = []
    monkeypatch.setattr(login_node.systemd, "ensure_dropin", lambda *_: True)
    monkeypatch.setattr(login_node.systemd, "ensure_unit", lambda name, _: units.append(name))
    login_node.install()
    assert installed == ["slurm-client", package, "munge"]
    assert units == (["sackd.service"] if known else [])
    assert (tmp_path / "sackd").exists() == bool(known)


# --- slurmctld --------------------------------------------------------------------------------------------------------


class FakeController:
    """The controller's workload."""

    Settings = slurm_controller.Settings
    ControllerError = slurm_controller.ControllerError

    def __init__(self) -> None:
        self.settings: slurm_controller.Settings | None = None
        self.key: str | None = None
        self.error: str | None = None

    def install(self) -> None: ...

    def version(self) -> str:
        return "22.05.8"

    def ensure(self, settings: slurm_controller.Settings, key: str) -> bool:
        self.settings, self.key = settings, key
        if self.error:
            raise slurm_controller.ControllerError(self.error)
        return True

    def is_configured(self) -> bool:
        return self.settings is not None

    def is_running(self) -> bool:
        return self.settings is not None and self.error is None

    def current_config(self) -> str:
        return "ClusterName=ddp"


@dataclasses.dataclass
class Slurmctld:
    """The charm with its doubles."""

    ctx: testing.Context[ops.CharmBase]
    controller: FakeController
    updates: list[tuple[object, ...]]

    @property
    def settings(self) -> slurm_controller.Settings:
        assert self.controller.settings is not None
        return self.controller.settings


@pytest.fixture
def slurmctld(monkeypatch: pytest.MonkeyPatch) -> Slurmctld:
    module, controller = charm("slurmctld"), FakeController()
    monkeypatch.setattr(module, "slurm_controller", controller)
    monkeypatch.setattr(module.socket, "gethostname", lambda: "slurmctld-0")
    updates: list[tuple[object, ...]] = []
    monkeypatch.setattr(module.scontrol, "update_node", lambda *arguments: updates.append(arguments))
    return Slurmctld(ctx=context(module, "slurmctld", "slurmctld"), controller=controller, updates=updates)


def peer() -> testing.PeerRelation:
    return testing.PeerRelation("slurmctld-peer")


def slurmd_relation(app: str = "compute", **options: str) -> testing.Relation:
    return testing.Relation("slurmd", remote_app_name=app, remote_app_data=wire.partition_databag(app, options))


def test_slurmctld_publishes_to_nodes_and_login_hosts_and_grants_the_key(slurmctld: Slurmctld):
    nodes, login = slurmd_relation(), testing.Relation("sackd", remote_app_name="sackd")
    state = testing.State(leader=True, relations={peer(), nodes, login}, config={"cluster-name": "ddp"})
    out = slurmctld.ctx.run(slurmctld.ctx.on.relation_created(login), state)
    secret = out.get_secret(label=wire.AUTH_LABEL)
    assert secret.owner == "app"
    assert set(secret.tracked_content) == {"key", "keyid"}
    assert secret.remote_grants == {nodes.id: {"compute"}, login.id: {"sackd"}}
    expected = CONTROLLER | {
        "auth_secret_id": json.dumps(secret.id),
        "controllers": '["slurmctld-0:6817"]',
    }
    for relation in (nodes, login):
        assert out.get_relation(relation.id).local_app_data == expected
    assert slurmctld.controller.key == secret.tracked_content["key"]
    assert out.unit_status == testing.ActiveStatus()


@pytest.mark.parametrize("event", ["start", "config_changed", "leader_elected", "update_status"])
def test_every_event_reaches_the_same_state(slurmctld: Slurmctld, event: str):
    relation = slurmd_relation(DefaultTime="45:00")
    state = testing.State(leader=True, relations={peer(), relation}, config={"default-partition": "compute"})
    out = slurmctld.ctx.run(getattr(slurmctld.ctx.on, event)(), state)
    first, key = slurmctld.controller.settings, slurmctld.controller.key
    assert first is not None
    assert first.partitions == ({"partitionname": "compute", "nodes": ["compute"], "defaulttime": "45:00"},)
    again = slurmctld.ctx.run(getattr(slurmctld.ctx.on, event)(), out)
    assert (slurmctld.controller.settings, slurmctld.controller.key) == (first, key)
    assert again.get_relation(relation.id) == out.get_relation(relation.id)


def test_the_clusters_name_is_latched(slurmctld: Slurmctld):
    state = testing.State(leader=True, relations={peer(), slurmd_relation()}, config={"cluster-name": "ddp"})
    out = slurmctld.ctx.run(slurmctld.ctx.on.start(), state)
    slurmctld.ctx.run(slurmctld.ctx.on.config_changed(), dataclasses.replace(out, config={"cluster-name": "other"}))
    assert slurmctld.settings.cluster_name == "ddp"


def test_slurmctld_waits_for_a_first_partition(slurmctld: Slurmctld):
    state = testing.State(leader=True, relations={peer(), testing.Relation("slurmd", remote_app_name="compute")})
    out = slurmctld.ctx.run(slurmctld.ctx.on.start(), state)
    text = "waiting for slurmd: slurmctld does not start without a partition"
    assert out.unit_status == testing.WaitingStatus(text)
    assert slurmctld.controller.settings is None


def test_a_nameless_cluster_gets_a_name(slurmctld: Slurmctld):
    slurmctld.ctx.run(slurmctld.ctx.on.start(), testing.State(leader=True, relations={peer(), slurmd_relation()}))
    assert slurmctld.settings.cluster_name.startswith("charmed-hpc-")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"cluster-name": "a b"}, "fix config: cluster-name takes letters, digits, - and _, at most 40"),
        ({"slurm-conf-parameters": "x"}, "fix config: slurm-conf-parameters: 'x' is not of the form Key=Value"),
        ({"cgroup-parameters": "=1"}, "fix config: cgroup-parameters: '=1' is not of the form Key=Value"),
    ],
)
def test_slurmctld_says_which_option_is_wrong_and_does_nothing(slurmctld: Slurmctld, config: dict[str, str], text: str):
    state = testing.State(leader=True, relations={peer(), slurmd_relation()}, config=config)
    out = slurmctld.ctx.run(slurmctld.ctx.on.config_changed(), state)
    assert out.unit_status == testing.BlockedStatus(text)
    assert slurmctld.controller.settings is None


def test_a_configuration_that_slurmctld_refuses_is_blocked_and_not_published(slurmctld: Slurmctld):
    slurmctld.controller.error = "slurmctld does not start: fatal: Invalid TaskPlugin"
    relation = slurmd_relation()
    state = testing.State(leader=True, relations={peer(), relation}, config={"slurm-conf-parameters": "TaskPlugin=x"})
    out = slurmctld.ctx.run(slurmctld.ctx.on.config_changed(), state)
    text = "slurmctld does not start: check slurm-conf-parameters and the debug log"
    assert out.unit_status == testing.BlockedStatus(text)
    assert out.get_relation(relation.id).local_app_data == {}


@pytest.mark.parametrize("endpoint", ["slurmdbd", "slurmrestd", "influxdb", "oci-runtime", "smtp", "cos-agent"])
def test_slurmctld_names_the_relation_that_is_not_played(slurmctld: Slurmctld, endpoint: str):
    state = testing.State(leader=True, relations={peer(), slurmd_relation(), testing.Relation(endpoint)})
    out = slurmctld.ctx.run(slurmctld.ctx.on.update_status(), state)
    assert out.unit_status == testing.BlockedStatus(f"the sandbox does not play the relation {endpoint}: remove it")


def test_a_second_controller_is_refused(slurmctld: Slurmctld):
    out = slurmctld.ctx.run(
        slurmctld.ctx.on.start(), testing.State(leader=False, relations={peer(), slurmd_relation()})
    )
    text = "the sandbox plays one slurmctld unit only: remove this one"
    assert out.unit_status == testing.BlockedStatus(text)
    assert slurmctld.controller.settings is None


def test_rotate_auth_key_replaces_the_secrets_content(slurmctld: Slurmctld):
    out = slurmctld.ctx.run(slurmctld.ctx.on.start(), testing.State(leader=True, relations={peer(), slurmd_relation()}))
    before = slurmctld.controller.key
    out = slurmctld.ctx.run(slurmctld.ctx.on.action("rotate-auth-key"), out)
    assert slurmctld.controller.key != before
    assert out.get_secret(label=wire.AUTH_LABEL).latest_content["key"] == slurmctld.controller.key


def test_set_node_state_passes_what_was_asked(slurmctld: Slurmctld):
    params = {"nodes": "compute-[0-3]", "state": "drain", "reason": "bad fan"}
    slurmctld.ctx.run(slurmctld.ctx.on.action("set-node-state", params=params), testing.State(leader=True))
    assert slurmctld.updates == [("compute-[0-3]", "drain", "bad fan")]


@pytest.mark.parametrize("nodes", ["", "a b", "a;b", "$(x)", "a\nb", "-a"])
def test_set_node_state_refuses_what_is_no_host_list(slurmctld: Slurmctld, nodes: str):
    event = slurmctld.ctx.on.action("set-node-state", params={"nodes": nodes, "state": "down"})
    with pytest.raises(testing.ActionFailed) as failed:
        slurmctld.ctx.run(event, testing.State(leader=True))
    assert failed.value.message == f"nodes: {nodes!r} is not a host list such as slurmd-[0-3]"
    assert slurmctld.updates == []


def settings(**changes: object) -> slurm_controller.Settings:
    base = slurm_controller.Settings("ddp", "slurmctld-0", (), "", {}, {})
    return dataclasses.replace(base, **changes)


def test_slurm_conf_is_upstreams_where_22_05_has_it():
    lines = slurm_controller.render(settings())["slurm.conf"].splitlines()
    for line in (
        "ClusterName=ddp",
        "SlurmctldHost=slurmctld-0",
        "GresTypes=gpu",
        "MaxNodeCount=65533",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU_Memory",
        "SlurmctldParameters=enable_configless",
        'RebootProgram="/usr/sbin/reboot --reboot"',
    ):
        assert line in lines
    assert not any(line.startswith(("ReturnToService", "AccountingStorageTRES", "DefMemPer")) for line in lines)


def test_a_partition_and_its_node_set_carry_the_applications_name():
    partition = {"partitionname": "compute", "nodes": ["compute"], "defaulttime": "45:00"}
    texts = slurm_controller.render(settings(partitions=(partition,), default_partition="compute"))
    assert texts["slurm.conf.compute"] == (
        "nodeset=compute feature=compute\npartitionname=compute nodes=compute defaulttime=45:00 default=yes\n"
    )
    assert "Include slurm.conf.compute" in texts["slurm.conf"].splitlines()


def test_an_operators_settings_win_whatever_their_case():
    texts = slurm_controller.render(settings(overrides={"grestypes": "gpu,shard"}, cgroup={"constraindevices": "no"}))
    assert "GresTypes=gpu" not in texts["slurm.conf"].splitlines()
    assert texts["slurm.conf"].splitlines()[-1] == "Include slurm.conf.overrides"
    assert texts["slurm.conf.overrides"] == "grestypes=gpu,shard\n"
    assert "ConstrainDevices=yes" not in texts["cgroup.conf"]
    assert "constraindevices=no" in texts["cgroup.conf"]


class FakeDaemon:
    """slurmctld under systemd, as slurm_controller sees it."""

    def __init__(self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.etc = tmp_path
        self.running = self.broken = False
        self.journal = "started\nslurmctld: fatal: Unable to find plugin task/x\nended\n"
        self.done: list[str] = []
        monkeypatch.setattr(slurm_controller, "ETC", tmp_path)
        monkeypatch.setattr(slurm_controller.munge, "ensure_key", lambda key: False)
        monkeypatch.setattr(slurm_controller.systemd, "is_active", lambda _: self.running)
        monkeypatch.setattr(slurm_controller.systemd, "enable_now", lambda _: self.start("start"))
        monkeypatch.setattr(slurm_controller.systemd, "restart", lambda _: self.start("restart"))
        monkeypatch.setattr(slurm_controller.scontrol, "reconfigure", lambda: self.done.append("reconfigure"))
        monkeypatch.setattr(slurm_controller, "run", self.run)

    def start(self, how: str) -> None:
        self.done.append(how)
        self.running = not self.broken

    def run(self, *argv: str, **_: object) -> Completed:
        if argv == ("/usr/bin/scontrol", "ping"):
            return Completed(0, "Slurmctld(primary) at slurmctld-0 is UP\n", "")
        assert argv[0] == "/usr/bin/journalctl", argv
        return Completed(0, self.journal, "")


def test_slurmctld_is_restarted_only_when_something_changed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    daemon = FakeDaemon(tmp_path, monkeypatch)
    assert slurm_controller.ensure(settings(), "k") is True
    assert daemon.done == ["start", "reconfigure"]
    assert slurm_controller.ensure(settings(), "k") is False
    assert daemon.done == ["start", "reconfigure"]
    partition = {"partitionname": "compute", "nodes": ["compute"]}
    assert slurm_controller.ensure(settings(partitions=(partition,)), "k") is True
    assert (tmp_path / "slurm.conf.compute").exists()
    assert slurm_controller.ensure(settings(), "k") is True
    assert not (tmp_path / "slurm.conf.compute").exists()


def test_gres_conf_is_written_once_and_then_others(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    FakeDaemon(tmp_path, monkeypatch)
    slurm_controller.ensure(settings(), "k")
    assert (tmp_path / "gres.conf").read_text() == "AutoDetect=off\n"
    (tmp_path / "gres.conf").write_text("NodeName=n Name=gpu File=/dev/nvidia0\n")
    slurm_controller.ensure(settings(cluster_name="x"), "k")
    assert (tmp_path / "gres.conf").read_text() == "NodeName=n Name=gpu File=/dev/nvidia0\n"


def test_slurmctlds_own_words_say_why_it_does_not_start(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    daemon = FakeDaemon(tmp_path, monkeypatch)
    daemon.broken = True
    with pytest.raises(slurm_controller.ControllerError) as error:
        slurm_controller.ensure(settings(overrides={"TaskPlugin": "task/x"}), "k")
    assert str(error.value) == "slurmctld does not start: fatal: Unable to find plugin task/x"
    daemon.journal = "slurmctld: error: at unrecognized key: Foo\nslurmctld: error: Include failed\nslurmctld: fatal: Unable to process configuration file\n"
    with pytest.raises(slurm_controller.ControllerError) as error:
        slurm_controller.ensure(settings(overrides={"Foo": "1"}), "k")
    assert str(error.value) == "slurmctld does not start: error: at unrecognized key: Foo"


def test_current_config_puts_includes_in_their_place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    FakeDaemon(tmp_path, monkeypatch)
    slurm_controller.ensure(settings(overrides={"MessageTimeout": "30"}), "k")
    assert slurm_controller.current_config().splitlines()[-1] == "MessageTimeout=30"


def test_munges_key_is_as_long_as_munge_allows():
    first, second = (base64.b64decode(munge.new_key()) for _ in range(2))
    assert len(first) == 1024
    assert first != second
