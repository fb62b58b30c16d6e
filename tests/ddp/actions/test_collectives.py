"""benchmark-collectives and plan: the measurement as a job, the baseline it leaves, and what is predicted from it."""

import json
import typing

import pytest
from cluster import Cluster, Job
from collective_results import TABLE, leave, measured
from harness import Trainer

from ddp.measure import plan


def measure(ready: Trainer, cluster: Cluster, busbw: float = 1.5, **params: object) -> dict[str, str]:
    cluster.submitted = lambda job: leave(job, measured(busbw))
    return ready.run("benchmark-collectives", **params)


def test_the_table_is_shown_and_kept_as_the_baseline(ready: Trainer, cluster: Cluster):
    results = measure(ready, cluster, min_bytes="1K", max_bytes="64M", step_factor=4)
    assert results["table"] == TABLE
    assert results["average-busbw"] == "1.5"
    assert results["comparison"] == "all_reduce: 1.5 GB/s, the first of its kind; stored"
    (entry,) = json.loads((ready.workspace / "baselines" / "collectives.json").read_text())["entries"]
    assert entry["hosts"] == ["slurmd-0", "slurmd-1"]
    assert [point["busbw"] for point in entry["points"]] == [1.5, 1.5]
    (command,) = cluster.jobs[-1].commands()
    assert "--collective all_reduce --min-bytes 1K --max-bytes 64M --step-factor 4" in command
    assert results["plot"].endswith("/collectives.png")


def test_a_slower_measurement_does_not_replace_the_baseline(ready: Trainer, cluster: Cluster):
    path = ready.workspace / "baselines" / "collectives.json"

    def stored() -> list[float]:
        return [entry["average_busbw"] for entry in json.loads(path.read_text())["entries"]]

    measure(ready, cluster, 2.0)
    results = measure(ready, cluster, 1.0)
    assert results["comparison"].endswith("0.50 of the baseline of 2026-11-20T18:00:00Z (2 GB/s); not stored")
    assert any("slower; to find out why: juju run trainer/0 doctor" in line for line in ready.log)
    assert stored() == [2.0]
    measure(ready, cluster, 1.9)
    assert stored() == [1.9]
    measure(ready, cluster, 3.0, store="never")
    assert stored() == [1.9]
    measure(ready, cluster, 0.5, store="always")
    assert stored() == [0.5]


def test_a_damaged_baseline_counts_as_none(ready: Trainer, cluster: Cluster):
    path = ready.workspace / "baselines" / "collectives.json"
    for text in ("", "[]", '{"entries": 1}', '{"entries": [1, {"collective": "all_reduce"}, {"points": []}]}'):
        path.write_text(text)
        assert measure(ready, cluster)["comparison"].endswith("the first of its kind; stored")


def test_wrong_values_fail_with_the_first_ranks_words(ready: Trainer, cluster: Cluster):
    def fail(job: Job) -> None:
        leave(job, measured())
        (job.script.parent / "control" / f"{job.job_id}.r0.outcome").write_text('{"outcome": "failed"}')
        (job.script.parent / "logs" / f"{job.job_id}.out").write_text(
            "[FATAL] 3 elements arrived wrong; a link is at fault\n"
        )

    cluster.submitted, cluster.states = fail, [("FAILED", 256)]
    assert "3 elements arrived wrong" in ready.fails("benchmark-collectives")
    assert not (ready.workspace / "baselines" / "collectives.json").exists()


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"collective": "gather"}, "collective: 'gather' is not allowed; one of: all_reduce, "),
        (
            {"min_bytes": "1T"},
            "min-bytes: '1T' is not allowed; a number of bytes with K, M or G, such as 64M",
        ),
        ({"min_bytes": "2M", "max_bytes": "1024K"}, "min-bytes: 2M is more than max-bytes=1024K; swap them"),
        ({"nodelist": "slurmd-9"}, "nodelist: Slurm knows no node slurmd-9; there are: slurmd-0, slurmd-1"),
        ({"nodes": 3}, "nodes: 3 requested, partition slurmd has 2 usable"),
        ({"store": "yes"}, "store: 'yes' is not allowed; one of: auto, always, never"),
        ({"iters": 0}, "iters: 0 is not allowed; a whole number from 1 to 100000"),
    ],
)
def test_what_cannot_be_measured_is_refused(ready: Trainer, params: dict[str, typing.Any], line: str):
    assert ready.fails("benchmark-collectives", **params).startswith(line)


# -- plan -------------------------------------------------------------------------------------------------------------

POINTS = [{"bytes": 1 << 20, "busbw": 1.0}, {"bytes": 4 << 20, "busbw": 4.0}]


def test_bandwidth_is_read_between_the_measured_sizes():
    assert plan.busbw(2 << 20, POINTS) == pytest.approx(2.0)
    assert plan.busbw(1 << 30, POINTS) == 4.0
    below = plan.reduce_seconds(1 << 10, 2, POINTS)
    assert below == pytest.approx(plan.reduce_seconds(1 << 20, 2, POINTS)), "latency is what counts there"
    assert plan.reduce_seconds(4 << 20, 8, POINTS) == pytest.approx(2 * 7 / 8 * (4 << 20) / 4e9)


def test_communication_hides_behind_the_backward_pass_but_for_the_last_bucket():
    points = [{"bytes": 1 << 20, "busbw": 10.0}, {"bytes": 1 << 30, "busbw": 10.0}]
    work = plan.Work("tiny", 25 << 20, 128, 1000, 1, 1.0)  # 100 MiB of gradients in 4 buckets
    comm = 2 * 3 / 4 * (100 << 20) / 10e9
    hidden = plan.predict(work, 1.0, 4, points, overlap=1.0)
    assert (hidden.buckets, hidden.comm_s) == (4, pytest.approx(comm))
    assert hidden.exposed_s == pytest.approx(comm / 4)
    assert hidden.efficiency == pytest.approx(1 / (1 + comm / 4))
    slow = plan.predict(work, comm / 2, 4, points, overlap=1.0)
    assert slow.exposed_s == pytest.approx(comm - 2 / 3 * comm / 2 * 3 / 4)
    bare = plan.predict(work, 1.0, 4, points, overlap=0.0)
    assert bare.exposed_s == pytest.approx(comm)


def test_the_parameters_are_those_of_the_payloads_models(ready: Trainer):
    # 124 M with 50304 padded words, 1024 positions: as the payload's model counts them itself
    results = ready.run("plan", model="gpt2", seq_len=1024, nodes=1, dataset=add_vocabulary(ready, 50257))
    assert results["parameters"] == f"{50304 * 768 + 1024 * 768 + 12 * (12 * 768 * 768 + 2 * 768) + 768:,}"
    assert results["efficiency"] == "100 %: one rank"
    assert "estimated within a factor of three: 2 cores" in results["compute"]


def add_vocabulary(ready: Trainer, vocab: int) -> str:
    folder = ready.workspace / "datasets" / f"v{vocab}"
    folder.mkdir()
    (folder / "dataset.json").write_text(json.dumps({"tokenizer": {"vocab": vocab}}))
    return folder.name


def test_without_a_baseline_it_says_what_to_type(ready: Trainer):
    assert ready.fails("plan") == (
        "no baseline of all_reduce over several nodes on CPUs: the network is not measured; juju run trainer/0 benchmark-collectives nodes=2"
    )
    assert "compute" in ready.results


def test_a_step_is_predicted_from_the_baseline(ready: Trainer, cluster: Cluster):
    measure(ready, cluster, 2.0)
    results = ready.run("plan", parameters=1_000_000_000, tokens_per_second=2048, batch=16, seq_len=128)
    assert results["memory"] == "14.90 GiB a rank, and activations"
    assert results["compute"] == "1.00 s a step (as given)"
    assert results["communication"].startswith("2.00 s a step in 153 buckets (baseline of 2 ranks on 2 nodes, 2026")
    exposed = 2.0 - 0.7 * 2 / 3 * (1 - 1 / 153)  # CPUs move the bytes too
    assert results["exposed"] == f"{exposed:.2f} s"
    assert results["step"] == f"{1 + exposed:.2f} s"
    assert results["efficiency"] == f"{1 / (1 + exposed):.0%}"
    assert results["advice"].startswith("grad-accum=14 raises the efficiency to 90 %")
    better = ready.run("plan", parameters=1_000_000_000, tokens_per_second=2048, batch=16, seq_len=128, grad_accum=14)
    assert better["efficiency"] == "90%"


def test_computation_is_taken_from_a_run_of_the_same_model(ready: Trainer, cluster: Cluster):
    measure(ready, cluster)
    folder = ready.workspace / "runs" / "before"
    folder.mkdir()
    (folder / "job.json").write_text("{}")
    (folder / "config.json").write_text('{"model": "tiny", "seq_len": 128, "batch": 16}')
    summary: dict[str, typing.Any] = {"tokens_per_second": 4096.0, "world_size": 1, "ranks": [{"device": "cpu"}]}
    (folder / "summary.json").write_text(json.dumps(summary))
    results = ready.run("plan")
    assert results["compute"] == "500.0 ms a step (measured by the run before, one rank)"


def test_a_run_of_several_ranks_counts_with_its_communication(ready: Trainer, cluster: Cluster):
    measure(ready, cluster)
    folder = ready.workspace / "runs" / "before"
    folder.mkdir()
    (folder / "job.json").write_text("{}")
    (folder / "config.json").write_text('{"model": "tiny", "seq_len": 128, "batch": 16, "grad_accum": 1}')
    summary: dict[str, typing.Any] = {"world_size": 2, "nodes": 2, "ranks": [{"device": "cpu"}]}
    (folder / "summary.json").write_text(json.dumps(summary | {"tokens_per_second": 8192.0}))
    compute = ready.run("plan")["compute"]
    assert compute == "500.0 ms a step (measured by the run before, 2 ranks, communication included)"


def test_more_nodes_than_the_cluster_has_are_planned_for(ready: Trainer, cluster: Cluster):
    measure(ready, cluster, 2.0)
    results = ready.run("plan", nodes=16)
    assert results["resources"] == "16 nodes x 1 ranks in slurmd"
    assert results["communication"].endswith("; the nearest measurement)")


def measure_on_gpus(ready: Trainer, cluster: Cluster) -> None:
    """Leave a baseline of two nodes with a GPU each, at 2 GB/s."""
    measure(ready, cluster, 2.0)
    path = ready.workspace / "baselines" / "collectives.json"
    path.write_text(path.read_text().replace('"gloo"', '"nccl"'))
    for machine in cluster.machines:
        machine.gres = "gpu:h200:1"


def test_on_gpus_communication_overlaps_with_the_backward_pass(ready: Trainer, cluster: Cluster):
    measure_on_gpus(ready, cluster)
    results = ready.run("plan", parameters=1_000_000_000, tokens_per_second=2048, batch=16, seq_len=128)
    assert results["compute"] == "1.00 s a step (as given)"
    assert results["communication"].startswith("2.00 s a step in 153 buckets")
    exposed = 2.0 - 2 / 3 * (1 - 1 / 153)
    assert results["exposed"] == f"{exposed:.2f} s"
    assert results["step"] == f"{1 + exposed:.2f} s"
    assert results["efficiency"] == f"{1 / (1 + exposed):.0%}"
    halves = ready.run("plan", parameters=1_000_000_000, tokens_per_second=2048, batch=16, seq_len=128, grad_accum=2)
    assert halves["exposed"] == results["exposed"], "only the last of the passes has something to overlap with"


def test_gpus_of_a_known_type_are_estimated(ready: Trainer, cluster: Cluster):
    for machine in cluster.machines:
        machine.gres = "gpu:h200:8(S:0-1)"
    cluster.driver = ""
    results = ready.fails("plan")
    assert "several nodes on GPUs" in results
    assert "35% of the h200's bf16 peak" in ready.results["compute"]
    for machine in cluster.machines:
        machine.gres = "gpu:8"
    assert "GPUs of the type unknown" in ready.fails("plan")


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"model": "llama"}, "model: 'llama' is not allowed; one of: tiny, small, gpt2"),
        ({"parameters": 0}, "parameters: 0 is not allowed; a whole number from 1"),
        ({"dataset": "none"}, "dataset: "),
        ({"partition": "x"}, "partition: no partition 'x'"),
    ],
)
def test_what_cannot_be_planned_is_refused(ready: Trainer, params: dict[str, typing.Any], line: str):
    assert ready.fails("plan", **params).startswith(line)


@pytest.mark.parametrize(("gres", "kind"), [("gpu:mi300x:8", "mi300x"), ("gpu:8", "unknown")])
def test_gpus_of_an_unknown_type_are_not_guessed(ready: Trainer, cluster: Cluster, gres: str, kind: str):
    for machine in cluster.machines:
        machine.gres = gres
    line = (
        f"tokens-per-second: the peak of GPUs of the type {kind} is not known, and no run has measured this model; give"
    )
    assert ready.fails("plan", nodes=1, gpus_per_node=1).startswith(line)
    assert ready.run("plan", nodes=1, gpus_per_node=1, tokens_per_second=5000)["tokens-per-second"] == "5000"


def test_a_controller_that_stops_responding_while_the_gpus_type_is_asked_is_reported(
    ready: Trainer,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
):
    for machine in cluster.machines:
        machine.gres = "gpu:h200:8"
    rate = plan._rate  # pyright: ignore[reportPrivateUsage]

    def stops_responding(*arguments: typing.Any) -> tuple[float, str]:
        cluster.silent = 1
        return rate(*arguments)

    monkeypatch.setattr(plan, "_rate", stops_responding)
    assert ready.fails("plan", nodes=1, gpus_per_node=1).startswith("Slurm: ")
