"""Users' logins: make a home on the filesystem; on a compute node, ssh joins a job."""

import pathlib
import re

import mount_plan
from slurm_ddp import apt, files, systemd
from slurm_ddp.charm import naming
from slurm_ddp.commands import CommandError, run
from slurm_ddp.slurm import binaries, show

HOMES, ADOPT = "homes", "pam-slurm-adopt"
_PROFILES = pathlib.Path("/usr/share/pam-configs")
_UPDATE = "/usr/sbin/pam-auth-update"
_SSSD = pathlib.Path("/etc/sssd/conf.d")
_SSHD = pathlib.Path("/etc/pam.d/sshd")
_SLURMD = "slurmd.service"
_PROFILE = """\
Name: Make homes on the shared filesystem at the first login
Default: yes
Priority: 0
Session-Interactive-Only: yes
Session-Type: Additional
Session:
\toptional\tpam_mkhomedir.so umask=0077
"""
_ACCOUNT, _SESSION = "@include common-account\n", "@include common-session\n"
# With SSSD, common-account ends at pam_localuser for an account of this machine; of a substack, it
# ends only that
_DECIDES_FIRST = "account substack common-account\n"
# pam_slurm_adopt comes last in its stack. Juju's account and administrators log in without a job,
# as root always does
_JOINS_JOB = """\
account sufficient pam_succeed_if.so quiet user = ubuntu
account sufficient pam_succeed_if.so quiet user ingroup sudo
-account required pam_slurm_adopt.so nodename={node}
"""
# Without pam_systemd, which would move the session out of the job's cgroup
_STAYS_THERE = "@include common-session-noninteractive\n"


def check(config: mount_plan.Config) -> None:
    """Raise `ValueError` with the option for an invalid folder, or if ssh could join no job."""
    with naming(HOMES):
        if not re.fullmatch(
            r"([A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)?", config.homes
        ):
            raise ValueError("a folder of the mount is needed, like homes")
    with naming(ADOPT):
        if config.pam_slurm_adopt and not _contains_jobs():
            raise ValueError("add PrologFlags=contain to slurmctld's slurm-conf-parameters")


def ensure(spec: mount_plan.Spec, node: str) -> str:
    """Follow both options; return why there are no homes, or "". Raises `CommandError`.

    `node` is the machine's name in Slurm; "" if it runs no jobs.
    """
    _ensure_adoption(spec.app, node if spec.pam_slurm_adopt else "")
    if not spec.homes:
        _remove_homes(spec.app)
        return ""
    return _ensure_homes(spec.app, pathlib.Path(spec.mountpoint, spec.homes))


def remove(app: str) -> None:
    """Undo both. The homes stay. Raises `CommandError`."""
    _ensure_adoption(app, "")
    _remove_homes(app)


# -- homes ----------------------------------------------------------------------------------------


def _ensure_homes(app: str, folder: pathlib.Path) -> str:
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as e:
        return f"{HOMES}: root cannot make {folder}: {e.strerror}"
    name = _profile(app)
    if files.ensure_file(_PROFILES / name, _PROFILE):
        run(_UPDATE, "--package", "--enable", name)
    settings = f"[nss]\noverride_homedir = {folder}/%u\n"
    if files.ensure_file(_settings(app), settings, mode=0o600):
        _restart_sssd()
    return ""


def _remove_homes(app: str) -> None:
    name = _profile(app)
    if (_PROFILES / name).exists():
        run(_UPDATE, "--package", "--remove", name)
        files.ensure_absent(_PROFILES / name)
    if files.ensure_absent(_settings(app)):
        _restart_sssd()


def _restart_sssd() -> None:
    if systemd.is_active("sssd"):
        systemd.restart("sssd")


def _profile(app: str) -> str:
    return f"slurm-ddp-homes-{app}"


def _settings(app: str) -> pathlib.Path:
    return _SSSD / f"50-slurm-ddp-homes-{app}.conf"


# -- ssh on compute nodes -------------------------------------------------------------------------


def _ensure_adoption(app: str, node: str) -> None:
    """Let ssh join the jobs of a node; of "" leave it as the system has it."""
    if not _SSHD.exists():
        return
    before = _SSHD.read_text()
    wanted = original(before, app)
    if node:
        apt.ensure_packages(("libpam-slurm-adopt",))
        wanted = adopting(wanted, app, node)
    if wanted != before:
        files.ensure_file(_SSHD, wanted)


def adopting(text: str, app: str, node: str) -> str:
    """Change sshd's PAM file: users can log in only to nodes that run their job, and join it."""
    mark = _mark(app)
    rules = "".join(f"{mark}{line}\n" for line in _JOINS_JOB.format(node=node).splitlines())
    text = text.replace(_ACCOUNT, mark + _DECIDES_FIRST + rules, 1)
    return text.replace(_SESSION, mark + _STAYS_THERE, 1)


def original(text: str, app: str) -> str:
    """Undo what `adopting` did for this application."""
    mark = _mark(app)
    text = text.replace(mark + _DECIDES_FIRST, _ACCOUNT)
    text = text.replace(mark + _STAYS_THERE, _SESSION)
    return re.sub(rf"{re.escape(mark)}[^\n]*\n", "", text)


def _mark(app: str) -> str:
    return f"# Of the charm shared-filesystem-client, application {app}\n"


def _contains_jobs() -> bool:
    """Report whether each job has a step that ssh can join; True if Slurm is missing or silent."""
    if not systemd.exists(_SLURMD):
        return True
    try:
        answer = run(binaries.find("scontrol"), "show", "config", timeout=20).stdout
    except CommandError:
        return True
    return "contain" in show.config(answer).get("PrologFlags", "").lower()
