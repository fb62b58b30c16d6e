"""Sites that exchange every few steps: the outer optimiser, its rhythm, and a training."""

# pyright: basic, reportPrivateImportUsage=false
import itertools
import json
import pathlib
import re
import time

import conftest
import pytest
import ranks

from ddptrain.checkpoint import stored
from ddptrain.ground import errors
from ddptrain.world import diloco, sites

TINY = (
    "--layers 2 --heads 2 --width 32 --seq-len 32 --batch 4 --warmup 4 --precision fp32 "
    "--eval-rows 16 --log-every 1 --dropout 0.1 --deterministic"
).split()
SITES = "--sites 2 --sync-every 3 --steps 20 --epoch-steps 10".split()

# Each rank moves its own parameters at random; the expected result of an exchange is computed here
# too
EXCHANGES = """
import os, torch, torch.distributed as dist
from ddptrain.world import agreement, diloco, sites
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
count = int(os.environ["COUNT"])
place = sites.divide(["a"] * size, count)
within = sites.Sites(agreement.Peers(rank, size, dist.group.WORLD, 60), place)
parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 5), (7,))]
exchange = diloco.Exchange(parameters, within)
reference = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 5), (7,))]
lr, momentum = float(os.environ["LR"]), float(os.environ["MOMENTUM"])
outer = torch.optim.SGD(reference, lr=lr, momentum=momentum, nesterov=momentum > 0)
for step in range(5):
    moves = []
    for site in range(count):
        generator = torch.Generator().manual_seed(100 * step + site)
        moves.append([torch.randn(p.shape, generator=generator) for p in parameters])
    with torch.no_grad():
        for p, move in zip(parameters, moves[within.number]):
            p.add_(move)
    exchange(lr, momentum)
    for p, *those in zip(reference, *moves):
        p.grad = -sum(those) / count
    outer.step()
    for p, wanted in zip(parameters, reference):
        torch.testing.assert_close(p, wanted, rtol=0, atol=0.03 * (step + 1))
    held = [torch.empty(22) for _ in range(size)]
    dist.all_gather(held, torch.cat([p.detach().flatten() for p in parameters]))
    assert all(torch.equal(held[0], one) for one in held)
part = -(-22 // count)  # of the parameters, rounded up: what a leader adds up for all
sent = 5 * 2 * (count - 1) * part * 2  # exchanges, messages, other leaders, numbers, bytes of bf16
assert exchange.take_figures()["sync_mib"] * 2**20 == (sent if within.leads else 0)
print("exchanged", flush=True)
"""


@pytest.mark.parametrize(("size", "count"), [(2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
def test_an_exchange_moves_all_ranks_as_nesterov_sgd_on_the_mean_does(
    size: int, count: int, lr: float, momentum: float, tmp_path: pathlib.Path
):
    """With rate 1 and momentum 0 it is the plain mean; within what bf16 can say."""
    script = tmp_path / "exchanges.py"
    script.write_text(EXCHANGES)
    about = {"DO": "nothing", "AT": "0", "LR": str(lr), "MOMENTUM": str(momentum)}
    about["COUNT"] = str(count)
    result = ranks.succeed(size, script, accident=ranks.SCRIPT, **about)
    assert result.output.count("exchanged") == size


def test_sites_are_the_hosts_or_equal_parts_of_the_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(sites.NEAR, raising=False)
    assert sites.divide(["a", "a", "b", "b", "c"]) == [0, 0, 1, 1, 2]
    assert sites.divide(["a", "b", "c", "d"], 2) == [0, 0, 1, 1]
    with pytest.raises(errors.UserError, match=r"--sites 2: 3 ranks do not make 2 equal sites"):
        sites.divide(["a", "b", "c"], 2)


@pytest.mark.parametrize(
    ("near", "hosts", "place"),
    [
        ("a,b c,d", "a a b c d", [0, 0, 0, 1, 1]),
        ("a,c b", "a b c", [0, 1, 0]),
        ("a,b c", "a b x", [0, 0, 1]),  # x was not measured
        ("a,b c,d", "a b", [0, 1]),  # all are near, and exchanges are wanted
        ("", "a b", [0, 1]),
    ],
)
def test_hosts_with_short_round_trips_are_one_site(
    near: str, hosts: str, place: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(sites.NEAR, near)
    assert sites.divide(hosts.split()) == place


def test_the_sites_average_through_the_warm_up_and_at_the_end_of_each_epoch():
    rhythm = diloco.Rhythm(50, 25, 0.7, 0.9, epoch_steps=60, steps=200)
    due = [step for step in range(1, 201) if rhythm.is_due(step)]
    assert due == [10, 20, 25, 60, 75, 120, 125, 175, 180, 200]
    assert [rhythm.outer(step) for step in (10, 25, 60)] == [(1.0, 0.0), (1.0, 0.0), (0.7, 0.9)]
    assert [rhythm.outer(step) for step in (175, 180, 200)] == [(0.7, 0.9), (0.7, 0.9), (1.0, 0.0)]
    assert (rhythm.until(60), rhythm.until(61), rhythm.until(181)) == (0, 14, 19)


@pytest.mark.parametrize(
    ("every", "rate", "momentum"),
    [(1, 0.3, 0.9), (10, 0.3, 0.9), (11, 1.0, 0.8), (500, 1.0, 0.8)],
)
def test_the_outer_step_follows_how_often_the_sites_exchange(
    every: int, rate: float, momentum: float
):
    assert diloco.outer_for(every) == (rate, momentum)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_it_trains_and_says_how_the_sites_exchange(
    size: int, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    result = ranks.trained(size, dataset, tmp_path / "run", *TINY, *SITES)

    shown = next(line for line in result.marked("DDP") if "sites" in line)
    assert shown == shown | {"sites": "2", "sync_every": "3"}
    assert shown == shown | {"averaged_until": "4", "averaged_from": "19"}
    assert shown == shown | {"outer_lr": "0.3", "outer_momentum": "0.9"}
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (record["sync_every"], record["outer_lr"], record["outer_momentum"]) == (3, 0.3, 0.9)
    losses = conftest.losses(tmp_path / "run")
    assert list(losses) == list(range(1, 21))
    assert losses[20] < losses[1] - 0.5
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [rank["site"] for rank in summary["ranks"]] == [rank * 2 // size for rank in range(size)]
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    sent_mib = {line["step"]: line["sync_mib"] for line in records if line.get("sync_mib")}
    bf16_mib = pytest.approx(2 * summary["parameters"] / 2**20)
    assert sent_mib == dict.fromkeys((3, 4, 7, 10, 13, 16, 19, 20), bf16_mib)
    a_step = {line["step"]: line["sync_bytes_per_step"] for line in records if "sync_s" in line}
    assert a_step[3] == pytest.approx(2 * summary["parameters"] / 3)
    assert a_step[4] == pytest.approx(2 * summary["parameters"])
    shares = [line["sync_share"] for line in records if "sync_s" in line]
    assert len(shares) == 8
    assert all(0 < share < 1 for share in shares)
    (host,) = {rank["host"] for rank in summary["ranks"]}
    assert records[0]["sites"] == f"{host} {host}"
    # The record of a checkpoint, from another thread, may come after the last step's
    steps = [line for line in records if line["kind"] == "step"]
    assert steps[-1]["sites"] == f"{host} {host}"


def test_bf16_gradients_train_as_fp32_ones_do(dataset: pathlib.Path, tmp_path: pathlib.Path):
    more = "--steps 8 --epoch-steps 8".split()
    for kind in ("fp32", "bf16"):
        ranks.trained(2, dataset, tmp_path / kind, *TINY, *more, "--gradients", kind)
    losses = {kind: conftest.losses(tmp_path / kind) for kind in ("fp32", "bf16")}
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=2e-3)


def ending(run_dir: pathlib.Path) -> list[dict]:
    """Return the files of the last checkpoint, with their sizes and CRC-32s."""
    found = stored.verify(run_dir / "epoch-0002")
    listed = json.loads((found.path / "manifest.json").read_text())["files"]
    return [entry for entry in listed if not entry["file"].endswith(".metadata")]


@pytest.fixture(scope="module")
def whole(dataset: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """20 steps on two sites without a break."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    ranks.trained(2, dataset, run_dir, *TINY, *SITES)
    return run_dir


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_killed_and_resumed_it_is_the_same_bit_for_bit(
    rank: int, whole: pathlib.Path, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    run_dir = tmp_path / "run"
    accident = f"accident_step DO=kill AT=14 OF={rank}"
    died = ranks.train(2, dataset, run_dir, *TINY, *SITES, accident=accident)
    assert died.returncode != 0

    result = ranks.trained(2, dataset, run_dir, *TINY, *SITES)

    resumed = next(line for line in result.marked("CKPT") if "resumed" in line)
    assert (resumed["step"], resumed["exact"]) == ("10", "yes")
    assert conftest.losses(run_dir) == conftest.losses(whole)
    assert ending(run_dir) == ending(whole)
    folders = {entry["file"].split("/")[0] for entry in ending(run_dir)}
    assert folders == {"dcp", "site-0001"}


def test_stopped_between_exchanges_it_waits_for_the_next(
    whole: pathlib.Path, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    run_dir, stop = tmp_path / "run", tmp_path / "stop"
    stop.touch()
    attempt = {"STOP_FILE": str(stop), "RUN_ATTEMPT_ID": "7.r0"}
    ranks.trained(2, dataset, run_dir, *TINY, *SITES, **attempt)
    assert conftest.outcome(run_dir, "7.r0")["outcome"] == "preempted"
    assert conftest.outcome(run_dir, "7.r0")["step"] == 3
    saved = stored.verify(run_dir / "epoch-0001-step-000003")
    assert saved.meta["sites"] == {"count": 2, "place": [0, 1], "is_synced": True}

    stop.unlink()
    ranks.trained(2, dataset, run_dir, *TINY, *SITES)

    assert conftest.losses(run_dir) == conftest.losses(whole)
    assert ending(run_dir) == ending(whole)


@pytest.mark.parametrize(("left_s", "step"), [(600, 20), (12, 1)])
def test_it_waits_for_an_exchange_that_comes_within_the_warning(
    left_s: float, step: int, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    """The stop file has the end of the time limit, and saving takes up to 15 s of the rest."""
    far = "--sites 2 --sync-every 20 --warmup 0 --steps 100 --epoch-steps 100".split()
    run_dir, stop = tmp_path / "run", tmp_path / "stop"
    stop.write_text(f"{time.time() + left_s:.0f}\n")
    attempt = {"STOP_FILE": str(stop), "RUN_ATTEMPT_ID": "7.r0"}

    ranks.trained(2, dataset, run_dir, *TINY, *far, **attempt)

    assert conftest.outcome(run_dir, "7.r0")["step"] == step
    saved = stored.verify(pathlib.Path(conftest.outcome(run_dir, "7.r0")["checkpoint"]))
    assert saved.meta["sites"]["is_synced"] == (step == 20)


def test_stopped_far_from_an_exchange_it_saves_each_sites_own_weights(
    dataset: pathlib.Path, tmp_path: pathlib.Path
):
    """With exchanges 100000 steps apart, a marked checkpoint of the step resumes exactly."""
    far = "--sites 2 --sync-every 100000 --warmup 0 --steps 100000 --epoch-steps 100000".split()
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    late = "accident_step DO=kill BY=SIGUSR1 AT=2"
    ranks.trained(2, dataset, whole, *TINY, *far, accident=late, RUN_ATTEMPT_ID="7.r0")
    stop = tmp_path / "stop"
    stop.touch()
    for attempt in range(3):  # each stops after a step
        about = {"STOP_FILE": str(stop), "RUN_ATTEMPT_ID": f"8.r{attempt}"}
        result = ranks.trained(2, dataset, broken, *TINY, *far, **about)

    saved = stored.verify(pathlib.Path(conftest.outcome(broken, "8.r2")["checkpoint"]))
    assert saved.meta["sites"] == {"count": 2, "place": [0, 1], "is_synced": False}
    resumed = next(line for line in result.marked("CKPT") if "resumed" in line)
    assert (resumed["step"], resumed["exact"]) == ("2", "yes")
    wanted = conftest.losses(whole)
    assert conftest.losses(broken) == {step: wanted[step] for step in (1, 2, 3)}


@pytest.mark.parametrize(
    "more", ["--sync-every 0", pytest.param("--sites 1", marks=pytest.mark.long)]
)
def test_at_another_number_of_sites_it_goes_on_with_site_0_and_says_so(
    more: str, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    run_dir = tmp_path / "run"
    ranks.trained(2, dataset, run_dir, *TINY, *SITES)

    result = ranks.trained(2, dataset, run_dir, *TINY, *SITES, more, "--steps 24")

    resumed = next(line for line in result.marked("CKPT") if "resumed" in line)
    assert resumed["exact"] == "no"
    assert "2 sites there, 1 here: all go on with site 0's moments" in resumed["why"]
    losses = conftest.losses(run_dir)
    assert list(losses) == list(range(1, 25))
    assert all(abs(b - a) < 0.5 for a, b in itertools.pairwise(list(losses.values())[15:]))


def test_sites_that_the_ranks_do_not_make_are_refused(
    dataset: pathlib.Path, tmp_path: pathlib.Path
):
    result = ranks.train(2, dataset, tmp_path / "run", *TINY, "--sync-every 5 --sites 3")
    wanted = "--sites 3: 2 ranks do not make 3 equal sites; give a number that divides them"
    assert result.codes == [2, 2]
    assert [text for text in result.fatal() if wanted in text]


PAGE = (conftest.ROOT / "docs/howto/slow-links.md").read_text()
SCRIPT = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)[0]


def script_losses(output: str) -> dict[str, str]:
    """Return the losses that the page's script prints, by rank and step."""
    return dict(re.findall(r"^(rank \d step \d+) loss (\S+)$", output, re.M))


def test_the_pages_own_loop_resumes_bit_for_bit(tmp_path: pathlib.Path):
    script, stop = tmp_path / "train.py", tmp_path / "stop"
    script.write_text(SCRIPT)

    def run(name: str, attempt: str, **env: str) -> ranks.Result:
        about = {"RUN_DIR": str(tmp_path / name), "RUN_ATTEMPT_ID": attempt, "STOP_FILE": str(stop)}
        about |= {"DO": "nothing", "AT": "0", "CUDA_VISIBLE_DEVICES": ""}
        return ranks.succeed(2, script, accident=ranks.SCRIPT, **{**about, **env})

    whole = script_losses(run("whole", "1.r0").output)
    first = run("broken", "2.r0", DO="stop", AT="4")
    stop.unlink()
    second = run("broken", "2.r1")

    assert conftest.outcome(tmp_path / "broken", "2.r0")["outcome"] == "preempted"
    assert conftest.outcome(tmp_path / "broken", "2.r1")["outcome"] == "done"
    assert len(whole) == 2 * 100
    assert script_losses(first.output) | script_losses(second.output) == whole
