"""What Slurm says about accounts, QOS, reservations and a partition's own rules."""

import pytest

from lib.test_jobs import ASKED, SACCT_FIELDS, Commands, node, partition
from slurm_ddp.run import CommandError
from slurm_ddp.slurm import access, jobs, nodes

CONFIG = {
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "ClusterName": "main",
    "AccountingStorageEnforce": "associations,limits,qos",
}
ASSOCIATIONS = ("associations", "where", "user=ubuntu", "cluster=main", "format=Account,Partition,QOS")
# As the manual describes `scontrol show reservations -o`, written by hand; 24.05 and later print no Watts.
RESERVATION = (
    "ReservationName=spring StartTime=2026-11-22T14:00:00 EndTime=2026-11-23T14:00:00 Duration=1-00:00:00 Nodes=n[0-1] "
    "NodeCnt=2 CoreCnt=4 Features=(null) PartitionName=gpu Flags=SPEC_NODES TRES=cpu=4 Users=eve,-bob Groups=(null) "
    "Accounts=physics Licenses=(null) State=ACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)\n"
)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    double = Commands()
    for module in (access, jobs, nodes):
        monkeypatch.setattr(module, "run", double)
    return double


def expect(commands: Commands, *words: str, stdout: str = "", returncode: int = 0, stderr: str = "") -> None:
    argv = ("/usr/bin/sacctmgr", "-n", "-P", "show", *words)
    commands.expect(*argv, stdout=stdout, returncode=returncode, stderr=stderr)


def ask(config: dict[str, str] | None = None) -> access.Accounting | None:
    return access.accounting(user="ubuntu", configuration=CONFIG | (config or {}))


def test_what_the_accounting_says(commands: Commands):
    expect(commands, "account", "format=Account", stdout="root\nphysics\nchem\n")
    expect(commands, "qos", "format=Name", stdout="normal\nhigh\n")
    expect(commands, *ASSOCIATIONS, stdout="physics||high,normal\nchem|gpu|+normal\n")
    found = ask()
    assert found is not None
    assert found.accounts == ("chem", "physics", "root")
    assert found.qos == ("high", "normal")
    assert found.charged("gpu") == ("chem", "physics")
    assert found.charged("main") == ("physics",)
    assert found.allowed_qos(None) == ("high", "normal")
    assert found.allowed_qos("CHEM") == ("normal",)
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
    said = (
        "sacctmgr: error: slurm_persist_conn_open_without_init: failed to open persistent connection to host:ctl:6819"
    )
    expect(commands, "account", "format=Account", returncode=1, stderr=said)
    assert ask() is None
    commands.fail(
        "/usr/bin/sacctmgr", "-n", "-P", "show", "account", "format=Account", error=CommandError("sacctmgr: not found")
    )
    assert ask() is None


@pytest.mark.parametrize("watts", [" Watts=n/a", ""])
def test_reservations(commands: Commands, watts: str):
    text = RESERVATION.replace(" Watts=n/a", watts)
    later = text.replace("spring", "autumn").replace("ACTIVE", "INACTIVE").replace("eve,-bob", "(null)")
    commands.expect("/usr/bin/scontrol", "show", "reservations", "-o", stdout=text + later)
    spring, autumn = access.reservations()
    assert spring == access.Reservation(
        "spring",
        is_active=True,
        users=("eve", "-bob"),
        accounts=("physics",),
        partition="gpu",
        start="2026-11-22T14:00:00",
    )
    assert (autumn.name, autumn.is_active, autumn.users) == ("autumn", False, ())


def test_there_may_be_no_reservation_and_no_answer(commands: Commands):
    argv = ("/usr/bin/scontrol", "show", "reservations", "-o")
    commands.expect(*argv, stdout="No reservations in the system\n")
    assert access.reservations() == ()
    commands.expect(*argv, returncode=1, stderr="slurm_load_reservations error: Access/permission denied\n")
    with pytest.raises(jobs.SlurmError, match="permission denied"):
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
    row = "{id}|ubuntu|{state}|0|0|1|slurmd|0:01|1:00|2026-11-20T22:18:35|2026-11-20T22:18:36|None|n1|12|{task}|run|\n"
    text = row.format(id=12, state="PENDING", task="2-4,7%2") + row.format(id=13, state="RUNNING", task="0")
    queue = ("/usr/bin/squeue", "-h", "-a", "-t", "all", "-u", "ubuntu", "-O", ASKED)
    for task, job_id, state in ((0, 13, "RUNNING"), (4, 12, "PENDING"), (7, 12, "PENDING")):
        commands.expect(*queue, stdout=text)
        found = jobs.element(12, task, user="ubuntu")
        assert found is not None
        assert (found.job_id, found.state, found.run_name) == (job_id, state, f"run-{task}")
    commands.expect(*queue, stdout=text)
    sacct = ("/usr/bin/sacct", "-X", "-n", "-P", "-j", "12_1", "-o", SACCT_FIELDS)
    told = "14|ubuntu|FAILED|1:0|1|slurmd|00:01:00|UNLIMITED|2026-11-20T18:48:22|n1|run\n"
    commands.expect(*sacct, stdout=told + told.replace("ubuntu", "eve"))
    found = jobs.element(12, 1, user="ubuntu")
    assert found is not None
    assert (found.job_id, found.state) == (14, "FAILED")
    commands.expect(*queue, stdout=text)
    commands.expect(*sacct, returncode=1, stderr="Slurm accounting storage is disabled\n")
    assert jobs.element(12, 1, user="ubuntu") is None
