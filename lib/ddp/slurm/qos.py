"""The QOS whose jobs others may take the place of."""

from ddp.slurm import jobs


def preemptible(user: str) -> str | None:
    """Return a QOS of the user's that another QOS preempts, None if there is none.

    Raises SlurmError.
    """
    if not jobs.configuration().get("PreemptType", "").endswith("/qos"):
        return None
    preempted: set[str] = set()
    for line in _show("qos", "format=Name,Preempt"):
        preempted.update(line.partition("|")[2].split(","))
    allowed: set[str] = set()
    for line in _show("assoc", "where", f"user={user}", "format=QOS"):
        allowed.update(line.split(","))
    return min(filter(None, preempted & allowed), default=None)


def _show(*words: str) -> list[str]:
    return jobs.ask("sacctmgr", "-n", "-P", "show", *words).splitlines()
