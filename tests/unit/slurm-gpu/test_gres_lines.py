"""The controller role: one file for all nodes, one reconfigure a burst, few databags an event."""

import base64
import dataclasses
import hmac
import json
import os
import pathlib

import pytest
from slurm_double import SlurmDouble

from controller import gres_lines
from gpu import gres_conf
from slurm_ddp import commands
from slurm_ddp.interfaces.slurm_gres import ControllerGres, NodeGres

UPSTREAM = "AutoDetect=nvidia\n"
LINE = "Name=gpu Type=h100 File=/dev/nvidia{} Flags=nvidia_gpu_env"


@dataclasses.dataclass
class Cluster:
    """Compute units and their published data; records each read."""

    shared: dict[str, NodeGres | Exception | None] = dataclasses.field(default_factory=dict)
    reads: list[str] = dataclasses.field(default_factory=list)

    def say(
        self, number: int, num_gpus: int = 1, *, awaits: bool = False, node: str | None = None
    ) -> str:
        lines = tuple(LINE.format(i) for i in range(num_gpus))
        unit = f"slurm-gpu/{number}"
        self.shared[unit] = NodeGres(
            node=node or f"slurmd-{number}", gres="gpu", lines=lines, awaits=awaits
        )
        return unit

    def read(self, unit: str) -> NodeGres | None:
        self.reads.append(unit)
        offered = self.shared[unit]
        if isinstance(offered, Exception):
            raise offered
        return offered

    def sync(self, first: str | None = None) -> gres_lines.View:
        self.reads.clear()
        return gres_lines.sync(self.shared, first, self.read, owner="slurm-gpu-controller/0")


@pytest.fixture
def cluster(slurm: SlurmDouble) -> Cluster:
    gres_lines.SLURM_CONF.write_text("ClusterName=x\n")
    gres_conf.PATH.write_text(UPSTREAM)
    return Cluster()


def node_names() -> list[str]:
    return [
        row.split()[0]
        for row in gres_conf.PATH.read_text().splitlines()
        if row.startswith("NodeName=")
    ]


def test_before_slurmctld_is_set_up_nothing_is_written(slurm: SlurmDouble):
    """Upstream writes gres.conf only if it is missing: our file would drop its AutoDetect."""
    cluster = Cluster()
    cluster.say(0)
    assert not cluster.sync().configured
    gres_lines.SLURM_CONF.write_text("ClusterName=x\n")
    slurm.slurmctld_active = False
    assert not cluster.sync().configured
    assert not gres_conf.PATH.exists()
    slurm.slurmctld_active = True
    assert cluster.sync().live
    assert node_names() == ["NodeName=slurmd-0"]


def test_lines_are_written_and_read_by_slurmctld_once(cluster: Cluster, slurm: SlurmDouble):
    for number in range(3):
        cluster.say(number, 2)
    now = cluster.sync()
    assert (now.configured, now.live, now.problem, now.silent) == (True, True, None, None)
    assert gres_conf.PATH.read_text().startswith(UPSTREAM)
    assert node_names() == [f"NodeName=slurmd-{i}" for i in (0, 0, 1, 1, 2, 2)]
    assert gres_lines.counts(now.conf) == (3, 6)
    before = gres_conf.PATH.stat()
    assert cluster.sync().live
    assert gres_conf.PATH.stat() == before
    assert slurm.reconfigured == 1


@pytest.mark.parametrize(
    ("trouble", "silent"),
    [
        ("slurmctld_active", None),
        (
            "answering",
            "reconfigure: slurm_x error: Unable to contact slurm controller (connect failure)",
        ),
    ],
)
def test_a_slurmctld_in_trouble_reads_the_file_later(
    cluster: Cluster, slurm: SlurmDouble, trouble: str, silent: str | None
):
    setattr(slurm, trouble, False)
    cluster.say(0, awaits=True)
    now = cluster.sync()
    assert (now.live, now.silent) == (False, silent)
    assert node_names() == ["NodeName=slurmd-0"]
    assert gres_lines.answer(now, {"slurm-gpu/0"}, ControllerGres()) == ControllerGres(
        autodetect="nvidia"
    )
    setattr(slurm, trouble, True)
    assert cluster.sync().live
    assert slurm.reconfigured == 1


def test_while_another_machine_is_in_control_it_reads_the_file(
    cluster: Cluster, slurm: SlurmDouble, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    slurm.slurmctld_active = False
    monkeypatch.setattr(gres_lines, "KEY", tmp_path / "jwt_hs256.key")
    monkeypatch.setenv("SLURM_JWT", "")
    gres_lines.KEY.write_text("-----BEGIN RSA PRIVATE KEY-----")
    cluster.say(0, awaits=True)
    assert cluster.sync().live
    assert slurm.reconfigured == 1
    head, claims, signature = (
        base64.urlsafe_b64decode(part + "==") for part in os.environ["SLURM_JWT"].split(".")
    )
    assert (json.loads(head)["alg"], json.loads(claims)["sun"]) == ("HS256", "root")
    assert commands.clean_env()["SLURM_JWT"] == os.environ["SLURM_JWT"]
    text = os.environ["SLURM_JWT"].rpartition(".")[0].encode()
    assert signature == hmac.digest(gres_lines.KEY.read_bytes(), text, "sha256")
    slurm.answering = False
    assert not cluster.sync().running


def test_a_damaged_file_is_not_written(cluster: Cluster, slurm: SlurmDouble):
    gres_conf.PATH.write_text("# BEGIN slurm-gpu\n")
    cluster.say(0)
    now = cluster.sync()
    assert now.damaged
    assert now.problem is not None
    assert "do not pair up" in now.problem
    assert gres_conf.PATH.read_text() == "# BEGIN slurm-gpu\n"
    assert slurm.reconfigured == 0


def test_two_units_that_claim_one_node(cluster: Cluster):
    cluster.say(0)
    cluster.say(3, node="slurmd-0", awaits=True)
    cluster.say(4, awaits=True)
    now = cluster.sync()
    assert now.problem == "slurm-gpu/0 and slurm-gpu/3 both claim node slurmd-0: remove one"
    assert node_names() == ["NodeName=slurmd-4"]
    good = cluster.shared["slurm-gpu/4"]
    assert isinstance(good, NodeGres)
    assert gres_lines.answer(now, cluster.shared, ControllerGres()).applied == (good.digest,)
    del cluster.shared["slurm-gpu/0"]
    assert cluster.sync().problem is None
    assert node_names() == ["NodeName=slurmd-0", "NodeName=slurmd-4"]


def test_unusable_databags_are_ignored(cluster: Cluster, caplog: pytest.LogCaptureFixture):
    cluster.say(0)
    cluster.say(1)
    cluster.sync()
    for number in (1, 2):
        cluster.shared[f"slurm-gpu/{number}"] = ValueError("lines: not a gres.conf record")
    assert cluster.sync().problem is None
    assert node_names() == ["NodeName=slurmd-0", "NodeName=slurmd-1"], "its last lines stay"
    assert "what slurm-gpu/2 published is ignored: lines: not a gres.conf record" in caplog.text


def test_an_answer_stands_until_slurmctld_has_read_something_newer(
    cluster: Cluster, slurm: SlurmDouble
):
    cluster.say(0, awaits=True)
    offered = gres_lines.answer(cluster.sync(), cluster.shared, ControllerGres())
    slurm.answering = False
    cluster.say(0, 2, awaits=True)
    assert gres_lines.answer(cluster.sync(), cluster.shared, offered) == offered
    slurm.answering = True
    assert gres_lines.answer(cluster.sync(), cluster.shared, offered) != offered


def test_a_burst_is_one_file_and_one_reconfigure(cluster: Cluster, slurm: SlurmDouble):
    """Many nodes of eight GPUs appear at once, then all change: few reads for each later event."""
    count = 150
    for round_, num_gpus in enumerate((8, 7), start=1):
        units = [cluster.say(number, num_gpus, awaits=True) for number in range(count)]
        total = 0
        for unit in units:
            assert cluster.sync(unit).live
            total += len(cluster.reads)
        assert slurm.reconfigured == round_
        assert len(node_names()) == count * num_gpus
        assert total <= count + count * 10


def test_without_a_unit_that_woke_it_all_of_a_few_are_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    units = [cluster.say(number) for number in range(64)]
    cluster.sync()
    for number in range(64):
        cluster.say(number, 2 if number == 40 else 1)
    assert gres_lines.rotating(units) is None
    cluster.sync(gres_lines.rotating(units))
    assert len(node_names()) == 65
    many = [*units, *(cluster.say(number) for number in range(64, 100))]
    seen: set[str] = set()
    cluster.sync()
    for minute in range(0, 5 * 13, 5):
        monkeypatch.setattr(gres_lines.time, "time", lambda minute=minute: 60.0 * minute)
        cluster.sync(gres_lines.rotating(many))
        assert len(cluster.reads) <= 9
        seen.update(cluster.reads)
    assert seen == set(many)


def test_the_last_unit_takes_the_block_away(cluster: Cluster, slurm: SlurmDouble):
    cluster.say(0)
    cluster.sync()
    gres_lines.release(owner="slurm-gpu-controller/0", last=True)
    assert gres_conf.PATH.read_text() == UPSTREAM
    assert slurm.reconfigured == 2
    assert not gres_lines.OWNER.exists()
    assert not gres_lines.LIVE.exists()
