"""benchmark-collectives and plan: the measurement as a job, its baseline, and the predictions."""

import json
import re
import typing

import pytest
from cluster import Cluster, Job
from harness import Trainer
from left_by_jobs import write_result

from ddp.prediction import baseline, step, workload

Json = dict[str, typing.Any]
TABLE = """# nThread 1 nGpus 1 minBytes 1024 maxBytes 4096 step: 4(factor) warmup iters: 2 iters: 10 agg iters: 1 validation: 1 graph: 0
#
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
        1024           256     float     sum      -1     10.0    0.10    0.10       0     10.0    0.10    0.10       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 1.5
#
# Collective test concluded: all_reduce_perf"""


def measured(busbw: float = 1.5) -> Json:
    """Make the payload's collectives.json."""
    rows = [
        {
            "size": size,
            "count": size // 4,
            "out_of_place": None,
            "in_place": {"time": size / busbw / 1e3, "alg_bw": busbw, "bus_bw": busbw, "nwrong": 0},
        }
        for size in (1 << 20, 64 << 20)
    ]
    one = {
        "collective": "all_reduce",
        "results": rows,
        "average_bus_bandwidth": {"bandwidth": busbw},
    }
    about = {"world_size": 2, "nodes": 2, "torch": "2.13.0+cpu", "backend": "gloo", "iface": "eth0"}
    return {**about, "created": "2026-11-20T18:00:00Z", "collectives": [one]}


def leave(job: Job, what: Json) -> None:
    """Write a measurement's files into its run's folder."""
    write_result(job)
    folder = job.script.parent
    (folder / "collectives.json").write_text(json.dumps(what))
    (folder / "summary.json").unlink()
    logs = folder / "logs" / f"{job.job_id}.r0" / "node-0" / "x" / "attempt_0" / "0"
    logs.mkdir(parents=True)
    (logs / "stdout.log").write_text(
        f"[DDP] world_size=2\n{TABLE}\n[RESULT] collective=all_reduce\n[DONE] ok\n"
    )


def measure(
    ready: Trainer, cluster: Cluster, busbw: float = 1.5, **params: object
) -> dict[str, str]:
    cluster.submitted = lambda job: leave(job, measured(busbw))
    return ready.run("benchmark-collectives", **params)


def test_the_table_is_shown_and_kept_as_the_baseline(ready: Trainer, cluster: Cluster):
    results = measure(ready, cluster, min_bytes="1K", max_bytes="64M", step_factor=4)
    assert results["table"] == TABLE
    assert results["average-busbw"] == "1.5"
    assert results["comparison"] == "all_reduce: 1.5 GB/s, the first of its kind; stored"
    (entry,) = json.loads((ready.workspace / "baselines" / "collectives.json").read_text())[
        "entries"
    ]
    assert (entry["nodes"], entry["world_size"]) == (2, 2)
    assert [point["busbw"] for point in entry["points"]] == [1.5, 1.5]
    (command,) = cluster.jobs[-1].commands()
    assert "--collective all_reduce --min-bytes 1K --max-bytes 64M --step-factor 4" in command


def test_a_slower_measurement_does_not_replace_the_baseline(ready: Trainer, cluster: Cluster):
    path = ready.workspace / "baselines" / "collectives.json"

    def stored() -> list[float]:
        return [entry["average_busbw"] for entry in json.loads(path.read_text())["entries"]]

    measure(ready, cluster, 2.0)
    results = measure(ready, cluster, 1.0)
    assert results["comparison"].endswith(
        "0.50 of the baseline of 2026-11-20T18:00:00Z (2 GB/s); not stored"
    )
    assert any(
        "slower; to find out why: juju run trainer/leader doctor" in line for line in ready.log
    )
    assert stored() == [2.0]
    measure(ready, cluster, 1.9)
    assert stored() == [1.9]


def test_a_damaged_baseline_counts_as_none(ready: Trainer, cluster: Cluster):
    path = ready.workspace / "baselines" / "collectives.json"
    for text in (
        "",
        "[]",
        '{"entries": 1}',
        '{"entries": [1, {"collective": "all_reduce"}, {"points": []}]}',
    ):
        path.write_text(text)
        assert measure(ready, cluster)["comparison"].endswith("the first of its kind; stored")


def test_wrong_values_fail_with_the_first_ranks_words(ready: Trainer, cluster: Cluster):
    def fail(job: Job) -> None:
        leave(job, measured())
        (job.script.parent / "control" / f"{job.job_id}.r0.outcome").write_text(
            '{"outcome": "failed"}'
        )
        (job.script.parent / "logs" / f"{job.job_id}.out").write_text(
            "[FATAL] 3 elements arrived wrong; a link is at fault\n"
        )

    cluster.submitted, cluster.states = fail, [("FAILED", 256)]
    assert "3 elements arrived wrong" in ready.fails("benchmark-collectives")
    assert not (ready.workspace / "baselines" / "collectives.json").exists()


@pytest.mark.parametrize(
    ("params", "line"),
    [
        (
            {"min_bytes": "1T"},
            "min-bytes: '1T' is not allowed; a number of bytes with K, M or G, such as 64M",
        ),
        (
            {"nodelist": "slurmd-9"},
            "nodelist: slurmd-9 is not in partition slurmd; see: scontrol show node slurmd-9",
        ),
        ({"nodes": 3}, "nodes: 3 requested, partition slurmd has 2 usable"),
    ],
)
def test_impossible_measurements_are_refused(
    ready: Trainer, params: dict[str, typing.Any], line: str
):
    assert ready.fails("benchmark-collectives", **params).startswith(line)


# -- plan -----------------------------------------------------------------------------------------

POINTS = [{"bytes": 1 << 20, "busbw": 1.0}, {"bytes": 4 << 20, "busbw": 4.0}]


def test_bandwidth_is_read_between_the_measured_sizes():
    assert baseline.busbw(2 << 20, POINTS) == pytest.approx(2.0)
    assert baseline.busbw(1 << 30, POINTS) == 4.0
    below = baseline.reduce_seconds(1 << 10, 2, POINTS)
    assert below == pytest.approx(baseline.reduce_seconds(1 << 20, 2, POINTS)), (
        "latency is what counts there"
    )
    assert baseline.reduce_seconds(4 << 20, 8, POINTS) == pytest.approx(2 * 7 / 8 * (4 << 20) / 4e9)


def test_communication_hides_behind_the_backward_pass_but_for_the_last_bucket():
    points = [{"bytes": 1 << 20, "busbw": 10.0}, {"bytes": 1 << 30, "busbw": 10.0}]
    work = workload.Workload("tiny", 25 << 20, 128, 1000, 1)  # 100 MiB of gradients in 4 buckets
    comm = 2 * 3 / 4 * (100 << 20) / 10e9
    for compute, overlap, exposed in (
        (1.0, 1.0, comm / 4),
        (comm / 2, 1.0, comm - 2 / 3 * comm / 2 * 3 / 4),
        (1.0, 0.0, comm),
    ):
        assert step.predict(work, compute, 4, points, overlap=overlap) == (
            pytest.approx(comm),
            pytest.approx(exposed),
        )


def test_the_parameters_are_those_of_the_payloads_models(ready: Trainer):
    # 124 M with 50304 padded words, 1024 positions: as the payload's model counts them itself
    given = {"seq_len": 1024, "nodes": 1, "tokens_per_second": 5000}
    results = ready.run("plan", model="gpt2", **given, dataset=add_vocabulary(ready, 50257))
    assert (
        results["parameters"]
        == f"{50304 * 768 + 1024 * 768 + 12 * (12 * 768 * 768 + 2 * 768) + 768:,}"
    )
    assert results["efficiency"] == "100%"
    assert results["tokens-per-second"] == "5000"


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_memory_of_each_way_is_known_before_anything_is_measured(ready: Trainer, nodes: int):
    """As published: 16 bytes a parameter (ZeRO), which FSDP2 shards; LoRA freezes them in bf16."""
    results = ready.run("plan", parameters=8_000_000_000, nodes=nodes, seq_len=2048, batch=2)
    assert results["step"].startswith("not predicted: tokens-per-second: no run has measured")
    rows = sizes_of(results["ways"])
    billions = 8e9 / 2**30

    parameters, gradients, optimizer, activations, total, recomputed = rows["DDP"]
    assert gradients == pytest.approx(4 * billions, rel=0.01)
    assert optimizer == pytest.approx(8 * billions, rel=0.01)
    assert total == pytest.approx(parameters + gradients + optimizer + activations, abs=0.3)
    assert recomputed < total
    sharded = rows["FSDP2"]
    assert sharded[2] == pytest.approx(8 * billions / nodes, rel=0.01)
    assert sharded[0] < parameters
    lora = rows["LoRA, rank 16"]
    assert lora[0] == pytest.approx(2 * billions, rel=0.05)
    assert lora[1] + lora[2] < 1


def sizes_of(text: str) -> dict[str, list[float]]:
    """Return the figures of a table's rows, by the first column."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines()[1:]:
        name, *cells = re.split(r"  +", line)
        found[name] = [float(cell) for cell in cells]
    return found


def add_vocabulary(ready: Trainer, vocab: int) -> str:
    folder = ready.workspace / "datasets" / f"v{vocab}"
    folder.mkdir()
    (folder / "dataset.json").write_text(json.dumps({"tokenizer": {"vocab": vocab}}))
    return folder.name


def test_without_a_baseline_the_command_that_measures_is_named(ready: Trainer):
    text = "no baseline of all_reduce over several nodes on CPUs: the network is not measured"
    assert (
        ready.fails("plan", tokens_per_second=5000)
        == f"{text}; juju run trainer/leader benchmark-collectives nodes=2"
    )
    assert "compute" in ready.results


BILLION: dict[str, typing.Any] = {
    "parameters": 1_000_000_000,
    "tokens_per_second": 2048,
    "batch": 16,
    "seq_len": 128,
}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_step_is_predicted_from_the_baseline(ready: Trainer, cluster: Cluster, on_gpu: bool):
    measure(ready, cluster, 2.0)
    if on_gpu:
        path = ready.workspace / "baselines" / "collectives.json"
        path.write_text(path.read_text().replace('"gloo"', '"nccl"'))
        for machine in cluster.machines:
            machine.gres = "gpu:h200:1"
    results = ready.run("plan", **BILLION)
    assert results["memory"] == "14.90 GiB a rank, and activations"
    assert results["compute"] == "1.00 s a step (as given)"
    # 153 buckets; CPUs move the bytes, too
    exposed = 2.0 - (1.0 if on_gpu else 0.7) * 2 / 3 * (1 - 1 / 153)
    communication = f"2.00 s a step, {exposed:.2f} s not hidden"
    assert results["communication"].startswith(
        f"{communication} (baseline of 2 ranks on 2 nodes, 2026"
    )
    assert results["step"] == f"{1 + exposed:.2f} s"
    assert results["efficiency"] == f"{1 / (1 + exposed):.0%}"
    halves = ready.run("plan", **BILLION, grad_accum=2)
    assert halves["communication"] == results["communication"], (
        "only the last of the passes has something to overlap with"
    )
    assert halves["step"] == f"{2 + exposed:.2f} s"


@pytest.mark.parametrize(("ranks", "rate"), [(1, 4096.0), (2, 8192.0)])
def test_computation_is_taken_from_a_run_of_the_same_model(
    ready: Trainer, cluster: Cluster, ranks: int, rate: float
):
    measure(ready, cluster)
    folder = ready.workspace / "runs" / "before"
    folder.mkdir()
    (folder / "job.json").write_text("{}")
    (folder / "config.json").write_text(
        '{"model": "tiny", "seq_len": 128, "batch": 16, "grad_accum": 1}'
    )
    summary: dict[str, typing.Any] = {
        "tokens_per_second": rate,
        "world_size": ranks,
        "ranks": [{"device": "cpu"}],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    assert (
        ready.run("plan")["compute"]
        == f"500.0 ms a step (measured by the run before, ranks: {ranks})"
    )


def test_a_plan_may_name_nodes_that_the_cluster_lacks(ready: Trainer, cluster: Cluster):
    measure(ready, cluster, 2.0)
    results = ready.run("plan", nodes=16, tokens_per_second=5000)
    assert results["resources"] == "16 nodes x 1 ranks in slurmd"
    assert "baseline of 2 ranks on 2 nodes" in results["communication"], "the nearest"
    path = ready.workspace / "baselines" / "collectives.json"
    path.write_text(path.read_text().replace('"gloo"', '"nccl"'))
    for machine in cluster.machines:
        machine.state = "DOWN"
    assert (
        ready.run("plan", nodes=4, gpus_per_node=8, tokens_per_second=5000)["resources"]
        == "4 nodes x 8 ranks"
    )


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"model": "llama"}, "model: 'llama' is not allowed; one of: tiny, small, gpt2"),
        ({"parameters": 0}, "parameters: 0 is not allowed; a whole number from 1"),
        ({"dataset": "none"}, "dataset: "),
        ({"partition": "x"}, "partition: no partition 'x'"),
        (
            {},
            "tokens-per-second: no run has measured this model; give that of one rank, or train it",
        ),
    ],
)
def test_impossible_plans_are_refused(ready: Trainer, params: dict[str, typing.Any], line: str):
    assert ready.fails("plan", **params).startswith(line)


def slow_down(ready: Trainer, cluster: Cluster, busbw: float = 0.0125) -> None:
    """Leave a baseline of 100 Mbit/s."""
    measure(ready, cluster, 2.0)
    path = ready.workspace / "baselines" / "collectives.json"
    entries = json.loads(path.read_text())
    for entry in entries["entries"]:
        for point in entry["points"]:
            point["busbw"] = busbw
    path.write_text(json.dumps(entries))


def leave_rate(ready: Trainer, rate: float, nodes: int = 1, **settings: object) -> None:
    """Leave a run that has measured the payload's smallest model, with a rank on each node."""
    folder = ready.workspace / "runs" / "before"
    folder.mkdir()
    (folder / "job.json").write_text("{}")
    about = {"model": "tiny", "seq_len": 128, "batch": 16, "grad_accum": 1, **settings}
    (folder / "config.json").write_text(json.dumps(about))
    ranks = [{"device": "cpu"}] * nodes
    summary = {"tokens_per_second": rate, "world_size": nodes, "nodes": nodes, "ranks": ranks}
    (folder / "summary.json").write_text(json.dumps(summary))


def remarks(ready: Trainer, **options: typing.Any) -> list[str]:
    """Return the remarks of a dry submission on the link."""
    dataset = ready.workspace / "datasets" / "bytes" / "dataset.json"
    dataset.parent.mkdir(exist_ok=True)
    dataset.write_text(json.dumps({"tokenizer": {"vocab": 257}}))
    given = {"workload": "gpt", "dataset": "bytes", "dry_run": True}
    results = ready.run("submit-ddp", **given, **options)
    return [line for line in results["checks"].splitlines() if "the link between" in line]


def test_a_submission_over_a_slow_link_names_the_option_that_keeps_the_ranks_busy(
    ready: Trainer, cluster: Cluster
):
    slow_down(ready, cluster, 0.00125)
    assert remarks(ready) == [], "no run has measured the model"
    leave_rate(ready, 40_000)
    plan = ready.run("plan")
    advised = plan["advice"].partition(":")[0]
    assert advised.startswith("--sync-every ")

    (line,) = remarks(ready)
    idle = 100 - int(plan["efficiency"].removesuffix("%"))
    assert f"would leave the ranks idle {idle}% of the time, and " in line
    assert line.endswith(f"% with {advised} (baseline of 2026-11-20T18:00:00Z)")
    assert remarks(ready, args="--sync-every 10") == []
    assert remarks(ready, args="--layers 2") == [], "a model that no run has measured"


def test_a_submission_over_a_fast_link_has_no_remark(ready: Trainer, cluster: Cluster):
    measure(ready, cluster, 200.0)
    leave_rate(ready, 40_000)
    assert remarks(ready) == []


@pytest.mark.parametrize(("busbw", "compute_s"), [(0.00125, 0.05), (0.0125, 0.5), (200.0, 0.5)])
def test_waiting_in_a_run_of_several_nodes_does_not_count_as_computation(
    busbw: float, compute_s: float
):
    (entry,) = baseline.entries_of(measured(busbw), "before")
    work = workload.Workload("tiny", 30_000_000, 128, 2048, 1)
    _, exposed_s = step.predict(work, compute_s, 2, entry["points"], overlap=0.7)
    pace = work.tokens / (compute_s + exposed_s)
    rate = workload.Rate(pace, "measured", 2, 2, work.tokens)

    found_s = step.compute_seconds(work, rate, [entry], on_gpu=False)

    assert found_s == pytest.approx(compute_s, abs=0.01 * (compute_s + exposed_s))


def test_over_a_slow_link_the_table_compares_what_sends_less(ready: Trainer, cluster: Cluster):
    slow_down(ready, cluster)

    results = ready.run("plan", **BILLION)

    rows = [line.split("  ") for line in results["table"].splitlines()]
    options = [row[0] for row in rows]
    assert options[1:] == [
        "-",
        "--gradients bf16",
        "--sync-every 10",
        "--sync-every 50",
        "--sync-every 500",
    ]
    sent = [next(cell.strip() for cell in row[1:] if cell.strip()) for row in rows[1:]]
    assert sent == ["4000", "2000", "200", "40", "4"]
    advised = "--sync-every 500: ranks compute 76% of the time, not 0% (gpt only)"
    assert results["advice"] == advised


def test_over_a_fast_link_nothing_is_advised(ready: Trainer, cluster: Cluster):
    measure(ready, cluster, 200.0)
    assert ready.run("plan", **BILLION)["advice"] == ""
