"""The sandbox model of the rows that need one: `default`, or the one in $SLURM_DDP_MODEL."""

# pyright: basic, reportPrivateImportUsage=false
import json
import os
import pathlib
import subprocess

from bench import row

CTL = pathlib.Path(__file__).resolve().parents[1] / "sandboxctl"
MODEL = os.environ.get("SLURM_DDP_MODEL", "default")
LIMIT_S = 120


def environment() -> str:
    """Return the name of the newest environment. Raises NotHere without a model that has one."""
    if os.geteuid() != 0:
        raise row.NotHere("the sandbox needs root")
    if '"trainer/0"' not in ctl("status", "--format", "json", check=False):
        raise row.NotHere(
            f"no sandbox model {MODEL} with the trainer: ./sandboxctl deploy ./bundle.yaml"
        )
    archive = login("ls -t /mnt/shared/environments/*.tar.zst | head -n 1")
    if not archive:
        raise row.NotHere(
            "no environment in the sandbox: ./sandboxctl run trainer/0 install-environment"
        )
    return archive.rsplit("/", 1)[-1].removesuffix(".tar.zst")


def action(name: str, *params: str) -> dict[str, str]:
    """Run an action of the trainer's; return its results."""
    answer = json.loads(ctl("run", "trainer/0", name, *params, "--format", "json"))
    return answer["trainer/0"]["results"]


def awaited(condition: str, then: str, trouble: str) -> str:
    """Wait on the login host, in one command of the sandbox's; return the output of `then`."""
    once = f"if {condition}; then {then}; exit; fi; sleep 0.1"
    return login(f"for _ in $(seq {LIMIT_S * 10}); do {once}; done; {trouble} >&2; exit 1")


def login(script: str) -> str:
    """Return the output of a script on the login host."""
    return on("sackd/0", "sh", "-c", script)


def on(unit: str, *command: str) -> str:
    """Return a command's output on a unit's host."""
    return ctl("exec", unit, "--", *command).strip()


def ctl(*words: str, check: bool = True) -> str:
    """Return the output of ./sandboxctl."""
    argv = [str(CTL), "--model", MODEL, *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S * 2, check=False)
    if check and done.returncode:
        raise RuntimeError(
            f"{' '.join(words)[:200]}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}"
        )
    return done.stdout
