import dataclasses
import pathlib
import shlex
import socket
import time
import typing

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from machine_mounts import MachineMounts, mode_of

import mount_plan
from kinds import fuse, kernel, nfs
from kinds import juicefs as juicefs_kind
from machine import Machine
from mount import mounter, watching
from scripts import keeper
from slurm_ddp import juicefs, mounts, readiness, records, systemd
from slurm_ddp.interfaces import filesystem_info as fs

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

UNIT = "juicefs-client.service"
TIMER = "mount-keeper-client.timer"
STARTER = "mount-keeper-client-up.service"
SECRET = fs.JuicefsSecret.from_content(
    {"meta-password": 'p@ss:/?#%word "x"$(id)`\\', "secret-key": "topSecret"}
)


class Rig:
    """mounter.py on a fake machine with temporary folders."""

    def __init__(self, root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.mounts = MachineMounts()
        self.mounts.install_in(mounts, monkeypatch)
        self.machine = Machine(secrets=set(SECRET.values()))
        self.machine.take_over(monkeypatch, [mounter, kernel, keeper], root / "units")
        self.machine.units.add("slurmd.service")
        self.machine.on_start, self.machine.on_stop = self._started, self._stopped
        self.machine.answers |= {
            "chattr": self._chattr,
            "journalctl": lambda words, _: self.journal,
            "cat": lambda words, _: self.shown,
            "systemd-escape": self._escape,
        }
        self.journal = ""
        self.shown = ""  # the content of the mount's .config
        self.immutable: set[str] = set()
        self.version: juicefs.Version = (1, 3, 1)
        self.listener = socket.create_server(("127.0.0.1", 0))
        for name in ("ETC", "LIB", "STATE", "CACHE"):
            monkeypatch.setattr(mount_plan, name, root / name.lower())
        monkeypatch.setattr(readiness, "DIRECTORY", root / "state" / "needs")
        monkeypatch.setattr(fuse, "check", lambda name: None)
        monkeypatch.setattr(kernel, "check", lambda kind: None)
        monkeypatch.setattr(juicefs, "version", lambda program: self.version)
        self.mountpoint = str(root / "shared")
        hosts = (f"127.0.0.1:{self.listener.getsockname()[1]}",)
        self.volume = fs.Juicefs(
            name="shared", hosts=hosts, engine="redis", db="1", uuid="u", version="1.3.1"
        )

    def plan(
        self,
        *,
        app: str = "client",
        volume: fs.Juicefs | None = None,
        secret: fs.JuicefsSecret = SECRET,
        cache: str = "4096",
        program_changed: bool = False,
        **spec: typing.Any,
    ) -> mount_plan.Plan:
        given = {"app": app, "mountpoint": self.mountpoint, "cache_size": cache} | spec
        wanted = mount_plan.Spec.model_validate(given)
        return juicefs_kind.plan(
            wanted, volume or self.volume, secret, program_changed=program_changed
        )

    def nfs(self, **spec: typing.Any) -> mount_plan.Plan:
        wanted = mount_plan.Spec.model_validate(
            {"app": "client", "mountpoint": self.mountpoint} | spec
        )
        return nfs.plan(
            wanted, fs.Nfs(host="127.0.0.1", path="/srv", port=self.listener.getsockname()[1])
        )

    def ensure(self, plan: mount_plan.Plan, unit: str = "client/0") -> mounts.Result:
        return mounter.ensure(
            dataclasses.replace(plan, spec=plan.spec.model_copy(update={"wanted_by": unit}))
        )

    def snapshot(self) -> dict[str, tuple[int, bytes]]:
        return {
            str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
            for path in sorted(self.root.rglob("*"))
        }

    def environment(self) -> str:
        return (self.root / "etc/client/environment").read_text()

    def _started(self, unit: str) -> None:
        text = (systemd.UNIT_DIR / unit).read_text() if (systemd.UNIT_DIR / unit).exists() else ""
        now = str(time.monotonic_ns() // 1000)
        if unit.startswith("juicefs-"):
            command = next(line for line in text.splitlines() if line.startswith("ExecStart="))
            options = command.partition(" -o ")[2].split(" ")[0].split(",")
            source = text.partition("--source ")[2].split()[0]
            self.mounts.drop(command.split(" ")[-1])
            self.mounts.add(
                command.split(" ")[-1], source, "fuse.juicefs", read_only="ro" in options
            )
            self.machine.stamps["ExecMainStartTimestampMonotonic"] = now
        elif unit.endswith(".mount"):
            values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
            self.mounts.add(values["Where"], values["What"], "nfs4")
            self.machine.stamps["ActiveEnterTimestampMonotonic"] = now

    def _stopped(self, unit: str) -> None:
        if unit.startswith("juicefs-") or unit.endswith(".mount"):
            self.mounts.drop(self.mountpoint)

    def _chattr(self, words: tuple[str, ...], _: str | None) -> None:
        assert not self.mounts.at(words[1]), (
            "an attribute of the mounted filesystem is none of our business"
        )
        change = self.immutable.add if words[0] == "+i" else self.immutable.discard
        change(words[1])

    def _escape(self, words: tuple[str, ...], _: str | None) -> str:
        assert words[:2] == ("--path", "--suffix=mount")
        return words[2].strip("/").replace("-", "\\x2d").replace("/", "-") + ".mount\n"


@pytest.fixture
def rig(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> typing.Iterator[Rig]:
    made = Rig(tmp_path, monkeypatch)
    yield made
    made.listener.close()


def test_the_first_time_it_is_mounted_for_good(rig: Rig):
    assert rig.ensure(rig.plan())
    assert "fuse3" in rig.machine.packages
    assert rig.machine.active == {UNIT, TIMER}
    assert rig.machine.enabled == {UNIT, TIMER, STARTER}
    assert [mount.source for mount in rig.mounts.at(rig.mountpoint)] == ["JuiceFS:shared"]
    assert rig.immutable == {rig.mountpoint}
    keeper = (systemd.UNIT_DIR / STARTER).read_text()
    assert "ExecStart=/usr/bin/python3 /" in keeper, "Python keeps the bytecode of a pass"
    dropin = (systemd.UNIT_DIR / "slurmd.service.d/10-client.conf").read_text()
    assert f"After={UNIT}\nWants={UNIT}\n" in dropin
    assert not mounter.pending(rig.plan())


def test_the_keeper_speaks_for_each_unit_until_it_goes(rig: Rig):
    def spoken_for() -> tuple[str, ...]:
        return records.read(keeper.Watch, mount_plan.STATE / "client" / keeper.WATCH).units

    rig.ensure(rig.plan(), unit="client/0")
    rig.ensure(rig.plan(), unit="client/1")
    assert spoken_for() == ("client/0", "client/1")
    for number in (0, 1):
        watching.wake_once_right("client", f"client/{number}", ["wake"])
    mounter.remove("client", unit="client/0")
    assert spoken_for() == ("client/1",)
    assert [path.name for path in (mount_plan.STATE / "client").glob("wake-*")] == [
        "wake-client-1.json"
    ]
    watching.wake_once_right("client", "client/1", [])
    assert list((mount_plan.STATE / "client").glob("wake-*")) == []


def test_what_the_keeper_has_proved_lately_and_in_this_boot_counts(rig: Rig):
    rig.ensure(rig.plan())
    folder = mount_plan.STATE / "client"
    boot = readiness.boot_id()
    seen = keeper.Health(state="right", checked=time.time(), boot=boot)
    for health, mountpoint in (
        (seen, rig.mountpoint),
        (dataclasses.replace(seen, boot="another"), None),
        (dataclasses.replace(seen, checked=time.time() - 60), None),
        (dataclasses.replace(seen, state="hung"), None),
    ):
        (folder / keeper.HEALTH).write_text(records.text(health))
        assert watching.proven("client") == mountpoint
    mounter.remove("client", unit="client/0")
    assert watching.proven("client") is None


def test_the_second_time_nothing_is_touched(rig: Rig):
    rig.ensure(rig.plan())
    before, calls = rig.snapshot(), len(rig.machine.calls)
    assert rig.ensure(rig.plan())
    assert rig.snapshot() == before
    reading = {"dpkg-query", "systemctl cat", "systemctl is-active", "systemctl show"}
    for call in rig.machine.calls[calls:]:
        name = pathlib.Path(call[0]).name
        assert name in reading or f"{name} {call[1]}" in reading, call


@pytest.mark.parametrize(
    ("text", "node"),
    [
        (None, socket.gethostname().partition(".")[0]),
        (
            "SLURMD_OPTIONS=\"--conf-server ctl:6817 --conf 'gres=gpu:1' \"\n",
            socket.gethostname().partition(".")[0],
        ),
        ("SLURMD_OPTIONS=--foo-No -Nslurmd-1\n", "slurmd-1"),
    ],
)
def test_the_keeper_gets_the_name_of_the_node(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, text: str | None, node: str
):
    defaults = rig.root / "slurmd"
    monkeypatch.setattr(watching, "_SLURMD_DEFAULTS", defaults)
    if text is not None:
        defaults.write_text(text)
    rig.ensure(rig.plan())
    assert records.read(keeper.Watch, mount_plan.STATE / "client" / keeper.WATCH).node == node


def test_secrets_lie_in_one_file_that_root_alone_reads(rig: Rig):
    rig.ensure(rig.plan())
    path = rig.root / "etc/client/environment"
    assert mode_of(path) == 0o600
    assert mode_of(path.parent) == 0o700
    for name, (_, content) in rig.snapshot().items():
        assert name == str(path) or b"p@ss" not in content, name
        assert b"topSecret" not in content, name  # the clients of a keyed volume do not need it
    assert "p@ss" not in repr(rig.plan())


@pytest.mark.parametrize("change", ["option", "password", "program"])
def test_a_change_waits_while_the_mount_is_used(
    rig: Rig, change: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mounter, "_RELOAD_S", 0.0)
    rig.ensure(rig.plan())
    rig.mounts.users_of[rig.mountpoint] = [(123, "python3")]
    new = {
        "option": lambda: rig.plan(cache="100"),
        "password": lambda: rig.plan(
            secret=fs.JuicefsSecret.from_content({"meta-password": "new"})
        ),
        "program": lambda: rig.plan(program_changed=True),
    }[change]()
    settled = dataclasses.replace(new, program_changed=False)
    assert rig.ensure(new)  # it works as before
    assert mounter.pending(settled)
    assert rig.machine.did("stop", UNIT) == 0
    assert rig.ensure(settled)
    assert mounter.pending(settled)
    rig.mounts.users_of.clear()
    assert rig.ensure(settled)
    assert not mounter.pending(settled)
    assert rig.machine.did("stop", UNIT) == 1


def test_a_newer_program_takes_over_a_mount_in_use(rig: Rig):
    rig.ensure(rig.plan())
    rig.mounts.users_of[rig.mountpoint] = [(123, "python3")]
    rig.shown = '{"Version": "1.3.2+2026-08-07.abc"}'
    rig.version = (1, 3, 2)
    assert "ExecReload=/bin/kill -HUP $MAINPID\n" in rig.plan().unit_text
    assert rig.ensure(rig.plan(program_changed=True))
    assert rig.machine.did("reload", UNIT) == 1
    assert rig.machine.did("stop", UNIT) == 0
    assert not mounter.pending(rig.plan())


def test_a_reboot_applies_what_waited(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    rig.ensure(rig.plan())
    rig.mounts.users_of[rig.mountpoint] = [(123, "python3")]
    rig.ensure(rig.plan(cache="100"))
    assert mounter.pending(rig.plan(cache="100"))
    monkeypatch.setattr(readiness, "boot_id", lambda: "another boot")
    assert not mounter.pending(rig.plan(cache="100"))


def test_another_volume_takes_the_place_of_the_first_once_nobody_uses_it(rig: Rig):
    rig.ensure(rig.plan())
    rig.mounts.users_of[rig.mountpoint] = [(123, "python3")]
    other = dataclasses.replace(rig.volume, name="other")
    for _ in range(2):
        look = rig.ensure(rig.plan(volume=other))
        assert look == mounts.Result(
            mounts.State.WRONG, f"{rig.mountpoint} holds JuiceFS:shared (fuse.juicefs)"
        )
        assert mounter.pending(rig.plan(volume=other))
    rig.mounts.users_of.clear()
    assert rig.ensure(rig.plan(volume=other))
    assert [mount.source for mount in rig.mounts.table] == ["JuiceFS:other"]


def test_another_mountpoint_frees_the_first(rig: Rig):
    rig.ensure(rig.plan())
    old, new = rig.mountpoint, str(rig.root / "elsewhere")
    assert rig.ensure(rig.plan(mountpoint=new))
    assert not pathlib.Path(old).exists()
    assert [mount.mountpoint for mount in rig.mounts.table] == [new]
    assert rig.immutable == {new}


def test_from_juicefs_to_nfs_and_back(rig: Rig):
    rig.ensure(rig.plan())
    assert rig.ensure(rig.nfs())
    assert not (systemd.UNIT_DIR / UNIT).exists()
    assert not (rig.root / "etc/client/environment").exists()
    assert [mount.fstype for mount in rig.mounts.table] == ["nfs4"]
    assert rig.ensure(rig.plan())
    assert [path.name for path in systemd.UNIT_DIR.glob("*.mount")] == []
    assert [mount.fstype for mount in rig.mounts.table] == ["fuse.juicefs"]


def test_a_foreign_mount_is_left_alone(rig: Rig):
    rig.mounts.add(rig.mountpoint, "tmpfs", "tmpfs")
    for _ in range(2):
        look = rig.ensure(rig.plan())
        assert look == mounts.Result(mounts.State.WRONG, f"{rig.mountpoint} holds tmpfs (tmpfs)")
    assert UNIT not in rig.machine.active
    mounter.remove("client", unit="client/0")
    assert [mount.source for mount in rig.mounts.table] == ["tmpfs"]


def test_a_dead_server_is_named_at_once_and_the_unit_keeps_trying(rig: Rig):
    rig.machine.on_start = lambda unit: None  # it does not come up
    rig.listener.close()
    begin = time.monotonic()
    with pytest.raises(
        juicefs.UnreachableError, match=r"^127\.0\.0\.1:\d+ does not answer \(connection refused\)$"
    ):
        rig.ensure(rig.plan())
    assert time.monotonic() - begin < 10
    assert rig.machine.active == {UNIT, TIMER}
    assert rig.machine.enabled == {UNIT, TIMER, STARTER}


def test_a_mount_that_works_while_its_server_takes_no_connection_is_right(rig: Rig):
    rig.ensure(rig.plan())
    rig.listener.close()
    assert rig.ensure(rig.plan())


@pytest.mark.parametrize("fstype", ["tmpfs", "nfs4", "fuse.juicefs"])
def test_no_copies_are_kept_in_memory_or_on_another_network_filesystem(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, fstype: str
):
    found = mounts.Mount(1, "0:1", "/scratch", fstype, "x", ("rw",))
    monkeypatch.setattr(mounts, "find", lambda path: found)
    spec = mount_plan.Spec(
        app="client", mountpoint=rig.mountpoint, cache_directories="/scratch/cache"
    )
    with pytest.raises(mount_plan.MountError) as caught:
        juicefs_kind.plan(spec, rig.volume, SECRET, program_changed=False)
    assert str(caught.value) == (
        f"cache-directories: /scratch/cache lies on {fstype}: name folders of a local disk"
    )


@pytest.mark.parametrize(("given", "mounted"), [("", "/"), ("team/a", "/team/a")])
def test_a_folder_is_named_always_else_deleted_files_are_everybodys(
    rig: Rig, given: str, mounted: str
):
    assert f" --subdir={mounted} " in rig.plan(subdirectory=given).unit_text


def test_a_folder_with_files_is_not_hidden(rig: Rig):
    path = pathlib.Path(rig.mountpoint)
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")
    with pytest.raises(mount_plan.MountError) as caught:
        rig.ensure(rig.plan())
    assert (
        str(caught.value)
        == f"mountpoint {path} holds files, which a mount would hide: move them away"
    )
    assert rig.machine.active == set()
    assert not (systemd.UNIT_DIR / UNIT).exists()


def test_a_symbolic_link_is_no_mountpoint(rig: Rig):
    (rig.root / "real").mkdir()
    pathlib.Path(rig.mountpoint).symlink_to(rig.root / "real")
    with pytest.raises(
        mount_plan.MountError, match=r"is a file or behind a symbolic link: choose another$"
    ):
        rig.ensure(rig.plan())


@pytest.mark.parametrize("place", ["", "/inner"])
def test_two_applications_do_not_share_a_mountpoint(rig: Rig, place: str):
    rig.ensure(rig.plan())
    with pytest.raises(mount_plan.MountError) as caught:
        rig.ensure(rig.plan(app="other", mountpoint=rig.mountpoint + place), unit="other/0")
    assert (
        str(caught.value)
        == f"application client mounts at {rig.mountpoint}: choose another mountpoint"
    )


def test_removal_leaves_nothing(rig: Rig):
    before = set(rig.snapshot())
    rig.ensure(rig.plan())
    (rig.root / "cache/client/block").write_text("copy")
    readiness.tell("client/0", ready=True)  # as the keeper does
    mounter.remove("client", unit="client/0")
    assert set(rig.snapshot()) == before
    assert not rig.mounts.table
    assert not rig.immutable
    assert not rig.machine.active | rig.machine.enabled
    mounter.remove("client", unit="client/0")  # and again


def test_a_folder_that_was_there_before_stays(rig: Rig):
    pathlib.Path(rig.mountpoint).mkdir()
    rig.ensure(rig.plan())
    mounter.remove("client", unit="client/0")
    assert pathlib.Path(rig.mountpoint).is_dir()
    assert not rig.immutable


@pytest.mark.parametrize("path", CASES["paths_that_are_no_mountpoints"])
def test_paths_that_are_no_mountpoints(path: str):
    with pytest.raises(
        ValueError,
        match=r"^an absolute path of letters, digits and \._\+@- is needed, like /mnt/shared$",
    ):
        mount_plan.check_mountpoint(path)


@pytest.mark.parametrize(
    "path",
    [
        "/etc",
        "/etc/x",
        "/usr/share",
        "/var",
        "/var/lib/juju",
        "/proc/1",
        "/tmp",
        "/mnt",
        "/run/x",
        "/boot",
    ],
)
def test_the_systems_own_folders_are_refused(path: str):
    with pytest.raises(
        ValueError, match=f"^{path} belongs to the system: mount elsewhere, like /mnt/shared$"
    ):
        mount_plan.check_mountpoint(path)


def systemd_words(line: str) -> list[str]:
    """Split as systemd does (systemd.service(5), systemd.syntax(7)), for the output of `quoted`."""
    words = shlex.split(line, posix=True)
    return [word.replace("%%", "%").replace("$$", "$") for word in words]


@given(
    st.lists(
        st.text(
            st.characters(codec="ascii", exclude_characters="\0\r\n`", exclude_categories=["Cc"]),
            min_size=1,
        ),
        min_size=1,
    )
)
def test_any_argument_reaches_the_program_as_it_is(arguments: list[str]):
    assert systemd_words(" ".join(map(mount_plan.quoted, arguments))) == arguments


def test_a_value_with_a_line_break_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"^REDIS_PASSWORD has a line break in it$"):
        mount_plan.environment_file({"REDIS_PASSWORD": "top\nSecret"})


def test_the_environment_file_is_quoted():
    assert (
        mount_plan.environment_file({"B": "plain", "A": 'x"\\$`y'})
        == 'A="x\\"\\\\\\$\\`y"\nB="plain"\n'
    )
