"""Make a folder here: ten of twenty steps of a run, by the payload of an earlier commit.

    .tox/payload/bin/python tests/payload/data/earlier/make.py COMMIT NAME [FLAG ...]

The lane `payload` has the packages. next.json has the losses of the next ten steps by the same
code.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
import conftest  # noqa: E402 - after the path is set

TINY = (
    "--layers 1 --heads 2 --width 16 --seq-len 16 --batch 4 --epoch-steps 5 --steps 20 --eval-rows 8 --precision fp32 "
    "--keep-checkpoints 4 --log-every 5"
).split()
KEPT = "epoch-0002"  # ends with step 10


def main(commit: str, name: str, *flags: str) -> None:
    """Make the folder `name`."""
    with tempfile.TemporaryDirectory() as scratch:
        place = pathlib.Path(scratch)
        archive = subprocess.run(
            ["git", "archive", commit, "payload"],
            check=True,
            capture_output=True,
            cwd=HERE.parents[3],
        )
        subprocess.run(["tar", "-x", "-C", place], input=archive.stdout, check=True)
        _write_text(place / "text")

        env = {**os.environ, "PYTHONPATH": str(place / "payload"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-s", "-m", "ddptrain"]
        prepare = "prepare --source text --output data --tokenizer byte --workers 1".split()
        subprocess.run([*command, *prepare], check=True, cwd=place, env=env)
        train = "train --data data --run-dir run".split()
        subprocess.run([*command, *train, *TINY, *flags], check=True, cwd=place, env=env)
        _keep(place, HERE / name)


def _write_text(folder: pathlib.Path) -> None:
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(conftest.prose(12, seed=number + 1))
    (folder / "val.txt").write_text(conftest.prose(6, seed=99))


def _keep(place: pathlib.Path, output: pathlib.Path) -> None:
    """Keep the dataset and the run as it was after ten steps, and the losses that followed."""
    shutil.rmtree(output, ignore_errors=True)
    run = output / "run"
    shutil.copytree(place / "data", output / "data", ignore=shutil.ignore_patterns("parts"))
    shutil.copytree(place / "run" / KEPT, run / KEPT)
    (run / "latest").symlink_to(KEPT)
    shutil.copyfile(place / "run" / "config.json", run / "config.json")

    records = [
        json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    before = [json.dumps(record) for record in records if record.get("step", 0) <= 10]
    (run / "metrics.jsonl").write_text("\n".join(before) + "\n")
    after = {
        record["step"]: record["loss"]
        for record in records
        if record["kind"] == "step" and record["step"] > 10
    }
    (output / "next.json").write_text(json.dumps(after, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
