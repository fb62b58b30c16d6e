"""Our lines against what Slurm's own detection yields, on a real slurmd with faked cards and processors.

Slurm is the sandbox's, which `real_slurm` unpacks. The nvml plugin is Debian's contrib package slurm-wlm-nvml-plugin,
fetched from this machine's own archives. NVML is `fake_nvml.c`; device nodes and the driver's /proc and /sys files are
mounted into a namespace. Needs Debian, root, gcc and what `scripts/setup.sh demo` installs.
"""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import typing

import pytest
import real_slurm
from conftest import ask_nvml
from machines import add_pci, add_topology, conf

from gpu import detect as gpu_detect
from gpu import gres, gres_check
from slurm_ddp import run

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = "slurm-wlm-nvml-plugin"


@dataclasses.dataclass(frozen=True)
class Faked:
    """A machine: its processors, its cards as `fake_nvml.c` reads them, and the Gres."""

    sockets: int
    cores: int
    threads: int
    cards: tuple[str, ...]
    gres: str
    aliases: str = ""
    caps: tuple[str, ...] = ()  # lines of /proc/driver/nvidia-caps/mig-minors
    has_cores: bool = True


def card(i: int, name: str, cpus: str, lanes: str = "-", minor: int | None = None) -> str:
    return f"gpu {name}|GPU-{i}|{i if minor is None else minor}|00000000:{i + 1:02X}:00.0|{cpus}|{lanes}"


SWITCH = "00000000:F0:00.0"
BUSES = [f"00000000:{i + 1:02X}:00.0" for i in range(4)]
MACHINES = {
    "1 x RTX 6000": Faked(
        1, 2, 1, (card(0, "Quadro RTX 6000", "0-1"),), "gpu:rtx_6000:1", aliases="quadro_rtx_6000=rtx_6000"
    ),
    "1 x H200": Faked(1, 2, 1, (card(0, "NVIDIA H200", "0-1", ",".join([SWITCH] * 18)),), "gpu:nvidia_h200:1"),
    "8 x H100 behind NVSwitches": Faked(
        2,
        56,
        2,
        tuple(
            card(i, "NVIDIA H100 80GB HBM3", ("0-55,112-167", "56-111,168-223")[i // 4], ",".join([SWITCH] * 18))
            for i in range(8)
        ),
        "gpu:h100:8",
        aliases="nvidia_h100_80gb_hbm3=h100",
    ),
    "4 x A100 with direct NVLinks, minors reversed": Faked(
        2,
        16,
        2,
        tuple(
            card(
                i,
                "NVIDIA A100-SXM4-40GB",
                ("0-15,32-47", "16-31,48-63")[i // 2],
                ",".join(bus for bus in BUSES if bus != BUSES[i] for _ in range(4)),
                minor=3 - i,
            )
            for i in range(4)
        ),
        "gpu:nvidia_a100-sxm4-40gb:4",
    ),
    "A100 as 2 x MIG 3g.20gb": Faked(
        2,
        16,
        2,
        (
            card(0, "NVIDIA A100-SXM4-40GB", "0-15,32-47"),
            "mig 0|NVIDIA A100-SXM4-40GB MIG 3g.20gb|MIG-0|1|0|3|20096",
            "mig 0|NVIDIA A100-SXM4-40GB MIG 3g.20gb|MIG-1|2|0|3|20096",
        ),
        "gpu:nvidia_a100_3g.20gb:2",
        caps=("gpu0/gi1/access 12", "gpu0/gi1/ci0/access 13", "gpu0/gi2/access 21", "gpu0/gi2/ci0/access 22"),
    ),
    "2 x H200 on an NPS4 EPYC": Faked(
        2,
        96,
        1,
        (card(0, "NVIDIA H200", "24-47"), card(1, "NVIDIA H200", "120-143")),
        "gpu:nvidia_h200:2",
        has_cores=False,
    ),
}


@pytest.fixture(scope="session")
def tree(slurm_tree: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Slurm's tree, with the nvml plugin and the built NVML in it."""
    library = slurm_tree / "upper/opt/nvml/libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    source = HERE / "fake_nvml.c"
    build = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-D_GNU_SOURCE", "-o", str(library), str(source)]
    subprocess.run(build, check=True, timeout=60)
    (library.parent / "libnvidia-ml.so").symlink_to(library.name)
    download(tmp_path_factory.mktemp("plugin"), slurm_tree / "upper")
    return slurm_tree


def download(folder: pathlib.Path, target: pathlib.Path) -> None:
    """Fetch the plugin's package from this machine's own archives, of the suite that Slurm is of, and unpack it."""
    found = contrib()
    if not found:
        pytest.fail("/etc/apt names no Debian archive with main, whose contrib could be asked", pytrace=False)
    sources = folder / "contrib.list"
    sources.write_text("".join(f"{line}\n" for line in found))
    lists = folder / "lists"
    (lists / "partial").mkdir(parents=True)
    options = [
        "Acquire::Retries=3",
        f"Dir::Etc::SourceList={sources}",
        "Dir::Etc::SourceParts=/dev/null",
        f"Dir::State::Lists={lists}",
    ]
    apt = ["apt-get", "-q", *(word for option in options for word in ("-o", option))]
    for command in ([*apt, "update"], [*apt, "download", PACKAGE]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            message = done.stderr.strip() or done.stdout.strip()
            pytest.fail(f"cannot fetch {PACKAGE} from this machine's archives ({found[0]}): {message}", pytrace=False)
    (package,) = folder.glob(f"{PACKAGE}_*.deb")
    subprocess.run(["dpkg-deb", "-x", str(package), str(target)], check=True, timeout=60)


def contrib() -> list[str]:
    """Return this machine's apt sources for the suite of Slurm, with the component contrib instead of theirs."""
    found: list[str] = []
    etc = pathlib.Path("/etc/apt")
    for file in (etc / "sources.list", *sorted(etc.glob("sources.list.d/*"))):
        text = file.read_text() if file.is_file() else ""
        if file.suffix == ".sources":
            for stanza in text.split("\n\n"):
                fields = dict(re.findall(r"^([\w-]+):[ \t]*(.+)$", stanza, re.MULTILINE))
                signed = f"[signed-by={fields['Signed-By']}] " if "Signed-By" in fields else ""
                for suite in fields.get("Suites", "").split() if "main" in fields.get("Components", "") else ():
                    found.append(f"deb {signed}{fields['URIs'].split()[0]} {suite} contrib")
        else:
            for options, uri, suite in re.findall(r"^deb\s+(\[.*?\]\s+)?(\S+)\s+(\S+)\s.*\bmain\b", text, re.MULTILINE):
                found.append(f"deb {options}{uri} {suite} contrib")
    suites = (re.sub(r"\b(bookworm|trixie)", real_slurm.SUITE, line) for line in found if "debian" in line)
    return list(dict.fromkeys(suites))


@dataclasses.dataclass(frozen=True)
class Bench:
    """One faked machine, on which slurmd can be asked."""

    machine: Faked
    folder: pathlib.Path
    tree: pathlib.Path

    @property
    def environment(self) -> dict[str, str]:
        """What makes NVML's callers and hwloc see this machine."""
        per_core = [str(c + self.machine.sockets * self.machine.cores * t) for c in self._cores for t in self._threads]
        shape = f"pack:{self.machine.sockets} core:{self.machine.cores} pu:{self.machine.threads}"
        return {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LD_LIBRARY_PATH": f"/opt/nvml:{self.tree}/upper/opt/nvml",  # in the tree, and of this machine
            "FAKE_NVML": str(self.folder / "cards"),
            "HWLOC_SYNTHETIC": f"{shape}(indexes={','.join(per_core)})",
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }

    @property
    def _cores(self) -> range:
        return range(self.machine.sockets * self.machine.cores)

    @property
    def _threads(self) -> range:
        return range(self.machine.threads)

    def run(self, *argv: str, **keywords: typing.Any) -> run.Completed:
        """Run this on the faked machine, in Slurm's tree."""
        dev, proc, drivers = self.folder / "dev", self.folder / "proc/driver", self.folder / "drivers"
        (proc / "nvidia").mkdir(exist_ok=True)
        mounts = [
            f"mount --bind {proc} $root/proc/driver",
            f"mount --bind {self.folder / 'shown/nvidia'} $root/proc/driver/nvidia",
            f"mount --bind {drivers} $root/sys/bus/pci/drivers",
            *(f"touch {dev}/{file} && mount --bind /dev/{file} {dev}/{file}" for file in ("null", "zero", "urandom")),
            f"mount --rbind {dev} $root/dev",
        ]
        return run.run(*real_slurm.inside(self.tree, argv, mounts), env=self.environment, **keywords)

    def slurmd(self, gres_conf: str, node_gres: str) -> list[str]:
        """Return the devices that `slurmd -G` prints."""
        settings = conf(self.machine.sockets, self.machine.cores, self.machine.threads)
        host = os.uname().nodename.partition(".")[0]
        (self.folder / "gres.conf").write_text(gres_conf)
        (self.folder / "slurm.conf").write_text(
            "ClusterName=x\nSlurmctldHost=localhost\nSlurmUser=root\nAuthType=auth/none\nCredType=cred/none\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nGresTypes=gpu\n"
            f"SlurmdSpoolDir={self.folder / 'spool'}\n"
            f"NodeName=n0 NodeHostname={host} {' '.join(f'{k}={v}' for k, v in settings.items())} Gres={node_gres}\n"
        )
        (self.folder / "spool").mkdir(exist_ok=True)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        done = self.run("slurmd", "-G", "-f", str(self.folder / "slurm.conf"))
        assert done.returncode == 0, done.stderr
        records = re.findall(r"\bGres Name=gpu .*", done.stdout + done.stderr)
        assert records, done.stderr
        return records


@pytest.fixture(params=MACHINES.values(), ids=list(MACHINES))
def bench(request: pytest.FixtureRequest, tree: pathlib.Path, paths: pathlib.Path) -> Bench:
    machine: Faked = request.param
    (paths / "cards").write_text("".join(f"{line}\n" for line in machine.cards))
    add_topology(paths, machine.sockets, machine.cores, machine.threads)
    (paths / "dev/nvidia-caps").mkdir()
    for line in machine.cards:
        fields = line.split("|")
        if line.startswith("gpu "):
            add_pci(paths, fields[3][4:].lower(), cpus=fields[4])
            os.mknod(paths / f"dev/nvidia{fields[2]}", 0o020666, os.makedev(195, int(fields[2])))
    (paths / "drivers/nvidia").mkdir(parents=True)
    for line in (line for line in machine.cards if line.startswith("gpu ")):
        name, uuid, minor, bus, cpus, *_ = line.removeprefix("gpu ").split("|")
        shown = paths / "shown/nvidia/gpus" / bus[4:].lower()  # to AutoDetect=nvidia; the charm asks NVML
        shown.mkdir(parents=True)
        (shown / "information").write_text(f"Model: \t\t {name}\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n")
        near = paths / "drivers/nvidia" / shown.name
        near.mkdir()
        (near / "local_cpulist").write_text(f"{cpus}\n")
    (paths / "proc/driver/nvidia-caps").mkdir(parents=True)
    (paths / "proc/driver/nvidia-caps/mig-minors").write_text("".join(f"{line}\n" for line in machine.caps))
    for line in machine.caps:
        number = int(line.split()[1])
        os.mknod(paths / f"dev/nvidia-caps/nvidia-cap{number}", 0o020666, os.makedev(511, number))
    return Bench(machine, paths, tree)


def planned(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> gres.Plan:
    """Detect this machine's GPUs as the charm does: its own detection, through nvidia-ml-py and the faked library."""
    real = gpu_detect.run

    def run(*argv: str, env: dict[str, str], **keywords: object) -> object:
        return real(*argv, env=env | bench.environment, **keywords)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(gpu_detect, "run", run)
    roots = gpu_detect.Roots(proc=bench.folder / "proc", sys=bench.folder / "sys")
    found = gpu_detect.detect(roots, ask_nvml)
    assert (found.source, found.problem, found.note) == ("nvml", None, None)
    machine = bench.machine
    settings = conf(machine.sockets, machine.cores, machine.threads)
    return gres.plan(
        found, settings, gres.read_topology(bench.folder / "sys"), aliases=gres.parse_aliases(machine.aliases)
    )


def test_slurmd_reads_our_lines_as_it_detects(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    plan = planned(bench, monkeypatch)
    assert plan.gres == bench.machine.gres
    ours = bench.slurmd("".join(f"{line}\n" for line in gres.node_lines("n0", plan.lines)), plan.gres)
    detected = bench.slurmd("AutoDetect=nvml\n", plan.gres)
    if not bench.machine.has_cores:  # 25.11 refuses those that detection gives, which cut a socket
        assert [re.search(r"Cores=(\S+)", line)[1] for line in detected] == ["24-47", "120-143"]  # type: ignore[index]
        assert not any("Cores=" in line for line in plan.lines)
        assert "numa_node_as_socket" in plan.notes[0]
        settings = conf(bench.machine.sockets, bench.machine.cores, bench.machine.threads)
        assert gres_check.refusal("n0", detected, settings) == (
            "Slurm would refuse n0: gres/gpu GRES core specification 24-47 for node n0 doesn't match socket boundaries. "
            "(Socket 0 is cores 0-95)"
        )
        assert gres_check.refusal("n0", plan.lines, settings) is None
        detected = [re.sub(r"(Cores|CoreCnt)=\S+ ", "", line) for line in detected]
        ours = [re.sub(r"(Cores|CoreCnt)=\S+ ", "", line) for line in ours]
    if bench.machine.caps:  # which NVML marks; a job gets the instances by their files all the same
        detected = [line.replace(",MIG", "") for line in detected]
    assert ours == detected


@pytest.mark.parametrize("shares", [None, gres.Shares("shard", 4)], ids=["whole", "shared"])
def test_slurmds_own_detection_needs_no_line(bench: Bench, monkeypatch: pytest.MonkeyPatch, shares: gres.Shares | None):
    """Where `beside` says so: the same devices in the order of their files, and what lines say beside it."""
    plan = planned(bench, monkeypatch)
    if bench.machine.caps or not bench.machine.has_cores:
        assert plan.beside is None
        return
    assert plan.beside == ()
    lines: list[str] = []
    if shares:
        count = plan.gres.rpartition(":")[2]
        lines = [f"AutoDetect=nvidia Name=shard Count={4 * int(count)}"]
        plan = dataclasses.replace(
            plan,
            gres=f"{plan.gres},shard:{4 * int(count)}",
            lines=(*plan.lines, *(f"Name=shard Count=4 File={file}" for file in plan.device_files)),
        )
    settings = conf(bench.machine.sockets, bench.machine.cores, bench.machine.threads)
    monkeypatch.setattr(gres_check, "run", bench.run)
    assert gres_check.difference("n0", plan, lines, settings, "nvidia") is None
    assert gres_check.difference("n0", plan, lines, settings, "off") is not None


INTERLEAVED = Faked(
    1, 2, 1,
    tuple(card(i, name, "0-1") for i, name in enumerate(("NVIDIA L40S", "Tesla T4", "NVIDIA L40S"))),
    "gpu:nvidia_l40s:2,gpu:tesla_t4:1",
)  # fmt: skip


@pytest.mark.parametrize("bench", [INTERLEAVED], indirect=True, ids=["L40S, T4, L40S"])
@pytest.mark.parametrize("aliases", [{}, {"nvidia_l40s": "big", "tesla_t4": "small"}], ids=["no line", "aliases"])
def test_cards_of_several_types_are_numbered_by_their_files(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, aliases: dict[str, str]
):
    """A job without device cgroups gets these numbers in CUDA_VISIBLE_DEVICES."""
    plan = planned(bench, monkeypatch)
    gpus = tuple(
        gpu_detect.Gpu(name, f"0000:0{i}:00.0", i) for i, name in enumerate(("NVIDIA L40S", "Tesla T4", "NVIDIA L40S"))
    )
    plan = gres.plan(gpu_detect.Detection("proc", gpus), {}, None, aliases=aliases)
    assert plan.beside is not None
    rows = gres.node_lines("n0", [f"AutoDetect=nvidia {line}" for line in plan.beside])
    records = bench.slurmd("".join(f"{row}\n" for row in ("AutoDetect=nvidia", *rows)), plan.gres)
    files = [re.findall(r" Index=(\d+) .* File=(\S+)", record)[0] for record in records]
    assert files == [(str(i), f"/dev/nvidia{i}") for i in range(3)]
    by_lines = bench.slurmd("".join(f"{row}\n" for row in gres.node_lines("n0", plan.lines)), plan.gres)
    assert [re.findall(r" File=(\S+)", record)[0][-1] for record in by_lines] == ["0", "2", "1"], (
        "why lines are not used"
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("Name=gpu Type=mock_gpu File=/dev/null Cores=0-1 Flags=nvidia_gpu_env", None),
        ("Name=gpu Type=mock_gpu File=/dev/null Flags=nvidia_gpu_env", None),
        ("Name=gpu Type=mock_gpu MultipleFiles=/dev/null,/dev/zero Flags=nvidia_gpu_env", None),
        (
            "Name=gpu Type=mock_gpu File=/dev/null Cores=0-9 Flags=nvidia_gpu_env",
            "Slurm would refuse slurmd-0: gres/gpu GRES core specification 0-9 for node slurmd-0 doesn't match socket "
            "boundaries. (Socket 0 is cores 0-1)",
        ),
        (
            "Name=gpu Type=other File=/dev/null Flags=nvidia_gpu_env",
            "slurmd -G: it finds no /dev/null (A line in gres.conf for GRES gpu:other has 1 more configured than expected in "
            "slurm.conf. Ignoring extra GRES.)",
        ),
    ],
)
def test_the_check_before_slurm_is_touched(
    tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch, line: str, problem: str | None
):
    """The charm's own check on a real slurmd, whose hwloc sees two cores."""
    monkeypatch.setattr(gres_check, "run", in_tree(tree))
    plan = gres.Plan("gpu:mock_gpu:1", (line,), ())
    assert gres_check.difference("slurmd-0", plan, [line], conf(1, 2, 1)) == problem


def in_tree(tree: pathlib.Path) -> typing.Callable[..., run.Completed]:
    def ask(*argv: str, **keywords: typing.Any) -> run.Completed:
        return run.run(*real_slurm.inside(tree, argv), env={"HWLOC_SYNTHETIC": "pack:1 core:2 pu:1"}, **keywords)

    return ask


@pytest.mark.parametrize("name", ["shard", "mps"])
def test_the_check_of_shared_cards(tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(gres_check, "run", in_tree(tree))
    lines = (
        "Name=gpu Type=mock_gpu File=/dev/null Flags=nvidia_gpu_env",
        "Name=gpu Type=mock_gpu File=/dev/zero Flags=nvidia_gpu_env",
        f"Name={name} Count=4 File=/dev/null",
        f"Name={name} Count=4 File=/dev/zero",
    )
    settings = conf(1, 2, 1)
    plan = gres.Plan(f"gpu:mock_gpu:2,{name}:8", lines, ())
    assert gres_check.difference("slurmd-0", plan, lines, settings) is None
    message = gres_check.difference("slurmd-0", gres.Plan("gpu:mock_gpu:2", lines, ()), lines, settings)
    assert message is not None
    assert f"it finds no {name} of /dev/null" in message
