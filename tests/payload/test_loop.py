"""The training loop by itself: a step is the same for any number of ranks and passes."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import dataclasses
import errno
import json
import math
import os
import pathlib
import random
import typing

import conftest
import numpy as np
import pytest
import ranks
import torch

from ddptrain import engine, model, planning, shapes, train
from ddptrain.checkpoint import stored, tensors
from ddptrain.data import batches, sampler, shards
from ddptrain.ground import attempt
from ddptrain.options import config
from ddptrain.world import distributed

STEPS = (
    "--layers 2 --heads 2 --width 32 --seq-len 32 --precision fp32 --eval-rows 16 --log-every 1 --warmup "
    "2 --steps 6 --epoch-steps 6 --lr 0.01"
).split()


def norms(run_dir: pathlib.Path) -> dict[int, float]:
    """Return the gradients' norm of each step."""
    return conftest.figures(run_dir, "grad_norm")


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A dataset whose rows have from none to all of their targets learned."""
    folder = tmp_path_factory.mktemp("unlike")
    lines = []
    for n in range(400):
        prompt = conftest.prose(1, seed=n)[: (7 * n) % 150]
        lines.append(
            json.dumps(
                {"prompt": prompt, "completion": conftest.prose(1, seed=n + 1)[: (11 * n) % 60]}
            )
        )
    (folder / "train.jsonl").write_text("\n".join(lines))
    flags = ("--tokenizer", "byte", "--workers", 1, "--mask-prompts", "--val-share", 0.1)
    ranks.succeed(1, "prepare --source", folder / "train.jsonl", "--output", folder / "d", *flags)
    return folder / "d"


@pytest.mark.parametrize("masked", [False, True])
def test_a_step_is_the_mean_over_its_tokens_however_it_is_spread(
    masked: bool, dataset: pathlib.Path, unlike: pathlib.Path, tmp_path: pathlib.Path
):
    """Eight sequences as one batch, in four passes, or on two ranks: the same loss and gradient."""
    data = unlike if masked else dataset
    spread = {"one": (1, 8, 1), "passes": (1, 2, 4), "ranks": (2, 2, 2)}
    for name, (size, batch, accumulate) in spread.items():
        flags = ("--batch", batch, "--grad-accum", accumulate)
        ranks.trained(size, data, tmp_path / name, *STEPS, *flags)
    for figures in (conftest.losses, norms, conftest.val_losses):
        wanted = figures(tmp_path / "one")
        assert len(set(wanted.values())) == len(wanted) > 0
        for name in ("passes", "ranks"):
            assert figures(tmp_path / name) == pytest.approx(wanted, rel=1e-3), name


def test_a_step_with_nothing_to_learn_has_no_loss_and_breaks_nothing(tmp_path: pathlib.Path):
    """A prompt far longer than a step."""
    prompts = [
        {"prompt": conftest.prose(4, seed=n), "completion": conftest.prose(1, seed=n)[:40]}
        for n in range(40)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(prompt) for prompt in prompts))
    flags = ("--tokenizer", "byte", "--workers", 1, "--mask-prompts", "--val-share", 0.1)
    ranks.succeed(
        1, "prepare --source", tmp_path / "train.jsonl", "--output", tmp_path / "d", *flags
    )
    result = ranks.trained(2, tmp_path / "d", tmp_path / "run", *STEPS, "--batch 1 --steps 40")
    losses = conftest.losses(tmp_path / "run")
    learned = [loss for loss in losses.values() if loss is not None]
    assert list(losses) == list(range(1, 41))
    assert None in losses.values()
    assert all(0 < loss < 10 for loss in learned)
    assert len(learned) > 3
    assert all(norm < 100 for norm in norms(tmp_path / "run").values())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["first_loss"], summary["last_loss"]) == (learned[0], learned[-1])
    assert "nan" not in result.output.lower()
    assert "verified: whole" in ranks.succeed(1, "inspect", tmp_path / "run").output


@pytest.fixture
def build(
    dataset: pathlib.Path, tmp_path: pathlib.Path
) -> collections.abc.Iterator[collections.abc.Callable[..., train.Training]]:
    """Return `build(steps=..., epoch_steps=..., accumulate=..., **settings)`, a training here."""
    opened = shards.open_dataset(dataset)
    with distributed.joined("cpu") as world, contextlib.ExitStack() as stack:

        def make(
            *, steps: int = 4, epoch_steps: int = 4, accumulate: int = 1, **more: object
        ) -> train.Training:
            shape = shapes.Shape(1, 2, 16, 16, 320, float(str(more.get("dropout", 0.0))))
            given = config.Config(
                run_dir=tmp_path, data=dataset, precision="fp32", lr=0.01, seq_len=16, eval_rows=8
            )
            settings = config.complete(dataclasses.replace(given, **more), "cpu", {})  # pyright: ignore[reportArgumentType]
            decided = planning.Decided(
                settings=settings,
                dataset=opened,
                plan=sampler.make_plan(1, 16, 4, opened.tokens("train")),
                batching=planning.Batching(4, 4 // accumulate, accumulate),
                schedule=planning.Schedule(steps, epoch_steps, 0.01, 0.001, 0),
                kind=model.Kind({"kind": "gpt"}, shapes.count(shape), lambda: model.GPT(shape)),
                found=None,
            )
            training = train.Training(decided, world)
            return stack.enter_context(training)

        yield make


def rows(training: train.Training) -> torch.Tensor:
    with batches.Reader(
        training.dataset, training.plan, rank=0, size=1, start=0, stop=1, device=torch.device("cpu")
    ) as own:
        return own.next()


@pytest.mark.parametrize(("clip", "bound"), [(0.02, 0.02), (0.0, math.inf), (1e6, math.inf)])
def test_clipping_bounds_what_the_optimiser_gets(
    build: collections.abc.Callable[..., train.Training], clip: float, bound: float
):
    training = build(clip=clip)
    got: list[float] = []
    training.optimizer.register_step_pre_hook(
        lambda *_: got.append(
            math.hypot(
                *(p.grad.norm().item() for p in training.core.parameters() if p.grad is not None)
            )
        )
    )
    norm = training.step(rows(training), lr=0.0).norm
    assert norm.item() > 0.02
    assert got == [pytest.approx(min(norm.item(), bound), rel=1e-4)]


def test_the_rate_of_the_step_is_the_schedules(
    build: collections.abc.Callable[..., train.Training],
):
    training = build()
    before = [p.detach().clone() for p in training.core.parameters()]
    training.step(rows(training), lr=0.5)
    moved = max(
        (a - b).abs().max().item() for a, b in zip(before, training.core.parameters(), strict=True)
    )
    assert 0.4 < moved < 0.7  # AdamW moves by about the rate
    assert all(p.grad is None for p in training.core.parameters()), (
        "the next step would add to them"
    )


def test_each_step_takes_its_own_rate_and_says_it(
    build: collections.abc.Callable[..., train.Training],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    training = build(steps=5, epoch_steps=5)
    step, taken = train.Training.step, list[float]()
    monkeypatch.setattr(
        train.Training,
        "step",
        lambda self, rows, *, lr: (taken.append(lr), step(self, rows, lr=lr))[1],
    )
    training.run(0.0)
    assert taken == [training.schedule.lr(step) for step in range(5)]
    assert list(conftest.figures(tmp_path, "lr").values()) == taken


def test_an_evaluation_changes_nothing(build: collections.abc.Callable[..., train.Training]):
    training = build(dropout=0.5)
    training.step(rows(training), lr=0.01)
    live = tensors.leaves(tensors.state_of(training.core, training.optimizer))
    before = [tensor.clone() for tensor in live]
    found = {training.evaluate() for _ in range(3)}
    assert len(found) == 1, "no dropout, and the same rows each time"
    assert training.core.training
    assert all(torch.equal(a, b) for a, b in zip(before, live, strict=True))
    assert all(p.grad is None for p in training.core.parameters())


def test_without_symbolic_links_the_best_is_kept_by_the_manifests(
    build: collections.abc.Callable[..., train.Training],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    def refuse(*_: object, **__: object) -> typing.NoReturn:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "symlink", refuse)
    training = build(steps=6, epoch_steps=1, keep_checkpoints=2)
    losses = iter([3.0, 2.0, 2.5, 2.75, 2.25, 9.0])
    monkeypatch.setattr(train.Training, "evaluate", lambda _: next(losses))
    assert training.run(0.0) == attempt.DONE
    kept = sorted(path.name for path in tmp_path.glob("epoch-*"))
    assert kept == ["epoch-0002", "epoch-0005", "epoch-0006"]


def test_only_an_improvement_is_the_best(
    build: collections.abc.Callable[..., train.Training],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    training = build(steps=6, epoch_steps=1)
    losses = iter([3.0, 2.5, 2.5, 2.75, 2.25, 9.0])
    monkeypatch.setattr(train.Training, "evaluate", lambda _: next(losses))
    assert training.run(0.0) == attempt.DONE
    assert (tmp_path / "best").readlink().name == "epoch-0005"
    assert (tmp_path / "latest").readlink().name == "epoch-0006"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["best_loss"], summary["best_step"], summary["val_loss"]) == (2.25, 5, 9.0)


def test_the_last_epoch_may_be_short(
    build: collections.abc.Callable[..., train.Training], tmp_path: pathlib.Path
):
    training = build(steps=7, epoch_steps=3)
    assert training.run(0.0) == attempt.DONE
    assert list(conftest.val_losses(tmp_path)) == [3, 6, 7]
    assert stored.verify(tmp_path / "epoch-0003").step == 7
    assert conftest.figures(tmp_path, "epoch") == {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2, 7: 3}


def test_the_schedule_at_its_edges():
    def rates(steps: int, warmup: int, floor: float = 0.1) -> list[float]:
        schedule = planning.Schedule(
            steps=steps, epoch_steps=steps, peak=1.0, floor=floor, warmup=warmup
        )
        return [schedule.lr(step) for step in range(steps)]

    assert rates(1, 0) == [1.0]
    assert rates(4, 0)[0] == 1.0, "without warm-up the first step has the peak"
    assert rates(4, 3) == [0.25, 0.5, 0.75, 1.0], "a warm-up to the last step"
    assert rates(5, 0, floor=1.0) == [1.0] * 5
    assert rates(5, 1)[3] == pytest.approx(0.1 + 0.45)  # half-way down the cosine
    late = planning.Schedule(steps=4, epoch_steps=4, peak=1.0, floor=0.1, warmup=0)
    assert late.lr(4) == late.lr(400) == pytest.approx(0.1)
    assert (late.epoch(0), late.epoch(4), late.ends_epoch(3), late.ends_epoch(4)) == (
        1,
        1,
        False,
        True,
    )


@pytest.mark.parametrize(
    ("given", "device", "wanted"),
    [
        ({}, "cpu", (200, 50, 40)),
        ({"steps": 3}, "cpu", (3, 3, 1)),
        ({"steps": 1, "warmup": 9}, "cpu", (1, 1, 0)),
        ({"epochs": 2}, "cpu", (160, 80, 40)),
        ({"epochs": 2, "epoch_steps": 7}, "cpu", (14, 7, 7)),
        ({}, "cuda", (80, 80, 40)),
        ({"steps": 10_000}, "cuda", (10_000, 80, 700)),
    ],
)
def test_a_schedules_gaps_are_filled_from_the_data(
    given: dict[str, int], device: str, wanted: tuple[int, int, int]
):
    asked = config.Config(**given)  # pyright: ignore[reportArgumentType]
    settings = planning.with_length(config.complete(asked, device, {}), 80, device)
    found = planning.make_schedule(settings)
    again = planning.with_length(settings, 7, device)
    assert again == settings, "what is recorded needs no data"
    assert (found.steps, found.epoch_steps, found.warmup) == wanted
    assert found.floor == pytest.approx(0.1 * found.peak)


def test_the_optimiser_decays_matrices_and_nothing_else(
    build: collections.abc.Callable[..., train.Training],
):
    training = build(weight_decay=0.3, beta2=0.77)
    decays = {
        id(p): group["weight_decay"]
        for group in training.optimizer.param_groups
        for p in group["params"]
    }
    assert decays == {id(p): 0.3 if p.dim() >= 2 else 0.0 for p in training.core.parameters()}
    assert set(decays.values()) == {0.0, 0.3}
    assert {group["betas"] for group in training.optimizer.param_groups} == {(0.9, 0.77)}


def test_each_rank_has_random_numbers_of_its_own_and_the_same_again():
    def drawn(seed: int, rank: int) -> tuple[float, float, float]:
        engine.seed_all(seed, rank)
        return random.random(), float(np.random.random()), torch.rand(()).item()

    first, other, seeded = drawn(1, 0), drawn(1, 1), drawn(2, 0)
    assert all(a != b for one in (other, seeded) for a, b in zip(first, one, strict=True))
    assert drawn(1, 0) == first
