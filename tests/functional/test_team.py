"""A team's users: Slurm's accounts, and one account on all hosts by a real slapd and SSSD."""

import collections.abc
import contextlib
import json
import pathlib
import re
import typing

import pytest

from functional.conftest import DEPLOY, REPOSITORY, Cluster, eventually
from functional.storage_faults import MP
from functional.test_people import HOSTS, LOGIN, ONE, Person, person

pytestmark = pytest.mark.timeout(1800)

CLIENT, NODE, DIRECTORY = "shared-filesystem-client", "slurmd/1", "openldap"
PARAMETERS = "slurm-conf-parameters"
ENFORCED = "AccountingStorageEnforce=associations"
SUFFIX = "dc=example,dc=org"
UID = "2101"
HELLO = "import os; print('uid', os.getuid(), flush=True)"
SUBMIT = f"cd hello && ddp submit --wait --json {ONE}"
# A line of docs/howto/team.md; sss_cache is in a package that sssd's charm does not install
FORGETS = "rm -f /var/lib/sss/db/cache_* && systemctl restart sssd"
PEOPLE = f"""\
dn: uid=dora,ou=people,{SUFFIX}
objectClass: inetOrgPerson
objectClass: posixAccount
cn: dora
sn: dora
uid: dora
uidNumber: {UID}
gidNumber: 3101
homeDirectory: /home/dora
loginShell: /bin/bash
userPassword: unused

dn: uid=erin,ou=people,{SUFFIX}
objectClass: inetOrgPerson
objectClass: posixAccount
cn: erin
sn: erin
uid: erin
uidNumber: 2102
gidNumber: 3101
homeDirectory: /home/erin
loginShell: /bin/bash
userPassword: unused

dn: cn=ml,ou=groups,{SUFFIX}
objectClass: groupOfNames
objectClass: posixGroup
cn: ml
gidNumber: 3101
member: uid=dora,ou=people,{SUFFIX}
member: uid=erin,ou=people,{SUFFIX}
"""
LEAVES = f"""\
dn: uid=dora,ou=people,{SUFFIX}
changetype: delete

dn: cn=ml,ou=groups,{SUFFIX}
changetype: modify
delete: member
member: uid=dora,ou=people,{SUFFIX}
"""


@contextlib.contextmanager
def slurm_conf(cluster: Cluster, line: str) -> collections.abc.Generator[None]:
    """Add a line to slurm.conf, as an operator does."""
    before = cluster.ok("config", "slurmctld", PARAMETERS).strip()
    cluster.ok("config", "slurmctld", f"{PARAMETERS}={before}\n{line}\n")
    try:
        yield
    finally:
        cluster.ok("config", "slurmctld", f"{PARAMETERS}={before}\n")


@contextlib.contextmanager
def no_account_stays(cluster: Cluster, user: str, account: str) -> collections.abc.Generator[None]:
    """Remove a user and an account from Slurm at the end."""
    try:
        yield
    finally:
        for what in (("user", user), ("account", account)):
            cluster.exec("slurmctld/0", "sacctmgr", "-i", "delete", *what)


@pytest.fixture(scope="module")
def bob(cluster: Cluster) -> typing.Iterator[Person]:
    with person(cluster, "bob", "2002") as one:
        yield one


@pytest.mark.long
@pytest.mark.trains
def test_a_user_submits_once_there_is_an_account(cluster: Cluster, bob: Person):
    cluster.action("install-environment", timeout=1500)
    bob.does("mkdir -p hello")
    bob.writes("hello/hello.py", HELLO)
    submit = f"{SUBMIT} hello.py"
    with no_account_stays(cluster, "bob", "physics"), slurm_conf(cluster, ENFORCED):
        line = bob.refused(submit)
        assert line == (
            "bob has no account in Slurm on cluster ddp, so it takes no job; "
            "ask the cluster's operator for: ddp user add bob --account ACCOUNT"
        )
        wanted = ("add-user", "user=bob", "account=Physics", "new-account=true")
        shown = cluster.action(*wanted, "dry-run=true")["would-run"]
        assert "sacctmgr add user bob cluster=ddp account=physics" in shown
        assert cluster.action(*wanted)["changes"] == "2"
        assert cluster.action(*wanted)["changes"] == "0"
        result = json.loads(bob.does(submit))
        assert result["state"] == "COMPLETED", result
        assert "uid 2002" in bob.does(f"cat {result['log']}")

        line = bob.refused(f"{SUBMIT} --account chem hello.py")
        assert "bob may not use chem; you may use physics" in line


@contextlib.contextmanager
def adopted(cluster: Cluster) -> collections.abc.Generator[None]:
    """Let ssh on nodes join jobs, as an operator does."""
    with slurm_conf(cluster, "PrologFlags=contain"):
        cluster.ok("config", CLIENT, "pam-slurm-adopt=true")
        try:
            yield
        finally:
            cluster.ok("config", CLIENT, "pam-slurm-adopt=false")


@pytest.mark.long
def test_ssh_needs_a_job_on_the_node_and_joins_it(cluster: Cluster, bob: Person):
    address = cluster.on(NODE, "hostname", "--all-ip-addresses").split()[0]
    install = ("apt-get", "install", "--yes", "--quiet", "openssh-server")
    assert cluster.exec(NODE, *install, timeout=300).code == 0
    cluster.on(NODE, "systemctl", "start", "ssh")
    bob.does("mkdir -m 700 .ssh && ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519")
    key = bob.does("cat .ssh/id_ed25519.pub")
    keys = "umask 077; mkdir -p ~/.ssh; cat >~/.ssh/authorized_keys"
    cluster.on(NODE, "runuser", "-l", "bob", "-c", f"{keys} <<'END'\n{key}\nEND")
    ssh = f"ssh -o BatchMode=yes -o StrictHostKeyChecking=no {address}"
    look = f"{ssh} 'cat /proc/self/cgroup'"
    assert "job_" not in bob.does(look)
    with adopted(cluster):
        refused = bob.tries(look)
        assert refused.code != 0
        assert "Access denied by pam_slurm_adopt" in refused.out + refused.err
        assert cluster.exec(LOGIN, "true").code == 0

        job = bob.does("sbatch --parsable -w slurmd-1 --mem 200 --wrap 'sleep 600'")
        with contextlib.ExitStack() as stack:
            stack.callback(bob.tries, f"scancel {job}")

            def joins() -> None:
                found = bob.tries(look)
                assert f"job_{job}/step_extern" in found.out, found

            eventually(joins)
            stays = f"nohup {ssh} sleep 300 >/dev/null 2>&1 &"
            bob.does(stays)
            eventually(lambda: _sleeps(cluster, 1))
        eventually(lambda: _sleeps(cluster, 0))  # it ended with the job
    assert "job_" not in bob.does(look)


def _sleeps(cluster: Cluster, count: int) -> None:
    found = cluster.exec(NODE, "pgrep", "-u", "bob", "-cx", "sleep").out.strip()
    wanted = {0: ("0",), 1: ("1", "2")}[count]  # the job's own among them
    assert found in wanted, found


def overlay(folder: pathlib.Path, address: str) -> pathlib.Path:
    """Fill in a copy of overlays/identity.yaml."""
    text = (REPOSITORY / "overlays" / "identity.yaml").read_text()
    values = {
        "urls": f"ldap://{address}",
        "base_dn": SUFFIX,
        "bind_dn": f"cn=admin,{SUFFIX}",
    }
    for name, value in values.items():
        text = text.replace(f"{name}: *FILL-IN", f"{name}: {value}")
    path = folder / "identity.yaml"
    path.write_text(text.replace("starttls: true", "starttls: false"))
    return path


@contextlib.contextmanager
def directory(cluster: Cluster, folder: pathlib.Path) -> collections.abc.Generator[None]:
    """Give the cluster the people of a directory, with homes on the shared filesystem."""
    (folder / "openldap.yaml").write_text(
        "applications: {openldap: {charm: openldap, num_units: 1}}\n"
    )
    cluster.ok("deploy", str(folder / "openldap.yaml"), timeout=1200)
    server = _server(cluster)
    address = cluster.on(server, "hostname", "--all-ip-addresses").split()[0]
    password = cluster.on(server, "cat", "/root/password")
    name = f"ldap-bind-{server.replace('/', '-')}"  # a model that is kept keeps its secrets
    secret = cluster.ok("add-secret", name, f"password={password}").strip()
    try:
        cluster.ok(*DEPLOY, "--once", "--overlay", str(overlay(folder, address)), timeout=1800)
        cluster.ok("grant-secret", name, "ldap-integrator")
        cluster.ok("config", "ldap-integrator", f"bind_password={secret}")
        # ldap-integrator tells of the password at its next update-status, or to a new relation
        cluster.ok("remove-relation", "sssd:ldap", "ldap-integrator:ldap")
        cluster.ok("integrate", "sssd:ldap", "ldap-integrator:ldap")
        cluster.ok("config", CLIENT, "homes=homes")
        yield
    finally:
        cluster.ok("config", CLIENT, "homes=")
        for app in ("sssd", "ldap-integrator", "openldap"):
            cluster.ctl("remove-application", "--no-prompt", app)


def ldap(cluster: Cluster, tool: str, *arguments: str) -> None:
    bind = ("-x", "-D", f"cn=admin,{SUFFIX}", "-y", "/root/password")
    cluster.on(_server(cluster), tool, *bind, *arguments)


def _server(cluster: Cluster) -> str:
    """Return the directory's unit, whose number counts all that there were."""
    return next(name for name in cluster.units() if name.startswith(f"{DIRECTORY}/"))


@pytest.mark.long
@pytest.mark.trains
def test_a_user_of_the_directory_is_the_same_everywhere(cluster: Cluster, tmp_path: pathlib.Path):
    cluster.action("install-environment", timeout=1500)
    with directory(cluster, tmp_path), no_account_stays(cluster, "dora,erin", "ml"):
        cluster.on(_server(cluster), "sh", "-c", f"cat >/root/people.ldif <<'END'\n{PEOPLE}\nEND")
        ldap(cluster, "ldapadd", "-f", "/root/people.ldif")

        def known(host: str) -> None:
            found = cluster.exec(host, "getent", "passwd", "dora").out
            home = "/home" if host == "slurmctld/0" else f"{MP}/homes"  # it has no mount
            assert found.strip() == f"dora:*:{UID}:3101:dora:{home}/dora:/bin/bash"

        for host in HOSTS:
            eventually(lambda host=host: known(host))
        found = cluster.action("sync-users", "group=ml", "new-account=true")
        assert re.search(r"(?m)^dora +added$", found["users"]), found

        dora = Person(cluster, "dora", UID)
        with slurm_conf(cluster, ENFORCED):
            cluster.on(LOGIN, "su", "-l", "dora", "-c", "true")  # a login; runuser makes no home
            assert dora.does("pwd; stat -c '%a %U' .").split("\n") == [
                f"{MP}/homes/dora",
                "700 dora",
            ]
            dora.does("mkdir -p hello")
            dora.writes("hello/hello.py", HELLO)
            result = dora.json(f"{SUBMIT} hello.py")
            assert result["state"] == "COMPLETED", result
            assert f"uid {UID}" in dora.does(f"cat {result['log']}")

            leaves = f"cat >/root/leaves.ldif <<'END'\n{LEAVES}\nEND"
            cluster.on(_server(cluster), "sh", "-c", leaves)
            ldap(cluster, "ldapmodify", "-f", "/root/leaves.ldif")
            for host in HOSTS:
                cluster.on(host, "sh", "-c", FORGETS)  # else sssd knows her for an hour and a half
            assert dora.tries("true").code != 0
            sbatch = ("setpriv", "--reuid", UID, "--regid", "3101", "--clear-groups", "sbatch")
            words = (*sbatch, "--parsable", "--chdir", "/tmp", "--wrap", "true")
            job = cluster.on(LOGIN, *words)  # Slurm still has her account
            eventually(lambda: _is_held(cluster, job))
            cluster.on(LOGIN, "scancel", job)
            eventually(lambda: _loses_account(cluster, "dora"))
            refused = cluster.exec(LOGIN, *words)
            assert refused.code != 0, refused.out
            assert "Invalid account" in refused.err


def _is_held(cluster: Cluster, job: str) -> None:
    """Slurm finds no such user as it starts the job, and holds it."""
    shown = cluster.on(LOGIN, "squeue", "--noheader", "--job", job, "--format", "%T %r")
    assert shown == "PENDING JobHeldAdmin"


def _loses_account(cluster: Cluster, user: str) -> None:
    found = cluster.action("sync-users", "group=ml", "remove=true")
    assert re.search(rf"(?m)^{user} +removed$", found["users"]), found
