"""What the lines of a failure prove.

Each pattern is anchored to who writes the line: the kernel, NCCL, or torch by an exception's type and the begin of its
text. A word anywhere in a message, or in what a program prints, proves nothing.
"""

import dataclasses
import itertools
import re

from ddp.node.diagnosis import rank_ends

RANK = re.compile(
    r"^\[rank\d+\]: ?"
)  # torch's prefix of an exception's lines within a process group
_MODULES = r"(?:[A-Za-z_]\w*\.)*"  # before an exception's name
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# Faults of the machine: the kernel's NVRM, CUDA (driver_types.h) within torch's exceptions, NVML (nvml.h), nvidia-smi
_BAD_NODE = re.compile(
    r"(?:\[ *\d+\.\d+\] |\S[^\[\]]{0,60} kernel: (?:\[ *\d+\.\d+\] )?)?"  # as dmesg and the journal print it
    r"NVRM: Xid \(PCI:[\da-fA-F:.]+\): (?!(?:13|31|43|45|68|69), )\d+, "  # those are a program's, by NVIDIA's catalog
    rf"|(?:{_MODULES}(?:RuntimeError|AcceleratorError|CudaError|DeferredCudaCallError): |\s*what\(\):  )"
    r"(?:\[PG [^\]]*\] [^:]*: |CUDA call failed lazily at initialization with error: )?CUDA (?:error: (?:"
    r"(?:an )?uncorrectable (?:ECC|NVLink) error |device not ready|hardware stack error|no CUDA-capable device is |"
    r"(?:all )?CUDA-capable device(?:s|\(s\) is/are) (?:are )?busy)"
    r"|driver initialization failed)"
    rf"|{_MODULES}NVMLError_(?:GpuIsLost|DriverNotLoaded|ResetRequired|IRQIssue|LibRmVersionMismatch|CorruptedInforom)\b"
    r"|Failed to initialize NVML: "
)
# nccl.h, in torch's exception and in the line that NCCL adds below it
_BAD_LINK = re.compile(
    rf"(?:{_MODULES}(?:DistBackendError|RuntimeError): |\s*what\(\):  .*)NCCL error in: .*"
    r"(?:ncclSystemError|unhandled system error)|ncclSystemError: System call (?!.*Last error: \w*[sS]ocket)"
)
# Consequences of another rank's end, as torch, gloo and NCCL report them; a download's ConnectionResetError is none.
# Three patterns, since one with a look-ahead takes the square of a long line's length.
_OF_TORCH = re.compile(
    rf"{_MODULES}(?:Dist\w*Error: |RuntimeError: (?:\[|Gloo |NCCL |Rank \d))|nccl\w+Error: |\s*what\(\): "
    r"|\[[IWEF]\d{4} [\d:.]+ "
)
_COLLECTIVE = re.compile(
    r"Dist\w+Error|gloo|nccl|c10d|TCPStore|ProcessGroup|\bRank \d", re.IGNORECASE
)
_PEER_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exit(?:ed|ing)|connect timeout"
    r"|collective operation timeout|communicator was aborted|recvValue failed|heartbeat monitor|Last error: \w*socket",
    re.IGNORECASE,
)
_PEER_LEFT = re.compile(
    rf"(?:(?:\w+:ddptrain:)?\[FATAL\] )?(?:rank \d+ leaves:|a rank (?:was lost|did not answer)\b)"  # of the payload
    rf"|{_MODULES}(?:SharedError|LostError|PeerError|SignalException)\b|Signal \d+ "
)
# Faults of the network, where no rank failed by itself: errors of gloo, NCCL and errno.h
CUT = re.compile(
    r"[Cc]onnection (closed|refused|reset|timed out)|Broken pipe|remote process exit(?:ed|ing)|No route to host"
    r"|Network is unreachable"
)
_SHM = "shared memory is full: use fewer workers, or a larger /dev/shm"
# Python's errors begin with the number, torch's, h5py's and safetensors' have strerror(3)'s words; `>: ` is torch's shm
_OF_SYSTEM = rf"{_MODULES}(?:\w+Error: \[Errno %s\]|(?:OS|IO|Runtime|Safetensor)Error: .*%s)"
# What a call on a shared filesystem returns once its client or server has failed (errno.h, strerror(3)): FUSE's ends
# open calls with ECONNABORTED and later ones with ENOTCONN (fs/fuse/dev.c), and one that was started again knows no
# open file, hence EBADF. Lustre and CephFS give ESHUTDOWN to a client that was cut off, NFS ESTALE and ETIMEDOUT.
# Sockets, and closed files, give most of them, too: they count with a path, or with other evidence.
OF_FILESYSTEM = {
    5: "Input/output error",
    9: "Bad file descriptor",
    103: "Software caused connection abort",
    107: "Transport endpoint is not connected",
    108: "Cannot send after transport endpoint shutdown",
    110: "Connection timed out",
    116: "Stale file handle",
}
_OF_LIMITS = (12, 24, 28, 122)  # memory, open files, room, quota
_NUMBERS = {words: number for number, words in OF_FILESYSTEM.items()}
_WORDS = "|".join(map(re.escape, _NUMBERS))
_REFUSED = re.compile(
    rf"{_MODULES}\w*Error: (?:\[\(.*?)?\[Errno (\d+)\]"
)  # Python's; shutil.copytree's is in a list
_REFUSED_BY_LIBRARY = re.compile(
    rf"(?:{_MODULES}(?:OS|IO|Runtime|Safetensor)Error: |\s*what\(\):  filesystem error: ).*({_WORDS})"
)
_REFUSED_BEHIND_PATH = re.compile(
    rf": ({_WORDS})(?:;|$)"
)  # of the payload (files.py) and of the shell's commands
# How a rank reports another one (distributed.py of the payload): its number, its node, its error
_PASSED_ON = re.compile(
    rf"(?:(?:\w+:ddptrain:)?\[FATAL\] |{_MODULES}(?:Shared|Peer)Error: )?(?:rank \d+ leaves: )?"
    r"rank (?P<rank>\d+) on (?P<node>\S+): "
)
_QUOTED_PATH = re.compile(r"(['\"])(/.*?)\1")
_BARE_PATH = re.compile(r"(?<![\w.'\"/])/[^\s'\":;,()\[\]<>]+")
_RELATIVE_PATH = re.compile(r": '([^'/][^']*)'(?: -> '[^']*')?$")
# What a program says whose files went away without an errno: the writers of torch, C++ and NumPy, and Python's imports
_OF_FILES = re.compile(
    rf"\[Errno (?!(?:{'|'.join(map(str, _OF_LIMITS))})\])\d+\]|Bus error|SIGBUS|signal 7 |{_WORDS}|inline_container\.cc"
    r"|PytorchStream|iostream error|requested and \d+ written|Parent directory .* does not exist|SafetensorError"
    r"|ModuleNotFoundError|ImportError|BadZipFile|EOFError"
)
_QUOTA = "quota -s, lfs quota or juicefs quota"
# Faults of the program by their exceptions (errno.h's numbers), each with its remedy: those that another attempt may
# not meet, then those that would come again
_PASSING = {
    rf"{_MODULES}OSError: \[Errno 28\] .*'/dev/shm/|RuntimeError: unable to .*</torch_.*>: No space left": _SHM,
    r"(torch\.(cuda\.)?)?OutOfMemoryError: |[\w.]+Error: CUDA (error: )?out of memory": "use a smaller batch",
    r"([\w.]+_Array)?MemoryError\b|RuntimeError: .*DefaultCPUAllocator: |"
    + _OF_SYSTEM % (12, "Cannot allocate memory"): "use a smaller batch, or more memory",
    r"(its torchrun was )?killed by signal 7 ": "a mapped file was cut, or /dev/shm is full",
    r"RuntimeError: DataLoader worker .* Bus error|ERROR: Unexpected bus error encountered in w": _SHM,
    rf"{_MODULES}(?:Runtime|Accelerator)Error: (?:CUDA error: CUDA driver version is |The NVIDIA driver on)": (
        "torch needs a newer driver (nvidia-smi shows it), or an environment with an older CUDA"
    ),
    r"(requests|urllib3|httpx|httpcore|aiohttp|botocore)\.[\w.]*(Connect|Timeout|ChunkedEncoding)"
    r"|urllib\.error\.URLError|socket\.gaierror|huggingface_hub\.[\w.]*LocalEntryNotFound": (
        "a download failed: do the nodes reach its host?"
    ),
}
_LASTING = {
    _OF_SYSTEM % (122, "Disk quota exceeded"): f"the quota is used up: {_QUOTA} show it",
    _OF_SYSTEM
    % (28, "(?<!>: )No space left on device"): f"remove files; {_QUOTA} show your limits",
    _OF_SYSTEM % (24, "Too many open files"): "see ulimit -n; use fewer workers, or close files",
    r"FileNotFoundError\b": "does the file exist on the nodes?",
    f"(DataLoader worker )?{re.escape(rank_ends.NO_MEMORY)}": "or use a smaller batch",
    r"RuntimeError: \[enforce fail at inline_container\.cc:": f"was the disk full? {_QUOTA} show your limits",
    r"RuntimeError: Parent directory .* does not exist": "does the folder exist on the nodes?",
}
_KNOWN = [
    (re.compile(pattern), comes_again, remedy)
    for comes_again, faults in ((False, _PASSING), (True, _LASTING))
    for pattern, remedy in faults.items()
]
# A worker that was killed, by torch/csrc/DataLoader.cpp and torch/utils/data/dataloader.py
LOST_WORKER = re.compile(
    rf"(?:{RANK.pattern})?RuntimeError: DataLoader worker \(pid(?:\(s\))? [\d, ]+\) "
    r"(?:is killed by signal: Killed|exited unexpectedly)"
)
# libstdc++'s words as a thread of gloo's releases the last tensor while Python shuts down: asking for the GIL ends the
# thread, inside of a destructor (~AsyncWork). No thread has a Python frame then. Python 3.14 lets it wait;
# in our environments ddptrain.startup waits for it.
_TERMINATED = "terminate called without an active exception"
_NO_FRAME = "<no Python frame>"
NOT_DESTROYED = (  # the first alone is not enough where a model of DDP still holds the group
    "aborted by torch after the program's last line, since its process group still existed: "
    "end it with torch.distributed.destroy_process_group() and os._exit(0)"
)


def proves_node(lines: list[str]) -> bool:
    """Return whether a rank's last line, or an exception that led to it, proves a fault of the machine."""
    return any(_BAD_NODE.match(line) or _BAD_LINK.match(line) for line in _raised(lines, _CHAINED))


def _raised(lines: list[str], chained: tuple[str, ...]) -> list[str]:
    """Return a rank's last line, and the first lines of the exceptions before a line of `chained`."""
    bare = [RANK.sub("", line, count=1) for line in lines]
    found, raised = bare[-1:], ""
    for before, line in itertools.pairwise(bare):
        if before[:1].isspace() and not line[:1].isspace():
            raised = line  # the first line behind a traceback's frames
        if line in chained:
            found.append(raised)
    return found


@dataclasses.dataclass(frozen=True)
class Refusal:
    """What the operating system refused a rank."""

    number: int  # errno.h's
    paths: tuple[str, ...]  # (): unknown, or none as of a socket
    node: str = ""  # where; "": the rank's own

    @property
    def is_of_filesystem(self) -> bool:
        """Return whether a shared filesystem that has failed gives this error."""
        return self.number in OF_FILESYSTEM

    @property
    def may_be_of_files(self) -> bool:
        """Return whether files that went away may be the reason, as no limit is."""
        return self.number not in _OF_LIMITS


def refusal(lines: list[str]) -> Refusal | None:
    """Find the refusal of the operating system in a rank's last lines; a filesystem's goes first."""
    found = [refused for line in _raised(lines, _CHAINED) if (refused := _parse_refusal(line))]
    of_filesystem = [refused for refused in found if refused.is_of_filesystem]
    return next(iter([*of_filesystem, *found]), None)


def _parse_refusal(line: str) -> Refusal | None:
    passed = _PASSED_ON.match(line)
    rest = line[passed.end() :] if passed else line
    number = _number(rest)
    if number is None:
        return None
    return Refusal(number, paths(rest), passed["node"] if passed else "")


def _number(line: str) -> int | None:
    """Return the errno that an error names by number or words; None where it names none."""
    if found := _REFUSED.match(line):
        return int(found[1])
    if found := _REFUSED_BY_LIBRARY.match(line):
        return _NUMBERS[found[1]]
    found = _REFUSED_BEHIND_PATH.search(line)
    if found and paths(line[: found.start()]):
        return _NUMBERS[found[1]]
    return None


def reported_of(line: str) -> int | None:
    """Return the rank whose failure another rank reports; None if it only reports a lost one."""
    line = RANK.sub("", line, count=1)
    found = _PASSED_ON.match(line)
    if found is None or reports_peer(line[found.end() :]):
        return None
    return int(found["rank"])


def paths(line: str) -> tuple[str, ...]:
    """Return the paths that an error names; a relative one is that in quotes at its end."""
    quoted = [match[2] for match in _QUOTED_PATH.finditer(line)]
    bare = _BARE_PATH.findall(_QUOTED_PATH.sub("", line))
    relative = [match[1] for match in _RELATIVE_PATH.finditer(line)]
    return (*quoted, *bare, *relative)


def is_of_files(line: str) -> bool:
    """Return whether an error may come from files that went away: with other evidence it does."""
    return bool(_OF_FILES.search(line))


def reports_peer(line: str) -> bool:
    """Return whether a line reports the loss of another rank."""
    line = RANK.sub("", line, count=1)
    return has_left(line) or bool(
        _OF_TORCH.match(line) and _PEER_LOST.search(line) and _COLLECTIVE.search(line)
    )


def has_left(line: str) -> bool:
    """Return whether a rank reports that it ends because of another one."""
    return bool(_PEER_LEFT.match(line))


def known(lines: list[str]) -> tuple[bool, str] | None:
    """Return whether a fault of the program would come again, and its remedy; None for an unknown one.

    The last line counts first, then the exceptions that it was raised from; one that was handled explains nothing.
    """
    return next(
        (one[1:] for line in _raised(lines, _CHAINED[1:]) for one in _KNOWN if one[0].match(line)),
        None,
    )


def was_not_destroyed(lines: list[str]) -> bool:
    """Return whether torch aborted a rank whose program had ended without `destroy_process_group`."""
    if _TERMINATED not in lines:
        return False
    after = lines[lines.index(_TERMINATED) :]
    return any(_NO_FRAME in line for line in after) or not any(
        line.startswith("  File ") for line in after
    )
