"""Fixtures of the payload's tests: text, datasets, and runs of the real command."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import typing

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAYLOAD = ROOT / "payload"
sys.path.insert(0, str(PAYLOAD))
sys.path.insert(0, str(pathlib.Path(__file__).parent))
# One thread per rank: the sums, hence the bits, must not depend on the machine's cores. Children inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([str(PAYLOAD), str(pathlib.Path(__file__).parent)])

import ranks  # noqa: E402 - after the path is set

WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one "
    "you were her all she there would their we him been has when who will more no if out so said what up its about into "
    "than them can only other new some could time these two may then do first any my now such like our over man me even"
).split()


@pytest.fixture(autouse=True)
def signals() -> collections.abc.Iterator[None]:
    """Undo a training's changes to signal handlers in this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def torchrun(
    num: int,
    *args: object,
    timeout: float = 240,
    flags: tuple[str, ...] = (),
    accident: str | None = None,
    **env: str,
) -> ranks.Result:
    """Run `ddptrain` under the real torchrun, or this folder's module that adds an accident."""
    module, variables = ranks.parse(accident)
    place = ["--master-addr=127.0.0.1", f"--master-port={ranks.free_port()}"]
    launch = [
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={num}",
        *place,
        *flags,
        "-m",
        module or "ddptrain",
    ]
    names = {"PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "OMP_NUM_THREADS"}
    env = {
        **{k: v for k, v in os.environ.items() if k in names},
        "PYTHONUNBUFFERED": "1",
        **variables,
        **env,
    }
    argv, pipe = [sys.executable, *launch, *ranks.words(args)], subprocess.PIPE
    with subprocess.Popen(
        argv, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException:  # too late, or interrupted
            process.terminate()  # a kill would leave its ranks, which are in separate sessions
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=40)  # it gives them 30 s
            process.kill()
            raise
    return ranks.Result([process.returncode], output)


def figures(run_dir: pathlib.Path, name: str, kind: str = "step") -> dict[int, float]:
    """Return a figure of each record of a kind in metrics.jsonl, by step."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r[name] for r in records if r["kind"] == kind}


def losses(run_dir: pathlib.Path) -> dict[int, float]:
    """Return the training loss of each step."""
    return figures(run_dir, "loss")


def val_losses(run_dir: pathlib.Path) -> dict[int, float]:
    """Return the validation loss of each evaluation."""
    return figures(run_dir, "val_loss", "eval")


def outcome(run_dir: pathlib.Path, attempt: str) -> dict[str, typing.Any]:
    """Return the outcome of an attempt, as the batch script reads it."""
    return json.loads((run_dir / "control" / f"{attempt}.outcome").read_text())


def prose(paragraphs: int, seed: int = 1) -> str:
    """Return made-up text with a strong pattern, the same for the same arguments."""
    state, out = seed, []
    for _ in range(paragraphs):
        line = []
        for _ in range(40):
            state = (state * 1103515245 + 12345) % 2**31
            line.append(WORDS[(state >> 16) % len(WORDS)])
        out.append(" ".join(line) + ".\n")
    return "".join(out)


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of small text files."""
    root = tmp_path_factory.mktemp("text")
    for number in range(12):
        (root / f"{number:02d}.txt").write_text(prose(40, seed=number + 1))
    (root / "val.txt").write_text(prose(60, seed=99))
    return root


@pytest.fixture(scope="session")
def dataset(text_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A byte-level dataset of that text."""
    output = tmp_path_factory.mktemp("data") / "words"
    ranks.succeed(
        1,
        "prepare --source",
        text_dir,
        "--output",
        output,
        "--tokenizer byte --part-mib 0.03 --workers 1",
    )
    return output
