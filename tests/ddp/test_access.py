"""What Slurm says about accounts, QOS, reservations and a partition's own rules."""

import pytest
from slurm_commands import ASKED, SACCT_FIELDS, Commands, node, partition

from ddp.slurm import access, jobs
from slurm_ddp.run import CommandError

CONFIG = {
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "ClusterName": "main",
    "AccountingStorageEnforce": "associations,limits,qos",
}
ASSOCIATIONS = ("associations", "where", "user=ubuntu", "cluster=main", "format=Account,Partition,QOS")
# As printed since 24.05, which has no Watts. The last one's list began as
# `users=-eve,-bob`, which keeps both out, and had `users+=ubuntu` after that.
RESERVATIONS = (
    "ReservationName=spring StartTime=2026-11-22T19:21:50 EndTime=2026-11-22T20:21:50 Duration=01:00:00 Nodes=n0 NodeCnt=1 "
    "CoreCnt=2 Features=(null) PartitionName=(null) Flags=IGNORE_JOBS,SPEC_NODES,ALL_NODES TRES=cpu=2 Users=eve,bob "
    "Groups=(null) Accounts=(null) Licenses=(null) State=ACTIVE BurstBuffer=(null) MaxStartDelay=(null)\n"
    "ReservationName=both StartTime=2028-04-05T19:22:14 EndTime=2028-04-05T20:22:14 Duration=01:00:00 Nodes=n0 NodeCnt=1 "
    "CoreCnt=2 Features=(null) PartitionName=(null) Flags=OVERLAP,IGNORE_JOBS,SPEC_NODES,ALL_NODES TRES=cpu=2 Users=eve "
    "Groups=(null) Accounts=physics Licenses=(null) State=INACTIVE BurstBuffer=(null) MaxStartDelay=(null)\n"
    "ReservationName=year StartTime=2026-11-23T19:22:14 EndTime=2027-11-23T19:22:14 Duration=365-00:00:00 Nodes=n0 NodeCnt=1 "
    "CoreCnt=2 Features=(null) PartitionName=gpu Flags=OVERLAP,IGNORE_JOBS,SPEC_NODES,PART_NODES TRES=cpu=2 Users=(null) "
    "Groups=(null) Accounts=chem Licenses=(null) State=INACTIVE BurstBuffer=(null) MaxStartDelay=(null)\n"
    "ReservationName=deny StartTime=2027-12-27T19:22:14 EndTime=2027-12-27T20:22:14 Duration=01:00:00 Nodes=n0 NodeCnt=1 "
    "CoreCnt=2 Features=(null) PartitionName=(null) Flags=OVERLAP,IGNORE_JOBS,SPEC_NODES,ALL_NODES TRES=cpu=2 "
    "Users=-eve,-bob,ubuntu Groups=(null) Accounts=-physics Licenses=(null) State=INACTIVE BurstBuffer=(null) "
    "MaxStartDelay=(null)\n"
)


def expect(commands: Commands, *words: str, stdout: str = "", returncode: int = 0, stderr: str = "") -> None:
    argv = ("/usr/bin/sacctmgr", "-n", "-P", "show", *words)
    commands.expect(*argv, stdout=stdout, returncode=returncode, stderr=stderr)


def ask(config: dict[str, str] | None = None) -> access.Accounting | None:
    return access.accounting(user="ubuntu", configuration=CONFIG | (config or {}))


def test_what_the_accounting_says(commands: Commands):
    """As captured where accounts and QOS were made as Upper and Gold, too."""
    expect(commands, "account", "format=Account", stdout="chem\nphysics\nroot\nupper\n")
    expect(commands, "qos", "format=Name", stdout="normal\nhigh\ngold\n")
    expect(commands, *ASSOCIATIONS, stdout="physics||normal\nchem|gpu|high,normal\n")
    found = ask()
    assert found is not None
    assert found.accounts == ("chem", "physics", "root", "upper")
    assert found.qos == ("gold", "high", "normal")
    assert found.charged("gpu") == ("chem", "physics")
    assert found.charged("main") == ("physics",)
    assert found.allowed_qos(None) == ("high", "normal")
    assert found.allowed_qos("CHEM") == ("high", "normal")
    assert found.allowed_qos("physics") == ("normal",)
    assert found.enforces == {"associations", "limits", "qos"}


@pytest.mark.parametrize(
    ("text", "enforced"),
    [
        ("none", set[str]()),
        ("(null)", set[str]()),
        ("nojobs", {"nojobs"}),
        ("safe", {"safe", "associations"}),
        ("qos", {"qos", "associations"}),
        ("all", {"all", "qos", "limits", "wckeys", "associations"}),
    ],
)
def test_what_is_enforced(commands: Commands, text: str, enforced: set[str]):
    for words in (("account", "format=Account"), ("qos", "format=Name"), ASSOCIATIONS):
        expect(commands, *words)
    found = ask({"AccountingStorageEnforce": text})
    assert found is not None
    assert found.enforces == enforced
    assert found.accounts == found.mine == ()


@pytest.mark.parametrize("kind", ["accounting_storage/none", "(null)", ""])
def test_without_slurmdbd_nobody_is_asked(commands: Commands, kind: str):
    assert ask({"AccountingStorageType": kind}) is None


def test_a_slurmdbd_that_gives_no_answer_counts_as_none(commands: Commands):
    refusal = (
        "sacctmgr: error: slurm_persist_conn_open_without_init: failed to open persistent connection to host:ctl:6819"
    )
    expect(commands, "account", "format=Account", returncode=1, stderr=refusal)
    assert ask() is None
    commands.fail(
        "/usr/bin/sacctmgr", "-n", "-P", "show", "account", "format=Account", error=CommandError("sacctmgr: not found")
    )
    assert ask() is None


def test_reservations_of_26_05(commands: Commands):
    text = (
        "ReservationName=spring StartTime=2026-11-22T19:45:56 EndTime=2026-11-22T20:45:56 Duration=01:00:00 Nodes=n1 NodeCnt=1 "
        "CoreCnt=2 Features=(null) PartitionName=(null) Flags=IGNORE_JOBS,SPEC_NODES TRES=cpu=2 AllowedPartitions=(null) "
        "QOS=(null) Users=ubuntu,eve Groups=(null) Accounts=(null) Licenses=(null) State=ACTIVE BurstBuffer=(null) "
        "MaxStartDelay=(null)\n"
    )  # captured from 26.05.5
    commands.expect("/usr/bin/scontrol", "show", "reservations", "-o", stdout=text)
    (spring,) = access.reservations()
    assert (spring.name, spring.is_active, spring.users, spring.accounts) == ("spring", True, ("ubuntu", "eve"), ())
    assert (spring.partition, spring.start) == ("", "2026-11-22T19:45:56")


@pytest.mark.parametrize("watts", ["", ""])
def test_reservations(commands: Commands, watts: str):
    text = RESERVATIONS.replace("", watts)
    commands.expect("/usr/bin/scontrol", "show", "reservations", "-o", stdout=text)
    found = [(one.name, one.is_active, one.users, one.accounts, one.partition) for one in access.reservations()]
    assert found == [
        ("spring", True, ("eve", "bob"), (), ""),
        ("both", False, ("eve",), ("physics",), ""),
        ("year", False, (), ("chem",), "gpu"),
        ("deny", False, ("-eve", "-bob", "ubuntu"), ("-physics",), ""),
    ]
    commands.expect("/usr/bin/scontrol", "show", "reservations", "-o", stdout=text)
    spring = access.reservations()[0]
    assert (spring.start, spring.nodes) == ("2026-11-22T19:21:50", "n0")
    assert spring.flags == {"IGNORE_JOBS", "SPEC_NODES", "ALL_NODES"}


@pytest.mark.parametrize(
    ("flags", "usable"),
    [
        ("MAINT,SPEC_NODES", ["n0", "n1"]),
        ("SPEC_NODES", ["n0"]),
        ("FLEX,SPEC_NODES", ["n0", "n3"]),
        ("ANY_NODES", ["n0", "n3"]),
    ],
)
def test_the_nodes_of_a_reservation(commands: Commands, flags: str, usable: list[str]):
    commands.expect("/usr/bin/scontrol", "show", "partition", "-o", stdout=partition())
    states = ("IDLE", "IDLE+MAINTENANCE", "IDLE+DRAIN+MAINTENANCE", "IDLE")
    text = "".join(node(f"n{number}", state=state) for number, state in enumerate(states))
    commands.expect("/usr/bin/scontrol", "show", "nodes", "-o", stdout=text)
    found = jobs.partitions()
    assert [kept.name for kept in found[0].nodes if kept.is_kept] == ["n1"]
    text = RESERVATIONS.replace("Nodes=n0", "Nodes=n[0-2]").replace("IGNORE_JOBS,SPEC_NODES,ALL_NODES", flags)
    commands.expect("/usr/bin/scontrol", "show", "reservations", "-o", stdout=text)
    if flags.endswith("SPEC_NODES") and "FLEX" not in flags:
        commands.expect("/usr/bin/scontrol", "show", "hostnames", "n[0-2]", stdout="n0\nn1\nn2\n")
    (inside,) = access.inside(found, "spring")
    assert [known.name for known in inside.usable] == usable
    assert [known.state for known in inside.nodes][3] == (
        access.OUTSIDE if len(usable) < 2 or "n1" in usable else "IDLE"
    )
    commands.expect("/usr/bin/scontrol", "show", "reservations", "-o", stdout=text)
    assert access.inside(found, "autumn") == found, "which is refused elsewhere, with the names there are"


def test_there_may_be_no_reservation_and_no_answer(commands: Commands):
    argv = ("/usr/bin/scontrol", "show", "reservations", "-o")
    commands.expect(*argv, stdout="No reservations in the system\n")
    assert access.reservations() == ()
    commands.expect(*argv, returncode=1, stderr="slurm_load_reservations error: Access/permission denied\n")
    with pytest.raises(jobs.SlurmError, match=r"^Access/permission denied$"):
        access.reservations()
    refusal = "slurm_load_reservations error: Unable to contact slurm controller (connect failure)\n"
    commands.expect(*argv, returncode=1, stderr=refusal)
    with pytest.raises(jobs.NotAnsweringError):
        access.reservations()


def test_whom_a_partition_lets_in(commands: Commands):
    text = partition("open") + partition("closed").replace("AllowAccounts=ALL", "AllowAccounts=Chem,bio")
    text += partition("barred").replace("AllowQos=ALL", "DenyQos=high")
    commands.expect("/usr/bin/scontrol", "show", "partition", "-o", stdout=text)
    commands.expect("/usr/bin/scontrol", "show", "nodes", "-o", stdout=node())
    found = {one.name: one.access for one in jobs.partitions()}
    assert found == {
        "open": (),
        "closed": (("AllowAccounts", frozenset({"chem", "bio"})),),
        "barred": (("DenyQos", frozenset({"high"})),),
    }


def test_an_element_of_an_array(commands: Commands):
    row = "{id}|ubuntu|{state}|0:0|0|1|slurmd|0:01|1:00|2026-11-20T22:18:35|2026-11-20T22:18:36|4294901757|None|n1|12|{task}|run|\n"
    text = row.format(id=12, state="PENDING", task="2-4,7%2") + row.format(id=13, state="RUNNING", task="0")
    queue = ("/usr/bin/squeue", "-h", "-a", "-t", "all", "-u", "ubuntu", "-O", ASKED)
    for task, job_id, state in ((0, 13, "RUNNING"), (4, 12, "PENDING"), (7, 12, "PENDING")):
        commands.expect(*queue, stdout=text)
        found = jobs.element(12, task, user="ubuntu")
        assert found is not None
        assert (found.job_id, found.state, found.run_name) == (job_id, state, f"run-{task}")
    commands.expect(*queue, stdout=text)
    sacct = ("/usr/bin/sacct", "-X", "-n", "-P", "-j", "12_1", "-o", SACCT_FIELDS)
    rows = "14|ubuntu|FAILED|1:0|1|slurmd|00:01:00|UNLIMITED|2026-11-20T18:48:22|n1|run\n"
    commands.expect(*sacct, stdout=rows + rows.replace("ubuntu", "eve"))
    found = jobs.element(12, 1, user="ubuntu")
    assert found is not None
    assert (found.job_id, found.state) == (14, "FAILED")
    commands.expect(*queue, stdout=text)
    commands.expect(*sacct, returncode=1, stderr="Slurm accounting storage is disabled\n")
    assert jobs.element(12, 1, user="ubuntu") is None
