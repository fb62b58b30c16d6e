"""A host for jobs without Slurm: its variables, and doubles of the commands that a job calls."""

import io
import json
import pathlib
import stat
import subprocess
import sys
import typing
import zipfile

from ddp.node import spec
from ddp.submit import job_program

# Captured from 24.11.5: slurmd-1's machine is called juju-2586ad-4, and no other machine resolves
# either.
NODE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=1 CPUAlloc=1 CPUEfctv=2 CPUTot=2 CPULoad=1.13 AvailableFeatures=slurmd "
    "ActiveFeatures=slurmd Gres=(null) NodeAddr={address} NodeHostName=juju-2586ad-4 Version=24.11.5 "
    "OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0 RealMemory=16003 AllocMem=0 FreeMem=1254 Sockets=2 Boards=1 "
    "State=MIXED+DYNAMIC_NORM ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=slurmd "
    "Comment=was NodeAddr=198.51.100.1 before\n"
)
# Runs the program as job.sbatch does, but for its pauses, which a test need not wait for.
DRIVER = """
import os, sys
specification = sys.argv[1]
sys.path.insert(0, os.path.dirname(specification) + "/ddp.pyz")
from ddp.node import slurm_calls, spool, storage, supervisor
slurm_calls.pause = lambda seconds: spool.write(f"slept {seconds:g}") if seconds >= 1 else None
storage.PATIENCE_S = float(os.environ.get("PATIENCE_S", "900"))
code = supervisor.main(specification)
os._exit(code)
"""


class Node:
    """A host for a job's script: Slurm's variables, and doubles of the commands that it calls."""

    def __init__(self, folder: pathlib.Path, run_dir: pathlib.Path) -> None:
        self.bin = folder / "commands"
        self.bin.mkdir()
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.cache = folder / "cache"
        self.run_dir = run_dir
        self.hosts = "slurmd-0"
        self.addresses: dict[str, str] = {}
        self.program = job_program.archive()
        self.add(
            "scontrol",
            'case "$*" in "show hostnames slurmd-[0-1]") printf "%s\\n" $HOSTS ;;\n'
            f'"-o show node slurmd-[0-1]") cat {self.notes}/nodes ;;\n'
            f'"-o show job "*) restarts=${{SLURM_RESTART_COUNT:-0}}; '
            f'if grep -qs "^requeue" {self.notes}/scontrol; then restarts=$((restarts + 1)); fi; '
            'echo "JobId=12 JobState=${STATE:-RUNNING} Reason=${REASON:-None} Restarts=${RESTARTS:-$restarts}" ;;\n'
            '"show config") printf "%s\\n" "ProctrackType = proctrack/${TRACKED_BY:-linuxproc}" ;;\n'
            f'*show*) echo "unexpected: $*"; exit 1 ;; *) echo "$*" >> {self.notes}/scontrol ;; esac',
        )
        self.add(
            "squeue",
            'case "$*" in *PreemptTime*) echo "${PREEMPTED:-N/A}" ;; *) echo "${STATE:-RUNNING}" ;; esac',
        )

    def add(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(stat.S_IRWXU)

    def env(self, **more: str) -> dict[str, str]:
        slurm = {
            "SLURM_JOB_ID": "12",
            "SLURM_JOB_NODELIST": "slurmd-[0-1]",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_CPUS_PER_TASK": "4",
            "SLURMD_NODENAME": "slurmd-0",
            "HOSTS": self.hosts,
            "SLURM_JOB_PARTITION": "main",
        }
        return {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": "/",
            "NOTES": str(self.notes),
            **slurm,
            **more,
        }

    def write(self, files: dict[str, str]) -> None:
        """Write a run's files; the files on nodes' own disks go to the test's folder."""
        for name in ("logs", "control"):
            (self.run_dir / name).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = self.run_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._moved(text) if name == "program/job.json" else text)
        (self.run_dir / "program" / spec.PROGRAM).write_bytes(self.program)

    def change(self, module: str, old: str, new: str) -> None:
        """Change a module of the program, such as `network.py`."""
        changed = io.BytesIO()
        with (
            zipfile.ZipFile(io.BytesIO(self.program)) as before,
            zipfile.ZipFile(changed, "w") as after,
        ):
            for name in before.namelist():
                text = before.read(name).decode()
                if name == f"ddp/node/{module}":
                    assert old in text
                    text = text.replace(old, new)
                after.writestr(name, text)
        self.program = changed.getvalue()

    def _moved(self, text: str) -> str:
        job: dict[str, typing.Any] = json.loads(text)
        if job.get("environment"):
            job["environment"]["cache"] = str(self.cache)
        return json.dumps({**job, "cache": str(self.cache)})

    def start(
        self, files: dict[str, str], *, waits: bool = False, **more: str
    ) -> subprocess.Popen[bytes]:
        """Start a job's script; with `waits` it really pauses."""
        self.write(files)
        shown = [
            NODE.format(name=name, address=address) for name, address in self.addresses.items()
        ]
        (self.notes / "nodes").write_text("".join(shown))
        log = (
            self.run_dir / "logs" / "12.out"
        )  # as Slurm does it, with the script's --open-mode=append
        self.size_before = log.stat().st_size if log.exists() else 0
        argv: list[object] = ["/bin/bash", self.run_dir / "job.sbatch"]
        if not waits:
            specification = self.run_dir / "program" / "job.json"
            argv = [sys.executable, "-I", "-S", "-B", "-c", DRIVER, specification]
        with log.open("ab") as output:
            return subprocess.Popen(
                [str(word) for word in argv],
                env=self.env(**more),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def finish(self, process: subprocess.Popen[bytes]) -> tuple[int, str]:
        """Run the script: its exit code and output."""
        process.wait(timeout=60)
        text = (self.run_dir / "logs" / "12.out").read_text()
        return process.returncode, text[self.size_before :]

    def run(self, files: dict[str, str], *, waits: bool = False, **more: str) -> tuple[int, str]:
        return self.finish(self.start(files, waits=waits, **more))

    def requeued(self) -> bool:
        notes = self.notes / "scontrol"
        return notes.exists() and "requeue 12" in notes.read_text()
