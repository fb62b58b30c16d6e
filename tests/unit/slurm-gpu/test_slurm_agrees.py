"""Our lines against what Slurm's own nvml detection yields, on Debian's slurmd, with faked cards and processors.

Needs Debian 12, whose Slurm is asked, root, and what `scripts/setup.sh test` installs. The nvml plugin is Debian's contrib
package slurm-wlm-nvml-plugin, fetched from this machine's own archives and unpacked beside slurmd's own plugins: apt cannot
install it, since it wants another build of Debian's Slurm. NVML is `fake_nvml.c`; device nodes and the driver's /proc files
are mounted into a namespace.

Only on another system are these tests skipped. On Debian 12 whatever is missing fails them.
"""

import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import typing

import pytest
from conftest import ask_nvml
from machines import add_pci, add_topology, conf

import gpu_detect
import gres
import gres_check
from slurm_ddp import run

HERE = pathlib.Path(__file__).resolve().parent
PLUGINS = pathlib.Path("/usr/lib/x86_64-linux-gnu/slurm-wlm")
PACKAGE = "slurm-wlm-nvml-plugin"


def system() -> str:
    """Return this machine's distribution and release: "debian 12"."""
    text = pathlib.Path("/etc/os-release").read_text()
    fields = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)"?$', text, re.MULTILINE))
    return f"{fields.get('ID', 'unknown')} {fields.get('VERSION_ID', '')}".strip()


def lacks() -> str | None:
    """Return what this machine lacks, in words that say what to do."""
    if os.geteuid() != 0:
        return "run this as root: it mounts device nodes into a namespace"
    path = "/usr/sbin:/usr/bin:/sbin:/bin"
    missing = [name for name in ("gcc", "slurmd", "dpkg", "unshare") if shutil.which(name, path=path) is None]
    if missing or not PLUGINS.is_dir():
        return f"{', '.join(missing) or PLUGINS} not here: run scripts/setup.sh test"
    return None


@pytest.fixture(scope="session", autouse=True)
def debian() -> None:
    """Ask Debian 12's Slurm, and no other: another has other plugins and other words."""
    if system() != "debian 12":
        pytest.skip(f"asks the slurmd of Debian 12 and its nvml plugin; this machine has {system()}")
    missing = lacks()
    if missing:
        pytest.fail(missing, pytrace=False)


@dataclasses.dataclass(frozen=True)
class Faked:
    """A machine: its processors, its cards as `fake_nvml.c` reads them, and the Gres as 22.05's detection names it."""

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
def parts(tmp_path_factory: pytest.TempPathFactory, debian: None) -> pathlib.Path:
    """Return a folder with the built NVML and the unpacked plugin."""
    folder = tmp_path_factory.mktemp("slurm")
    library = folder / "lib/libnvidia-ml.so.1"
    library.parent.mkdir()
    source = HERE / "fake_nvml.c"
    build = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-D_GNU_SOURCE", "-o", str(library), str(source)]
    subprocess.run(build, check=True, timeout=60)
    (library.parent / "libnvidia-ml.so").symlink_to(library.name)
    shutil.copytree(download(folder) / PLUGINS.relative_to("/"), folder / "plugins")
    return folder


def download(folder: pathlib.Path) -> pathlib.Path:
    """Fetch the plugin's package from this machine's own archives, contrib taken in, and unpack it."""
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
            said = done.stderr.strip() or done.stdout.strip()
            pytest.fail(f"cannot fetch {PACKAGE} from this machine's archives ({found[0]}): {said}", pytrace=False)
    (package,) = folder.glob(f"{PACKAGE}_*.deb")
    subprocess.run(["dpkg", "-x", str(package), str(folder / "unpacked")], check=True, timeout=60)
    return folder / "unpacked"


def contrib() -> list[str]:
    """Return this machine's apt sources with the component contrib instead of theirs."""
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
    return [line for line in found if "debian" in line]


@dataclasses.dataclass(frozen=True)
class Bench:
    """One faked machine, on which slurmd can be asked."""

    machine: Faked
    folder: pathlib.Path
    parts: pathlib.Path

    @property
    def environment(self) -> dict[str, str]:
        """What makes NVML's callers and hwloc see this machine."""
        per_core = [str(c + self.machine.sockets * self.machine.cores * t) for c in self._cores for t in self._threads]
        shape = f"pack:{self.machine.sockets} core:{self.machine.cores} pu:{self.machine.threads}"
        return {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LD_LIBRARY_PATH": str(self.parts / "lib"),
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

    def slurmd(self, gres_conf: str, node_gres: str) -> list[str]:
        """Return the devices that `slurmd -G` prints."""
        settings = conf(self.machine.sockets, self.machine.cores, self.machine.threads)
        host = os.uname().nodename.partition(".")[0]
        (self.folder / "gres.conf").write_text(gres_conf)
        (self.folder / "slurm.conf").write_text(
            "ClusterName=x\nSlurmctldHost=localhost\nSlurmUser=root\nAuthType=auth/none\nCredType=cred/none\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nGresTypes=gpu\n"
            f"PluginDir={PLUGINS}:{self.parts / 'plugins'}\nSlurmdSpoolDir={self.folder / 'spool'}\n"
            f"NodeName=n0 NodeHostname={host} {' '.join(f'{k}={v}' for k, v in settings.items())} Gres={node_gres}\n"
        )
        dev, proc = self.folder / "dev", self.folder / "proc/driver"
        script = (
            f"mount --bind {shlex.quote(str(proc))} /proc/driver && for f in null zero urandom; do "
            f"touch {dev}/$f && mount --bind /dev/$f {dev}/$f || exit 1; done && mount --rbind {dev} /dev "
            f"&& exec slurmd -G -f {self.folder / 'slurm.conf'}"
        )
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        records = re.findall(r"\bGres Name=gpu .*", done.stdout + done.stderr)
        assert records, done.stderr
        return records


@pytest.fixture(params=MACHINES.values(), ids=list(MACHINES))
def bench(request: pytest.FixtureRequest, parts: pathlib.Path, paths: pathlib.Path) -> Bench:
    machine: Faked = request.param
    (paths / "cards").write_text("".join(f"{line}\n" for line in machine.cards))
    add_topology(paths, machine.sockets, machine.cores, machine.threads)
    (paths / "dev/nvidia-caps").mkdir()
    for line in machine.cards:
        fields = line.split("|")
        if line.startswith("gpu "):
            add_pci(paths, fields[3][4:].lower(), cpus=fields[4])
            os.mknod(paths / f"dev/nvidia{fields[2]}", 0o020666, os.makedev(195, int(fields[2])))
    (paths / "proc/driver/nvidia-caps").mkdir(parents=True)
    (paths / "proc/driver/nvidia-caps/mig-minors").write_text("".join(f"{line}\n" for line in machine.caps))
    for line in machine.caps:
        number = int(line.split()[1])
        os.mknod(paths / f"dev/nvidia-caps/nvidia-cap{number}", 0o020666, os.makedev(511, number))
    return Bench(machine, paths, parts)


def planned(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> gres.Plan:
    """Return what the charm makes of this machine: its own detection, through nvidia-ml-py and the faked library."""
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
            "gres/gpu GRES core specification 24-47 for node n0 doesn't match socket boundaries. (Socket 0 is cores 0-95)"
        )
        assert gres_check.refusal("n0", plan.lines, settings) is None
        detected = [re.sub(r"(Cores|CoreCnt)=\S+ ", "", line) for line in detected]
        ours = [re.sub(r"(Cores|CoreCnt)=\S+ ", "", line) for line in ours]
    if bench.machine.caps:  # 22.05 gives MIG instances Links, which 25.11 does not
        detected = [re.sub(r"Links=\S+", "(null)", line) for line in detected]
    assert ours == detected


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("Name=gpu Type=mock_gpu File=/dev/null Cores=0-1 Flags=nvidia_gpu_env", None),
        ("Name=gpu Type=mock_gpu File=/dev/null Flags=nvidia_gpu_env", None),
        ("Name=gpu Type=mock_gpu MultipleFiles=/dev/null,/dev/zero Flags=nvidia_gpu_env", None),
        (
            "Name=gpu Type=mock_gpu File=/dev/null Cores=0-9 Flags=nvidia_gpu_env",
            "slurmd -G: Invalid GRES data for gpu, Cores=0-9",
        ),
        (
            "Name=gpu Type=other File=/dev/null Flags=nvidia_gpu_env",
            "slurmd -G: it finds no /dev/null (A line in gres.conf for GRES gpu:other has 1 more configured than expected in "
            "slurm.conf. Ignoring extra GRES.)",
        ),
    ],
)
def test_the_check_before_slurm_is_touched(monkeypatch: pytest.MonkeyPatch, line: str, problem: str | None):
    """The charm's own check on a real slurmd, whose hwloc sees two cores."""

    def ask(*argv: str, **keywords: typing.Any) -> run.Completed:
        return run.run(*argv, env={"HWLOC_SYNTHETIC": "pack:1 core:2 pu:1"}, **keywords)

    monkeypatch.setattr(gres_check, "run", ask)
    said = gres_check.difference("slurmd-0", "gpu:mock_gpu:1", [line], conf(1, 2, 1), (22, 5))
    assert said == problem
    assert gres_check.ACCEPTED.exists() == (problem is None)


@pytest.mark.parametrize("name", ["shard", "mps"])
def test_the_check_of_shared_cards(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(gres_check, "run", run.run)
    lines = [
        "Name=gpu Type=mock_gpu File=/dev/null Flags=nvidia_gpu_env",
        "Name=gpu Type=mock_gpu File=/dev/zero Flags=nvidia_gpu_env",
        f"Name={name} Count=4 File=/dev/null",
        f"Name={name} Count=4 File=/dev/zero",
    ]
    settings = conf(1, 2, 1)
    assert gres_check.difference("slurmd-0", f"gpu:mock_gpu:2,{name}:8", lines, settings, (22, 5)) is None
    said = gres_check.difference("slurmd-0", "gpu:mock_gpu:2", lines, settings, (22, 5))
    assert said is not None
    assert f"it finds no {name} of /dev/null" in said
