"""Accounts and reservations, as Slurm prints them."""

import pytest
from slurm_commands import Commands, node, partition

from ddp.slurm import access, jobs
from slurm_ddp.run import CommandError

CONFIG = {"AccountingStorageType": "accounting_storage/slurmdbd", "ClusterName": "main"}
ACCOUNTS = ("/usr/bin/sacctmgr", "-n", "-P", "show", "account", "format=Account")
MINE = ("/usr/bin/sacctmgr", "-n", "-P", "show", *"associations where user=ubuntu cluster=main".split())
RESERVATIONS = ("/usr/bin/scontrol", "show", "reservations", "-o")
# As printed by 24.11 and by 26.05, which has AllowedPartitions and QOS.
RESERVATION = (
    "ReservationName=spring StartTime=2026-11-22T19:21:50 EndTime=2026-11-22T20:21:50 Duration=01:00:00 Nodes=n[0-2] "
    "NodeCnt=3 CoreCnt=6 Features=(null) PartitionName=(null) Flags={flags} TRES=cpu=6 {new}Users=eve,bob "
    "Groups=(null) Accounts=(null) Licenses=(null) State=ACTIVE BurstBuffer=(null) MaxStartDelay=(null)\n"
)


def ask(config: dict[str, str]) -> access.Accounting | None:
    return access.accounting(user="ubuntu", configuration=CONFIG | config)


@pytest.mark.parametrize(
    ("enforced", "mine", "lacking"),
    [
        ("associations,limits,qos", "physics|\nchem|gpu\n", []),
        ("safe", "chem|gpu\n", ["main"]),
        ("all", "", ["gpu", "main"]),
        ("nojobs", "", []),
        ("none", "", []),
        ("(null)", "", []),
    ],
)
def test_who_lacks_an_account(commands: Commands, enforced: str, mine: str, lacking: list[str]):
    commands.expect(*ACCOUNTS, stdout="physics\nroot\nchem\n")
    commands.expect(*MINE, "format=Account,Partition", stdout=mine)
    found = ask({"AccountingStorageEnforce": enforced})
    assert found is not None
    assert found.accounts == ("chem", "physics", "root")
    assert [name for name in ("gpu", "main") if found.lacks_account(name)] == lacking


def test_without_slurmdbd_or_its_answer_nothing_is_known(commands: Commands):
    for kind in ("accounting_storage/none", "(null)", ""):
        assert ask({"AccountingStorageType": kind}) is None
    commands.expect(
        *ACCOUNTS, returncode=1, stderr="sacctmgr: error: failed to open persistent connection to host:6819"
    )
    assert ask({}) is None
    commands.fail(*ACCOUNTS, error=CommandError("sacctmgr: not found"))
    assert ask({}) is None


@pytest.mark.parametrize("new", ["", "AllowedPartitions=(null) QOS=(null) "], ids=["24.11", "26.05"])
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
    commands.expect("/usr/bin/scontrol", "show", "partition", "-o", stdout=partition())
    states = ("IDLE", "IDLE+MAINTENANCE", "IDLE+DRAIN+MAINTENANCE", "IDLE")
    text = "".join(node(f"n{number}", state=state) for number, state in enumerate(states))
    commands.expect("/usr/bin/scontrol", "show", "nodes", "-o", stdout=text)
    found = jobs.partitions()
    commands.expect(*RESERVATIONS, stdout=RESERVATION.format(flags=flags, new=new))
    if "n3" not in usable:
        commands.expect("/usr/bin/scontrol", "show", "hostnames", "n[0-2]", stdout="n0\nn1\nn2\n")
    (inside,) = access.inside(found, "spring")
    assert [known.name for known in inside.usable] == usable
    assert inside.nodes[3].state == ("IDLE" if "n3" in usable else access.OUTSIDE)
    commands.expect(*RESERVATIONS, stdout="No reservations in the system\n")
    assert access.inside(found, "autumn") == found, "which sbatch refuses"
    commands.expect(*RESERVATIONS, returncode=1, stderr="slurm_load_reservations error: Access/permission denied\n")
    with pytest.raises(jobs.SlurmError, match=r"^Access/permission denied$"):
        access.inside(found, "spring")
