"""Marker lines of two tasks through srun into one log: how many arrive whole, our way and submitit's."""

# pyright: basic, reportPrivateImportUsage=false
import pathlib
import re
import subprocess
import sys
import textwrap

from bench import row, slurm

LINES = 400  # of each of two tasks
WHOLE = re.compile(r"^(\d): INFO:ddptrain:\[TRAIN\] step=(\d+) fill=(x+) end=yes$")
PROGRAM = f"""
    from ddptrain import markers
    markers.setup(rank=0)
    for step in range({LINES}):
        markers.emit("TRAIN", step=step, fill="x" * (40 + step % 300), end=True)
"""


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure on a Slurm of two nodes on this host."""
    if reason := slurm.absent():
        raise row.NotHere(reason)
    program = scratch / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    whole: dict[str, int] = {}
    with slurm.running(scratch / "slurm") as env:
        for name, flags in (("ours", []), ("peer", ["--unbuffered"])):
            log = scratch / f"{name}.log"
            argv = ["srun", "-N2", "-n2", "--label", *flags, "--output", str(log), sys.executable, str(program)]
            subprocess.run(argv, env={**env, "PYTHONUNBUFFERED": "1"}, check=True, timeout=120, capture_output=True)
            found = (WHOLE.match(line) for line in log.read_text(errors="replace").splitlines())
            whole[name] = len({m.groups() for m in found if m and len(m[3]) == 40 + int(m[2]) % 300})
    note = "lines of 80 to 380 bytes, the same program on both sides"
    return [
        row.Row(
            "marker lines whole in srun's merged log", whole["ours"], whole["peer"], f"of {2 * LINES}",
            "srun --unbuffered --label, as submitit asks", goal=1.0, note=note,
        )
    ]  # fmt: skip
