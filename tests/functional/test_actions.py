"""Every action of the four charms, once, on the deployed cluster: its success or refusal.

The table actions.yaml has a row for each declared action; the other files here test actions in
depth.
"""

import pathlib
import re
import typing

import pytest
import yaml

from functional.conftest import REPOSITORY, Cluster, Json

pytestmark = [
    pytest.mark.trains,
    pytest.mark.timeout(1500),
]  # the first test of a run deploys; each command has its own limit

# For the others, the unit on the machine of slurmd/0
UNITS = {"ddp-trainer": "trainer/0", "juicefs-server-proxy": "juicefs-server-proxy/0"}
RUNS = ("tour-a", "tour-b")
SMALL = ("gpus-per-node=0", "cpus-per-task=1")  # so that torch for CPUs fits the job
TABLE: dict[str, dict[str, Json | str]] = yaml.safe_load(
    pathlib.Path(__file__).with_name("actions.yaml").read_text()
)
ROWS = [
    (charm, name)
    for charm, rows in TABLE.items()
    for name, row in rows.items()
    if row != "elsewhere"
]


@pytest.fixture(scope="module")
def runs(cluster: Cluster) -> None:
    """Two runs to look at."""
    for name in RUNS:
        options = ("nodes=2", *SMALL, f"run={name}", "wait=true")
        found = cluster.action("submit-ddp", "workload=smoke", *options, timeout=1500)
        assert found["state"] == "COMPLETED", found


def test_the_table_has_every_action():
    declared = {
        (path.parent.name, name)
        for path in (REPOSITORY / "charms").glob("*/charmcraft.yaml")
        for name in yaml.safe_load(path.read_text())["actions"]
    }
    assert declared == {(charm, name) for charm, rows in TABLE.items() for name in rows}


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(("charm", "name"), ROWS)
def test_action(cluster: Cluster, charm: str, name: str):
    row = typing.cast(Json, TABLE[charm][name])
    unit = UNITS.get(charm) or cluster.beside("slurmd/0", charm)
    answer = cluster.ctl("run", unit, name, *row.get("arguments", []), "--format", "json")
    if "refused" in row:
        assert answer.code == 1, answer.out
        assert re.fullmatch(f"{name}: {row['refused']}", answer.error), answer.error
        return
    assert answer.code == 0, answer.err[-3000:]
    results: Json = answer.json()[unit]["results"]
    assert results, "an action says something"
    for key, pattern in row.get("results", {}).items():
        assert re.fullmatch(pattern, str(results[key]).strip()), (key, results)
