"""Reservations, as Slurm prints them."""

import socket

import pytest
from slurm_commands import Commands, node, partition

from ddp.slurm import jobs, partition_list, usable_nodes

RESERVATIONS = ("/usr/bin/scontrol", "show", "reservations", "-o")
# As printed by 24.11 and by 26.05, which has AllowedPartitions and QOS.
RESERVATION = (
    "ReservationName=spring StartTime=2026-11-22T19:21:50 EndTime=2026-11-22T20:21:50 Duration=01:00:00 Nodes=n[0-2] "
    "NodeCnt=3 CoreCnt=6 Features=(null) PartitionName=(null) Flags={flags} TRES=cpu=6 {new}Users=eve,bob "
    "Groups=(null) Accounts=(null) Licenses=(null) State=ACTIVE BurstBuffer=(null) MaxStartDelay=(null)\n"
)


@pytest.mark.parametrize(
    "new", ["", "AllowedPartitions=(null) QOS=(null) "], ids=["24.11", "26.05"]
)
@pytest.mark.parametrize(
    ("flags", "usable"),
    [
        ("MAINT,SPEC_NODES", ["n0", "n1"]),
        ("SPEC_NODES", ["n0"]),
        ("FLEX,SPEC_NODES", ["n0", "n3"]),
        ("ANY_NODES", ["n0", "n3"]),
    ],
)
def test_the_nodes_of_a_reservation(commands: Commands, flags: str, usable: list[str], new: str):
    commands.expect("/usr/bin/scontrol", "-a", "show", "partition", "-o", stdout=partition())
    states = ("IDLE", "IDLE+MAINTENANCE", "IDLE+DRAIN+MAINTENANCE", "IDLE")
    text = "".join(node(f"n{number}", state=state) for number, state in enumerate(states))
    commands.expect("/usr/bin/scontrol", "-a", "show", "nodes", "-o", stdout=text)
    commands.expect("/usr/bin/scontrol", "show", "config", stdout="MaxArraySize = 1001\n")
    found = partition_list.partitions()
    commands.expect(*RESERVATIONS, stdout=RESERVATION.format(flags=flags, new=new))
    if "n3" not in usable:
        commands.expect("/usr/bin/scontrol", "show", "hostnames", "n[0-2]", stdout="n0\nn1\nn2\n")
    (inside,) = usable_nodes.inside(found, "spring")
    assert [known.name for known in inside.usable] == usable
    assert inside.nodes[3].state == ("IDLE" if "n3" in usable else usable_nodes.OUTSIDE)
    commands.expect(*RESERVATIONS, stdout="No reservations in the system\n")
    assert usable_nodes.inside(found, "autumn") == found, "which sbatch refuses"
    commands.expect(
        *RESERVATIONS,
        returncode=1,
        stderr="slurm_load_reservations error: Access/permission denied\n",
    )
    with pytest.raises(jobs.SlurmError, match=r"^Access/permission denied$"):
        usable_nodes.inside(found, "spring")


@pytest.mark.parametrize("others_port", ["open", "closed"])
@pytest.mark.parametrize(
    "state",
    [
        "IDLE+DYNAMIC_NORM",
        "DOWN+DYNAMIC_NORM+NOT_RESPONDING",
        "IDLE",
        "IDLE+DYNAMIC_NORM+POWERING_UP",
    ],
)
def test_a_node_that_its_machine_left_behind_is_unusable(
    commands: Commands, state: str, others_port: str
):
    """Its port is closed while another's is open; if all are closed, it may be a firewall."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.2", 0)) as closed,
    ):
        ports = [server.getsockname()[1], closed.getsockname()[1]]
        for one in (closed, *([server] if others_port == "closed" else [])):
            one.close()
        nodes = (
            (f"127.0.0.{i + 1} Port={ports[i]}", ("IDLE+DYNAMIC_NORM", state)[i]) for i in range(2)
        )
        text = "".join(
            node(f"n{i}", state=found).replace("NodeAddr=", f"NodeAddr={address} x=")
            for i, (address, found) in enumerate(nodes)
        )
        commands.expect("/usr/bin/scontrol", "-a", "show", "partition", "-o", stdout=partition())
        commands.expect("/usr/bin/scontrol", "-a", "show", "nodes", "-o", stdout=text)
        commands.expect("/usr/bin/scontrol", "show", "config", stdout="MaxArraySize = 1001\n")
        (found,) = usable_nodes.present(partition_list.partitions())
    is_absent = others_port == "open" and "DYNAMIC" in state and "POWERING" not in state
    assert [one.state == usable_nodes.GONE for one in found.nodes] == [False, is_absent]
    assert [one.name for one in found.usable] == ["n0"] + ["n1"] * (
        not is_absent and "DOWN" not in state
    )
