"""Helpers of the GPU tests: look at a node, its unit and its jobs, and wait for their states."""

import functools
import re
import time

from functional.conftest import PATIENCE_S, Cluster, eventually

NODE, HOST = "slurmd-0", "slurmd/0"


def show(cluster: Cluster, node: str = NODE) -> dict[str, str]:
    """Return the controller's record: all fields, Gres without sockets, Reason without its author.

    Waits for a controller that is starting.
    """

    def record() -> str:
        answer = cluster.exec("slurmctld/0", "scontrol", "show", "node", node, "-o")
        assert answer.code == 0 and "State=" in answer.out, answer
        return answer.out.strip()

    text = eventually(record)
    fields = {
        key: value for key, _, value in (word.partition("=") for word in text.split()) if value
    }
    reason = text.partition(" Reason=")[2].partition(" [")[0]
    return fields | {"Gres": re.sub(r"\(S:[^)]*\)", "", fields["Gres"]), "Reason": reason}


def states(found: dict[str, str]) -> tuple[str, set[str]]:
    """Return the base state and the flags that are not of this moment only."""
    base, *flags = found["State"].split("+")
    held = {
        "MAINTENANCE",
        "RESERVED",
    }  # the reservation of a held node, which shows some seconds after its drain
    return base.rstrip("*"), set(flags) - {"DYNAMIC_NORM", "NOT_RESPONDING"} - held


def is_fit(cluster: Cluster, gres: str, node: str = NODE, within: float = PATIENCE_S) -> bool:
    """Whether the node has this Gres and takes jobs; waits through Slurm's own transitions only.

    A resumed node answers within slurmctld's next ping; until then it is marked NOT_RESPONDING.
    """
    deadline = time.monotonic() + within
    while True:
        found = show(cluster, node)
        base, *flags = found["State"].split("+")
        if (
            found["Gres"] == gres
            and base in {"IDLE", "MIXED", "ALLOCATED"}
            and set(flags) <= {"DYNAMIC_NORM"}
        ):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)


def step(cluster: Cluster, *words: str) -> str:
    """Run a step from the login host with srun and return its output, once the job is off its nodes.

    slurmctld looks up the login host's name to tell srun about the end. If nothing resolves, the
    job is COMPLETING for a minute, and the node is not registered again during that time.
    """
    output = cluster.on("sackd/0", "srun", *words)

    def is_over() -> None:
        assert cluster.on("slurmctld/0", "squeue", "--noheader", "--states=COMPLETING") == ""

    eventually(is_over)
    return output


def until_held(cluster: Cluster, loss: str) -> None:
    """Let five minutes pass repeatedly until slurmd runs and the node is drained for this loss."""

    def is_held() -> None:
        assert notice(cluster) == f"blocked: bring back what is missing, or run accept-gpus: {loss}"
        found = show(cluster)
        base, flags = states(found)
        assert (found["Reason"], base, flags - {"INVALID_REG"}) == (
            f"slurm-gpu: {loss}",
            "IDLE",
            {"DRAIN"},
        )
        assert cluster.exec(HOST, "systemctl", "is-active", "slurmd").out.strip() == "active"

    eventually(is_held)


def restart_slurmd(cluster: Cluster) -> None:
    """Restart slurmd; return when it has registered its node.

    Without slurm-gpu that fails during a reconfigure; docs/howto/observe.md has the remedy.
    """
    before = show(cluster)
    time.sleep(1.1)  # SlurmdStartTime has seconds
    if cluster.exec(HOST, "systemctl", "restart", "slurmd").code != 0:
        log = cluster.on(HOST, "journalctl", "-u", "slurmd", "-n", "20", "-o", "cat", "--no-pager")
        guarded = cluster.on(
            HOST, "sh", "-c", "ls /etc/systemd/system/slurmd.service.d/20-gpu.conf || true"
        )
        assert "Address already in use" in log and guarded == "", log
        remedy = "systemctl stop slurmd; pkill -x slurmd; systemctl reset-failed slurmd; systemctl start slurmd"
        cluster.on(HOST, "sh", "-c", remedy)
    until_registered_again(cluster, before)


def until_registered_again(cluster: Cluster, before: dict[str, str]) -> dict[str, str]:
    """Wait until the node's slurmd has registered after a new start; return the node's record."""

    def registered() -> dict[str, str]:
        found = show(cluster)
        assert found["SlurmdStartTime"] not in {before["SlurmdStartTime"], "None", "Unknown"}
        return found

    return eventually(registered)


@functools.cache
def unit_on(cluster: Cluster) -> str:
    """Return the slurm-gpu unit of the host."""
    return cluster.beside(HOST, "slurm-gpu")


def notice(cluster: Cluster, unit: str = "") -> str:
    """Let five minutes pass for the unit, by default the host's; return its status."""
    unit = unit or unit_on(cluster)
    cluster.ok("update-status", "--once", unit)
    status = cluster.units()[unit]["workload-status"]
    return f"{status['current']}: {status['message']}"


def until(cluster: Cluster, words: str, unit: str = "") -> str:
    """Let five minutes pass repeatedly until the unit's status begins so; Slurm may delay it."""

    def noticed() -> str:
        output = notice(cluster, unit)
        assert output.startswith(words), (output, show(cluster))
        return output

    return eventually(noticed)


def submit(cluster: Cluster, script: str, *options: str) -> str:
    arguments = ("--parsable", f"--nodelist={NODE}", "--output=/dev/null", *options)
    return cluster.on("sackd/0", "sbatch", *arguments, f"--wrap={script}")


def jobs(cluster: Cluster) -> dict[str, str]:
    """Return the state of each job that Slurm remembers, with a mark if it started repeatedly."""
    text = cluster.on("slurmctld/0", "scontrol", "show", "jobs", "-o")
    rows = re.findall(r"^JobId=(\d+) .*? JobState=(\w+) .*? Restarts=(\d+) ", text, re.MULTILINE)
    return {job: state if again == "0" else f"{state} again" for job, state, again in rows}


def wait_for(cluster: Cluster, **wanted: str) -> None:
    """Wait until the jobs are in these states: `wait_for(cluster, j7="COMPLETED")`."""

    def are_reached() -> None:
        found = jobs(cluster)
        assert {job: found.get(job.removeprefix("j")) for job in wanted} == wanted

    eventually(are_reached)


def block(cluster: Cluster) -> list[str]:
    """Return the records of the controller's gres.conf."""
    rows = cluster.on("slurmctld/0", "cat", "/etc/slurm/gres.conf").splitlines()
    return [row for row in rows if row.startswith("NodeName=")]


WATCH, SEEN = "watch-for-refusals", "/run/refusals"


def refusals(cluster: Cluster) -> str:
    """Return the lines that the watch wrote."""
    return cluster.on("slurmctld/0", "sh", "-c", f"cat {SEEN} 2>/dev/null || true")
