"""/etc/default/slurmd, written and rewritten by upstream's slurmd charm and by slurm-gpu."""

import dataclasses
import importlib
from typing import Any

import checkout
import pytest
from ops import testing

from host import Host
from node import slurmd_options

GRES = "gpu:nvidia_h100_80gb_hbm3:8,shard:32"
KEY = testing.Secret({"key": "a2V5", "keyid": "1"}, label="slurm-auth-key", owner=None)
SLURMCTLD = testing.Relation(
    "slurmctld",
    interface="slurmd",
    remote_app_name="slurmctld",
    remote_app_data={
        "auth_key": '""',
        "auth_key_id": '""',
        "auth_secret_id": f'"{KEY.id}"',
        "controllers": '["juju-2586ad-0:6817"]',
        "jwt_key": '""',
        "jwt_secret_id": '""',
        "slurmconfig": "{}",
    },
)
RELATED = testing.State(
    leader=True, relations={SLURMCTLD}, secrets={KEY}, config={"default-node-state": "idle"}
)


@pytest.fixture
def installed(
    slurmd: testing.Context[Any], host: Host, monkeypatch: pytest.MonkeyPatch
) -> testing.Context[Any]:
    """Upstream's slurmd after its install hook; slurm-gpu's module looks at the same file."""
    monkeypatch.setattr(slurmd_options, "PATH", host.default / "slurmd")
    slurmd.run(slurmd.on.install(), testing.State(leader=True))
    return slurmd


@pytest.fixture
def joined(installed: testing.Context[Any]) -> testing.Context[Any]:
    """... after it was related to slurmctld, with the node registered."""
    installed.run(installed.on.relation_changed(SLURMCTLD), RELATED)
    return installed


def of_upstream(host: Host) -> dict[str, Any]:
    """Return the options as upstream's own parser reads them."""
    core: Any = importlib.import_module("slurm_ops.core")
    libs: Any = importlib.import_module("charmed_hpc_libs.ops")
    return core.parse_options(libs.EnvManager(file=host.default / "slurmd").get("SLURMD_OPTIONS"))


def read() -> slurmd_options.Options:
    options = slurmd_options.read()
    assert options is not None
    return options


def test_what_install_writes_is_read(installed: testing.Context[Any]):
    options = read()
    assert (options.node, options.conf_server, options.gres) == ("slurmd-0", None, None)
    assert options.settings["features"] == "slurmd"
    assert options.settings["memspeclimit"] == "1024"


def test_gpus_that_upstream_finds_are_read(
    slurmd: testing.Context[Any], host: Host, monkeypatch: pytest.MonkeyPatch
):
    upstream: Any = importlib.import_module("slurm_ops.slurmd")
    for name, value in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda index: ("NVIDIA L40S", "Tesla T4", "NVIDIA L40S")[index],
        "nvmlDeviceGetMinorNumber": lambda index: index,
    }.items():
        monkeypatch.setattr(upstream.pynvml, name, value)
    monkeypatch.setattr(slurmd_options, "PATH", host.default / "slurmd")
    slurmd.run(slurmd.on.install(), testing.State(leader=True))
    assert read().gres == "gpu:nvidia_l40s:2,gpu:tesla_t4:1"


def test_what_slurm_gpu_writes_upstream_reads_with_every_other_option_as_it_was(
    joined: testing.Context[Any], host: Host
):
    before = of_upstream(host)
    assert slurmd_options.ensure_gres(GRES)
    after = of_upstream(host)
    slurmutils: Any = importlib.import_module("slurmutils")
    node = slurmutils.Node.from_str(after.pop("--conf"))
    assert node.gres == GRES.split(",")
    assert node.features == ["slurmd"]
    del before["--conf"]
    assert after == before == {"-Z": True, "-N": "slurmd-0", "--conf-server": "juju-2586ad-0:6817"}


@pytest.mark.parametrize(
    "event", ["config_changed", "update_status", "start", "upgrade_charm", "relation_changed"]
)
def test_no_event_of_upstream_takes_the_gres_away(joined: testing.Context[Any], event: str):
    slurmd_options.ensure_gres(GRES)
    arguments = (SLURMCTLD,) if event == "relation_changed" else ()
    joined.run(getattr(joined.on, event)(*arguments), RELATED)
    assert read().gres == GRES
    assert read().conf_server == "juju-2586ad-0:6817"


def test_a_rotated_key_reaches_slurmd_and_keeps_the_gres(joined: testing.Context[Any], host: Host):
    """By a restart; upstream's main reloads slurmd, so that jobs do not notice."""
    slurmd_options.ensure_gres(GRES)
    host.restarts.clear()
    secret = dataclasses.replace(KEY, latest_content={"key": "bmV3", "keyid": "2"})
    joined.run(joined.on.secret_changed(secret), dataclasses.replace(RELATED, secrets={secret}))
    assert (host.restarts, host.reloads) == (
        ([], ["slurmd"]) if checkout.IS_MAIN else (["slurmd"], [])
    )
    assert read().gres == GRES


def test_a_node_that_leaves_keeps_all_but_its_server(joined: testing.Context[Any], host: Host):
    slurmd_options.ensure_gres(GRES)
    joined.run(joined.on.relation_broken(SLURMCTLD), RELATED)
    assert (read().gres, read().conf_server, read().node) == (GRES, None, "slurmd-0")
    assert set(host.nodes) == (set() if not checkout.IS_MAIN else {"slurmd-0"})


@pytest.mark.parametrize(
    ("params", "gres"),
    [({"parameters": "weight=200"}, GRES), ({"parameters": "", "reset": True}, None)],
    ids=["parameters", "reset"],
)
def test_set_node_config_keeps_the_gres_unless_it_resets(
    joined: testing.Context[Any], params: dict[str, Any], gres: str | None
):
    slurmd_options.ensure_gres(GRES)
    joined.run(joined.on.action("set-node-config", params={"reset": False, **params}), RELATED)
    assert (
        read().gres == gres
    )  # after a reset slurm-gpu finds the node without the options for its cards


def test_set_node_config_ends_a_drain(joined: testing.Context[Any], host: Host):
    """Upstream takes the first of the states, and the drain is the second: slurm-gpu has to hold such a node again."""
    host.nodes["slurmd-0"] = {
        "state": ["IDLE", "DRAIN", "DYNAMIC_NORM"],
        "reason": "gpu-health: Xid 79",
    }
    host.updates.clear()
    joined.run(
        joined.on.action("set-node-config", params={"parameters": "weight=2", "reset": False}),
        RELATED,
    )
    assert host.updates == [["nodename=slurmd-0", "state=idle"]]
