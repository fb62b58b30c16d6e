"""Homes at the first login, and ssh that joins a job: PAM and sssd. Effect: tests/functional."""

import pathlib

import pytest

import logins
import mount_plan
from machine import Machine
from slurm_ddp.commands import Completed

APP, NODE = "client-a", "slurmd-7"
# Of Debian's openssh-server, without its comments
SSHD = """\
@include common-auth
account    required     pam_nologin.so
@include common-account
session    required     pam_loginuid.so
@include common-session
session    optional     pam_motd.so  motd=/run/motd.dynamic
@include common-password
"""


class Host(Machine):
    """A machine with sshd; commands are answered as Debian's are."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(answers={"pam-auth-update": self._update, "scontrol": self._config})
        self.folder = folder
        self.prolog_flags = "Alloc,Contain"
        self.profiles: set[str] = set()

    @property
    def sshd(self) -> str:
        return (self.folder / "sshd").read_text()

    @property
    def snippets(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in (self.folder / "sssd").glob("*")}

    def spec(self, **options: object) -> mount_plan.Spec:
        given = {"mountpoint": str(self.folder / "mnt"), **options}
        return mount_plan.Spec.model_validate({"app": APP, **given})

    def _update(self, words: tuple[str, ...], _: str | None) -> str:
        package, verb, name = words
        assert package == "--package"
        assert (self.folder / "profiles" / name).exists(), "pam-auth-update reads the profile"
        if verb == "--enable":
            self.profiles.add(name)
        else:
            self.profiles.remove(name)
        return ""

    def _config(self, words: tuple[str, ...], _: str | None) -> Completed:
        assert words == ("show", "config")
        return Completed(0, f"PrologFlags             = {self.prolog_flags}\n", "")


@pytest.fixture
def host(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host(tmp_path)
    host.take_over(monkeypatch, [logins], tmp_path / "units")
    (tmp_path / "mnt").mkdir()
    (tmp_path / "sshd").write_text(SSHD)
    monkeypatch.setattr(logins, "_SSHD", tmp_path / "sshd")
    monkeypatch.setattr(logins, "_SSSD", tmp_path / "sssd")
    monkeypatch.setattr(logins, "_PROFILES", tmp_path / "profiles")
    return host


def test_homes_are_on_the_mount_and_made_at_the_first_login(host: Host):
    host.units.add("sssd")
    host.active.add("sssd")
    spec = host.spec(homes="people/homes")
    assert logins.ensure(spec, NODE) == ""
    folder = host.folder / "mnt/people/homes"
    assert folder.stat().st_mode & 0o7777 == 0o755
    (snippet,) = host.snippets.values()
    assert snippet == f"[nss]\noverride_homedir = {folder}/%u\n"
    assert host.profiles == {f"slurm-ddp-homes-{APP}"}
    assert ("/usr/bin/systemctl", "restart", "sssd") in host.calls

    host.calls.clear()
    logins.ensure(spec, NODE)
    assert not any("pam-auth-update" in call[0] or "restart" in call for call in host.calls)


@pytest.mark.parametrize("how", ["option", "removal"])
def test_nothing_but_the_homes_is_left(host: Host, how: str):
    logins.ensure(host.spec(homes="homes", pam_slurm_adopt=True), NODE)
    if how == "option":
        logins.ensure(host.spec(), NODE)
    else:
        logins.remove(APP)
    assert (host.profiles, host.snippets, host.sshd) == (set(), {}, SSHD)
    assert (host.folder / "mnt/homes").is_dir()


def test_a_filesystem_on_which_root_may_not_write_is_named(host: Host):
    (host.folder / "mnt/homes").write_text("")
    assert logins.ensure(host.spec(homes="homes"), NODE).startswith("homes: root cannot make ")
    assert not host.profiles


def test_ssh_joins_a_job_on_compute_nodes_only(host: Host):
    logins.ensure(host.spec(pam_slurm_adopt=True), "")
    assert (host.sshd, host.packages) == (SSHD, set())

    for _ in range(2):
        logins.ensure(host.spec(pam_slurm_adopt=True), NODE)
    assert "libpam-slurm-adopt" in host.packages
    stack = [line for line in host.sshd.splitlines() if "account" in line]
    assert stack[-1] == "-account required pam_slurm_adopt.so nodename=slurmd-7"
    assert "account substack common-account" in stack
    assert "@include common-account\n" not in host.sshd, "its `sufficient` would end the stack"
    assert "@include common-session\n" not in host.sshd, "pam_systemd would move the session"
    assert host.sshd.count("pam_slurm_adopt") == 1


def test_another_application_leaves_it_alone(host: Host):
    logins.ensure(host.spec(pam_slurm_adopt=True), NODE)
    before = host.sshd
    logins.remove("client-b")
    assert host.sshd == before


@pytest.mark.parametrize("text", ["/homes", "../homes", "a//b", "a/../b", "homes/", "a b", "-x/.."])
def test_a_folder_that_cannot_be_names_the_option(host: Host, text: str):
    with pytest.raises(ValueError, match=r"^homes: a folder of the mount is needed"):
        logins.check(mount_plan.Config(homes=text))


@pytest.mark.parametrize("flags", ["(null)", "Alloc", "Contain"])
def test_ssh_can_join_a_job_only_where_slurm_contains_it(host: Host, flags: str):
    host.units.add("slurmd.service")
    host.prolog_flags = flags
    config = mount_plan.Config(pam_slurm_adopt=True)
    if flags == "Contain":
        logins.check(config)
        return
    with pytest.raises(ValueError, match=r"^pam-slurm-adopt: add PrologFlags=contain"):
        logins.check(config)


def test_a_silent_controller_keeps_no_mount_from_being_made(host: Host):
    host.units.add("slurmd.service")
    host.answers["scontrol"] = lambda *_: Completed(1, "", "Unable to contact slurm controller")
    logins.check(mount_plan.Config(pam_slurm_adopt=True))
