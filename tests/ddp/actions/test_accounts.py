"""add-user and sync-users, and the refusal of a user without an account."""

import grp
import os
import pwd

import pytest
from cluster import Cluster
from harness import Trainer
from run_verbs import Program

ME = pwd.getpwuid(os.geteuid()).pw_name
PEOPLE = ("alice", "bob", "carol")
REFUSED = "allocation failure: Invalid account or account/partition combination specified"
SILENT = (
    "sacctmgr: error: _open_persist_conn: failed to open persistent connection to host:10.0.0.2:6819: "
    "Connection refused\nsacctmgr: error: Sending PersistInit msg: Connection refused"
)


@pytest.fixture
def people(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The directory: accounts of PEOPLE, and groups with their members."""
    groups = {"ml": ["carol", "alice"], "empty": []}
    own = pwd.getpwnam(ME)

    def find_person(name: str) -> pwd.struct_passwd:
        if name == ME:
            return own
        if name not in PEOPLE:
            raise KeyError(name)
        number = 2001 + PEOPLE.index(name)
        return pwd.struct_passwd((name, "x", number, number, "", f"/home/{name}", "/bin/bash"))

    def find_group(name: str) -> grp.struct_group:
        return grp.struct_group((name, "x", 3000, groups[name]))

    monkeypatch.setattr(pwd, "getpwnam", find_person)
    monkeypatch.setattr(grp, "getgrnam", find_group)
    return groups


def enforce(cluster: Cluster) -> None:
    cluster.config += "AccountingStorageEnforce = associations,limits\n"


def test_a_user_gets_an_account_once(
    trainer: Trainer, cluster: Cluster, people: dict[str, list[str]]
):
    enforce(cluster)
    wanted = {"user": "alice", "account": "Physics"}
    assert trainer.run("add-user", **wanted) == {
        "user": "alice",
        "account": "physics",
        "changes": "1",
    }
    assert trainer.log == ["sacctmgr add user alice cluster=main account=physics"]
    assert "alice" in cluster.accounts["physics"]
    assert trainer.run("add-user", **wanted)["changes"] == "0"


def test_an_account_is_made_only_on_request(
    trainer: Trainer, cluster: Cluster, people: dict[str, list[str]]
):
    assert trainer.fails("add-user", user="alice", account="biology") == (
        "account: Slurm has no account biology; there is chem, physics; to make it add new-account=true"
    )
    assert not cluster.changes
    trainer.run("add-user", user="alice", account="bio", new_account=True)
    assert cluster.accounts["bio"] == {"alice"}


def test_a_dry_run_shows_the_lines_and_changes_nothing(
    trainer: Trainer, cluster: Cluster, people: dict[str, list[str]]
):
    found = trainer.run("add-user", user="bob", account="bio", new_account=True, dry_run=True)
    assert found["would-run"].splitlines() == [
        "sacctmgr add account bio cluster=main",
        "sacctmgr add user bob cluster=main account=bio",
    ]
    assert not cluster.changes


def test_the_result_shows_where_slurm_takes_jobs_of_everybody(
    trainer: Trainer, people: dict[str, list[str]]
):
    enforced = trainer.run("add-user", user="alice", account="chem")["enforced"]
    assert enforced.endswith("until AccountingStorageEnforce has associations")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("root", "user: jobs never run as root; name an ordinary account"),
        ("allice", "user: this host knows no user allice; add it to the directory (LDAP); is sssd"),
    ],
)
def test_a_name_that_is_no_person_is_refused(
    trainer: Trainer, cluster: Cluster, people: dict[str, list[str]], name: str, line: str
):
    assert trainer.fails("add-user", user=name, account="chem").startswith(line)
    assert not cluster.changes


@pytest.mark.parametrize("action", ["add-user", "sync-users"])
def test_what_is_missing_without_slurmdbd_is_one_line(
    trainer: Trainer, cluster: Cluster, people: dict[str, list[str]], action: str
):
    cluster.config = cluster.config.replace("accounting_storage/slurmdbd", "(null)")
    given = {"user": "alice", "account": "chem"} if action == "add-user" else {"group": "ml"}
    assert trainer.fails(action, **given) == (
        "Slurm keeps no accounts here: it has no slurmdbd; juju integrate slurmdbd slurmctld"
    )


def test_a_silent_slurmdbd_is_named(
    trainer: Trainer, cluster: Cluster, people: dict[str, list[str]]
):
    cluster.accounting_silence = SILENT
    line = trainer.fails("add-user", user="alice", account="chem")
    assert line.startswith("slurmdbd does not answer: ")
    assert line.endswith("is slurmdbd up? see: juju status slurmdbd")


def test_a_group_gets_the_account_of_its_name(
    trainer: Trainer, cluster: Cluster, people: dict[str, list[str]]
):
    cluster.accounts["ml"] = {"alice", "bob"}
    people["ml"].append("ghost")
    found = trainer.run("sync-users", group="ml")
    rows = [line.split(maxsplit=1) for line in found["users"].splitlines()[1:]]
    assert rows == [
        ["alice", "kept"],
        ["carol", "added"],
        ["ghost", "unknown on this host, left out"],
        ["bob", "not in the group, kept"],
    ]
    assert cluster.accounts["ml"] == {"alice", "bob", "carol"}


def test_those_who_left_the_group_lose_the_account_only_on_request(
    trainer: Trainer, cluster: Cluster, people: dict[str, list[str]]
):
    cluster.accounts["ml"] = {"bob", "root"}
    trainer.run("sync-users", group="ml", remove=True, dry_run=True)
    assert not cluster.changes
    trainer.run("sync-users", group="ml", remove=True)
    assert cluster.accounts["ml"] == {"alice", "carol", "root"}
    assert trainer.run("sync-users", group="ml", remove=True)["changes"] == "0"


@pytest.mark.parametrize(
    ("group", "line"),
    [("mll", "this host knows no group mll"), ("empty", "the group empty lists no members")],
)
def test_a_group_without_members_changes_nothing(
    trainer: Trainer, cluster: Cluster, people: dict[str, list[str]], group: str, line: str
):
    assert trainer.fails("sync-users", group=group).startswith(f"group: {line}")
    assert not cluster.changes


def test_an_operator_without_an_account_gets_the_line_to_type(ready: Trainer, cluster: Cluster):
    enforce(cluster)
    cluster.refusal, cluster.accounts = REFUSED, {"chem": set()}
    assert ready.fails("submit-ddp", workload="smoke") == (
        f"{ME} has no account in Slurm on cluster main, so it takes no job; "
        f"juju run trainer/leader add-user user={ME} account=ACCOUNT"
    )


@pytest.mark.parametrize("contact", ["", "hpc@example.org"])
def test_a_user_without_an_account_learns_whom_to_ask_for_what(
    program: Program, cluster: Cluster, contact: str
):
    enforce(cluster)
    cluster.refusal, cluster.accounts = REFUSED, {"chem": set()}
    program.config["contact"] = contact
    line = program.fails("submit-ddp", workload="smoke", account="chem")
    whom = contact or "the cluster's operator"
    assert line.endswith(f"; ask {whom} for: ddp user add {ME} --account chem")


def test_a_user_learns_which_accounts_are_theirs(ready: Trainer, cluster: Cluster):
    enforce(cluster)
    cluster.refusal = REFUSED
    line = ready.fails("submit-ddp", workload="smoke", account="bio")
    assert line.startswith(f"account: {ME} may not use bio; you may use chem, physics; ")
    assert not cluster.changes


def test_slurms_own_words_remain_where_slurmdbd_does_not_tell(ready: Trainer, cluster: Cluster):
    cluster.refusal, cluster.accounting_silence = REFUSED, SILENT
    line = ready.fails("submit-ddp", workload="smoke")
    assert line == f"account: Slurm rejects the job: {REFUSED}"


def test_a_user_learns_which_qos_are_theirs(program: Program, cluster: Cluster):
    cluster.refusal = "allocation failure: Invalid qos specification"
    cluster.qos = "low,normal"
    line = program.fails("submit-ddp", workload="smoke", qos="gold")
    assert line == (
        f"qos: Slurm rejects the job: {cluster.refusal}; {ME} may use low, normal; "
        f"ask the cluster's operator for: sacctmgr modify user {ME} set qos+=NAME"
    )
