"""The stand-ins behave as upstream's charms: a scenario or a test for each row of the table in sandbox/standins/README.md."""

import base64
import collections.abc
import dataclasses
import json
import pathlib
import re
import sys
import typing
import unittest.mock

import pytest
import slurm_controller
import slurmd_node
import yaml
from common import service, wire
from ops import testing
from standin_host import (
    AUTH_ID,
    CONF,
    CONTROLLER,
    DATABASE,
    DATABASE_ID,
    KEYS,
    NAMES,
    SHORT,
    STANDINS,
    FakeHost,
    Standin,
    metadata,
)

HERE = pathlib.Path(__file__).resolve().parent
UPSTREAM = yaml.safe_load((HERE.parent / "bundle" / "upstream.yaml").read_text())["charms"]
SCENARIOS: dict[str, dict[str, typing.Any]] = yaml.safe_load((HERE / "standins.yaml").read_text())


@pytest.fixture
def host(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    return FakeHost(tmp_path, monkeypatch)


Make = collections.abc.Callable[..., Standin]


@pytest.fixture
def make(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Make:
    def of(name: str, base: str = "ubuntu@24.04") -> Standin:
        return Standin(name, host, monkeypatch, base)

    return of


# --- metadata, and the table ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_endpoints_and_options_are_upstreams(name: str):
    """Of those whose code is in the checkouts of `tox -e upstream`, that lane compares defaults and actions, too."""
    declared, upstream = metadata(name), UPSTREAM[name]
    options = declared.get("config", {}).get("options", {})
    assert {option: facts["type"] for option, facts in options.items()} == upstream["options"]
    ours, theirs = (
        {
            (role, endpoint): {
                key: facts[key] for key in ("interface", "scope", "limit") if key in facts
            }
            for role in ("provides", "requires")
            for endpoint, facts in side.get(role, {}).items()
        }
        for side in (declared, upstream)
    )
    assert ours == theirs


def rows() -> list[list[str]]:
    """Return the rows of the table of behaviours: behaviour, source, the words at that line, test."""
    lines = (STANDINS / "README.md").read_text().splitlines()
    table = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in lines
        if line.startswith("| ")
    ]
    return [row for row in table if len(row) == 4 and row[0] != "behaviour"]


def test_each_row_of_the_table_has_its_source_and_a_test():
    assert len(rows()) > 40
    for behaviour, source, words, test in rows():
        assert re.fullmatch(r"`(charms|internal|pkg|hpc-libs)/[\w/.-]+\.py:\d+`", source), behaviour
        assert re.fullmatch(r"`.+`", words), behaviour
        name = test.strip("`").removeprefix("test_")
        assert name in SCENARIOS or callable(globals()[f"test_{name}"]), behaviour


OFFERED = {
    "fsid": "f",
    "sharepoint": "cephfs:/team a",
    "monitor-hosts": "a:6789 b:6789",
    "auth-info": "u:AQB==",
}


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, ""),
        ({"fsid": "", "auth-info": ""}, "Missing required configuration for `fsid`, `auth-info`"),
        ({"sharepoint": "cephfs:"}, "Invalid sharepoint `cephfs:`"),
    ],
)
def test_cephfs_server_proxy_offers_what_is_configured(
    make: Make, changes: dict[str, str], status: str
):
    context: testing.Context[typing.Any] = make("cephfs-server-proxy").ctx
    peers, first, late = (
        testing.PeerRelation("server-peers"),
        *(testing.Relation("filesystem") for _ in range(2)),
    )
    state = testing.State(leader=True, config=OFFERED | changes, relations=[peers, first])
    out = context.run(context.on.config_changed(), state)
    assert out.unit_status == (testing.BlockedStatus(status) if changes else testing.ActiveStatus())
    out = dataclasses.replace(out, relations=[*out.relations, late])
    out = context.run(context.on.relation_joined(late, remote_unit=0), out)
    published = [out.get_relation(one.id).local_app_data.get("endpoint") for one in (first, late)]
    secrets = {
        one.id.replace(":", "%3A"): (one.latest_content, set(one.remote_grants))
        for one in out.secrets
    }
    assert list(secrets.values()) == ([] if changes else [({"key": "AQB=="}, {first.id, late.id})])
    uri = f"cephfs://u@(a%3A6789%2Cb%3A6789)/team%20a?fsid=f&name=cephfs&auth={next(iter(secrets), '')}&auth-rev=1"
    assert published == [None if changes else uri] * 2


def test_two_controllers_share_settings_and_state(
    make: Make, host: FakeHost, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(slurm_controller, "SHARED", shared)
    monkeypatch.setattr(
        pathlib.Path, "is_mount", lambda path: path == shared and bool(made.state.planned_units > 1)
    )
    made = make("slurmctld")
    made.relate("mount", testing.SubordinateRelation("mount", remote_unit_data={"mounted": "true"}))
    made.run("relation-created mount")
    assert made.relation("mount").local_app_data["mountpoint"] == f'"{shared}"'
    assert isinstance(made.run("start").unit_status, testing.BlockedStatus), (
        "nothing is mounted yet"
    )
    other = {"hostname": '"juju-1234-1(10.0.0.6)"'}
    made.share({"cluster_name": '"ddp"'}, peers_data={1: other})
    made.update(planned_units=2)
    made.run("relation-created peer")
    assert made.relation("peer").local_unit_data["hostname"] == '"juju-1234-0(10.0.0.5)"'
    made.run("update-status")  # the deferred start
    with slurm_controller.slurm_conf().edit() as config:
        config.state_save_location = str(tmp_path / "checkpoint")
    host.since()
    made.run("relation-changed mount")
    assert host.etc.resolve() == shared / "etc" / "slurm"
    assert [line for line in host.since() if not line.startswith("enable")] == [
        "cp slurm",
        "stop slurmctld",
        "cp checkpoint",
        "restart slurmctld",
    ]
    made.run("relation-changed peer")
    assert slurm_controller.hosts() == ["juju-1234-0(10.0.0.5)", "juju-1234-1(10.0.0.6)"]
    assert f"StateSaveLocation={shared}/checkpoint".lower() in host.text("slurm.conf").lower()
    signal = made.relation("peer").local_app_data["restart_signal"]
    made.run("relation-changed peer")
    assert made.relation("peer").local_app_data["restart_signal"] == signal, (
        "its own signal makes no other one"
    )
    made.update(leader=False)
    host.since()
    made.share({"restart_signal": '"2"'})
    made.run("relation-changed peer")
    assert made.state.unit_status == testing.WaitingStatus("waiting for the cluster's name")
    made.share({"cluster_name": '"ddp"', "restart_signal": '"3"'})
    made.run("relation-changed peer")
    assert "restart slurmctld" in host.since()


# --- scenarios -----------------------------------------------------------------------------------

CASES = {
    name + (f"-{number}" if number else ""): {
        key: value for key, value in one.items() if key != "cases"
    }
    | case
    for name, one in SCENARIOS.items()
    for number, case in enumerate(one.get("cases", [{}]))
}


def prepare(made: Standin, case: dict[str, typing.Any]) -> None:
    """Bring charm and host to a scenario's start."""
    host = made.host
    made.update(config=case.get("config", {}), leader=case.get("leader", made.state.leader))
    if case.get("name") == "":
        made.share({})
    if "node" in case:
        options = {"--conf": case["node"], "-Z": True, "-N": "compute-0"} if case["node"] else {}
        slurmd_node.SERVICE.set_options(options)
    for one in case.get("with", []):
        ((name, values),) = (
            one.items() if isinstance(one, dict) else ((one, DATABASE if one == "mysql" else {}),)
        )
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
        status, wanted = f"{out.unit_status.name}: {out.unit_status.message}", case["status"]
        assert status.startswith(wanted[:-3]) if wanted.endswith("...") else status == wanted
    if "deferred" in case:
        assert len(out.deferred) == case["deferred"]
    for name, lines in case.get("files", {}).items():
        assert lines == (host.lines(name) if (host.etc / name).exists() else None)
    for name, lines in case.get("contains", {}).items():
        assert set(lines) <= set(host.lines(name))
    for name, beginnings in case.get("absent", {}).items():
        assert not [line for line in host.lines(name) if line.startswith(tuple(beginnings))]
    if "includes" in case:  # the first and the last have their places
        lines = [
            line.removeprefix("include ")
            for line in host.lines("slurm.conf")
            if line.startswith("include ")
        ]
        assert sorted(lines) == sorted(case["includes"])
        assert [lines[0], lines[-1]] == [case["includes"][0], case["includes"][-1]]
    if "options" in case:
        reset = SHORT.replace(" memspeclimit", " gres=gpu:nvidia_h200:8 memspeclimit")
        wanted = (
            case["options"].replace("CONF", CONF).replace("SHORT", SHORT).replace("RESET", reset)
        )
        assert host.options(made.name) == f"{made.name.upper()}_OPTIONS={wanted}"
    if "published" in case:
        wanted = {"controller": CONTROLLER, "keys": KEYS}.get(
            str(case["published"]), case["published"]
        )
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
    made = make(case["charm"], case.get("base", "ubuntu@24.04"))
    prepare(made, case)
    *events, last = case["run"]
    for event in events:
        made.play(event)
    try:
        made.play(last)
    except testing.errors.UncaughtCharmError as e:
        assert case["error"] in str(e.__cause__)
    except testing.ActionFailed as e:
        assert case["fails"] in e.message
    else:
        assert not {"error", "fails"} & case.keys()
    check(made, case)


# --- common to the daemons
# -------------------------------------------------------------------------


def test_a_daemon_is_installed_but_neither_runs_nor_starts_at_boot(host: FakeHost):
    host.active.add("slurmd")
    slurmd_node.SERVICE.install()
    assert host.done == [
        "mask --runtime --no-reload slurmd",
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
    slurmd_node.set_node(slurmd_node.describe("compute/0", []))
    slurmd_node.SERVICE.set_options(slurmd_node.SERVICE.options() | {"-Z": True, "-N": "compute-0"})
    slurmd_node.SERVICE.set_controllers(["juju-1-0:6817", "juju-1-1:6817"])
    line = f"SLURMD_OPTIONS=--conf '{CONF}' -Z -N compute-0 --conf-server juju-1-0:6817,juju-1-1:6817\n"
    assert path.read_text() == f'# Additional options\n#SLURMD_OPTIONS=""\n{line}'


def test_options_of_others_survive_until_a_comment(host: FakeHost):
    path = host.defaults / "slurmd"
    path.write_text(
        "SLURMD_OPTIONS=--conf 'cpus=2 gres=gpu:h200:8' -Z -N n-0 --parameters numa_node_as_socket -vv\n"
    )
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
    path.write_text("SLURMD_OPTIONS=-Z -N n-0 # mine\n")
    assert slurmd_node.SERVICE.options() == {"-Z": True, "-N": "n-0"}


def test_a_key_of_auth_slurm_has_2048_bytes_and_its_file_belongs_to_the_daemon(host: FakeHost):
    first, second = service.new_auth_key(), service.new_auth_key()
    assert len(base64.b64decode(first["key"])) == 2048
    assert first != second
    daemon = slurm_controller.SERVICE
    daemon.set_auth_key("b2xk", "1")
    assert json.loads(host.text("slurm.jwks")) == {
        "keys": [{"alg": "HS256", "kty": "oct", "kid": "1", "k": "b2xk"}]
    }
    assert host.owners["slurm.jwks"] == "slurm"
    assert (host.etc / "slurm.jwks").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="is empty"):
        daemon.set_auth_key("", "1")


# --- slurmctld -----------------------------------------------------------------------------------


def test_rotate_auth_key_adds_a_key_restarts_and_publishes_it(make: Make, host: FakeHost):
    made = make("slurmctld")
    made.run("start")
    host.since()
    out = made.run("action rotate-auth-key")
    assert host.done == ["enable slurmctld", "restart slurmctld", "scontrol reconfigure"]
    known, new = host.keys()
    assert known == "a2V5"
    published = out.get_secret(label=wire.AUTH_LABEL).latest_content
    assert published is not None
    assert published["key"] == new


def test_slurmctld_is_installed_stopped_and_with_its_keys_as_secrets_of_the_application(
    make: Make, host: FakeHost
):
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
    (host.etc / "slurm.jwks").unlink()
    slurmctld.run("install")
    assert host.keys() == [auth.tracked_content["key"]], "the file comes back from the secret"


def test_the_clusters_name_is_latched_when_the_peer_relation_is_made(make: Make):
    slurmctld = make("slurmctld")
    slurmctld.share({})
    for name, latched in (("ddp", '"ddp"'), ("other", '"ddp"')):
        slurmctld.update(config={"cluster-name": name})
        slurmctld.run("relation-created peer")
        assert slurmctld.relation("peer").local_app_data["cluster_name"] == latched
    unnamed = make("slurmctld")
    unnamed.share({})
    unnamed.run("relation-created peer")
    assert json.loads(unnamed.relation("peer").local_app_data["cluster_name"]).startswith(
        "charmed-hpc-"
    )


def test_slurmrestd_waits_for_slurmdbd_but_gets_the_settings_at_any_restart(make: Make):
    slurmctld = make("slurmctld")
    slurmctld.join("database", {})
    slurmctld.join("slurmrestd", {})
    slurmctld.run("start")
    assert slurmctld.run("relation-created").unit_status == testing.WaitingStatus(
        "waiting for slurmdbd"
    )
    assert slurmctld.relation().local_app_data == {}
    slurmctld.update(deferred=[])
    slurmctld.run("config-changed")
    data = slurmctld.relation().local_app_data
    assert json.loads(data["auth_secret_id"]) == AUTH_ID
    settings = json.loads(data["slurmconfig"])
    assert settings["slurm.conf"]["clustername"] == "ddp"
    assert {"slurm.conf.accounting", "slurm.conf.profiling", "slurm.conf.overrides"} < set(settings)


# --- slurmd, slurmdbd, slurmrestd ----------------------------------------------------------------


def test_memory_and_cores_are_left_to_others(host: FakeHost, monkeypatch: pytest.MonkeyPatch):
    for cpus, threads, left in (
        (2, 1, [[1], [0]]),
        (6, 2, [[2, 3, 4, 5], [0, 1]]),
        (2, 2, [None, None]),
    ):
        report = (
            f"NodeName=vm CPUs={cpus} ThreadsPerCore={threads} RealMemory=9000\nUpTime=0-00:01:00"
        )
        monkeypatch.setattr(host, "slurmd", lambda _, report=report: report)
        assert [slurmd_node.describe(f"a/{number}", []).cpu_spec_list for number in (2, 3)] == left
    monkeypatch.setattr(
        host, "slurmd", lambda _: "NodeName=vm CPUs=1 RealMemory=900\nUpTime=0-00:01:00"
    )
    node = slurmd_node.describe("compute/0", ["gpu:tesla_t4:1"])
    assert (
        str(node) == "cpus=1 realmemory=900 memspeclimit=450 gres=gpu:tesla_t4:1 features=compute"
    )


def test_gpus_are_counted_by_model(monkeypatch: pytest.MonkeyPatch):
    nvml = unittest.mock.Mock(NVMLError=RuntimeError)
    nvml.nvmlDeviceGetCount.return_value = 3
    nvml.nvmlDeviceGetName.side_effect = ["NVIDIA  L40S", "Tesla T4", "NVIDIA L40S"]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert slurmd_node.gpus() == ["gpu:nvidia_l40s:2", "gpu:tesla_t4:1"]
    nvml.nvmlInit.side_effect = RuntimeError("no driver")
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
    assert host.done[-1] == "systemd-sysusers u slurmrestd 64031"
    unit = (tmp_path / "slurmrestd.service").read_text()
    assert "ExecStart=/usr/sbin/slurmrestd $SLURMRESTD_OPTIONS -vv 0.0.0.0:6820" in unit
    assert 'Environment="SLURM_JWT=daemon"' in unit
    assert {port.port for port in out.opened_ports} == {6820}


# --- mysql ---------------------------------------------------------------------------------------


def test_mysql_makes_a_database_once_and_publishes_where_it_is(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    made, done = make("mysql"), list[tuple[str, ...]]()
    monkeypatch.setattr(
        made.module, "_create", lambda *arguments: done.append(("create", *arguments))
    )
    monkeypatch.setattr(made.module, "_version", lambda: "10.11.18")
    monkeypatch.setattr(made.module.systemd, "is_active", lambda _: True)
    asked = {"database": "slurm_acct_db", "requested-secrets": '["username"]'}
    made.relate(
        "slurmdbd",
        testing.Relation("database", remote_app_name="slurmdbd", remote_app_data=asked, id=4),
    )
    made.update(networks={testing.Network("database", ingress_addresses=["10.0.0.9"])})
    out = made.run("relation-changed")
    given = made.relation().local_app_data
    assert (given["endpoints"], given["database"]) == ("10.0.0.9:3306", "slurm_acct_db")
    secret = out.get_secret(id=given["secret-user"])
    assert secret.remote_grants == {4: {"slurmdbd"}}
    assert "password" not in given
    assert done == [("create", "slurm_acct_db", "relation-4", secret.tracked_content["password"])]
    made.run("relation-changed")
    assert len(done) == 1
