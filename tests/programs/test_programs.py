"""Others' programs on two nodes: interrupted four times, each continues from its checkpoint.

The rows are in rows.yaml. SLURM_DDP_PEERS names a folder with checkouts for the rows with a `peer`:
$SLURM_DDP_PEERS/karpathy/nanoGPT. `tox -e programs` writes results.yaml, from which
scripts/programs.py makes docs/reference/programs.md.
"""

import collections.abc
import dataclasses
import json
import os
import pathlib
import re
import shlex
import time
import typing

import pytest
import yaml

from functional.test_people import Person
from programs.conftest import HERE, SMALL, tiny

Row = dict[str, typing.Any]
ROWS: dict[str, Row] = yaml.safe_load((HERE / "rows.yaml").read_text())["ran"]
PATIENCE_S = 420
T = typing.TypeVar("T")
pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]


@dataclasses.dataclass
class Job:
    """A submitted program."""

    person: Person
    run: str
    job_id: str
    folder: str

    @property
    def log(self) -> str:
        """Everything that the run's attempts wrote."""
        return self.person.does(f"cat {self.folder}/logs/*.out 2>/dev/null || true")

    def listed(self) -> dict[str, typing.Any]:
        """The run as `ddp list` has it."""
        rows = self.person.json("ddp list --json")["runs"]
        return next(row for row in rows if row["run"] == self.run)

    def step(self) -> int:
        """Return the newest step of `ddp list`; 0 before the first."""
        return self.listed()["step"] or 0

    def until(self, what: str, check: collections.abc.Callable[[], T]) -> T:
        """Wait for a true value of `check`, and return it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if found := check():
                return found
            state = self.state
            assert state in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"), (
                f"{what}: {state}\n{self.log[-4000:]}"
            )
            time.sleep(2)
        pytest.fail(f"{what}\n{self.log[-4000:]}")

    def _shown(self, name: str) -> str:
        """Return a field of `scontrol show job`."""
        shown = self.person.cluster.on("sackd/0", "scontrol", "show", "job", self.job_id, "-o")
        return shown.partition(f" {name}=")[2].partition(" ")[0]

    @property
    def state(self) -> str:
        """Slurm's state of the job."""
        return self._shown("JobState")

    def requeues(self) -> int:
        """Return how often Slurm has requeued the job."""
        return int(self._shown("Restarts"))

    def ran_minutes(self) -> int:
        """Return the whole minutes that the job has run since it was last started."""
        hours, minutes, _ = self._shown("RunTime").split(":")
        return 60 * int(hours) + int(minutes)


def submit(one: Person, name: str, row: Row) -> Job:
    """Submit a row's command, as its user types it."""
    folder = place_of(one, name, row)
    command = row["command"].replace("TINY", tiny(one))
    options = f"-N 2 {SMALL} --time-limit 60 -e programs --run {name} --max-restarts 2"
    if "again" in row:
        options += f" --again {shlex.quote(row['again'])}"
    typed = f"ddp submit --json {options} {row.get('options', '')} {command}"
    done = one.json(f"cd {folder} && {typed}")
    return Job(one, name, str(done["job-id"]), str(done["run-dir"]))


def place_of(one: Person, name: str, row: Row) -> str:
    """Return the folder to type the command in; copy a peer's checkout there first."""
    if "peer" not in row:
        return "code"
    root = os.environ.get("SLURM_DDP_PEERS")
    source = pathlib.Path(root or "/nonexistent", row["peer"])
    if not source.is_dir():
        pytest.skip(f"SLURM_DDP_PEERS has no checkout of {row['peer']}")
    one.does(f"mkdir -p {name}")
    for path in sorted(source.rglob("*")):
        if path.suffix in (".py", ".yaml") and ".git" not in path.parts:
            text = path.read_text()
            for line, on_cpus in row.get("edits", {}).items():
                text = text.replace(line, on_cpus)
            target = path.relative_to(source)
            one.does(f"mkdir -p {name}/{target.parent}")
            one.writes(f"{name}/{target}", text)
    if "prepare" in row:
        one.does(f"cd {name} && {row['prepare']}")
    return name


def kill_rank(job: Job, host: str) -> None:
    """Kill a rank of the job on a host, as the kernel does when memory runs out."""
    script = (
        "for environ in $(grep -l '^LOCAL_RANK=\\|LOCAL_RANK=0' /proc/[0-9]*/environ 2>/dev/null); do "
        f"grep -qz 'SLURM_JOB_ID={job.job_id}' $environ && basename $(dirname $environ); done | sort -n | head -n 1"
    )
    pid = job.person.cluster.on(host, "sh", "-c", script)
    assert pid, f"no rank of job {job.job_id} on {host}"
    job.person.cluster.on(host, "kill", "-9", pid)


@pytest.mark.parametrize("name", ROWS)
def test_a_program_continues_after_a_requeue_a_killed_rank_and_its_time_limit(
    paula: Person, name: str, tmp_path: pathlib.Path
):
    row = ROWS[name]
    began = time.monotonic()
    job = submit(paula, name, row)

    def continued() -> int:
        return len(set(re.findall(f".*(?:{row['continues']}).*", job.log)))

    def times() -> int:
        """How often ddp started it again, with the arguments of --again if there are any."""
        if "again" in row:
            return job.log.count("it continues with:")
        return len(set(re.findall(r"\[ENV\] job=\S+ attempt=(\S+)", job.log))) - 1

    job.until("a loss in ddp list", lambda: job.listed()["loss"] is not None)
    first = job.step()
    seconds = round(time.monotonic() - began)
    assert "each trained alone" not in job.log
    job.until("a checkpoint", lambda: job.step() >= 25)

    paula.does(f"scontrol requeue {job.job_id}")
    job.until("queued", lambda: job.state == "PENDING" or times() >= 1)
    paula.tries(f"ddp resume {name}")
    job.until("continues after scontrol requeue", lambda: times() >= 1 and continued() >= 1)
    trains_on(job)

    kill_rank(job, "slurmd/1")
    job.until("continues after a killed rank", lambda: times() >= 2)
    trains_on(job)

    before = job.requeues()
    limit = job.ran_minutes() + 2
    paula.does(f"scontrol update JobId={job.job_id} TimeLimit={limit}")
    job.until("queued again at its limit", lambda: job.requeues() > before)
    paula.cluster.on("sackd/0", "scontrol", "update", f"JobId={job.job_id}", "TimeLimit=60")
    paula.tries(f"ddp resume {name}")
    job.until("continues after its limit", lambda: times() >= 3)
    trains_on(job)

    paula.does(f"ddp cancel {name}")
    keep(name, {"seconds": seconds, "first": first, "last": job.step()})


def trains_on(job: Job) -> None:
    """Wait for more than five further steps."""
    step = job.step()
    job.until("trains on", lambda: job.step() > step + 5)


def keep(name: str, seen: dict[str, typing.Any]) -> None:
    """Add the observations to the results file, if there is one."""
    file = os.environ.get("SLURM_DDP_PROGRAMS_RESULTS")
    if file is None:
        return
    path = pathlib.Path(file)
    known = yaml.safe_load(path.read_text()) if path.exists() else {}
    known = {**(known or {}), name: seen}
    path.write_text(yaml.safe_dump(known, sort_keys=True))
    assert json.loads(json.dumps(known))
