"""Lines that the kernel, CUDA, NCCL and torch print about a fault, and what each proves.

Each pattern is anchored to who writes the line: by the line's beginning, or by an exception's type
and the beginning of its text. A word anywhere in a message, or in a program's output, proves
nothing. To recognise another fault, add a row with its source.
"""

import dataclasses
import functools
import re

from ddp.node.diagnosis import excerpts, rank_ends

MODULES = r"(?:[A-Za-z_]\w*\.)*"  # before an exception's name
_OF_CUDA = (
    rf"(?:{MODULES}(?:RuntimeError|AcceleratorError|CudaError|DeferredCudaCallError): "
    r"|\s*what\(\):  )"
    r"(?:\[PG [^\]]*\] [^:]*: |CUDA call failed lazily at initialization with error: )?CUDA "
)
_SHM = "shared memory is full: use fewer workers, or a larger /dev/shm"
_QUOTA = "quota -s, lfs quota or juicefs quota"
# Of a worker process that runs the whole script again
_BOOTSTRAPPING = "An attempt has been made to start a new process before the"


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@dataclasses.dataclass(frozen=True)
class MachineFault:
    """A line that proves a fault of the machine, by its pattern."""

    pattern: str
    source: str


@dataclasses.dataclass(frozen=True)
class ProgramFault:
    """A pattern of the line that a program fails with, and the remedy."""

    pattern: str
    remedy: str
    source: str
    comes_again: bool = False  # another attempt would fail, too


def _of_system(number: int, words: str) -> str:
    """Return the pattern of an error of errno.h.

    Python's errors have the number, errors of libraries the words of strerror(3).
    """
    return (
        rf"{MODULES}(?:\w+Error: \[Errno {number}\]"
        rf"|(?:OS|IO|Runtime|Safetensor)Error: .*{words})"
    )


MACHINE_FAULTS = (
    MachineFault(
        r"(?:\[ *\d+\.\d+\] |\S[^\[\]]{0,60} kernel: (?:\[ *\d+\.\d+\] )?)?"
        r"NVRM: Xid \(PCI:[\da-fA-F:.]+(?: GPU-I:\d+)?(?: GPU-CI:\d+)?\): "
        r"(?!(?:13|31|43|45|68|69), )\d+, ",
        source="NVIDIA's kernel driver, as dmesg and the journal print it, with MIG's instances"
        " behind the card; the Xids left out are a program's by NVIDIA's catalog of Xids",
    ),
    MachineFault(
        rf"{_OF_CUDA}(?:error: (?:"
        r"(?:an )?uncorrectable (?:ECC|NVLink) error |device not ready|hardware stack error"
        r"|no CUDA-capable device is |(?:all )?CUDA-capable device(?:s|\(s\) is/are) (?:are )?busy)"
        r"|driver initialization failed)",
        source="torch's exceptions with the texts of CUDA's driver_types.h",
    ),
    MachineFault(
        rf"{MODULES}NVMLError_(?:GpuIsLost|DriverNotLoaded|ResetRequired|IRQIssue"
        r"|LibRmVersionMismatch|CorruptedInforom)\b",
        source="pynvml, by the names of nvml.h",
    ),
    MachineFault(r"Failed to initialize NVML: ", source="nvidia-smi"),
    MachineFault(
        rf"(?:{MODULES}(?:DistBackendError|RuntimeError): |\s*what\(\):  .*)NCCL error in: .*"
        r"(?:ncclSystemError|unhandled system error)",
        source="torch's exception of an error of nccl.h",
    ),
    MachineFault(
        r"ncclSystemError: System call (?!.*Last error: \w*[sS]ocket)",
        source="the line that NCCL adds below torch's exception",
    ),
)

PROGRAM_FAULTS = (
    # Another attempt may not meet these
    ProgramFault(
        rf"{MODULES}OSError: \[Errno 28\] .*'/dev/shm/",
        _SHM,
        source="Python's multiprocessing",
    ),
    ProgramFault(
        r"RuntimeError: unable to .*</torch_.*>: No space left",
        _SHM,
        source="torch's shared memory (MapAllocator.cpp)",
    ),
    ProgramFault(
        r"(torch\.(cuda\.)?)?OutOfMemoryError: |[\w.]+Error: CUDA (error: )?out of memory",
        "use a smaller batch",
        source="torch's CUDA allocator",
    ),
    ProgramFault(
        r"([\w.]+_Array)?MemoryError\b|RuntimeError: .*DefaultCPUAllocator: |"
        + _of_system(12, "Cannot allocate memory"),
        "use a smaller batch, or more memory",
        source="Python, NumPy, torch's alloc_cpu.cpp; ENOMEM",
    ),
    ProgramFault(
        r"(its torchrun was )?killed by signal 7 ",
        "a mapped file was cut, or /dev/shm is full",
        source="rank_ends.py; signal(7), SIGBUS",
    ),
    ProgramFault(
        r"RuntimeError: DataLoader worker .* Bus error"
        r"|ERROR: Unexpected bus error encountered in w",
        _SHM,
        source="torch/csrc/DataLoader.cpp",
    ),
    ProgramFault(
        rf"{MODULES}(?:Runtime|Accelerator)Error: "
        r"(?:CUDA error: CUDA driver version is |The NVIDIA driver on)",
        "torch needs a newer driver (nvidia-smi shows it), or an environment with an older CUDA",
        source="CUDA's driver_types.h; c10/cuda/CUDAFunctions.cpp",
    ),
    ProgramFault(
        r"(requests|urllib3|httpx|httpcore|aiohttp|botocore)\.[\w.]*"
        r"(Connect|Timeout|ChunkedEncoding)"
        r"|urllib\.error\.URLError|socket\.gaierror|huggingface_hub\.[\w.]*LocalEntryNotFound",
        "a download failed: do the nodes reach its host?",
        source="the exceptions of these packages",
    ),
    # These would come again
    ProgramFault(
        _of_system(122, "Disk quota exceeded"),
        f"the quota is used up: {_QUOTA} show it",
        source="errno.h, EDQUOT",
        comes_again=True,
    ),
    ProgramFault(
        _of_system(28, "(?<!>: )No space left on device"),  # `>: ` is torch's, of shared memory
        f"remove files; {_QUOTA} show your limits",
        source="errno.h, ENOSPC",
        comes_again=True,
    ),
    ProgramFault(
        _of_system(24, "Too many open files"),
        "see ulimit -n; use fewer workers, or close files",
        source="errno.h, EMFILE",
        comes_again=True,
    ),
    ProgramFault(
        rf"{MODULES}(?:OSError|ImportError): .*failed to map segment from shared object",
        "its folder is mounted noexec (findmnt -T shows it): use another one",
        source="glibc's dl-map-segments.h",
        comes_again=True,
    ),
    ProgramFault(
        r"FileNotFoundError\b",
        "does the file exist on the nodes?",
        source="Python; errno.h, ENOENT",
        comes_again=True,
    ),
    ProgramFault(
        f"(DataLoader worker )?{re.escape(rank_ends.NO_MEMORY)}",
        "or use a smaller batch",
        source="rank_ends.py, by the cgroup's oom_kill",
        comes_again=True,
    ),
    ProgramFault(
        r"RuntimeError: \[enforce fail at inline_container\.cc:",
        f"was the disk full? {_QUOTA} show your limits",
        source="torch's writer of zip archives (caffe2/serialize/inline_container.cc)",
        comes_again=True,
    ),
    ProgramFault(
        r"RuntimeError: Parent directory .* does not exist",
        "does the folder exist on the nodes?",
        source="torch.save",
        comes_again=True,
    ),
    ProgramFault(
        rf"{MODULES}UnpicklingError: Weights only load failed",
        "if you trust the file: torch.load(..., weights_only=False), or add_safe_globals",
        source="torch.load, since torch 2.6 (torch/serialization.py)",
        comes_again=True,
    ),
    ProgramFault(
        r"RuntimeError: operator torch(?:vision|audio)::\w+ does not exist",
        "this package was built for another torch: install both from the same index",
        source="torch's library (torch/library.py), as torchvision registers its operators",
        comes_again=True,
    ),
    ProgramFault(
        rf"RuntimeError:\s+{_BOOTSTRAPPING}",
        'put what the script does below `if __name__ == "__main__":`',
        source="Python's multiprocessing/spawn.py",
        comes_again=True,
    ),
)

# A worker that was killed, by torch/csrc/DataLoader.cpp and torch/utils/data/dataloader.py
_LOST_WORKER = re.compile(
    r"RuntimeError: DataLoader worker \(pid(?:\(s\))? [\d, ]+\) "
    r"(?:is killed by signal: Killed|exited unexpectedly)"
)
# Consequences of another rank's end, as torch, gloo and NCCL report them; a download's
# ConnectionResetError is none. Three patterns: one with a look-ahead takes the square of a long
# line's length.
_OF_TORCH = re.compile(
    rf"{MODULES}(?:Dist\w*Error: |RuntimeError: (?:\[|Gloo |NCCL |Rank \d))|nccl\w+Error: "
    r"|\s*what\(\): |\[[IWEF]\d{4} [\d:.]+ "
)
_COLLECTIVE = re.compile(
    r"Dist\w+Error|gloo|nccl|c10d|TCPStore|ProcessGroup|\bRank \d", re.IGNORECASE
)
_PEER_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exit(?:ed|ing)|connect timeout"
    r"|collective operation timeout|communicator was aborted|recvValue failed|heartbeat monitor"
    r"|Last error: \w*socket",
    re.IGNORECASE,
)
_PEER_LEFT = re.compile(  # the payload's; the last line is torchrun's
    r"(?:(?:\w+:ddptrain:)?\[FATAL\] )?(?:rank \d+ leaves:|a rank (?:was lost|did not answer)\b)"
    rf"|{MODULES}(?:SharedError|LostError|PeerError|SignalException)\b|Signal \d+ "
)
# How a rank reports another one (distributed.py of the payload): its number, its node, its error
PASSED_ON = re.compile(
    rf"(?:(?:\w+:ddptrain:)?\[FATAL\] |{MODULES}(?:Shared|Peer)Error: )?(?:rank \d+ leaves: )?"
    r"rank (?P<rank>\d+) on (?P<node>\S+): "
)
# Faults of the network, if no rank failed by itself: errors of gloo, NCCL and errno.h
_CUT = re.compile(
    r"[Cc]onnection (closed|refused|reset|timed out)|Broken pipe|remote process exit(?:ed|ing)"
    r"|No route to host|Network is unreachable"
)
# libstdc++'s words as a thread of gloo's releases the last tensor while Python shuts down: asking
# for the GIL ends the thread, inside of a destructor (~AsyncWork). No thread has a Python frame
# then. Python 3.14 lets it wait; in our environments ddptrain.world.startup waits for it.
_TERMINATED = "terminate called without an active exception"
_NO_FRAME = "<no Python frame>"
NOT_DESTROYED = (  # the first alone is not enough if a model of DDP still holds the group
    "aborted by torch after the program's last line, since its process group still existed: "
    "end it with torch.distributed.destroy_process_group() and os._exit(0)"
)


def proves_machine_fault(lines: list[str]) -> bool:
    """Return whether a rank's last line, or an exception before it, proves a machine's fault."""
    for line in excerpts.raised(lines, with_context=True):
        if any(_compiled(fault.pattern).match(line) for fault in MACHINE_FAULTS):
            return True
    return False


def find_program_fault(lines: list[str]) -> ProgramFault | None:
    """Return the known fault of a program in a rank's last lines.

    The last line counts first, then the exceptions that it was raised from; one that was handled
    explains nothing.
    """
    for line in excerpts.raised(lines, with_context=False):
        for fault in PROGRAM_FAULTS:
            if _compiled(fault.pattern).match(line):
                return fault
    return None


def is_lost_worker(line: str) -> bool:
    """Return whether DataLoader reports that one of its workers was killed."""
    return _LOST_WORKER.match(excerpts.without_rank(line)) is not None


def until_worker_failed(text: list[str]) -> list[str]:
    """Return an output up to the error of a worker that ran the script again, or all of it.

    The main process then only reports the loss of that worker.
    """
    bare = [excerpts.without_rank(line) for line in text]
    for index, line in enumerate(bare):
        if not line.strip().startswith(_BOOTSTRAPPING):
            continue
        end = index
        while end < len(bare) and bare[end][:1].isspace():
            end += 1
        return text[:end]
    return text


def reports_peer(line: str) -> bool:
    """Return whether a line reports the loss of another rank."""
    line = excerpts.without_rank(line)
    if has_left(line):
        return True
    if not _OF_TORCH.match(line):
        return False
    return bool(_PEER_LOST.search(line) and _COLLECTIVE.search(line))


def has_left(line: str) -> bool:
    """Return whether a rank reports that it ends because of another one."""
    return _PEER_LEFT.match(line) is not None


def reported_rank(line: str) -> int | None:
    """Return the rank whose own failure another rank reports; None for a lost rank."""
    line = excerpts.without_rank(line)
    found = PASSED_ON.match(line)
    if found is None or reports_peer(line[found.end() :]):
        return None
    return int(found["rank"])


def reports_cut(line: str) -> bool:
    """Return whether a line reports a connection that the network cut."""
    return _CUT.search(line) is not None


def was_group_left(lines: list[str]) -> bool:
    """Return whether torch aborted a program that had not called `destroy_process_group`."""
    if _TERMINATED not in lines:
        return False
    after = lines[lines.index(_TERMINATED) :]
    if any(_NO_FRAME in line for line in after):
        return True
    return not any(line.startswith("  File ") for line in after)
