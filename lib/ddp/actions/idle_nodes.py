"""Check idle nodes: doctor's test, DCGM's, and collectives between two of them.

A check never delays a job: it begins only while no job waits for nodes, its jobs have a QOS that
others preempt if the user has one, and it is cancelled as soon as a job waits.
"""

import collections.abc
import contextlib
import dataclasses
import re
import threading
import time

from ddp.doctor import examine, node_checks
from ddp.environment import store
from ddp.measure import collectives
from ddp.options import fields, models
from ddp.problem import Problem, Results, one_line
from ddp.results import tables
from ddp.results.progress import Log
from ddp.settings import Settings
from ddp.slurm import jobs, partition_list, qos, queued_jobs

_NAME = "node-check"  # of its jobs, and the prefix of its runs' names
_NOT_IDLE = partition_list.POWER | {"COMPLETING", "PLANNED", "POWERING_DOWN", "RESERVED"}
_LOOK_S = 2.0
_ALL_S = 3000.0  # the check is started again within the hour
_WAIT_S = 30
_PAIR_S = 600
_SLOW = 0.5  # of the baseline
# One line from each node where a test of DCGM failed. Its section Deployment is left out, since a
# setting such as persistence mode fails there, too; a silent daemon is not a card's fault
DCGM = """\
command -v dcgmi >/dev/null || exit 0
bad=$(
    dcgmi diag -r 2 2>&1 |
        awk '/-----  [A-Z]/ { part = $2 } / Fail( |$)/ && part != "Deployment"' |
        head -n 3 | tr -s ' |\\n' ' '
)
[ -z "$bad" ] || echo "DCGM $SLURMD_NODENAME $bad"
"""
_DCGM_S = 900.0
_DCGM_LINE = re.compile(r"^DCGM (\S+) (.+)$", re.MULTILINE)


class GaveWayError(Exception):
    """A job waits for nodes, or has taken them; `str()` says so."""


class _Watch:
    """Cancels the check's jobs once another job waits for nodes."""

    def __init__(self, user: str) -> None:
        self._user = user
        self._ended = threading.Event()
        self.waiting = ""  # the job, and whose it is

    def check(self) -> None:
        """Raise GaveWayError if a job waits for nodes, has waited since the watch began, or may."""
        try:
            self._look()
        except jobs.SlurmError as e:
            raise GaveWayError(f"the queue is not known: {e}") from e
        if self.waiting:
            raise GaveWayError(self.waiting)

    @contextlib.contextmanager
    def keeping(self) -> collections.abc.Generator[None]:
        """Look every two seconds while the block runs."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(timeout=60)

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            with contextlib.suppress(jobs.SlurmError):  # a silent controller starts no job, either
                self._look()
                if self.waiting:
                    self._cancel()

    def _look(self) -> None:
        for job in queued_jobs.list_all():
            if job.waits_for_nodes and not self._is_own(job):
                self.waiting = f"job {job.job_id} of {job.user} waits for nodes"

    def _cancel(self) -> None:
        own = [job.job_id for job in queued_jobs.list_all() if self._is_own(job)]
        if own:
            jobs.cancel(*own)

    def _is_own(self, job: queued_jobs.QueuedJob) -> bool:
        return job.user == self._user and job.name.startswith(_NAME)


@dataclasses.dataclass(frozen=True)
class _Pair:
    """The nodes of one check, and their partition."""

    partition: partition_list.Partition
    subject: str
    partner: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.subject, self.partner)))

    @property
    def num_gpus(self) -> int:
        """The number of GPUs that each of them has."""
        return min(node.gpus for node in self.partition.nodes if node.name in self.names)


def check(settings: Settings, params: models.Doctor, log: Log) -> Results:
    """Check the idle nodes that are due, two at a time; return them, and which failed twice.

    Raises Problem.
    """
    workspace = settings.workspace
    with jobs.asking():
        if params.qos is None:
            params = params.model_copy(update={"qos": qos.preemptible(workspace.user)})
    checker = _Checker(settings, params, log)
    checks = node_checks.read(workspace)
    began = time.monotonic()
    rows: list[tuple[str, ...]] = []
    done: set[str] = set()
    judged: node_checks.Checks = {}
    note = "no idle node is due"
    while time.monotonic() - began < _ALL_S:
        pair = _next_pair(params, checks, done)
        if pair is None:
            break
        done.update(pair.names)
        before = checks
        try:
            checks = checker.check(pair, before)
        except GaveWayError as e:
            note = f"stopped: {e}"
            break
        node_checks.write(workspace, checks)
        judged |= {name: one for name, one in checks.items() if one != before.get(name)}
        rows += [_row(name, pair, checks) for name in pair.names]
        note = "done"
    return _results(rows, note, judged)


def _next_pair(params: models.Doctor, checks: node_checks.Checks, done: set[str]) -> _Pair | None:
    """Return the next idle node that is due, with a neighbour of its partition."""
    with jobs.asking():
        partitions = partition_list.partitions()
    for partition in partitions:
        if params.partition not in (None, partition.name):
            continue
        idle = [node.name for node in partition.usable if _is_idle(node)]
        left = [name for name in idle if name not in done]
        chosen = node_checks.choose(left, checks, time.time())
        if chosen is not None:
            return _Pair(partition, *chosen)
    return None


def _is_idle(node: partition_list.Capacity) -> bool:
    """Return whether nothing runs there, is planned there, or has to wake it."""
    flags = set(node.state.split("+"))  # such as IDLE+DYNAMIC_NORM
    return "IDLE" in flags and not flags & _NOT_IDLE


@dataclasses.dataclass(frozen=True)
class _Checker:
    """Tests pairs of nodes."""

    settings: Settings
    params: models.Doctor
    log: Log

    def check(self, pair: _Pair, checks: node_checks.Checks) -> node_checks.Checks:
        """Test two nodes, and return the checks with the verdicts. Raises GaveWayError."""
        watch = _Watch(self.settings.workspace.user)
        watch.check()
        with watch.keeping():
            faults = self._test_nodes(pair)
            watch.check()
            trouble = ""
            if pair.partner and not faults:
                trouble = self._test_together(pair)
                watch.check()

        for name, why in faults.items():
            checks = node_checks.failed(checks, name, why)
        if trouble:
            return node_checks.failed(checks, pair.subject, trouble, pair.partner or "")
        for name in pair.names:
            if name not in faults:
                checks = node_checks.passed(checks, name)
        return checks

    def _test_nodes(self, pair: _Pair) -> dict[str, str]:
        """Return each node's fault, by doctor and DCGM, unless all nodes have the same."""
        given: dict[str, object] = {"nodes": ",".join(pair.names), "wait-timeout": _WAIT_S}
        asked = fields.parse(models.Doctor, given | self._place(pair))
        facts = examine.gather(self.settings, asked, (pair.partition,), self.log, job_name=_NAME)
        for name in pair.names:
            if name not in facts.reports:  # taken, or silent, which Slurm itself looks after
                raise GaveWayError(f"{name} was not free, or gave no answer")
        faults: dict[str, str] = {}
        for finding in examine.judge(self.settings, facts):
            if finding.level == "error" and finding.where in pair.names:
                faults.setdefault(finding.where, one_line(finding.text, 150))
        if len(faults) > 1 and len(set(faults.values())) == 1:
            self.log(f"not counted, since both nodes have it: {faults[pair.subject]}")
            faults = {}
        if pair.num_gpus:
            faults |= self._ask_dcgm(pair)
        return faults

    def _ask_dcgm(self, pair: _Pair) -> dict[str, str]:
        """Run DCGM's diagnosis on nodes that have it; return the failed tests by node."""
        self.log(f"dcgmi diag -r 2 on {', '.join(pair.names)}, where it is installed")
        options = [
            f"--nodelist={','.join(pair.names)}",
            f"--nodes={len(pair.names)}",
            "--ntasks-per-node=1",
            f"--gpus-per-node={pair.num_gpus}",
            f"--immediate={_WAIT_S}",
            f"--job-name={_NAME}",
            "--time=15",
            "--chdir=/",
        ]
        options += [f"--{name}={value}" for name, value in self._place(pair).items()]
        text, _ = jobs.run_everywhere("/bin/sh", "-c", DCGM, options=options, timeout_s=_DCGM_S)
        found = _DCGM_LINE.findall(text)
        return {node: f"dcgmi diag: {one_line(bad, 150)}" for node, bad in found}

    def _test_together(self, pair: _Pair) -> str:
        """Measure collectives between the two; return what is wrong, or ""."""
        environment = store.Store(self.settings).installed(self.settings.workspace.look())
        if environment is None:
            self.log("there is no environment yet, so no collectives are measured")
            return ""
        uses_gpus = pair.num_gpus > 0 and not environment.torch.endswith("+cpu")
        given: dict[str, object] = {
            "nodes": 2,
            "nodelist": ",".join(pair.names),
            "time-limit": "10",
            "max-bytes": "256M" if uses_gpus else "4M",
            "wait-timeout": _PAIR_S,
        }
        if not uses_gpus:
            given["gpus-per-node"] = "0"
        wanted = fields.parse(models.BenchmarkCollectives, given | self._place(pair))
        try:
            share = collectives.measure_pair(self.settings, wanted, self.log, kind=_NAME)
        except Problem as e:
            return one_line(f"collectives with {pair.partner} fail: {e.what}", 150)
        if share is not None and share < _SLOW:
            return f"all_reduce with {pair.partner} has {share:.0%} of the baseline's bandwidth"
        return ""

    def _place(self, pair: _Pair) -> dict[str, object]:
        """Return the options that ask Slurm for a place, with the pair's partition."""
        place: dict[str, object] = {"partition": pair.partition.name}
        for name in ("account", "qos", "reservation"):
            value = getattr(self.params, name)
            if value is not None:
                place[name] = value
        return place


def _row(name: str, pair: _Pair, checks: node_checks.Checks) -> tuple[str, ...]:
    known = checks.get(name, node_checks.NodeCheck())
    other = next((one for one in pair.names if one != name), "-")
    if not known.checked:
        return (name, other, "-", "its neighbour failed beside it")
    if not known.failures:
        return (name, other, "passed", "-")
    times = "failed twice" if known.is_unfit else "failed once"
    return (name, other, times, known.failures[-1])


def _results(rows: list[tuple[str, ...]], note: str, judged: node_checks.Checks) -> Results:
    """Build the results; only what was judged now is unfit: a node may be repaired since."""
    table = tables.Table([("NODE", "WITH", "RESULT", "WHY"), *rows])
    unfit = [f"{name}: {one.failures[-1]}" for name, one in sorted(judged.items()) if one.is_unfit]
    return {"checked": table, "verdict": note, "unfit": "\n".join(unfit) or "none"}
