"""The bench of collectives: nccl-tests' table, and results that are checked."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib

import pytest
import ranks
import torch

from ddptrain.world import exchanges

QUICK = ("-b", "1K", "-e", "64K", "-f", "8", "-n", "2", "-w", "1")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[ranks.Result, dict]:
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    result = ranks.succeed(2, "collectives --collective all", *QUICK, "-J", path)
    return result, json.loads(path.read_text())


def rows(output: str) -> list[list[str]]:
    """Return the table's rows as the parsers in use do: by columns."""
    return [line.split() for line in output.splitlines() if line.lstrip()[:1].isdigit()]


def test_the_table_has_nccl_tests_columns(measured: tuple[ranks.Result, dict]):
    found = rows(measured[0].output)
    assert len(found) == 5 * 3
    assert all(len(row) == 13 for row in found)
    assert [row[0] for row in found[:3]] == ["1024", "8192", "65536"]
    assert found[0][1:5] == ["256", "float", "sum", "-1"]
    for row in found:
        size, time, algbw = int(row[0]), float(row[5]), float(row[6])
        assert algbw == pytest.approx(size / time / 1e3, abs=0.006 + 0.01 * algbw)
    gather = found[3]
    assert (gather[0], gather[1]) == (
        "1024",
        "128",
    )  # all_gather: size is of all ranks, count of one
    alltoall = found[12]
    assert alltoall[9:] == ["N/A"] * 4
    output = measured[0].output
    header = "minBytes 1024 maxBytes 65536 step: 8(factor) warmup iters: 1 iters: 2 agg iters: 1 validation: 1 graph: 0"
    assert output.count(f"# nThread 1 nGpus 1 {header}") == 5
    assert output.count("# Out of bounds values : 0 OK") == 5
    assert output.count("# Avg bus bandwidth    : ") == 5
    for name in exchanges.COLLECTIVES:
        assert f"# Collective test concluded: {name}_perf" in output


def test_the_json_says_the_same(measured: tuple[ranks.Result, dict]):
    report = measured[1]
    assert report["world_size"] == 2
    assert [c["collective"] for c in report["collectives"]] == list(exchanges.COLLECTIVES)
    for entry in report["collectives"]:
        factor = exchanges.COLLECTIVES[entry["collective"]].bus_factor(2)
        placed = [
            row[p] for row in entry["results"] for p in ("out_of_place", "in_place") if row[p]
        ]
        assert all(p["bus_bw"] == pytest.approx(p["alg_bw"] * factor) for p in placed)
        assert entry["average_bus_bandwidth"]["bandwidth"] == pytest.approx(
            sum(p["bus_bw"] for p in placed) / len(placed)
        )
        assert entry["out_of_bounds"] == {"count": 0, "okay": True}


def test_bus_factors_are_nccl_tests():
    ring = 15 / 16
    expected = dict.fromkeys(exchanges.COLLECTIVES, ring) | {
        "all_reduce": 2 * ring,
        "broadcast": 1,
    }
    assert {name: c.bus_factor(16) for name, c in exchanges.COLLECTIVES.items()} == expected


def test_a_size_that_does_not_fit_is_one_line():
    result = ranks.run(2, "collectives -b 1048576G -e 1048576G")
    (line,) = result.fatal()
    assert "no memory for a buffer of 1125899906842624 bytes; lower --max-bytes" in line
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", list(exchanges.COLLECTIVES))
def test_a_corrupted_buffer_is_counted_and_fails_on_every_rank(name: str):
    result = ranks.run(
        2, "collectives --collective", name, *QUICK, accident="accident_corrupt", CORRUPT=name
    )
    assert result.codes == [2, 2]
    assert [row[8] for row in rows(result.output)] == ["1", "1", "1"]
    assert "# Out of bounds values : 3 FAILED" in result.output
    assert "3 elements arrived wrong" in result.fatal()[0]


@pytest.mark.parametrize("datatype", ["bfloat16", "half", "int8", "uint8", "int64", "double"])
@pytest.mark.parametrize("size", [2, 60])
def test_the_expected_values_are_exact_in_every_dtype(datatype: str, size: int):
    coder = exchanges.Coder(datatype, size, torch.device("cpu"))
    sent = torch.stack([coder.reducible(rank, 200).to(torch.int64) for rank in range(size)])
    reduced = sent.sum(0)
    assert torch.equal(coder.reduced(0, 200).to(torch.int64), reduced)
    assert torch.equal(coder.reduced(77, 100).to(torch.int64), reduced[77:177])
    assert (
        len({tuple(coder.reducible(rank, 61).tolist()) for rank in range(2)}) == 2 or coder.top == 1
    )
    code = coder.coded(1, 0, 500)
    assert torch.equal(code.to(torch.int64).to(coder.dtype), code)
    assert not torch.equal(code, coder.coded(0, 0, 500))


def test_values_tell_whence_whither_and_where():
    """Every element of a part from or for the wrong rank, or at the wrong place, is wrong."""
    coder = exchanges.Coder("float", 4, torch.device("cpu"))
    parts = {
        (source, target): coder.coded(source, target, 1000)
        for source in range(4)
        for target in range(4)
    }
    for one, values in parts.items():
        assert int((values[1:] != values[:-1]).sum()) == 999
        for other, others in parts.items():
            assert int((values != others).sum()) == (0 if one == other else 1000), (one, other)


MEETS = """
import json, os, torch.distributed as dist
rank = int(os.environ["RANK"])
os.environ["SLURMD_NODENAME"] = "abb"[rank]
from ddptrain.world import distributed, round_trips
dist.init_process_group("gloo")
world = distributed.adopted()
trips = round_trips.measure(world)
assert bool(trips) == world.is_main
print("TRIPS", json.dumps(trips), flush=True)
"""


def test_hosts_measure_the_round_trips_between_them(tmp_path: pathlib.Path):
    script = tmp_path / "meets.py"
    script.write_text(MEETS)
    result = ranks.succeed(3, script, accident=ranks.SCRIPT, DO="nothing", AT="0")
    (line,) = [line for line in result.output.splitlines() if line.startswith('TRIPS {"')]
    trips = json.loads(line.removeprefix("TRIPS"))
    assert {one: list(others) for one, others in trips.items()} == {"a": ["b"], "b": ["a"]}
    assert all(0 < trip_ms < 10_000 for others in trips.values() for trip_ms in others.values())
