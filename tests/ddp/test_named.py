"""A user's own environments: the requirements that are read, what pip is asked for, and which one a job takes."""

import itertools
import pathlib
import typing

import pytest
from cluster import Cluster
from pip_double import Pip

from ddp import verbs
from ddp.base import ParameterError, Settings
from ddp.environment import environments, named
from ddp.options import fields
from ddp.workspace import folders


def write(folder: pathlib.Path, text: str | bytes, name: str = "requirements.txt") -> pathlib.Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(path: pathlib.Path) -> str:
    with pytest.raises(ParameterError) as caught:
        named.read(path)
    assert caught.value.name == "requirements"
    assert str(caught.value).isprintable()
    return str(caught.value).removeprefix("requirements: ")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("einops\n", ("einops",)),
        ("# mine\n\n  einops >= 0.8  # for rearrange\n\ttqdm\n", ("einops >= 0.8", "tqdm")),
        ("einops \\\n  >=0.8\n", ("einops    >=0.8",)),
        ("einops\\\r\n>=0.8\r\ntqdm\r\n", ("einops >=0.8", "tqdm")),
        ("x @ git+https://example.org/x.git#egg=x\n", ("x @ git+https://example.org/x.git#egg=x",)),
        ("--extra-index-url https://example.org/simple\neinops", ("--extra-index-url https://example.org/simple", "einops")),
        ('tomli; python_version < "3.11"', ('tomli; python_version < "3.11"',)),
        (b"\xef\xbb\xbfeinops\n", ("einops",)),
    ],
)  # fmt: skip
def test_a_list_of_requirements(tmp_path: pathlib.Path, text: str | bytes, lines: tuple[str, ...]):
    assert named.read(write(tmp_path, text)) == lines


@pytest.mark.parametrize(
    "line",
    [
        "-r other.txt", "-rother.txt", "--requirement other.txt", "--requirement=other.txt", "-c pins.txt", "-cpins.txt",
        "--constraint pins.txt", "-e .", "-e.", "--editable=.", "./mine", "../mine", "/srv/x.whl", "file:x.whl", ".",
        ".[dev]",
    ],
)  # fmt: skip
def test_what_lies_beside_the_file_is_not_taken(tmp_path: pathlib.Path, line: str):
    path = write(tmp_path, f"einops\n{line}\n")
    assert (
        refusal(path)
        == f"{path}: {line.split(maxsplit=1)[0]} is not taken; write the packages themselves into one file"
    )
    project = write(tmp_path, f'[project]\ndependencies = ["einops", "{line}"]\n', "pyproject.toml")
    assert "is not taken" in refusal(project)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "names no package"),
        (b"# einops\n\n \n", "names no package"),
        (b"einops\xff\n", "cannot be read: it is not UTF-8"),
        (b"#" * (named.MAX_BYTES + 1), f"has more than {named.MAX_BYTES} bytes"),
        (b"#" * (named.MAX_BYTES) + "\u00e9".encode(), f"has more than {named.MAX_BYTES} bytes"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: pathlib.Path, data: bytes, words: str):
    path = write(tmp_path, data)
    assert refusal(path) == f"{path} {words}"


def test_a_file_that_is_not_there_and_one_without_end(tmp_path: pathlib.Path):
    assert refusal(tmp_path / "x.txt") == f"{tmp_path}/x.txt cannot be read: No such file or directory"
    assert refusal(tmp_path) == f"{tmp_path} cannot be read: Is a directory"
    assert refusal(pathlib.Path("/dev/zero")) == f"/dev/zero has more than {named.MAX_BYTES} bytes"


def test_the_dependencies_of_a_project(tmp_path: pathlib.Path):
    text = '[project]\nname = "mine"\ndependencies = ["einops>=0.8", "tqdm"]\n[project.optional-dependencies]\ndev = ["x"]\n'
    assert named.read(write(tmp_path, text, "pyproject.toml")) == ("einops>=0.8", "tqdm")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[project\n", "Expected"),
        ('[project]\ndependencies = "einops"\n', "project.dependencies is no list of texts"),
        ("[project]\ndependencies = [1]\n", "project.dependencies is no list of texts"),
        ("project = 3\n", "project.dependencies is no list of texts"),
        ('[project]\ndependencies = ["einops\\n-r /etc/shadow"]\n', "-r is not taken"),
        ('[project]\ndynamic = ["dependencies"]\n', "names no package"),
        ('[tool.poetry.dependencies]\neinops = "*"\n', "names no package"),
    ],
)
def test_a_project_that_cannot_be_used(tmp_path: pathlib.Path, text: str, words: str):
    path = write(tmp_path, text, "pyproject.toml")
    assert refusal(path).startswith(str(path))
    assert words in refusal(path)


def do(settings: Settings, verb: str, **params: object) -> dict[str, str]:
    with settings.claims:
        given = {name.replace("_", "-"): value for name, value in params.items()}
        return verbs.ALL[verb].do(settings, fields.parse(verbs.ALL[verb].params, given), lambda _: None)


@pytest.fixture
def wanted(tmp_path: pathlib.Path) -> str:
    return str(write(tmp_path, "einops>=0.8\ntqdm\n"))


def test_what_every_environment_holds_keeps_its_versions(
    settings: Settings, cluster: Cluster, pip: Pip, wanted: str, monkeypatch: pytest.MonkeyPatch
):
    seen: dict[str, str] = {}
    install = pip.run

    def look(*argv: str | pathlib.Path, **how: typing.Any):
        for flag, path in itertools.pairwise(argv):
            if "pip" in argv and flag in ("-r", "-c"):
                seen[str(flag)] = pathlib.Path(path).read_text()
        return install(*argv, **how)

    monkeypatch.setattr(environments, "run", look)
    found = do(settings, "create-environment", name="mine", requirements=wanted)
    assert found["name"] == "mine"
    assert seen["-r"] == "einops>=0.8\ntqdm\n"
    assert seen["-c"] == f"numpy==2.0\ntorch=={environments.TORCH}+cpu\n"
    *_, last = (call for call in pip.calls if call[1:4] == ("-m", "pip", "install"))
    assert "-c" in last, "the user's come last, so they cannot replace what is there"


def test_an_environment_is_made_once_unless_forced_or_changed(
    settings: Settings, cluster: Cluster, pip: Pip, wanted: str, tmp_path: pathlib.Path
):
    do(settings, "create-environment", name="mine", requirements=wanted)
    made = len(pip.calls)
    do(settings, "create-environment", name="mine", requirements=wanted)
    assert len(pip.calls) == made
    do(settings, "create-environment", name="mine", requirements=wanted, force=True)
    assert len(pip.calls) == 2 * made
    write(tmp_path, "einops>=0.9\n")
    do(settings, "create-environment", name="mine", requirements=wanted)
    assert len(pip.calls) == 3 * made
    do(settings, "create-environment", name="other", requirements=wanted)
    assert len(pip.calls) == 4 * made


def test_pips_refusal_is_the_requirements_fault(
    settings: Settings, cluster: Cluster, pip: Pip, wanted: str, monkeypatch: pytest.MonkeyPatch
):
    install = pip.run

    def run(*argv: str | pathlib.Path, **how: typing.Any):
        pip.failure = (
            "ERROR: Cannot install numpy==1.0\nERROR: ResolutionImpossible" if "pip" in argv and "-c" in argv else ""
        )
        return install(*argv, **how)

    monkeypatch.setattr(environments, "run", run)
    with pytest.raises(ParameterError, match=r"^requirements: pip: Cannot install numpy==1\.0; ResolutionImpossible$"):
        do(settings, "create-environment", name="mine", requirements=wanted)
    assert not list(settings.environments.iterdir())


def manifest(folder: pathlib.Path, letter: str, created: str, *, key: str, name: str = "mine") -> folders.Manifest:
    return folders.Manifest(
        key=key, hash=letter * 16, sha256=letter * 64, size_bytes=1, unpacked_bytes=1, python="3.12", torch="2.13.0",
        build="cpu", created=created, name=name, folder=str(folder),
    )  # fmt: skip


def test_the_users_own_goes_before_the_trainers_and_the_newest_first(settings: Settings, pip: Pip):
    key = environments._key(settings, "cpu")
    other = settings.workspace / "trainers"
    own = [manifest(settings.environments, letter, "1", key=key) for letter in "ab"]
    theirs = manifest(other, "c", "2", key=key)
    alone = manifest(other, "d", "2", key=key, name="shared")
    contents = folders.Contents((theirs, alone, *own), {}, is_writable=True)
    assert environments.named(settings, contents, "mine").manifest is own[0]
    assert environments.named(settings, contents, "shared").manifest is alone
    with pytest.raises(ParameterError) as caught:
        environments.named(settings, contents, "x")
    hint = "there are: mine, shared; ddp env create x --requirements FILE"
    assert str(caught.value) == f"environment: there is none called x; {hint}"


def test_an_environment_of_another_release_is_refused(settings: Settings, pip: Pip):
    stale = manifest(settings.environments, "a", "1", key="0" * 16)
    with pytest.raises(ParameterError, match=r"^environment: mine was made by another release of ddp; make it again: "):
        environments.named(settings, folders.Contents((stale,), {}, is_writable=True), "mine")


def test_environments_are_listed_shown_and_removed(settings: Settings, cluster: Cluster, pip: Pip, wanted: str):
    do(settings, "create-environment", name="mine", requirements=wanted)
    listed = do(settings, "list-environments")
    assert listed["count"] == "1"
    heads, row = listed["environments"].splitlines()
    assert heads.split() == ["NAME", "HASH", "TORCH", "PYTHON", "SIZE", "OWNER", "CREATED"]
    assert (row.split()[0], row.split()[-2]) == ("mine", settings.user)
    archive = pathlib.Path(do(settings, "show-environment", name="mine")["environment"])
    assert archive.is_file()
    removed = do(settings, "remove-environment", name="mine")
    assert removed == {"name": "mine", "removed": archive.name.removesuffix(".tar.zst")}
    assert not archive.exists()
    assert do(settings, "list-environments")["count"] == "0"
    for verb in ("show-environment", "remove-environment"):
        with pytest.raises(ParameterError) as caught:
            do(settings, verb, name="mine")
        assert str(caught.value) == f"name: {settings.user} has no environment mine; see: ddp env list"


def test_an_environment_that_a_job_uses_stays(
    settings: Settings, cluster: Cluster, pip: Pip, wanted: str, tmp_path: pathlib.Path
):
    do(settings, "create-environment", name="mine", requirements=wanted)
    archive = do(settings, "show-environment", name="mine")["environment"]
    cluster.states = [("PENDING", 0)]
    script = tmp_path / "project" / "train.py"
    script.parent.mkdir()
    script.touch()
    do(settings, "submit-ddp", workload=str(script), run="night", environment="mine", nodes=1)
    used = cluster.job(40).training().environment
    assert used is not None
    assert used.archive == archive
    with pytest.raises(ParameterError) as caught:
        do(settings, "remove-environment", name="mine")
    assert str(caught.value) == "name: mine is used by night; wait for its end, or cancel it"
    assert pathlib.Path(archive).is_file()
    cluster.job(40).states = [("COMPLETED", 0)]
    do(settings, "remove-environment", name="mine")
    assert not pathlib.Path(archive).exists()
