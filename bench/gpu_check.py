"""Check a machine with a GPU: the bench's rows `gpu` and `larger`, and slurm-gpu's NVML reader.

    python3 bench/gpu_check.py > gpu.json

Needs torch with CUDA, and the packages of payload/requirements.txt for the row `gpu`, transformers and peft
for `larger`; the reader needs Python alone. Prints one JSON object: `differences` lists each value that
slurm-gpu reads otherwise than nvidia-smi prints it, `row` is the report of the bench. The exit status is 0
if nothing differs and the rows were measured.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import typing

ROOT = pathlib.Path(__file__).resolve().parent.parent
READER = ROOT / "charms" / "slurm-gpu" / "src" / "gpu" / "nvml.py"
FIELDS = ("pci.bus_id", "uuid", "name", "driver_version", "mig.mode.current")


def output(*argv: str) -> str:
    """Return a command's output; the programs of slurm-gpu and the bench find their modules."""
    places = os.pathsep.join(
        str(ROOT / place) for place in ("charms/slurm-gpu/src", "lib", "payload", ".")
    )
    environment = {**os.environ, "PYTHONPATH": places}
    return subprocess.run(
        argv, check=True, stdout=subprocess.PIPE, text=True, env=environment, timeout=3600
    ).stdout


def bus_id(text: str) -> str:
    """Return a bus id with a domain of four digits in lower case, as sysfs has it."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def cards() -> tuple[list[dict[str, typing.Any]], list[str]]:
    """Return the cards that slurm-gpu lists, and how they differ from nvidia-smi's."""
    found = json.loads(output(sys.executable, str(READER)))
    if "error" in found:
        raise SystemExit(f"gpu_check: NVML: {found['error']}; run this on a machine with a GPU")
    listed = output(
        "nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"
    )
    differences: list[str] = []
    ours = {bus_id(card["bus_id"]): card for card in found["gpus"]}
    theirs = {bus_id(line.split(", ")[0]): line.split(", ") for line in listed.splitlines()}
    if ours.keys() != theirs.keys():
        differences.append(f"cards: {sorted(ours)}, nvidia-smi {sorted(theirs)}")
    for bus in ours.keys() & theirs.keys():
        card, (_, uuid, name, driver, mig) = ours[bus], theirs[bus]
        pairs = {
            "uuid": (card["uuid"], uuid),
            "name": (card["name"], name),
            "driver": (found["driver"], driver),
            "mig": (card["mig"], mig == "Enabled"),
        }
        differences += [
            f"{bus} {key}: {one}, nvidia-smi {two}"
            for key, (one, two) in pairs.items()
            if one != two
        ]
    return found["gpus"], differences


def main() -> int:
    """Check, print the JSON object, return an exit status."""
    listed, differences = cards()
    with tempfile.TemporaryDirectory() as scratch:
        report = pathlib.Path(scratch, "row.json")
        done = subprocess.run(
            [sys.executable, "-m", "bench", "gpu", "larger", "--json", str(report)],
            cwd=ROOT,
            stdout=sys.stderr,
            check=False,
        )
        row = (
            json.loads(report.read_text())
            if report.exists()
            else {"failed": f"exit status {done.returncode}"}
        )
    print(json.dumps({"cards": listed, "differences": differences, "row": row}, indent=2))
    return int(bool(differences) or not row.get("rows"))


if __name__ == "__main__":
    sys.exit(main())
