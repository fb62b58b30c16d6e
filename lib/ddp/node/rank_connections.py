"""Check whether the ranks connect, by the keys of the agent's store and by their sockets.

A program that forms no group, such as Lightning's Trainer without num_nodes, trains the whole alone
in each rank, and ends well. Another rendezvous is legitimate and cannot be seen, so this is a
remark and not a failure.
"""

import contextlib
import glob
import os
import re
import threading

from ddp.node import processes, spool, storage

PATIENCE_S = 60.0  # after the ranks started
SUFFIX = ".remark"  # of the file in the run's control/; its name is the attempt's
_ESTABLISHED = "01"  # include/net/tcp_states.h
_SOURCE_BYTES = 1 << 20
_IMPORT = re.compile(r"^\s*(?:import|from)\s+(\w+)", re.MULTILINE)
# In the agent: report to the pipe when the ranks start, and once there is a group.
# `init_process_group` writes keys below default_pg/ into the agent's store (torch 2.13);
# TCPStore.list_keys is newer than torch 2.6. The clone has its own connection, since the agent may
# wait on its own; without the original the store would end before the last look.
AGENT = """\
import threading
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
report = open({pipe}, "w", buffering=1)
stores, over = [], threading.Event()
def has_met():
    try:
        return bool(stores) and any("default_pg/" in key for key in stores[0].list_keys())
    except RuntimeError:
        return False
def watch():
    while not has_met():
        if over.wait(1.0):
            return
    report.write("met\\n")
def next_rendezvous(self, meet=static_tcp_rendezvous.StaticTCPRendezvous.next_rendezvous):
    found = meet(self)
    if not stores and hasattr(self._store, "list_keys"):
        stores[:] = self._store.clone(), self._store
        report.write("started\\n")
        threading.Thread(target=watch, daemon=True).start()
    return found
static_tcp_rendezvous.StaticTCPRendezvous.next_rendezvous = next_rendezvous
"""
AT_END = """\
over.set()
if has_met():
    report.write("met\\n")
"""
_LIGHTNING = "in Trainer(...) or Fabric(...) give num_nodes={nodes}, devices={ranks}"
_ACCELERATE = "on CPUs it takes --use_cpu (Trainer), or --env ACCELERATE_USE_CPU=true"
_REMEDIES = {
    **dict.fromkeys(("lightning", "pytorch_lightning", "lightning_fabric", "litgpt"), _LIGHTNING),
    **dict.fromkeys(("transformers", "accelerate", "trl", "peft"), _ACCELERATE),
}
_ANY = "the program has to call init_process_group in each rank"


class Watch:
    """Watches the ranks of a job's first node; logs a line after a minute, and one at the end.

    `path` is the file that holds the remark for as long as it is true.
    """

    def __init__(
        self, path: str, num_nodes: int, ranks_per_node: int, words: list[str], port: int
    ) -> None:
        self._path = path
        self._port = port
        self._words = words
        self._num_nodes = num_nodes
        self._ranks_per_node = ranks_per_node
        self._reader, self.pipe = os.pipe()  # the agent's end is `pipe`
        self._has_started = threading.Event()
        self._has_met = threading.Event()
        self._over = threading.Event()
        self._is_remarked = False
        self._agent = 0
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._watcher = threading.Thread(target=self._look, daemon=True)

    def start(self, agent: int) -> None:
        """Begin, once the agent's process has its end of the pipe."""
        os.close(self.pipe)
        self._agent = agent
        self._listener.start()
        self._watcher.start()

    def close(self, *, is_done: bool) -> None:
        """Remark at the end, if the agent ended well, that the ranks never connected."""
        self._over.set()
        self._listener.join(storage.CALL_S)
        if is_done and self._has_started.is_set() and not self._has_met.is_set():
            self._remark("never connected: each trained alone")

    def _listen(self) -> None:
        with os.fdopen(self._reader, encoding="utf-8") as lines:
            for line in lines:
                if line.strip() == "started":
                    self._has_started.set()
                if line.strip() == "met":
                    self._note_met()

    def _look(self) -> None:
        while not self._has_started.wait(1.0):
            if self._over.is_set():
                return
        if self._over.wait(PATIENCE_S) or self._has_met.is_set():
            return
        if any(is_connected(rank, self._port) for rank in processes.children(self._agent)):
            self._has_met.set()  # NCCL connects, and writes its key, at the first collective
            return
        self._remark(f"have not connected after {PATIENCE_S:.0f} s: each trains alone")

    def _note_met(self) -> None:
        self._has_met.set()
        if self._is_remarked:
            self._is_remarked = False
            spool.write(f"[ENV] the {self._num_ranks} ranks have connected now")
            with contextlib.suppress(OSError):
                storage.within(lambda: os.unlink(self._path), storage.CALL_S)

    @property
    def _num_ranks(self) -> int:
        return self._num_nodes * self._ranks_per_node

    def _remark(self, what: str) -> None:
        self._is_remarked = True
        text = f"the {self._num_ranks} ranks {what}, unless the program connects them itself"
        text += f"; {self._remedy()}"
        spool.write(f"[ENV] {text}")
        with contextlib.suppress(OSError):
            storage.within(lambda: _write(self._path, text), storage.CALL_S)

    def _remedy(self) -> str:
        imported: list[str] = []
        with contextlib.suppress(OSError):
            imported = storage.within(lambda: libraries(self._words), storage.CALL_S)
        known = [_REMEDIES[name] for name in imported if name in _REMEDIES]
        remedy = known[0] if known else _ANY
        return remedy.format(nodes=self._num_nodes, ranks=self._ranks_per_node)


def libraries(words: list[str]) -> list[str]:
    """Return the modules that a torchrun command line's program imports itself. Raises OSError."""
    if words[:1] in (["-m"], ["--module"]):
        return [words[1].partition(".")[0]]
    with open(words[0], encoding="utf-8", errors="replace") as file:
        return _IMPORT.findall(file.read(_SOURCE_BYTES))


def is_connected(process: int, port: int) -> bool:
    """Return whether a process holds a connection to this port of any host."""
    sockets = _sockets(process)
    for table in ("tcp", "tcp6"):
        for inode in _connections(f"/proc/{process}/net/{table}", port):
            if f"socket:[{inode}]" in sockets:
                return True
    return False


def _sockets(process: int) -> set[str]:
    sockets: set[str] = set()
    for path in glob.iglob(f"/proc/{process}/fd/*"):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(path))
    return sockets


def _connections(table: str, port: int) -> list[str]:
    """Return the inodes of the established connections to a port, by a table of /proc (proc(5))."""
    inodes: list[str] = []
    with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
        for line in lines:
            fields = line.split()
            remote, state, inode = fields[2], fields[3], fields[9]
            if remote.endswith(f":{port:04X}") and state == _ESTABLISHED:
                inodes.append(inode)
    return inodes


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{text}\n")
