"""`python -m bench.scale`: count what a training asks of the shared filesystem, the network and Slurm, by its size.

Each size is a Slurm of that many nodes on this machine (tests/functional/plain_slurm.py; root), on which `ddp submit`
trains a tiny GPT with every system call counted by strace. The counts are fitted to a + b nodes + c ranks + d ranks²
and carried on to 1,000 nodes of 8 ranks. The nodes' environment is a stand-in of some bytes that leads to this
interpreter's packages: how often it is unpacked counts here, not how long that takes.
"""

# pyright: basic, reportPrivateImportUsage=false
import argparse
import collections
import collections.abc
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import platform
import re
import shutil
import site
import stat
import subprocess
import sys
import tempfile
import time
import typing

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "lib"), str(ROOT / "payload")]

from functional import plain_slurm  # noqa: E402 # pyright: ignore[reportMissingImports] - of tests/

RESULTS = ROOT / "bench" / "results"
SIZES = "2x1,8x1,32x1,2x4,8x4"  # nodes x ranks
GOAL = (1000, 8)
WORKSPACE = plain_slurm.HOME / "training"
LIMIT_S = 1500
PARTS = 8  # shards of the training split
TRAINING = "--steps 4 --epoch-steps 2 --seq-len 16 --batch 1 --layers 1 --heads 1 --width 16 --eval-rows 64"
TRAINING += " --precision fp32 --device cpu"
CALLS = "openat,open,creat,stat,lstat,newfstatat,statx,access,faccessat,faccessat2,readlink,readlinkat,statfs,mkdir,"
CALLS += "mkdirat,unlink,unlinkat,rmdir,rename,renameat,renameat2,symlink,symlinkat,link,linkat,chmod,fchmodat,"
CALLS += "utimensat,execve,clone,clone3,fork,vfork,connect,sendto,recvfrom"
STRACE = f"strace -f -ff -qq -yy -s 512 --seccomp-bpf -e signal=none -e trace={CALLS} -o /mnt/$host/trace/t slurmd"
SLURM = {"sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun", "sbcast"}
_LINE = re.compile(r"^(\w+)\((.*)\)\s+= (-?\d+)")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_PLACE = re.compile(r"^(?:AT_FDCWD|\d+)<([^>]*)>")
_PEER = re.compile(r"sin6?_port=htons\((\d+)\)")
_CONNECTED = re.compile(r"^\d+<TCP(?:v6)?:\[.*->.*:(\d+)\]>")
_KINDS = (  # of what lies in a run's folder, the first that matches
    ("program", r"program(/|$)"),
    ("code", r"code(/|$)"),
    ("logs", r"logs(/|$)"),
    ("control", r"control(/|$)"),
    ("checkpoint", r"(epoch-|checkpoint-|latest|best|\.latest|\.best)"),
    ("metrics", r"\.?(metrics|summary|config|tracking|loss|job)\."),
)


@dataclasses.dataclass
class Count:
    """What one training did, by who did it and what it was."""

    nodes: int
    ranks: int  # of all nodes
    took_s: float = 0.0
    of: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def total(self, *patterns: str) -> int:
        """Return the sum over the counters that match any of the patterns."""
        return sum(count for name, count in self.of.items() if any(re.fullmatch(one, name) for one in patterns))


ROWS = (  # what it is, the counters that it sums
    ("the job's program and its specification: opens", (r".*:open:program",)),
    ("the environment's archive: opens", (r".*:open:environment",)),
    ("the environment's archive: unpackings", (r".*:exec:tar",)),
    ("the dataset's dataset.json: opens", (r".*:open:manifest",)),
    ("the dataset's shards: opens", (r".*:open:shards",)),
    ("control folder: opens", (r".*:open:control",)),
    ("logs: opens", (r".*:open:logs",)),
    ("logs: files and folders made", (r".*:make:logs",)),
    ("checkpoints: opens", (r".*:open:checkpoint",)),
    ("checkpoints: files and folders made, two checkpoints", (r".*:make:checkpoint",)),
    ("metrics, summary, curve: opens", (r".*:open:metrics",)),
    ("anything else in the workspace: opens", (r".*:open:other",)),
    ("lookups of names in the workspace (stat, access, readlink)", (r".*:look:.*",)),
    ("Slurm commands that nodes run", (r"(node|agent|rank):slurm:.*",)),
    ("Slurm commands of the batch script", (r"supervisor:slurm:.*",)),
    ("connections to the rendezvous store", (r"(node|agent|rank):tcp:store",)),
    ("requests to the rendezvous store", (r"(agent|rank):sent:store",)),
    ("bytes from the rendezvous store", (r"(agent|rank):received:store",)),
    ("connections between ranks", (r"rank:tcp:peer",)),
)


def main() -> int:
    """Measure the sizes and print the table; return 1 when a training failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--sizes", default=SIZES, help=f"nodes x ranks of each, default {SIZES}")
    parser.add_argument("--json", type=pathlib.Path, help="where to keep the counts (default: bench/results/)")
    parser.add_argument("--again", type=pathlib.Path, help="print the table of counts that were kept")
    parser.add_argument("--launcher", choices=("torchrun", "srun"), default="torchrun")
    args = parser.parse_args()
    if args.again:
        kept = json.loads(args.again.read_text())
        print(table([Count(one["nodes"], one["ranks"], one["took_s"], collections.Counter(one["of"])) for one in kept]))
        return 0
    if missing := plain_slurm.lacks() or (None if shutil.which("strace") else "strace is not installed"):
        print(f"not measured: {missing}", file=sys.stderr)
        return 1
    path = args.json or RESULTS / f"scale-{args.launcher}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    counts: list[Count] = []
    for size in args.sizes.split(","):
        nodes, ranks = map(int, size.split("x"))
        counts.append(measure(nodes, ranks, args.launcher))
        print(f"# {size}: {counts[-1].took_s:.0f} s", file=sys.stderr, flush=True)
        path.write_text(json.dumps([vars(one) for one in counts], indent=1) + "\n")
    print(table(counts))
    return 0


def measure(num_nodes: int, ranks_per_node: int, launcher: str) -> Count:
    """Train on a Slurm of so many nodes, and count. Raises RuntimeError when the training fails."""
    conf = "SlurmdParameters=config_overrides\nGresTypes=gpu\n"
    node = f"CPUs={ranks_per_node} RealMemory=16000 Gres=gpu:{ranks_per_node}"
    prepare = functools.partial(_prepare, gpus=ranks_per_node)  # GPUs by name, or Slurm would start one rank
    with plain_slurm.running(num_nodes, slurmd=STRACE, conf=conf, node=node, prepare=prepare) as cluster:
        began = time.monotonic()
        packages = os.pathsep.join([str(ROOT / "lib"), *sys.path[3:]])
        ddp = f"PYTHONPATH={packages} DDP_WORKSPACE={WORKSPACE} {sys.executable} -B -m ddp"
        done = cluster.tries(
            f"{ddp} --json submit --wait --run scale --dataset tiny -N {num_nodes} --gpus-per-node {ranks_per_node} "
            f"--memory 15000M --launcher {launcher} --max-restarts 0 gpt {TRAINING}",
            timeout=LIMIT_S,
        )
        if done.code:
            logs = cluster.home.glob("training/runs/scale/logs/*.out")
            shown = "\n".join(path.read_text()[-6000:] for path in logs)
            raise RuntimeError(f"{num_nodes} nodes: {done.err[-2000:]}\n{shown}")
        result = json.loads(done.out)
        assert (result["nodes"], result["ranks"]) == (str(num_nodes), str(num_nodes * ranks_per_node)), result
        found = Count(num_nodes, num_nodes * ranks_per_node, time.monotonic() - began)
        _made.clear()
        for name in cluster.nodes:
            found.of.update(_of_node(cluster.folder / name / "trace"))
        return found


def _prepare(folder: pathlib.Path, nodes: tuple[str, ...], *, gpus: int) -> None:
    """Make what the account's workspace holds before: a dataset, and the stand-in of an environment with its key."""
    for number in range(gpus):
        os.mknod(folder / f"gpu{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # of null(4)
    (folder / "etc/slurm/gres.conf").write_text("".join(f"Name=gpu File=/mnt/gpu{n}\n" for n in range(gpus)))
    for name in nodes:
        (folder / name / "trace").mkdir()
    workspace = folder / "home" / plain_slurm.USER / "training"
    for name in ("runs", "datasets", "environments", "baselines"):
        (workspace / name).mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        text = pathlib.Path(scratch, "text")
        text.mkdir()
        for number in range(PARTS):
            (text / f"{number}.txt").write_text(f"part {number} " * 170_000)
        (text / "val.txt").write_text("value " * 20_000)
        argv = [sys.executable, "-m", "ddptrain", "prepare", "--source", text, "--output", workspace / "datasets/tiny"]
        argv += ["--tokenizer", "byte", "--part-mib", "1"]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "payload")}
        subprocess.run(argv, check=True, capture_output=True, timeout=300, env=env)
        _store_environment(pathlib.Path(scratch, "build"), workspace / "environments")
    subprocess.run(["chown", "-R", f"{plain_slurm.UID}:{plain_slurm.UID}", folder / "home"], check=True)


def _store_environment(build: pathlib.Path, store: pathlib.Path) -> None:
    from ddp import config
    from ddp.base import Settings
    from ddp.environment import archives, environments

    version = ".".join(platform.python_version_tuple()[:2])
    packages = build / "env" / "lib" / f"python{version}" / "site-packages"
    packages.mkdir(parents=True)
    (build / "env" / "bin").mkdir()
    (build / "env" / "bin" / "python").symlink_to(f"/usr/bin/python{version}")
    (build / "env" / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    shutil.copytree(ROOT / "payload" / "ddptrain", packages / "ddptrain", ignore=shutil.ignore_patterns("__pycache__"))
    (packages / "ddptrain.pth").write_text("import ddptrain.startup\n")
    (packages / "stand-in.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
    about = typing.cast(Settings, argparse.Namespace(payload=config.payload(), extras=()))
    manifest = {
        "torch": environments.TORCH, "key": environments._key(about, "cpu"), "unpacked_bytes": 1 << 20, "files": 1,
        "python": version, "build": "cpu", "driverless": True, "name": "", "requirements": "", "wheelhouse": "",
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip
    archives.store_environment(str(build), str(store), manifest)


@dataclasses.dataclass
class _Process:
    lines: list[tuple[str, str, int]]
    role: str = ""


def _of_node(folder: pathlib.Path) -> collections.Counter[str]:
    """Count the calls in a node's traces, one file for each thread."""
    threads: dict[int, list[tuple[str, str, int]]] = {}
    for path in folder.glob("t.*"):
        matches = map(_LINE.match, path.read_text(errors="replace").splitlines())
        threads[int(path.suffix[1:])] = [(m[1], m[2], int(m[3])) for m in matches if m is not None]
    born = {result for lines in threads.values() for call, _, result in lines if call in _FORKS and result > 0}
    counts: collections.Counter[str] = collections.Counter()
    waiting = [(pid, "slurmd") for pid in threads if pid not in born]
    while waiting:
        pid, role = waiting.pop()
        for call, words, result in threads.pop(pid, []):
            if call in _FORKS:
                waiting.append((result, role))
            elif call == "execve" and result == 0:
                role = _role(words, role, counts)
            else:
                _count(call, words, result, role, counts)
    return counts


_FORKS = frozenset({"clone", "clone3", "fork", "vfork"})


def _role(words: str, role: str, counts: collections.Counter[str]) -> str:
    """Return who a process is once it runs a program, whose start is counted."""
    argv = _QUOTED.findall(words)
    name = pathlib.PurePath(argv[0]).name
    if name in SLURM:
        counts[f"{role}:slurm:{name}"] += 1
        return f"{role}'s {name}"
    if name == "tar" and role == "node":
        counts[f"{role}:exec:{name}"] += 1
    if any(word.endswith("/program") or word.endswith(".pyz") or word == "-c" for word in argv[1:9]):
        for part, found in (("job", "supervisor"), ("node", "node")):
            if part in argv:
                return found
    if "torch.distributed.run" in argv:
        return "agent"
    if "ddptrain" in argv:
        return "rank"
    return role


def _count(call: str, words: str, result: int, role: str, counts: collections.Counter[str]) -> None:
    if call in ("sendto", "recvfrom", "connect"):
        _count_network(call, words, result, role, counts)
        return
    quoted = _QUOTED.findall(words)
    if not quoted:
        return
    place = _PLACE.match(words)
    folder = pathlib.Path(place[1] if place else "/")
    path = os.path.normpath(folder / quoted[-1 if "symlink" in call else 0])
    if (what := _kind(path)) is None:
        return
    if call in ("openat", "open", "creat") and "O_PATH" not in words:
        counts[f"{role}:open:{what}"] += 1
        if "O_CREAT" in words and result >= 0 and path not in _made:
            _made.add(path)
            counts[f"{role}:make:{what}"] += 1
    elif call in ("mkdir", "mkdirat", "symlink", "symlinkat") and result == 0:
        counts[f"{role}:make:{what}"] += 1
    elif call in ("unlink", "unlinkat", "rmdir", "rename", "renameat", "renameat2", "link", "linkat", "chmod"):
        counts[f"{role}:change:{what}"] += 1
    else:
        counts[f"{role}:look:{what}"] += 1


def _count_network(call: str, words: str, result: int, role: str, counts: collections.Counter[str]) -> None:
    if call == "connect":
        if (peer := _PEER.search(words)) and "<TCP" in words:
            port = int(peer[1])
            kind = "store" if _is_store(port) else "slurm" if 6810 < port < 6830 else "peer"
            counts[f"{role}:tcp:{kind}"] += 1
    elif (peer := _CONNECTED.match(words)) and _is_store(int(peer[1])) and result > 0:
        if call == "sendto":
            counts[f"{role}:sent:store"] += 1
        else:
            counts[f"{role}:received:store"] += result


_made: set[str] = set()  # names of files, which attempts and passes open again


def _is_store(port: int) -> bool:
    return 20000 <= port < 30000  # ddp.node.supervisor.PORT


def _kind(path: str) -> str | None:
    """Return the kind of a path of the workspace, None where it is elsewhere."""
    if not path.startswith(f"{WORKSPACE}/"):
        return None
    inner = path.removeprefix(f"{WORKSPACE}/")
    top, _, rest = inner.partition("/")
    if top == "datasets":
        return "manifest" if rest.endswith("dataset.json") else "shards" if rest.count("/") else "dataset"
    if top == "environments":
        return "environment"
    if top == "runs":
        below = rest.partition("/")[2]
        return next((kind for kind, pattern in _KINDS if re.match(pattern, below)), "other")
    return "other"


def table(counts: list[Count]) -> str:
    """Return the table in Markdown."""
    heads = [f"{one.nodes} x {one.ranks // one.nodes}" for one in counts]
    lines = ["| what | " + " | ".join(heads) + " | law | 1,000 x 8 |", "|---" * (len(heads) + 3) + "|"]
    for text, patterns in ROWS:
        values = [one.total(*patterns) for one in counts]
        law, goal = _fit(counts, values)
        lines.append(f"| {text} | " + " | ".join(f"{value:,}" for value in values) + f" | {law} | {goal:,.0f} |")
    return "\n".join(lines)


def _fit(counts: list[Count], values: list[int]) -> tuple[str, float]:
    """Return the law a + b N + c R + d R² that fits, of N nodes and R ranks, and what it says of the goal.

    No part is negative. d counts only where it explains nearly all that a law without it leaves: polls vary with time.
    """
    nodes, ranks = (np.array([getattr(one, name) for one in counts], float) for name in ("nodes", "ranks"))
    columns = np.stack([np.ones_like(nodes), nodes, ranks, ranks**2], axis=1)
    target = np.array(values, float)
    off, law = min(_laws(columns, target, 3), key=lambda found: found[0])
    if off > 0.02 * target.max(initial=0.0) and len(counts) > 4:
        square_off, square = min(_laws(columns, target, 4), key=lambda found: found[0])
        law = square if square_off < off / 5 else law
    goal = law @ np.array([1.0, GOAL[0], GOAL[0] * GOAL[1], (GOAL[0] * GOAL[1]) ** 2])
    largest = np.abs(columns * law).max(initial=0.0)
    shown = [
        f"{value:.3g} {name}".strip()
        for value, name, column in zip(law, ("", "N", "R", "R²"), columns.T, strict=True)
        if value * column.max() > 0.01 * largest
    ]
    return " + ".join(shown) or "0", float(goal)


def _laws(columns: np.ndarray, target: np.ndarray, most: int) -> collections.abc.Iterator[tuple[float, np.ndarray]]:
    """Yield each law of the first columns that has no negative part, after how far it is off."""
    for size in range(1, most + 1):
        for kept in itertools.combinations(range(most), size):
            law = np.zeros(columns.shape[1])
            law[list(kept)] = np.linalg.lstsq(columns[:, kept], target, rcond=None)[0]
            if (law >= -1e-9).all():
                yield float(np.abs(columns @ law - target).max()), law.clip(0)


if __name__ == "__main__":
    sys.exit(main())
