"""Slurm's nodes by scontrol: states as printed, and every kind of refusal by the controller."""

import collections.abc
import contextlib
import pathlib

import pytest
import yaml

from slurm_ddp.commands import CommandError, CommandTimeout, Completed
from slurm_ddp.slurm import nodes

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

# In the shape of 24.11.5.
SHOWN = (
    "NodeName=slurmd-0 Arch=x86_64 CoresPerSocket=2  CPUAlloc={cpus} CPUEfctv=2 CPUTot=2 CPULoad=1.13 "
    "AvailableFeatures=slurmd ActiveFeatures=slurmd Gres={gres} NodeAddr=10.91.0.11 NodeHostName=slurmd-0 "
    "Version=24.11.5 OS=Linux 6.18.44-fc-v669 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=4000 AllocMem=0 FreeMem=22793 "
    "Sockets=1 Boards=1 MemSpecLimit=1024 State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A "
    "Partitions=slurmd  BootTime=2026-11-20T18:25:37 SlurmdStartTime=2026-11-20T18:53:17 "
    "LastBusyTime=2026-11-20T18:53:17 CfgTRES=cpu=2,mem=4000M,billing=2 ResumeAfterTime=None AllocTRES={tres} CurrentWatts=0 "
    "AveWatts=0{reason}\n"
)
SILENT = "Unable to contact slurm controller (connect failure)"


def shown(
    state: str = "IDLE+DYNAMIC_NORM",
    gres: str = "(null)",
    cpus: int = 0,
    tres: str = "",
    reason: str = "",
) -> str:
    return SHOWN.format(
        state=state, gres=gres, cpus=cpus, tres=tres, reason=f" Reason={reason}" if reason else ""
    )


class Commands:
    """Answers only the expected commands, in their order, and fails on any other."""

    def __init__(self) -> None:
        self.expected: list[tuple[tuple[str, ...], Completed | CommandError]] = []

    def expect(self, *argv: str, stdout: str = "", stderr: str = "", returncode: int = 0) -> None:
        self.expected.append((argv, Completed(returncode, stdout, stderr)))

    def fail(self, *argv: str, error: CommandError) -> None:
        self.expected.append((argv, error))

    def __call__(
        self, *argv: str, timeout: float = 0, check: bool = True, **_: object
    ) -> Completed:
        assert timeout > 0
        assert self.expected, f"nobody expected {argv}"
        wanted, answer = self.expected.pop(0)
        assert argv == wanted
        if isinstance(answer, CommandError):
            raise answer
        if check and answer.returncode:
            raise CommandError(
                f"{argv[0]} exited {answer.returncode}",
                returncode=answer.returncode,
                stdout=answer.stdout,
                stderr=answer.stderr,
            )
        return answer


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> collections.abc.Iterator[Commands]:
    double = Commands()
    monkeypatch.setattr(nodes, "run", double)
    yield double
    assert not double.expected, f"never asked: {double.expected}"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(nodes, "_POLL_S", 1)
    monkeypatch.setattr(nodes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(nodes.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def show_argv(name: str = "slurmd-0") -> tuple[str, ...]:
    return ("/usr/bin/scontrol", "show", "node", name, "-o")


def test_a_nodes_address_is_the_one_that_it_registered_with():
    """Its name is a label: a node called slurmd-0 runs on a machine called juju-2586ad-3."""
    (node,) = nodes.parse(shown().replace("NodeHostName=slurmd-0", "NodeHostName=juju-2586ad-3"))
    assert (node.name, node.address) == ("slurmd-0", "10.91.0.11")


def test_a_node(commands: Commands):
    text = shown(
        "MIXED+DRAIN+DYNAMIC_NORM",
        "gpu:h100:8(S:0-1)",
        1,
        "cpu=1,mem=100M",
        "slurm-gpu: x [root@2026-11-20T18]",
    )
    commands.expect(*show_argv(), stdout=text)
    node = nodes.show("slurmd-0")
    assert node is not None
    assert (node.state, node.flags) == ("MIXED", {"DRAIN", "DYNAMIC_NORM"})
    assert node.gres == "gpu:h100:8"
    assert node.reason == "slurm-gpu: x"
    assert node.is_busy and node.is_drained and node.is_dynamic and node.is_valid
    assert not node.is_down
    assert node.state_text == "MIXED+DRAIN+DYNAMIC_NORM"


@pytest.mark.parametrize(
    ("state", "base", "flags"),
    [
        ("IDLE", "IDLE", set()),
        ("DOWN*", "DOWN", {"NOT_RESPONDING"}),
        ("IDLE*+DRAIN", "IDLE", {"NOT_RESPONDING", "DRAIN"}),
        ("DOWN*$", "DOWN", {"NOT_RESPONDING", "MAINTENANCE"}),
        (
            "IDLE+DYNAMIC_NORM+FAIL+NOT_RESPONDING",
            "IDLE",
            {"DYNAMIC_NORM", "FAIL", "NOT_RESPONDING"},
        ),
        ("idle-", "IDLE", {"PLANNED"}),
    ],
)
def test_states_as_slurm_prints_them(state: str, base: str, flags: set[str]):
    (node,) = nodes.parse(shown(state))
    assert (node.state, node.flags) == (base, flags)


@pytest.mark.parametrize(
    ("text", "busy"),
    [
        (shown("IDLE"), False),
        (shown("ALLOCATED", cpus=2, tres="cpu=2"), True),
        (shown("MIXED", cpus=1, tres="cpu=1"), True),
        (shown("IDLE+COMPLETING"), True),
        (shown("DOWN", cpus=1, tres="cpu=1"), True),
        (shown("IDLE+PLANNED"), False),
    ],
)
def test_a_node_is_busy_as_long_as_a_job_holds_anything(text: str, busy: bool):
    (node,) = nodes.parse(text)
    assert node.is_busy is busy


def test_a_reason_with_brackets_and_without_author():
    (node,) = nodes.parse(shown("DOWN", reason="see [ticket 7]"))
    assert node.reason == "see [ticket 7]"
    (node,) = nodes.parse(shown("DOWN", reason="see [ticket 7] [slurm@2026-11-20T18:51:55]"))
    assert node.reason == "see [ticket 7]"


def test_a_node_that_the_controller_does_not_know(commands: Commands):
    commands.expect(*show_argv(), stdout="Node slurmd-0 not found\n", returncode=1)
    assert nodes.show("slurmd-0") is None


@pytest.mark.parametrize("printed", CASES["a_controller_that_does_not_answer_is_another_thing"])
def test_a_controller_that_does_not_answer_is_another_thing(commands: Commands, printed: str):
    commands.expect(*show_argv(), stderr=printed, returncode=1)
    with pytest.raises(nodes.ControllerSilent, match=r"^show node slurmd-0: "):
        nodes.show("slurmd-0")


@pytest.mark.parametrize(
    "error", [CommandTimeout("no answer within 30 s"), CommandError("No such file or directory")]
)
def test_a_command_that_hangs_or_is_missing(commands: Commands, error: CommandError):
    commands.fail(*show_argv(), error=error)
    with pytest.raises(nodes.ControllerSilent, match=str(error)):
        nodes.show("slurmd-0")


def test_any_other_refusal_is_an_error_in_slurms_words(commands: Commands):
    commands.expect(*show_argv(), stderr="slurm_load_node error: Invalid user id\n", returncode=1)
    with pytest.raises(nodes.NodeError) as caught:
        nodes.show("slurmd-0")
    assert type(caught.value) is nodes.NodeError
    assert str(caught.value) == "show node slurmd-0: slurm_load_node error: Invalid user id"


@pytest.mark.parametrize(
    ("why", "caught"),
    [
        (
            "Requested nodes are busy",
            pytest.raises(nodes.NodeBusy, match="Requested nodes are busy"),
        ),
        ("Invalid node name specified", contextlib.nullcontext()),  # it is not there
    ],
)
def test_deleting_a_node(
    commands: Commands, why: str, caught: contextlib.AbstractContextManager[object]
):
    printed = (
        f"scontrol: error: failed to delete nodes slurmd-0\ndelete_node nodename=slurmd-0: {why}\n"
    )
    commands.expect(
        "/usr/bin/scontrol", "delete", "nodename=slurmd-0", stderr=printed, returncode=1
    )
    with caught:
        nodes.delete("slurmd-0")


def test_the_jobs_of_a_node(commands: Commands):
    argv = ("/usr/bin/squeue", "--noheader", "--nodelist", "slurmd-0", "--format", "%i")
    commands.expect(*argv, stdout="7\n12_3\n7\n")
    assert nodes.job_ids("slurmd-0") == ["12_3", "7"]
    commands.expect(*argv, stderr=f"slurm_load_jobs error: {SILENT}\n", returncode=1)
    with pytest.raises(nodes.ControllerSilent):
        nodes.job_ids("slurmd-0")


def test_the_jobs_that_asked_for_a_gres(commands: Commands):
    """As squeue 24.11.5 prints them, which shows finished ones for MinJobAge."""
    fields = (
        "jobarrayid:40,tres-per-job:400,tres-per-node:400,tres-per-socket:400,tres-per-task:400"
    )
    argv = (
        "/usr/bin/squeue",
        "--noheader",
        "--states",
        "all",
        "--nodelist",
        "slurmd-0",
        "--Format",
        fields,
    )
    rows = (
        ("8", "N/A", "gres/shard:2"),
        ("12_3", "gres/gpu:1,gres/shard:1", "N/A"),
        ("9", "N/A", "gres/gpu:1"),
    )
    commands.expect(
        *argv, stdout="".join(f"{a:40}{b:400}{c:400}{'N/A':400}{'N/A':400}\n" for a, b, c in rows)
    )
    assert nodes.remembered_jobs("slurmd-0", "shard") == ["12_3", "8"]


def test_the_reservations_of_a_node(commands: Commands):
    """As Slurm prints them; a node's name may be part of another's, or behind a hostlist."""
    row = (
        "ReservationName={} StartTime=2026-11-22T03:20:00 EndTime=2026-11-22T04:20:00 Duration=01:00:00 Nodes={} NodeCnt=1 "
        "CoreCnt=2 Features=(null) PartitionName=slurmd Flags=MAINT,SPEC_NODES TRES=cpu=2 Users=root Groups=(null) "
        "Accounts=(null) Licenses=(null) State={} BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)\n"
    )
    rows = [
        ("maint", "slurmd-[0-3]", "ACTIVE"),
        ("class", "slurmd-10", "ACTIVE"),
        ("later", "slurmd-0", "INACTIVE"),
    ]
    shown = "".join(row.format(*one) for one in rows) + row.format("licences", "(null)", "ACTIVE")
    commands.expect("/usr/bin/scontrol", "show", "reservations", "-o", stdout=shown)
    commands.expect(
        "/usr/bin/scontrol",
        "show",
        "hostnames",
        "slurmd-[0-3]",
        stdout="slurmd-0\nslurmd-1\nslurmd-2\n",
    )
    commands.expect(
        "/usr/bin/scontrol", "show", "hostlist", "slurmd-1,slurmd-2", stdout="slurmd-[1-2]"
    )
    commands.expect("/usr/bin/scontrol", "show", "hostnames", "slurmd-10", stdout="slurmd-10\n")
    commands.expect("/usr/bin/scontrol", "show", "hostnames", "slurmd-0", stdout="slurmd-0\n")
    assert nodes.reservations("slurmd-0") == {"later": "", "maint": "slurmd-[1-2]"}
    commands.expect(
        "/usr/bin/scontrol", "show", "reservations", "-o", stdout="No reservations in the system\n"
    )
    assert nodes.reservations("slurmd-0") == {}


def test_all_nodes_sorted(commands: Commands):
    text = shown().replace("slurmd-0", "slurmd-1") + shown()
    commands.expect("/usr/bin/scontrol", "-a", "show", "nodes", "-o", stdout=text)
    assert [node.name for node in nodes.show_all()] == ["slurmd-0", "slurmd-1"]


def test_waiting_ends_as_soon_as_it_can(commands: Commands, clock: list[float]):
    commands.expect(*show_argv(), stdout="Node slurmd-0 not found\n", returncode=1)
    commands.expect(*show_argv(), stderr=f"slurm_load_node error: {SILENT}\n", returncode=1)
    commands.expect(*show_argv(), stdout=shown())
    node = nodes.wait("slurmd-0", lambda n: n is not None, timeout=10)
    assert node is not None
    assert clock == [2.0]


def test_waiting_ends_in_time(commands: Commands, clock: list[float]):
    for _ in range(4):
        commands.expect(*show_argv(), stdout="Node slurmd-0 not found\n", returncode=1)
    assert nodes.wait("slurmd-0", lambda n: n is not None, timeout=3) is None
    assert clock == [3.0]
    for _ in range(2):
        commands.expect(*show_argv(), stderr=f"slurm_load_node error: {SILENT}\n", returncode=1)
    with pytest.raises(nodes.ControllerSilent):
        nodes.wait("slurmd-0", lambda n: n is not None, timeout=1)


@pytest.mark.parametrize(("left", "right", "same"), CASES["comparing_gres"])
def test_comparing_gres(left: str | None, right: str | None, same: bool):
    assert nodes.same_gres(left, right) is same
    assert nodes.same_gres(right, left) is same


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("", 0),
        ("gpu", 1),
        ("gpu:h200:8(S:0-1)", 8),
        ("gpu:a:2(S:0,1),gpu:b:3", 5),
        ("shard:32,gpu:2", 2),
        ("nic:2", 0),
    ],
)
def test_gpus_are_counted(gres: str, count: int):
    assert nodes.count_gres(gres, "gpu") == count
