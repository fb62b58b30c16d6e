"""The controller role with a thousand nodes of eight GPUs: what one event costs, what a burst costs, and that it is linear.

Time is this process's own, so that a busy machine does not fail a test; the limits are several times what was measured.
"""

import dataclasses
import time

import pytest
from slurm_double import SlurmDouble

from controller import gres_lines
from gpu import gres_conf
from slurm_ddp import files
from slurm_ddp.interfaces.slurm_gres import ControllerGres, NodeGres

NODES, CARDS = 1000, 8
EVENT_S = 1.0  # the goal for one node's change
LINE = "Name=gpu Type=nvidia_h100_80gb_hbm3 File=/dev/nvidia{} Cores={} Links={} Flags=nvidia_gpu_env"  # a real one's length


@dataclasses.dataclass
class Cloud:
    """Compute units that published what they have. Counts what is read of them and how often the file is written."""

    databags: dict[str, NodeGres]
    reads: int = 0
    writes: int = 0

    def read(self, unit: str) -> NodeGres:
        self.reads += 1
        return self.databags[unit]

    def event(self, unit: str | None) -> gres_lines.View:
        """Handle the event of one unit as the charm does, its answer to the nodes included."""
        now = gres_lines.sync(self.databags, unit, self.read, owner="slurm-gpu-controller/0")
        gres_lines.answer(now, self.databags, ControllerGres())
        return now


def node(number: int, cards: int = CARDS) -> NodeGres:
    lines = tuple(
        LINE.format(i, "0-55" if i < 4 else "56-111", ",".join("-1" if j == i else "0" for j in range(cards)))
        for i in range(cards)
    )
    return NodeGres(node=f"slurmd-{number}", gres=f"gpu:nvidia_h100_80gb_hbm3:{cards}", lines=lines, awaits=True)


def cloud(monkeypatch: pytest.MonkeyPatch, count: int) -> Cloud:
    gres_lines.SLURM_CONF.write_text("ClusterName=x\n")
    gres_conf.PATH.write_text("AutoDetect=nvidia\n")
    files.ensure_absent(gres_lines.LIVE)
    one = Cloud({f"slurm-gpu/{i}": node(i) for i in range(count)})
    ensure_file = files.ensure_file

    def counting(path: object, *arguments: object, **keywords: object) -> bool:
        changed = ensure_file(path, *arguments, **keywords)  # pyright: ignore[reportArgumentType]
        one.writes += changed and path == gres_conf.PATH.resolve()
        return changed

    monkeypatch.setattr(gres_conf.files, "ensure_file", counting)
    return one


def timed(work: object) -> float:
    started = time.process_time()
    assert callable(work)
    work()
    return time.process_time() - started


def test_one_nodes_change_among_a_thousand(monkeypatch: pytest.MonkeyPatch, slurm: SlurmDouble):
    one = cloud(monkeypatch, NODES)
    one.event("slurm-gpu/0")
    one.reads = one.writes = 0
    one.databags["slurm-gpu/500"] = node(500, 7)
    spent = timed(lambda: one.event("slurm-gpu/500"))
    print(f"one change: {spent:.3f} s")  # seen with pytest -s
    assert spent < EVENT_S
    assert one.writes == 1
    assert one.reads <= 10, "its own databag, and a look whether others have news, too"
    assert slurm.reconfigured == 2
    before = one.reads
    spent = timed(lambda: one.event("slurm-gpu/501"))  # nothing new
    assert spent < EVENT_S
    assert (one.writes, slurm.reconfigured) == (1, 2)
    assert one.reads - before <= 9


def test_a_burst_of_a_thousand_changes(monkeypatch: pytest.MonkeyPatch, slurm: SlurmDouble):
    """All nodes are installed at once: Juju delivers an event for each, and the first finds the news of all."""
    one = cloud(monkeypatch, NODES)
    first = timed(lambda: one.event("slurm-gpu/0"))
    assert one.reads == NODES
    assert (one.writes, slurm.reconfigured) == (1, 1)
    summary = gres_lines.summary()
    assert (summary["nodes"], summary["gpus"]) == (str(NODES), str(NODES * CARDS))
    sample = [f"slurm-gpu/{i}" for i in range(1, NODES, 50)]
    rest = timed(lambda: [one.event(unit) for unit in sample]) / len(sample)
    print(f"burst: {first:.3f} s, each further event {rest:.3f} s, in all {first + (NODES - 1) * rest:.0f} s")
    assert first < 3 * EVENT_S
    assert rest < EVENT_S
    assert (one.writes, slurm.reconfigured) == (1, 1), "one file and one reconfigure for the burst"


def test_a_burst_costs_in_proportion(monkeypatch: pytest.MonkeyPatch):
    def cost(count: int) -> float:
        one = cloud(monkeypatch, count)
        return timed(lambda: one.event("slurm-gpu/0"))

    cost(100)  # what is made once
    small, large = min(cost(NODES // 4) for _ in range(3)), min(cost(NODES) for _ in range(3))
    assert large < 8 * small, f"four times the nodes took {large / small:.1f} times as long"


def test_a_node_that_leaves_a_thousand(monkeypatch: pytest.MonkeyPatch, slurm: SlurmDouble):
    one = cloud(monkeypatch, NODES)
    one.event("slurm-gpu/0")
    del one.databags["slurm-gpu/999"]
    one.reads = one.writes = 0
    assert timed(lambda: one.event("slurm-gpu/3")) < EVENT_S
    assert one.writes == 1
    assert "slurmd-999 " not in gres_conf.PATH.read_text()
