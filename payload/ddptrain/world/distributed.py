"""One world of ranks: started by torchrun or alone, ended together.

Two process groups: the default one moves gradients (NCCL on GPUs, gloo on CPUs), `control` (always gloo) moves
objects and flags, along a tree, so nothing small ever waits behind a GPU. A watch thread on each rank reads one key of
the rendezvous store: a rank that must give up writes it there, and all the others leave within seconds, whatever
collective they are waiting in. The first one to give up reports why, in the log and in the run's files, before the
others learn of it: what they meet then is only a consequence.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import datetime
import json
import math
import os
import signal
import sys
import threading
import time
import typing

import torch
import torch.distributed as dist

from ddptrain.ground import error_file, errors, files, log
from ddptrain.options import config
from ddptrain.world import hardware, rendezvous, tree

WATCH_S = 1.0
REPORT_S = 10.0  # how long the first rank that gives up has to report why
STUCK_S = 15.0  # after SIGTERM; launchers and Slurm send SIGKILL after 30 s
EXIT_FAILED = 1
_ABORT, _FIRST = "ddptrain/abort", "ddptrain/first"

Report = collections.abc.Callable[[Exception], None]


class World(tree.Tree):
    """The ranks that train together; `control` is gloo's group for what they agree on."""

    def __init__(
        self, place: rendezvous.Place, device: torch.device, report: Report = lambda _: None
    ) -> None:
        super().__init__(place.rank, place.size, None)
        self.place, self.device, self.host, self.is_main = (
            place,
            device,
            rendezvous.host(),
            place.rank == 0,
        )
        self.leads_node = (
            place.local_rank == 0
        )  # it looks at shared files for all ranks of its node
        self.report = report  # called by the first rank that gives up, with the reason
        self.store: typing.Any = (
            None  # a client of the rendezvous store for the watch thread; None when alone
        )
        self.members: list[dict[str, object]] = []  # rank, host, device; on rank 0 alone
        self.stop_requested = threading.Event()
        self.arrivals = os.pipe2(
            os.O_NONBLOCK | os.O_CLOEXEC
        )  # gets the numbers of signals, as bytes
        self._watch_over = threading.Event()
        self._watch: threading.Thread | None = None

    @property
    def num_nodes(self) -> int:
        """Return on how many hosts the ranks are, on rank 0."""
        return len({member["host"] for member in self.members})

    @property
    def backend(self) -> str:
        """Describe the transport of gradients: NCCL refuses two ranks on one card, as MIG instances may be."""
        is_shared = self.place.local_size > 1 and os.environ.get(
            "CUDA_VISIBLE_DEVICES", ""
        ).startswith("MIG-")
        return "nccl" if self.device.type == "cuda" and not is_shared else "gloo"

    @property
    def interface(self) -> str | None:
        """Return the network interface that the environment sets for the backend."""
        return os.environ.get(f"{self.backend.upper()}_SOCKET_IFNAME")

    def leave(self, *, with_script: bool) -> None:
        """Wait for all ranks and take down the group that `adopted` made, and on request those of the script.

        A group's threads end with the last reference to it. One that still releases the tensors of its last collective
        when the interpreter ends takes the whole process down with SIGABRT (torch 2.13; pytorch issue 190489).
        """
        self.barrier()
        if self.control is not None:
            dist.destroy_process_group(self.control)
            self.control = None
        if with_script and dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def together(self) -> collections.abc.Iterator[None]:
        """Run the block on every rank; when it fails on any, every rank raises, so that none waits for another."""
        own: Exception | None = None
        try:
            yield
        except Exception as e:  # whatever it is, the others learn of it before it goes on
            own = e
        (failed,) = self.sum([float(own is not None)])
        if not failed:
            return
        report = (
            None
            if own is None
            else (self.rank, self.host, *files.describe(own), _cause_of(own, self))
        )
        reports = [one for one in self.collect(report) if one]
        rank, host, text, retry, cause = self.broadcast(reports[0] if reports else None)
        if own is not None and not isinstance(own, (errors.UserError, OSError)):
            raise own
        if failed < self.size:
            text = f"rank {rank} on {host}: {text}"
        raise errors.SharedError(text, retry=retry, cause=cause) from own


@contextlib.contextmanager
def joined(
    device: str,
    problem: str | None = None,
    report: Report = lambda _: None,
    *,
    timeout_minutes: float = config.TIMEOUT_MINUTES,
) -> collections.abc.Iterator[World]:
    """Yield the world, and take it down at the end. If a rank has a `problem`, all learn of it and none enters.

    From then on SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 set `stop_requested`. When the block raises on some ranks, the
    first of them calls `report` with its exception, which goes on; then the others leave, with PeerError if they can.
    """
    world, store = _join(device, problem, report)
    try:
        _connect(world, store, datetime.timedelta(minutes=timeout_minutes))
        _listen(world)
        yield world
        world.barrier()
    except errors.SharedError:
        world._watch_over.set()
        raise
    except Exception as e:
        _give_up(world, e)
        raise
    except BaseException as e:
        _alert_others(world, e)
        raise
    else:
        world._watch_over.set()
        if world._watch is not None:
            world._watch.join(timeout=10)
            world.barrier()
        dist.destroy_process_group()
    finally:
        if (
            world.size == 1 and dist.is_initialized()
        ):  # after a failure too: there is no peer that could hold it up
            dist.destroy_process_group()


def adopted() -> World:
    """Return the world of a script that has connected its ranks itself, with a group of its own for what they agree on.

    From now on SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 set `stop_requested`. All ranks call it.
    """
    if dist.is_initialized():
        here = rendezvous.Place(dist.get_rank(), dist.get_world_size(), 0, 1)
    elif (here := rendezvous.place()).size > 1:
        raise errors.UserError(
            f"{here.size} ranks are not connected; call torch.distributed.init_process_group before"
        )
    _connect_lazily()
    control = dist.new_group(backend="gloo") if here.size > 1 else None
    world = World(here, torch.device("cpu"))
    world.control = control
    world.members = world.collect({"rank": here.rank, "host": world.host})
    _listen(world)
    _start_watch(world)
    return world


def leave(code: int) -> typing.NoReturn:
    """End this process at once: with a peer lost, an orderly end could wait in a collective for minutes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _listen(world: World) -> None:
    """Let signals ask to stop, from now to the end of the process."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: world.stop_requested.set())
        signal.set_wakeup_fd(world.arrivals[1], warn_on_full_buffer=False)


def _join(wanted: str, problem: str | None, report: Report) -> tuple[World, typing.Any]:
    """Return the world, once all ranks have met and watch each other, and the store to connect them by."""
    here = rendezvous.place()
    device = torch.device("cpu")
    try:
        device = hardware.choose_device(wanted, here.local_rank)
    except errors.UserError as e:
        problem = problem or str(e)
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else "cpu"
    world = World(here, device, report)
    own = {"rank": here.rank, "host": world.host, "device": name}
    if here.size > 1:
        store: typing.Any = rendezvous.connect(here)
        world.members = rendezvous.meet(store, here, own, problem)
        timeout = datetime.timedelta(seconds=30)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        client = dist.TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=timeout
        )
        world.store = dist.PrefixStore(f"attempt{rendezvous.restarts()}", client)
        _start_watch(world)
    elif problem is not None:
        raise errors.UserError(problem)
    else:
        store, world.members = dist.HashStore(), [own]
    return world, store


def _connect(world: World, store: typing.Any, timeout: datetime.timedelta) -> None:
    """Make the process groups: the one of the device, and gloo's for what the ranks agree on."""
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(world.device)
    _connect_lazily()
    backend = f"cpu:gloo,cuda:{world.backend}" if cuda else "gloo"
    extra: dict[str, typing.Any] = {"device_id": world.device} if world.backend == "nccl" else {}
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout, **extra
    )
    world.control = dist.new_group(backend="gloo", timeout=timeout) if cuda else dist.group.WORLD


def _connect_lazily() -> None:
    """Let gloo connect two ranks at their first message, not each with each: that would be 32 million connections."""
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # torch 2.13 reads it when it makes a group


def _start_watch(world: World) -> None:
    """Start the thread that leaves when another rank gives up, the store's host is lost, or an end is overdue."""
    world._watch = threading.Thread(target=_keep_watch, args=(world,), name="watch", daemon=True)
    world._watch.start()


def _keep_watch(world: World) -> None:
    ends_at: float | None = None
    while not world._watch_over.wait(WATCH_S):
        reported: errors.PeerError | None = None
        is_lost = False
        ends_at = ends_at or _end_asked(world)
        if ends_at and time.monotonic() > ends_at and not world.stop_requested.is_set():
            # Python's own handler has not run: the main thread stands in a collective, and SIGKILL comes next.
            ends_at, words = (
                math.inf,
                "ended from outside, waiting for a rank that is lost or stuck",
            )
            world.report(errors.LostError(f"rank {world.rank} leaves: {words}", retry=True))
            reported = errors.PeerError(words) if world.store is None else None
        elif world.store is not None:
            try:
                if world.store.check([_ABORT]):
                    reported = _read_abort(world)
            except (RuntimeError, dist.DistError):
                reported, is_lost = (
                    errors.PeerError("connection closed by the rendezvous store"),
                    True,
                )
        if reported is not None and not world._watch_over.is_set():
            text = f"rank {world.rank} leaves: {reported}"
            print(text, file=sys.stderr, flush=True)
            if (
                is_lost
            ):  # the store's host is lost, and with it every rank that could have reported why
                world.report(
                    errors.LostError(
                        f"a rank was lost, killed or with its host: {reported}", retry=True
                    )
                )
            else:
                error_file.leave(reported, text)
            leave(EXIT_FAILED)


def _end_asked(world: World) -> float | None:
    """Return when an end that a signal asks for will be overdue, or None without such a signal."""
    with contextlib.suppress(BlockingIOError):
        if {signal.SIGTERM, signal.SIGINT} & set(os.read(world.arrivals[0], 4096)):
            return time.monotonic() + STUCK_S
    return None


def _give_up(world: World, e: Exception) -> None:
    """Report why this rank ends, in the log and to the others. Raises PeerError when another one was first."""
    world._watch_over.set()
    if (reported := _reported_by_another(world)) is not None:
        raise reported from e
    world.report(e)
    _alert_others(world, e)


def _reported_by_another(world: World) -> errors.PeerError | None:
    """Return why another rank, the first to give up, does so; None on that rank itself."""
    if world.store is None:
        return None
    try:
        if world.store.compare_set(_FIRST, "", str(world.rank)).decode() == str(world.rank):
            return None
        world.store.wait([_ABORT], datetime.timedelta(seconds=REPORT_S))
        return _read_abort(world)
    except (
        RuntimeError,
        dist.DistError,
    ):  # the store has ended, or the first rank was killed too early
        return None


def _alert_others(world: World, e: BaseException) -> None:
    """Write the key that makes the other ranks leave."""
    world._watch_over.set()
    if world.store is not None:
        with contextlib.suppress(RuntimeError, dist.DistError):
            text = f"rank {world.rank} on {world.host}: {type(e).__name__}: {e}"[:500]
            world.store.set(_ABORT, json.dumps([text, _cause_of(e, world)]))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and world.is_main:
                time.sleep(2 * WATCH_S)  # this process holds the store: let the others read it


def _read_abort(world: World) -> errors.PeerError:
    """Read the alert that `_alert_others` of another rank wrote."""
    text, cause = json.loads(world.store.get(_ABORT))
    return errors.PeerError(text, errors.Cause(*cause) if cause else None)


def _cause_of(e: BaseException, world: World) -> errors.Cause | None:
    """Find the refusal of the operating system on this rank's node, or on the one that reported it."""
    cause = errors.cause_of(e)
    if cause is None or cause.node:
        return cause
    return cause._replace(node=world.host)


def describe(world: World) -> dict[str, object]:
    """Return the ranks, the device and the versions of a training, as JSON values. Rank 0 only."""
    return {
        "world_size": world.size,
        "nodes": world.num_nodes,
        "device": world.members[0]["device"],
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda,
        "backend": world.backend,
    }


def report_world(world: World) -> None:
    """Print `[DDP]`, `[ENV]` and one `[RANK]` line per rank."""
    meeting = f"{os.environ.get('MASTER_ADDR', '-')}:{os.environ.get('MASTER_PORT', '-')}"
    where = {"master": meeting, "iface": world.interface}
    log.emit("DDP", world_size=world.size, nodes=world.num_nodes, backend=world.backend, **where)
    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
    }
    job = {"job": os.environ.get("SLURM_JOB_ID"), "attempt": os.environ.get("RUN_ATTEMPT_ID")}
    log.emit("ENV", **versions, device=world.device.type, threads=torch.get_num_threads(), **job)
    own = {"rank": world.rank, "local_rank": world.place.local_rank, "host": world.host}
    log.every_rank("RANK", **own, device=world.device, pid=os.getpid())
