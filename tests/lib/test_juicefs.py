import datetime
import gzip
import hashlib
import io
import json
import pathlib
import re
import socket
import sys
import tarfile
import typing

import pytest
import yaml

from slurm_ddp import download, juicefs, juicefs_access
from slurm_ddp.commands import CommandError, Completed
from slurm_ddp.interfaces import filesystem_info as fs

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

SECRET = fs.JuicefsSecret.from_content(
    {"meta-password": 'p@ss:/?#%word "x"', "secret-key": "topSecret"}
)

# A juicefs that answers from a table in its folder and fails on any other command line
FAKE = f"""#!{sys.executable}
import json, os, pathlib, sys
here = pathlib.Path(__file__)
table = json.loads((here.parent / "table.json").read_text())
answer = table[" ".join(sys.argv[1:])]
(here.parent / "seen.json").write_text(json.dumps(dict(os.environ)))
sys.stdout.write(answer.get("out", "")), sys.stderr.write(answer.get("err", ""))
sys.exit(answer.get("rc", 0))
"""

STATUS: str = CASES["printed"]["STATUS"]


class Program:
    """A fake program, with the listening port of an engine that is up."""

    def __init__(self, directory: pathlib.Path, port: int) -> None:
        self.path = directory / "juicefs"
        self.path.write_text(FAKE)
        self.path.chmod(0o755)
        engine = juicefs_access.Engine("redis", (f"127.0.0.1:{port}",), "1")
        self.access = juicefs_access.access(engine, SECRET, directory=directory)

    def answers(self, command: str, **answer: str | int) -> None:
        table = self.path.with_name("table.json")
        known = json.loads(table.read_text()) if table.exists() else {}
        table.write_text(json.dumps(known | {command: answer}))

    def answers_status(self, **answer: str | int) -> None:
        self.answers(f"--no-agent status {self.access.url}", **answer)

    @property
    def seen(self) -> dict[str, str]:
        return json.loads(self.path.with_name("seen.json").read_text())


@pytest.fixture
def program(tmp_path: pathlib.Path) -> typing.Iterator[Program]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Program(tmp_path, listener.getsockname()[1])


@pytest.mark.parametrize(("printed", "expected"), CASES["the_version_is_read"])
def test_the_version_is_read(program: Program, printed: str, expected: tuple[int, int, int]):
    program.answers("--version", out=printed)
    assert juicefs.version(program.path) == tuple(expected)


@pytest.mark.parametrize(
    ("printed", "error", "message"),
    [
        (
            "GNU coreutils 9.1\n",
            CommandError,
            "juicefs: cannot read its version from 'GNU coreutils 9.1'",
        ),
        (
            "juicefs version 1.2.9 (2021-09-05 03f36d6)\n",
            juicefs.OldProgramError,
            "juicefs 1.2.9 is too old: attach 1.3 or newer",
        ),
    ],
)
def test_a_program_of_no_use_is_refused(
    program: Program, printed: str, error: type[Exception], message: str
):
    program.answers("--version", out=printed)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        juicefs.version(program.path)


def test_clients_are_those_whose_session_lives(program: Program):
    def moment(seconds: int) -> str:  # as juicefs writes it
        then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
        return then.strftime("%Y-%m-%dT%H:%M:%SZ")

    def clients(*sessions: dict[str, str]) -> tuple[str, ...]:
        program.answers_status(
            out=STATUS.replace('"Sessions": []', f'"Sessions": {json.dumps(sessions)}')
        )
        found = juicefs.inspect(program.path, program.access)
        assert found is not None
        return found.clients

    new = {"Version": "1.3.1", "HostName": "juju-1-2", "MountPoint": "/mnt/b"}  # seen of 1.3.1
    assert clients(
        new | {"Expire": moment(50)}, new | {"Expire": moment(-5), "MountPoint": "/gone"}
    ) == ("juju-1-2 at /mnt/b",)
    with pytest.raises(juicefs.JuicefsError, match=r"^juicefs status printed unexpected output$"):
        clients(new)


def test_the_volume_of_an_engine(program: Program):
    program.answers_status(out=STATUS)
    assert juicefs.inspect(program.path, program.access) == juicefs.Setting(
        "shared",
        "u",
        "sftp",
        "10.0.0.5:2022:/data/",
        encrypted=True,
        capacity_gib=2,
        trash_days=1,
        used_bytes=4096,
        used_inodes=2,
    )
    assert program.seen["REDIS_PASSWORD"] == 'p@ss:/?#%word "x"'
    assert "topSecret" not in json.dumps(program.seen)  # of no use to the engine


def test_a_volume_from_before_1_0_is_refused(program: Program):
    program.answers_status(out=STATUS.replace('"MetaVersion": 1,', ""))
    with pytest.raises(
        juicefs.JuicefsError,
        match=r"^volume shared was made by a juicefs before 1\.0, too old: deploy",
    ):
        juicefs.inspect(program.path, program.access)


def test_an_engine_without_a_volume(program: Program):
    err = (
        "2026/01/01 <FATAL>: get status: load setting: database is not formatted, please run `juicefs format ...` first "
        "[status.go:96]\n"
    )
    program.answers_status(rc=1, err=err)
    assert juicefs.inspect(program.path, program.access) is None
    assert (
        juicefs.reason(err)
        == "the metadata engine holds no volume: look at the charm that offers it"
    )


@pytest.mark.parametrize(
    ("err", "message"), CASES["any_other_failure_is_not_taken_for_an_empty_engine"]
)
def test_any_other_failure_is_not_taken_for_an_empty_engine(
    program: Program, err: str, message: str | None
):
    program.answers_status(rc=1, err=err)
    with pytest.raises(juicefs.JuicefsError) as caught:
        juicefs.inspect(program.path, program.access)
    assert message is None or str(caught.value) == message
    assert not isinstance(caught.value, juicefs.UnreachableError)


DIED: str = CASES["printed"]["DIED"]


@pytest.mark.parametrize(
    ("dies", "message"),
    [(2, None), (3, "juicefs crashed: route ip+net: no such network interface")],
)
def test_a_juicefs_that_died_at_its_start_runs_again(
    program: Program, monkeypatch: pytest.MonkeyPatch, dies: int, message: str | None
):
    really, runs = juicefs.run, list[object]()

    def run(*argv: typing.Any, **keywords: typing.Any) -> Completed:
        runs.append(argv)
        if len(runs) <= dies:
            raise CommandError("juicefs exited 2", returncode=2, stderr=DIED)
        return really(*argv, **keywords)

    monkeypatch.setattr(juicefs, "run", run)
    program.answers_status(out=STATUS)
    if message is None:
        assert juicefs.inspect(program.path, program.access) is not None
    else:
        with pytest.raises(juicefs.JuicefsError, match=f"^{re.escape(message)}$"):
            juicefs.inspect(program.path, program.access)
    assert len(runs) == 3


@pytest.mark.parametrize("out", ["", "null", "{\n}", '{\n"Setting": {}\n}', "{\nnot json"])
def test_unexpected_output_does_not_mean_an_empty_engine(program: Program, out: str):
    program.answers_status(out=out)
    with pytest.raises(juicefs.JuicefsError, match=r"^juicefs status printed unexpected output$"):
        juicefs.inspect(program.path, program.access)


def test_an_engine_that_is_down_is_not_asked(tmp_path: pathlib.Path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    silent = Program(tmp_path, port)  # its table is empty: running it would fail in another way
    with pytest.raises(
        juicefs.UnreachableError,
        match=rf"^127\.0\.0\.1:{port} does not answer \(connection refused\)$",
    ):
        juicefs.inspect(silent.path, silent.access)


def runs(path: pathlib.Path) -> bytes:
    """Return a program that says it is juicefs."""
    return f"#!/bin/sh\necho juicefs version 1.3.1 from {path.name}\n".encode()


def tarball(**files: bytes) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return raw.getvalue()


@pytest.mark.parametrize("packed", [False, True])
def test_a_resource_is_installed_once(tmp_path: pathlib.Path, packed: bool):
    resource, target = tmp_path / "resource", tmp_path / "lib" / "app" / "juicefs"
    content = runs(resource)
    resource.write_bytes(tarball(LICENSE=b"text", juicefs=content) if packed else content)
    assert juicefs.ensure_program(target, resource)
    assert target.read_bytes() == content
    assert target.stat().st_mode & 0o7777 == 0o755
    assert not juicefs.ensure_program(target, resource)
    resource.write_bytes(b"#!/bin/sh\necho juicefs version 1.4.0\n")
    assert juicefs.ensure_program(target, resource)
    assert juicefs.version(target) == (1, 4, 0)
    assert sorted(path.name for path in target.parent.iterdir()) == ["juicefs", "juicefs.source"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x7fELF garbage", "resource juicefs does not run here: "),
        (
            b"#!/bin/sh\necho hello\n",
            "resource juicefs does not run here: .juicefs.new: cannot read its version from 'hello'",
        ),
        (gzip.compress(b"no tarball"), "the juicefs tarball is damaged"),
        (tarball(README=b"x"), "the juicefs tarball has no program named juicefs in it"),
    ],
)
def test_a_resource_that_is_no_juicefs_leaves_the_old_one(
    tmp_path: pathlib.Path, content: bytes, message: str
):
    resource, target = tmp_path / "resource", tmp_path / "juicefs"
    resource.write_bytes(runs(resource))
    juicefs.ensure_program(target, resource)
    before = target.read_bytes()
    resource.write_bytes(content)
    with pytest.raises(juicefs.JuicefsError) as caught:
        juicefs.ensure_program(target, resource)
    assert str(caught.value).startswith(message)
    assert target.read_bytes() == before
    assert not (tmp_path / ".juicefs.new").exists()


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> list[str]:
    """Have a release to download; return the addresses that were asked for."""
    asked: list[str] = []

    def fetch(url: str, **_: object) -> bytes:
        asked.append(url)
        return tarball(juicefs=runs(tmp_path))

    monkeypatch.setattr(download, "fetch", fetch)
    return asked


@pytest.mark.parametrize("empty", [False, True], ids=["no resource", "a placeholder"])
def test_without_a_resource_the_pinned_release_is_fetched_once(
    release: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, empty: bool
):
    resource = tmp_path / "resource" if empty else None
    if resource is not None:
        resource.write_bytes(b"")
    digest = hashlib.sha256(tarball(juicefs=runs(tmp_path))).hexdigest()
    monkeypatch.setattr(juicefs, "_SHA256", {"amd64": digest, "arm64": digest})
    target = tmp_path / "juicefs"
    assert juicefs.ensure_program(target, resource)
    assert not juicefs.ensure_program(target, resource)
    assert juicefs.version(target) == (1, 3, 1)
    (asked,) = release
    assert asked.startswith(
        f"https://github.com/juicedata/juicefs/releases/download/v{juicefs.RELEASE}/juicefs-{juicefs.RELEASE}-linux-"
    )


def test_a_release_with_another_checksum_is_not_installed(
    release: list[str], tmp_path: pathlib.Path
):
    problem = f"juicefs {juicefs.RELEASE}: what github.com sent has another checksum"
    with pytest.raises(juicefs.DownloadError, match=re.escape(problem)):
        juicefs.ensure_program(tmp_path / "juicefs", None)
    assert not (tmp_path / "juicefs").exists()
