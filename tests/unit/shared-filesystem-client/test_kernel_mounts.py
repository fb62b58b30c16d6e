"""CephFS, Lustre and NFS: the generated files, the packages, and errors of unfit machines."""

import dataclasses
import json
import pathlib
import platform
import typing

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mount_plan
from kinds import cephfs, fuse, kernel, lustre, lustre_client, nfs, presets
from machine import Machine
from slurm_ddp import apt, download, mounts
from slurm_ddp.commands import Completed
from slurm_ddp.interfaces import filesystem_info as fs

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

KEY = "AQCl3+poAAAAABAAq5cPw7qTB0q1BDtpRk9y3Q=="
FSID = "354ca7c4-f10d-11ee-93f8-1f85f87b7845"
KERNEL = "6.8.0-1015-aws"
SPEC = mount_plan.Spec(app="client", mountpoint="/mnt/shared")


def values(plan: mount_plan.Plan) -> dict[str, str]:
    return dict(line.split("=", 1) for line in plan.unit_text.splitlines() if "=" in line)


def options(plan: mount_plan.Plan) -> dict[str, str]:
    return {
        item.partition("=")[0]: item.partition("=")[2]
        for item in values(plan)["Options"].split(",")
    }


class Rig:
    """A machine with a kernel, packages and routes."""

    def __init__(self, root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.machine = Machine(secrets={KEY})
        self.machine.take_over(
            monkeypatch, [apt, kernel, cephfs, lustre, lustre_client], root / "units"
        )
        self.ceph_version = "19.2.1-0ubuntu0.24.04.2"
        self.container = ""
        self.loadable = {"nfsv4", "ceph"}
        self.installed_kernels: set[str] = set()
        self.archive = {"lustre-client-modules-6.8.0-1015-aws"}  # what apt finds after an update
        self.is_updated = False
        self.machine.answers |= {
            "systemd-escape": lambda words, _: "mnt-shared.mount\n",
            "systemd-detect-virt": lambda words, _: self.container or Completed(1, "none\n", ""),
            "modprobe": self._modprobe,
            "modinfo": lambda words, _: (
                "" if words[1] in self.installed_kernels else Completed(1, "", "not found")
            ),
            "depmod": lambda words, _: "",
            "dpkg-query": self._dpkg,
            "apt-get": self._apt,
            "ip": self._route,
            "lustre_rmmod": lambda words, _: "",
        }
        for name in ("sources", "keyrings"):
            monkeypatch.setattr(lustre_client, name.upper(), root / name)
        monkeypatch.setattr(lustre, "MODPROBE", root / "modprobe.conf")
        monkeypatch.setattr(lustre, "LNET", root / "lnet")
        monkeypatch.setattr(kernel, "PROC", root / "proc")
        (root / "proc/self").mkdir(parents=True)
        self.set_uid_map("0 0 4294967295")
        self.set_filesystems(
            "nodev\tsysfs", "\text4", "nodev\tlustre", "nodev\tnfs4", "nodev\tnfs", "nodev\tceph"
        )
        release = {"ID": "ubuntu", "VERSION_ID": "24.04", "VERSION_CODENAME": "noble"}
        monkeypatch.setattr(platform, "freedesktop_os_release", lambda: release)
        self.content = b"-----BEGIN PGP PUBLIC KEY BLOCK-----"
        monkeypatch.setattr(download, "fetch", lambda url, **_: self.content)
        self.installs: list[tuple[str, ...]] = []
        monkeypatch.setattr(mounts, "table", list)

    def set_filesystems(self, *lines: str) -> None:
        (self.root / "proc/filesystems").write_text("\n".join(lines) + "\n")

    def set_uid_map(self, text: str) -> None:
        (self.root / "proc/self/uid_map").write_text(f"         {text}\n")

    def _modprobe(self, words: tuple[str, ...], _: str | None) -> Completed:
        known = words[0] in self.loadable
        return Completed(
            0 if known else 1, "", "" if known else f"modprobe: FATAL: Module {words[0]} not found."
        )

    def _dpkg(self, words: tuple[str, ...], _: str | None) -> str:
        if "${Package}" in words[2]:
            here = [name for name in words[3:] if name not in self.archive]
            return "".join(f"installed {name} 1\n" for name in here)
        return self.ceph_version if "${Version}" in words else "installed"

    def _apt(self, words: tuple[str, ...], _: str | None) -> str | Completed:
        if words[-1] == "update":
            self.is_updated = True
            return ""
        packages = words[words.index("install") + 1 :]
        if not self.is_updated or not set(packages) <= self.archive:
            return Completed(100, "", f"E: Unable to locate package {packages[0]}")
        self.installs.append(packages)
        self.installed_kernels.add(KERNEL)
        return ""

    def _route(self, words: tuple[str, ...], _: str | None) -> str:
        device = {"10.0.0": "eth0", "10.1.0": "ib0", "10.2.0": "eth1"}[words[-1].rpartition(".")[0]]
        return json.dumps([{"dst": words[-1], "dev": device}])

    def line(self) -> str:
        return (self.root / "sources/slurm-ddp-lustre.list").read_text().splitlines()[-1]


@pytest.fixture
def bare(rig: "Rig") -> "Rig":
    """Return a machine whose kernel lacks Lustre."""
    rig.set_filesystems("nodev\tsysfs", "\text4")
    return rig


@pytest.fixture
def rig(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


def ceph(**changes: typing.Any) -> fs.Cephfs:
    hosts = ("10.0.0.1:6789", "10.0.0.2:6789")
    return dataclasses.replace(
        fs.Cephfs(hosts, "fs-client", FSID, "cephfs", "/", key=KEY), **changes
    )


def test_cephfs_by_the_newer_name(rig: Rig):
    plan = cephfs.plan(SPEC, ceph(), KEY)
    unit = values(plan)
    assert unit["What"] == plan.source == f"fs-client@{FSID}.cephfs=/"
    assert (unit["Where"], unit["Type"]) == ("/mnt/shared", "ceph")
    assert plan.aliases == ("10.0.0.1:6789,10.0.0.2:6789:/",)  # an older kernel shows it so
    valued = {
        "mon_addr": "10.0.0.1:6789/10.0.0.2:6789",
        "secretfile": "/etc/slurm-ddp/client/ceph.secret",
    }
    flags = dict.fromkeys(("noatime", "nosuid", "nodev", "rw"), "")
    assert options(plan) == valued | flags | {"recover_session": "clean"}
    assert plan.servers == ((("10.0.0.1", 6789), ("10.0.0.2", 6789)),)


def test_monitors_of_the_newer_protocol_are_preferred(rig: Rig):
    plan = cephfs.plan(SPEC, ceph(hosts=("10.0.0.1:6789", "10.0.0.1:3300", "[::1]:3300")), KEY)
    assert options(plan)["mon_addr"] == "10.0.0.1:3300/[::1]:3300"
    assert options(plan)["ms_mode"] == "prefer-crc"
    spec = SPEC.model_copy(
        update={"mount_options": "ms_mode=secure", "read_only": True, "subdirectory": "a/b"}
    )
    plan = cephfs.plan(spec, ceph(hosts=("10.0.0.1:3300",), path="/team"), KEY)
    assert options(plan)["ms_mode"] == "secure"
    assert "ro" in options(plan)
    assert plan.source.endswith("=/team/a/b")


@pytest.mark.parametrize(("uri", "shown", "proto"), CASES["the_same_export_however_it_is_written"])
def test_the_same_export_however_it_is_written(rig: Rig, uri: str, shown: str, proto: str):
    export = fs.parse(uri)
    assert isinstance(export, fs.Nfs)
    plan = nfs.plan(SPEC, export)
    assert (plan.source, values(plan)["What"], options(plan)["proto"]) == (shown, shown, proto)
    assert not {f"{shown}2", f"{shown.rstrip('/')}/x"} & set(plan.sources)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(line=st.sampled_from(CASES["vendors_lines"]), data=st.data())
def test_a_vendors_line_is_taken_in_any_order(rig: Rig, line: tuple[str, str], data: st.DataObject):
    given, version = line
    words = data.draw(st.permutations(given.split(",")))
    found = options(
        nfs.plan(
            SPEC.model_copy(update={"mount_options": ",".join(words)}), fs.Nfs("10.0.0.5", "/x")
        )
    )
    kept = {word.partition("=")[0]: word.partition("=")[2] for word in words if "=" in word}
    for name in ("nfsvers", "minorversion", "vers"):
        kept.pop(name, None)
    assert found == found | kept | {"vers": version, "hard": "", "rw": "", "proto": "tcp"}


@pytest.mark.parametrize(("given", "message"), CASES["nfs_options_that_contradict"])
def test_nfs_options_that_contradict(rig: Rig, given: str, message: str):
    with pytest.raises(presets.OptionError) as caught:
        nfs.plan(SPEC.model_copy(update={"mount_options": given}), fs.Nfs("10.0.0.5", "/x"))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "key", "message"), CASES["options_that_the_ceph_helper_would_misread_are_refused"]
)
def test_options_that_the_ceph_helper_would_misread_are_refused(
    rig: Rig, changes: dict[str, str], key: str, message: str
):
    with pytest.raises(mount_plan.MountError) as caught:
        cephfs.plan(SPEC, ceph(**changes), key)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("choice", "known", "fuse_opens", "mounted", "expected"), CASES["the_client_that_mounts_cephfs"]
)
def test_the_client_that_mounts_cephfs(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    choice: str,
    known: bool,
    fuse_opens: bool,
    mounted: str,
    expected: str,
):
    def check(name: str) -> None:
        if not fuse_opens:
            raise mount_plan.MountError(f"/dev/fuse does not open: {name} needs access to it")

    monkeypatch.setattr(fuse, "check", check)
    monkeypatch.setattr(apt, "ensure_packages", rig.installs.append)
    here = [mounts.Mount(1, "0:9", SPEC.mountpoint, mounted, "x", ())] if mounted else []
    monkeypatch.setattr(mounts, "table", lambda: here)
    if not known:
        rig.set_filesystems("nodev\tsysfs")
        rig.loadable.clear()
    try:
        found = cephfs.ensure_client(SPEC.model_copy(update={"cephfs_client": choice}))
        assert rig.installs == [("ceph-common" if found == "mount.ceph" else "ceph-fuse",)]
    except mount_plan.MountError as e:
        found = str(e).replace(platform.release(), "RELEASE")
    assert found == expected


def test_ceph_fuse_gets_the_key_in_its_file_alone_and_the_kernels_name_for_the_source(rig: Rig):
    spec = SPEC.model_copy(update={"profile": "tokens", "noexec": True, "subdirectory": "a b"})
    with pytest.raises(mount_plan.MountError, match=r"^the folder has a space, comma or backslash"):
        cephfs.plan(spec, ceph(), KEY, cephfs.FUSE)
    spec = spec.model_copy(update={"subdirectory": "team/a"})
    plan, by_kernel = (
        cephfs.plan(spec, ceph(), KEY, cephfs.FUSE),
        cephfs.plan(SPEC, ceph(path="/team/a"), KEY),
    )
    assert (plan.source, plan.servers) == (by_kernel.source, by_kernel.servers)
    unit = values(plan)
    conf, keyring = (f"/etc/slurm-ddp/client/ceph.{name}" for name in ("conf", "keyring"))
    command = f"/usr/bin/ceph-fuse -f --conf={conf} --id=fs-client -r /team/a /mnt/shared"
    assert (
        unit["ExecStart"]
        == f"{command} -o nosuid,nodev,noexec,rw,subtype=ceph-fuse,fsname={plan.source}"
    )
    assert "EnvironmentFile" not in unit
    assert "ExecReload" not in unit
    texts = {str(path): text.splitlines() for path, text in plan.files.items()}
    assert texts[keyring] == ["[client.fs-client]", f"key = {KEY}"]
    assert KEY not in plan.unit_text + "".join(texts[conf])
    assert {"mon_host = v1:10.0.0.1:6789,v1:10.0.0.2:6789", "client_fs = cephfs"} <= set(
        texts[conf]
    )
    assert "client_readahead_max_bytes = 1048576" in texts[conf]


@pytest.mark.parametrize(
    ("given", "source"),
    CASES["servers_that_take_over_and_those_with_two_networks_are_distinguished"],
)
def test_servers_that_take_over_and_those_with_two_networks_are_distinguished(
    rig: Rig, given: tuple[str, ...], source: str
):
    plan = lustre.plan(SPEC, fs.Lustre(nids=given, fs_name="exafs"))
    assert plan.source == values(plan)["What"] == source


NETWORKS = ("tcp", "tcp1", "tcp12", "o2ib", "o2ib3", "kfi")
lustre_hosts = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.from_regex(
        r"[a-z][a-z0-9-]{0,10}[a-z0-9](\.[a-z][a-z0-9-]{0,8}[a-z0-9]){0,3}", fullmatch=True
    ),
)
lustre_servers = st.lists(
    st.lists(st.tuples(lustre_hosts, st.sampled_from(NETWORKS)), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


@settings(max_examples=500)
@given(lustre_servers, st.booleans())
def test_lustre_servers_and_their_rails_are_those_that_the_manual_writes(
    wanted: list[list[tuple[str, str]]], is_divided: bool
):
    nodes = [[f"{host}@{network}" for host, network in rails] for rails in wanted]
    written = ":".join(",".join(rails) for rails in nodes)
    given_nids = tuple(written.split(",")) if is_divided else (written,)
    if ":" in written:  # one server's rails are ambiguous without
        assert lustre.servers(given_nids) == tuple(tuple(rails) for rails in nodes)
    uri = f"lustre://({written.replace('@', '%40').replace(':', '%3A').replace(',', '%2C')})/?fs-name=a"
    assert lustre.servers(typing.cast(fs.Lustre, fs.parse(uri)).nids) == lustre.servers(given_nids)


@pytest.mark.parametrize(
    "given_nids", [("2001:db8::1@tcp",), ("10.0.0.1@tcp:",), ("a@tcp:,b@tcp",)]
)
def test_invalid_lists_of_lustre_servers_are_refused(given_nids: tuple[str, ...]):
    with pytest.raises(mount_plan.MountError, match="is ADDRESS@NETWORK"):
        lustre.servers(given_nids)


# Options of mount.lustre(8), and those that libmount passes on
LUSTRE_OPTIONS = set(
    "flock lazystatfs user_xattr retry noatime nosuid nodev noexec rw _netdev checksum".split()
)


@pytest.mark.parametrize("profile", ("none", "dataset", "checkpoint", "tokens"))
def test_a_lustre_mount_as_the_strict_helper_takes_it(rig: Rig, profile: str):
    spec = SPEC.model_copy(
        update={
            "profile": profile,
            "noexec": True,
            "subdirectory": "/team/a",
            "mount_options": "retry=3",
        }
    )
    plan = lustre.plan(spec, fs.Lustre(nids=("10.0.0.1@tcp",), fs_name="exafs"))
    found = options(plan)
    assert {"flock", "nosuid", "nodev", "noexec", "rw"} <= set(found)
    assert plan.source == "10.0.0.1@tcp:/exafs/team/a"
    assert plan.servers == ((("10.0.0.1", 988),),)
    assert set(found) <= LUSTRE_OPTIONS


def test_an_archive_of_the_table_is_added_and_removed_again(bare: Rig):
    lustre_client.ensure("aws", KERNEL)
    assert bare.installs == [("lustre-client-modules-6.8.0-1015-aws",)]
    keyring = bare.root / "keyrings/slurm-ddp-lustre.asc"
    repository = "https://fsx-lustre-client-repo.s3.amazonaws.com/ubuntu noble main"
    assert bare.line() == f"deb [signed-by={keyring}] {repository}"
    assert keyring.read_bytes() == bare.content
    lustre.ensure_networks(mount_plan.Config(), ["10.2.0.1@tcp1"], mounted=False)
    lustre.remove()
    assert not [
        *bare.root.glob("sources/*"),
        *bare.root.glob("keyrings/*"),
        *bare.root.glob("modprobe*"),
    ]


@pytest.mark.parametrize("repository", sorted(lustre_client.ARCHIVES))
def test_every_archive_is_over_https_and_signed_but_the_one_that_says_so(
    bare: Rig, repository: str
):
    row = lustre_client.ARCHIVES[repository]
    assert "https://" in row.archive
    is_signed = "signed-by={keyring}" in row.archive and row.key.startswith("https://")
    assert is_signed or ("trusted=yes" in row.archive and repository == "whamcloud")
    bare.archive = {name.format(kernel=KERNEL) for name in row.packages}
    lustre_client.ensure(repository, KERNEL)
    assert "{" not in bare.line()
    assert bare.installs == [tuple(sorted(bare.archive))]


@pytest.mark.parametrize("repository", sorted(lustre_client.ARCHIVES))
def test_an_archive_without_a_client_for_this_kernel_is_answered_with_the_vendors_page(
    bare: Rig, repository: str
):
    bare.archive = set()
    with pytest.raises(mount_plan.MountError) as caught:
        lustre_client.ensure(repository, KERNEL)
    page = lustre_client.ARCHIVES[repository].page
    line = f"no Lustre client for {KERNEL}: see {page}"
    assert str(caught.value).startswith(line)
    assert len(line) <= 120


def test_without_an_archive_the_status_says_which_there_are(bare: Rig):
    with pytest.raises(mount_plan.MountError) as caught:
        lustre_client.ensure("", KERNEL)
    assert str(caught.value) == (
        f"no Lustre client for kernel {KERNEL}: set lustre-repository=aws|gcp|azure|whamcloud"
    )


def test_a_client_that_is_installed_is_used_whoever_made_it(bare: Rig):
    bare.installed_kernels.add(KERNEL)
    lustre_client.ensure("", KERNEL)
    assert bare.installs == []
    assert not (bare.root / "sources").exists()


@pytest.mark.parametrize(("settings", "message"), CASES["options_about_lustre_that_make_no_sense"])
def test_options_about_lustre_that_make_no_sense(settings: dict[str, str], message: str):
    with pytest.raises(
        ValueError, match="^" + message.replace("(", r"\(").replace(")", r"\)").replace("{", r"\{")
    ):
        lustre.check(mount_plan.Config.model_validate(settings))


@pytest.mark.parametrize(
    ("identifiers", "networks"), CASES["the_interface_that_leads_to_the_servers"]
)
def test_the_interface_that_leads_to_the_servers(rig: Rig, identifiers: list[str], networks: str):
    assert lustre.derive_networks(identifiers) == networks


def test_lnet_that_runs_on_other_networks_changes_only_while_nothing_is_mounted(rig: Rig):
    (rig.root / "lnet").write_text("tcp(eth0)\n")
    settings = mount_plan.Config(lnet_networks="tcp1(eth1)")
    with pytest.raises(mount_plan.MountError) as caught:
        lustre.ensure_networks(settings, ["10.2.0.1@tcp1"], mounted=True)
    assert str(caught.value) == (
        "LNet runs on tcp(eth0), not on tcp1(eth1): unmount all Lustre here, or reboot"
    )
    lustre.ensure_networks(settings, ["10.2.0.1@tcp1"], mounted=False)
    assert rig.machine.did("/usr/sbin/lustre_rmmod") == 1
    (rig.root / "lnet").write_text("tcp1(eth1)\n")
    lustre.ensure_networks(settings, ["10.2.0.1@tcp1"], mounted=True)
    assert rig.machine.did("/usr/sbin/lustre_rmmod") == 1


KINDS = [kernel.NFS, kernel.CEPH, kernel.LUSTRE]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_unprivileged_container_is_named_with_what_would_do(rig: Rig, kind: kernel.Kind):
    rig.container = "lxc\n"
    rig.set_uid_map("0 1000000 1000000000")
    with pytest.raises(mount_plan.MountError) as caught:
        kernel.check(kind)
    remedy = (
        "deploy with --constraints virt-type=virtual-machine, or set security.privileged=true on it"
    )
    assert (
        str(caught.value)
        == f"{kind.name} cannot be mounted in an unprivileged lxc container: {remedy}"
    )


def test_a_machine_loads_the_module_itself(rig: Rig):
    rig.set_filesystems("nodev\tsysfs")
    kernel.check(kernel.NFS)
    assert rig.machine.did("/usr/sbin/modprobe", "nfsv4") == 1
    rig.loadable.clear()
    with pytest.raises(
        mount_plan.MountError,
        match=r"^the kernel \S+ has no NFS \(module nfsv4\): modprobe exited 1",
    ):
        kernel.check(kernel.NFS)
