"""One world of ranks: started by torchrun or alone, ended together.

Two process groups: the default one moves gradients (NCCL on GPUs, gloo on CPUs), `control` (always
gloo) moves the small values of agreement.py, so that nothing small ever waits behind a GPU. A rank
that fails takes the others with it (alarm.py).
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import datetime
import os
import sys
import threading
import typing

import torch
import torch.distributed as dist

from ddptrain.ground import errors, files, log
from ddptrain.options import flags
from ddptrain.world import agreement, alarm, hardware, rendezvous


class World(agreement.Peers):
    """The ranks that train together."""

    def __init__(
        self,
        place: rendezvous.Place,
        device: torch.device,
        report: alarm.Report = lambda _: None,
        timeout_minutes: float = flags.TIMEOUT_MINUTES,
    ) -> None:
        super().__init__(place.rank, place.size, None, 60 * timeout_minutes)
        self.place = place
        self.device = device
        self.host = rendezvous.host()
        self.is_main = place.rank == 0
        self.leads_node = place.local_rank == 0  # looks at shared files for all ranks of its node
        self.members: list[dict[str, object]] = []  # rank, host, device; on rank 0 alone
        self.alarm = alarm.Alarm(place.rank, self.host, report)

    @property
    def stop_requested(self) -> threading.Event:
        """Return the event that a signal to stop sets."""
        return self.alarm.stop_requested

    @property
    def num_nodes(self) -> int:
        """Return on how many hosts the ranks are, on rank 0."""
        return len({member["host"] for member in self.members})

    @property
    def backend(self) -> str:
        """Return the gradients' transport.

        NCCL refuses two ranks on one card, and MIG instances may be on one card.
        """
        if self.device.type != "cuda":
            return "gloo"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        is_shared = self.place.local_size > 1 and visible.startswith("MIG-")
        return "gloo" if is_shared else "nccl"

    @property
    def interface(self) -> str | None:
        """Return the network interface that the environment sets for the backend."""
        return os.environ.get(f"{self.backend.upper()}_SOCKET_IFNAME")

    def leave(self, *, with_script: bool) -> None:
        """Wait for all ranks and remove the group that `adopted` made, and on request the script's.

        A group's threads end with the last reference to it. One that still releases the tensors of
        its last collective when the interpreter ends takes the whole process down with SIGABRT
        (torch 2.13; pytorch issue 190489).
        """
        self.barrier()
        if self.control is not None:
            dist.destroy_process_group(self.control)
            self.control = None
        if with_script and dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def together(self) -> collections.abc.Iterator[None]:
        """Run the block on every rank; if it fails on any, all raise, so that none waits."""
        own: Exception | None = None
        try:
            yield
        except Exception as e:  # of any kind: the others learn of it first
            own = e
        (failed,) = self.sum([float(own is not None)])
        if not failed:
            return

        rank, host, text, retry, cause = self._first_report(own)
        if own is not None and not isinstance(own, (errors.UserError, OSError)):
            raise own
        if failed < self.size:
            text = f"rank {rank} on {host}: {text}"
        raise errors.SharedError(text, retry=retry, cause=cause) from own

    def _first_report(self, own: Exception | None) -> typing.Any:
        """Return rank, host, text, whether to retry, and the cause of the first failed rank."""
        report = None
        if own is not None:
            text, retry = files.describe(own)
            report = (self.rank, self.host, text, retry, self.alarm.cause_of(own))
        reports = [one for one in self.collect(report) if one]
        return self.broadcast(reports[0] if reports else None)


@contextlib.contextmanager
def joined(
    device: str,
    problem: str | None = None,
    report: alarm.Report = lambda _: None,
    *,
    timeout_minutes: float = flags.TIMEOUT_MINUTES,
) -> collections.abc.Iterator[World]:
    """Yield the world, and take it down at the end; if a rank has a `problem`, none enters.

    From then on SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 set `stop_requested`. When the block raises on
    some ranks, the first of them calls `report` with its exception, which goes on; then the others
    leave, with PeerError if they can.
    """
    world, store = _join(device, problem, report, timeout_minutes)
    try:
        make_groups(world, store, datetime.timedelta(minutes=timeout_minutes))
        world.alarm.listen()
        yield world
        world.barrier()
    except errors.SharedError:
        world.alarm.stop()
        raise
    except Exception as e:
        world.alarm.give_up(e)
        raise
    except BaseException as e:
        world.alarm.alert_others(e)
        raise
    else:
        world.alarm.stop()
        if world.alarm.join():
            world.barrier()
        dist.destroy_process_group()
    finally:
        # After a failure too: without peers nothing can hold it up
        if world.size == 1 and dist.is_initialized():
            dist.destroy_process_group()


def adopted() -> World:
    """Return the world of a script that has connected its ranks, with a gloo group for agreements.

    From now on SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 set `stop_requested`. All ranks call it.
    """
    here = rendezvous.Place(0, 1, 0, 1)
    if dist.is_initialized():
        here = rendezvous.Place(dist.get_rank(), dist.get_world_size(), 0, 1)
    elif (launched := rendezvous.place()).size > 1:
        what = f"{launched.size} ranks are not connected"
        raise errors.UserError(f"{what}; call torch.distributed.init_process_group before")

    _connect_lazily()
    world = World(here, torch.device("cpu"))
    if here.size > 1:
        world.control = dist.new_group(backend="gloo")
    world.members = world.collect({"rank": here.rank, "host": world.host})
    world.alarm.listen()
    world.alarm.start()
    return world


def _join(
    wanted: str, problem: str | None, report: alarm.Report, timeout_minutes: float
) -> tuple[World, typing.Any]:
    """Return the world, once all ranks have met and watch each other, and the store."""
    here = rendezvous.place()
    device = torch.device("cpu")
    try:
        device = hardware.choose_device(wanted, here.local_rank)
    except errors.UserError as e:
        problem = problem or str(e)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    world = World(here, device, report, timeout_minutes)
    own = {"rank": here.rank, "host": world.host, "device": name}

    if here.size == 1:
        if problem is not None:
            raise errors.UserError(problem)
        world.members = [own]
        return world, dist.HashStore()
    store = rendezvous.connect(here)
    world.members = rendezvous.meet(store, here, own, problem)
    world.alarm.store = rendezvous.second_client()
    world.alarm.start()
    return world, store


def make_groups(world: World, store: typing.Any, timeout: datetime.timedelta) -> None:
    """Make the process groups: one for gradients, and one on gloo for agreements."""
    has_gpu = world.device.type == "cuda"
    if has_gpu:
        torch.cuda.set_device(world.device)
    _connect_lazily()
    dist.init_process_group(
        f"cpu:gloo,cuda:{world.backend}" if has_gpu else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=world.device if world.backend == "nccl" else None,
    )
    world.control = dist.group.WORLD
    if has_gpu:
        world.control = dist.new_group(backend="gloo", timeout=timeout)


def _connect_lazily() -> None:
    """Let gloo connect two ranks at their first message, not all pairs at once.

    That would be 32 million connections.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # torch 2.13 reads it when it makes a group


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
    log.emit(
        "DDP",
        world_size=world.size,
        nodes=world.num_nodes,
        backend=world.backend,
        master=meeting,
        iface=world.interface,
    )
    log.emit(
        "ENV",
        python=sys.version.split()[0],
        torch=torch.__version__,
        cuda=torch.version.cuda or "none",
        device=world.device.type,
        threads=torch.get_num_threads(),
        job=os.environ.get("SLURM_JOB_ID"),
        attempt=os.environ.get("RUN_ATTEMPT_ID"),
    )
    log.every_rank(
        "RANK",
        rank=world.rank,
        local_rank=world.place.local_rank,
        host=world.host,
        device=world.device,
        pid=os.getpid(),
    )
