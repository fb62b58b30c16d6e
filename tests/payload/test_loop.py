"""The training loop by itself: what a step does, however it is spread over ranks and passes."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib

import conftest
import pytest
import ranks

STEPS = (
    "--layers", 2, "--heads", 2, "--width", 32, "--seq-len", 32, "--precision", "fp32", "--eval-rows", 16,
    "--log-every", 1, "--warmup", 2, "--steps", 6, "--epoch-steps", 6, "--lr", 0.01,
)  # fmt: skip


def norms(run_dir: pathlib.Path) -> dict[int, float]:
    """Return the gradients' norm of each step."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["grad_norm"] for r in records if r["kind"] == "step"}


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A dataset whose rows have from none to all of their targets learned."""
    folder = tmp_path_factory.mktemp("unlike")
    lines = []
    for n in range(400):
        prompt = conftest.prose(1, seed=n)[: (7 * n) % 150]
        lines.append(json.dumps({"prompt": prompt, "completion": conftest.prose(1, seed=n + 1)[: (11 * n) % 60]}))
    (folder / "train.jsonl").write_text("\n".join(lines))
    flags = ("--tokenizer", "byte", "--workers", 1, "--mask-prompts", "--val-share", 0.1)
    ranks.succeed(1, "prepare", "--source", folder / "train.jsonl", "--output", folder / "d", *flags)
    return folder / "d"


def test_with_masked_prompts_a_step_is_the_mean_over_its_tokens_however_it_is_spread(
    unlike: pathlib.Path, tmp_path: pathlib.Path
):
    """Eight sequences as one batch, in four passes, on two ranks in two passes each: the same loss and gradient."""
    spread = {"one": (1, 8, 1), "passes": (1, 2, 4), "ranks": (2, 2, 2)}
    for name, (size, batch, accumulate) in spread.items():
        flags = ("--batch", batch, "--grad-accum", accumulate)
        ranks.succeed(size, "train", "--data", unlike, "--run-dir", tmp_path / name, *STEPS, *flags)
    for figures in (conftest.losses, norms, conftest.val_losses):
        wanted = figures(tmp_path / "one")
        assert len(set(wanted.values())) == len(wanted) > 0
        for name in ("passes", "ranks"):
            assert figures(tmp_path / name) == pytest.approx(wanted, rel=1e-3), name


def test_a_step_with_nothing_to_learn_has_no_loss_and_breaks_nothing(tmp_path: pathlib.Path):
    """A prompt far longer than a step."""
    prompts = [{"prompt": conftest.prose(4, seed=n), "completion": conftest.prose(1, seed=n)[:40]} for n in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(prompt) for prompt in prompts))
    flags = ("--tokenizer", "byte", "--workers", 1, "--mask-prompts", "--val-share", 0.1)
    ranks.succeed(1, "prepare", "--source", tmp_path / "train.jsonl", "--output", tmp_path / "d", *flags)
    result = ranks.succeed(
        2, "train", "--data", tmp_path / "d", "--run-dir", tmp_path / "run", *STEPS, "--batch", 1, "--steps", 40
    )
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
