"""Paths on the command line may be anything: a pipe that blocks, an endless device, a folder."""

import collections.abc
import os
import pathlib
import shutil
import socket
import stat

import pytest
from cluster import Cluster
from command_line import typed
from pip_double import Pip

from ddp import cli
from ddp.actions import prerequisites, verbs
from ddp.host import files
from ddp.options import config, declared
from ddp.problem import ParameterError
from ddp.settings import Settings

pytestmark = pytest.mark.timeout(120)  # what reads a pipe or /dev/zero never ends
HUGE = 1 << 40  # of zeros, without any blocks


@pytest.fixture
def special(settings: Settings) -> collections.abc.Iterator[dict[str, pathlib.Path]]:
    """Special files in the workspace; a device as a link."""
    place = settings.workspace.path / "odd"
    place.mkdir()
    os.mkfifo(place / "pipe", 0o600)
    (place / "device").symlink_to("/dev/zero")
    (place / "folder").mkdir()
    (place / "to-pipe").symlink_to("pipe")
    (place / "loop").symlink_to("loop")
    with (place / "huge").open("wb") as file:
        file.truncate(HUGE)
    (place / "huge").chmod(0o600)
    here = pathlib.Path.cwd()
    os.chdir(place)  # the name of a socket has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        os.chdir(here)
        names = ("pipe", "device", "folder", "to-pipe", "loop", "huge", "socket", "missing")
        yield {name: place / name for name in names}


def test_only_a_file_is_read(special: dict[str, pathlib.Path], tmp_path: pathlib.Path):
    words = {
        "pipe": "a pipe",
        "device": "a device",
        "folder": "a folder",
        "to-pipe": "a pipe",
        "socket": "a socket",
    }
    for name, what in words.items():
        with pytest.raises(files.RefusedError, match=rf"^{special[name]} is {what}, not a file$"):
            files.read_named(special[name])
    with pytest.raises(files.RefusedError, match=rf"^{special['huge']} has more than 4096 KiB$"):
        files.read_named(special["huge"])
    for name in ("loop", "missing"):
        with pytest.raises(OSError, match=name):
            files.read_named(special[name])
    (tmp_path / "text").write_text("x" * 2048)
    (tmp_path / "link").symlink_to("text")
    assert files.read_named(tmp_path / "link", 2048) == b"x" * 2048
    with pytest.raises(files.RefusedError, match="can be read by others; type: chmod 600 "):
        files.read_named(tmp_path / "text", is_private=True)


# A command for each option that takes a path; {} is the path
COMMANDS = {
    "workload": "submit --dry-run {}",
    "env-file": "submit --dry-run --env-file {} smoke",
    "notify": "submit --dry-run --notify {} smoke",
    "function": "submit --function {} --module ddptrain.functions",
    "python": "submit --dry-run --python {} train.py",
    "Training.requirements": "submit --dry-run --requirements {} smoke",
    "requirements": "env create mine --requirements {}",
    "project": "env create mine --project {}",
    "wheelhouse": "env install --wheelhouse {}",
    "source": "prepare --source {}",
    "tokenizer": "prepare --tokenizer {}",
    "container-image": "submit --dry-run --container-image {} smoke",
    "dataset": "submit --dry-run --dataset {} gpt",
    "ImportImage.source": "image import docker-archive:{} mine",
    "output": "report night --output {}",
    "Fetch.to": "fetch night train.py --to {}",
}
WRITTEN = ("output", "Fetch.to")


@pytest.fixture
def user(
    settings: Settings,
    cluster: Cluster,
    pip: Pip,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user in the folder of a program, with a run."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cli, "settings_of", lambda _: settings)
    monkeypatch.setattr(prerequisites, "require", lambda *_, **__: None)
    real = shutil.which
    monkeypatch.setattr(
        shutil,
        "which",
        lambda name, **how: f"/bin/{name}" if name in ("skopeo", "umoci") else real(name, **how),
    )
    (tmp_path / "home").mkdir()
    (tmp_path / "proj").mkdir()
    (tmp_path / "proj" / "train.py").write_text("")
    monkeypatch.chdir(tmp_path / "proj")
    folder = settings.workspace.runs / "night"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "train.py").write_text("")
    (folder / "job.json").write_text(
        f'{{"job_id": 7, "kind": "script", "workdir": "{folder}/code"}}'
    )


def test_every_option_that_takes_a_path_is_tried_here():
    named = {
        option.name
        for verb in verbs.ALL.values()
        for option in declared.options(verb.options)
        if option.text.is_path or option.text.may_be_path
    }
    assert named == {name.rpartition(".")[2] for name in COMMANDS}


@pytest.mark.parametrize(
    "name", ["pipe", "device", "to-pipe", "loop", "socket", "folder", "huge", "missing"]
)
@pytest.mark.parametrize("option", COMMANDS)
def test_pipes_and_devices_are_refused_in_one_line_at_once(
    special: dict[str, pathlib.Path], user: None, option: str, name: str
):
    if option in WRITTEN and name == "missing":
        return  # it is made
    if option == "ImportImage.source" and name == "huge":
        return  # a file, which skopeo judges
    words = [word.format(special[name]) for word in COMMANDS[option].split()]
    code, _, err = typed(*words)
    lines = [line for line in err.splitlines() if line.startswith("ddp")]
    is_fine = code == 0 and (option in WRITTEN or name in ("huge", "folder"))
    assert is_fine or (code in (1, 2) and len(lines) == 1), err
    assert "Traceback" not in err


def test_a_requirement_is_included_only_from_a_file(
    special: dict[str, pathlib.Path], user: None, tmp_path: pathlib.Path
):
    for name in ("pipe", "device", "folder"):
        (tmp_path / "proj" / "r.txt").write_text(f"einops\n-r {special[name]}\n")
        code, _, err = typed("submit", "--dry-run", "--requirements", "r.txt", "smoke")
        assert (code, err.count("\n")) == (1, 1), err
        assert f"--requirements: {special[name]} is a {name}, not a file" in err


def test_a_configuration_that_is_a_pipe_is_refused(
    special: dict[str, pathlib.Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(config, "SYSTEM", special["pipe"])
    with pytest.raises(
        ParameterError, match=r"is a pipe, not a file; correct the file, or remove it$"
    ):
        config.load({})


def test_a_project_with_pipes_and_sockets_is_copied_without_them(
    special: dict[str, pathlib.Path], user: None, tmp_path: pathlib.Path
):
    os.mkfifo(tmp_path / "proj" / "pyproject.toml")
    code, _, err = typed("submit", "--dry-run", "train.py")
    assert code == 0, err
    os.mkfifo(tmp_path / "proj" / ".ddpignore")
    code, _, err = typed("submit", "train.py")
    assert code == 1
    assert f"{tmp_path}/proj/.ddpignore is a pipe, not a file" in err


def test_a_fetch_copies_the_files_and_names_what_it_left_out(
    settings: Settings, user: None, special: dict[str, pathlib.Path], tmp_path: pathlib.Path
):
    code = settings.workspace.runs / "night" / "code"
    (code.parent / "code.json").write_text("{}")
    for name in ("a", "out/z", "out/deep/y"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(name)
    os.mkfifo(code / "out" / "pipe")
    special["socket"].rename(code / "socket")
    if os.geteuid() == 0:
        os.mknod(code / "zeros", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    status, out, err = typed("fetch", "night", "--to", "got")
    got = tmp_path / "proj" / "got"
    assert status == 0, err
    names = sorted(str(path.relative_to(got)) for path in got.rglob("*") if not path.is_dir())
    assert names == ["a", "out/deep/y", "out/z", "train.py"]
    assert "out/pipe: is a pipe" in out
    assert "socket: is a socket" in out
    assert ("zeros: is a device" in out) == (os.geteuid() == 0)
    status, _, err = typed("fetch", "night", "out/pipe", "--to", "more")
    assert (status, f"{code}/out/pipe is a pipe, and there is nothing else to copy" in err) == (
        1,
        True,
    )
