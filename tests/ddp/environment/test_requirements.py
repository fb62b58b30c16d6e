"""A user's own environments: the requirements that are read, and which environment a job takes."""

import dataclasses
import pathlib
import tempfile

import hypothesis
import hypothesis.strategies as st
import pytest
from cluster import Cluster
from pip_double import Pip

from ddp.actions import verbs
from ddp.environment import requirements, store
from ddp.options import fields
from ddp.problem import ParameterError
from ddp.results.result import texts_of
from ddp.settings import Settings
from ddp.workspace import folders


def do(settings: Settings, verb: str, **params: object) -> dict[str, str]:
    with settings.workspace.claims:
        given = {name.replace("_", "-"): value for name, value in params.items()}
        return texts_of(
            verbs.ALL[verb].do(
                settings, fields.parse(verbs.ALL[verb].options, given), lambda _: None
            )
            or {}
        )


@pytest.fixture
def wanted(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "requirements.txt"
    path.write_text("einops>=0.8\n-r more.txt\n-c https://example.org/pins.txt\n")
    (tmp_path / "more.txt").write_text("tqdm\n--requirement=requirements.txt\n")
    return path


def test_a_file_is_known_by_its_content_and_by_what_it_includes(wanted: pathlib.Path):
    first = requirements.digest(wanted)
    assert requirements.digest(wanted) == first
    for changed in (wanted.with_name("more.txt"), wanted):
        changed.write_text(f"{changed.read_text()}# another\n")
        assert requirements.digest(wanted) != first
        first = requirements.digest(wanted)


@pytest.mark.parametrize("name", ["x.txt", "x.txt/y", "dangling.txt"])
def test_a_file_that_cannot_be_read(tmp_path: pathlib.Path, name: str):
    (tmp_path / "dangling.txt").write_text("-rgone.txt\n")
    with pytest.raises(ParameterError, match=r"^requirements: .* cannot be read: "):
        requirements.digest(tmp_path / name)


_NAMES = st.from_regex(r"[a-z][a-z0-9_.-]{0,8}[a-z0-9]", fullmatch=True)
_TAILS = "|==1| >=2,<3|[a,b]~=1.0|; python_version < '3'| # ./x| @ https://h/x.whl#sha256=0|==1 --hash=x:0".split(
    "|"
)
_OTHERS = "|# -e .|--index-url https://h|-e git+https://h/x|git+ssh://h/x|https://h/x.whl|  --hash=x:0".split(
    "|"
)
_FINE = st.builds("{}{}".format, _NAMES, st.sampled_from(_TAILS)) | st.sampled_from(_OTHERS)
_HEADS = "-e |--editable=|  -e|x @ file:|./|../|\t/|file:|--require-hashes ".split("|")
_REFUSED = st.builds(
    "{}{}".format, st.sampled_from(["", *_HEADS]), st.sampled_from([".", "..", ".[train]"])
)


@hypothesis.given(st.lists(_FINE, max_size=6), _REFUSED, st.lists(_FINE, max_size=3))
def test_a_line_that_only_this_host_could_follow_is_refused_by_file_and_line(
    before: list[str], refused: str, after: list[str]
):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "r.txt")
        path.write_text("\n".join([*before, *after]))
        assert len(requirements.digest(path)) == 64
        path.write_text("\n".join([*before, refused, *after]))
        with pytest.raises(ParameterError) as caught:
            requirements.digest(path)
        assert str(caught.value).startswith(
            f"requirements: {path}:{len(before) + 1}: '{refused.strip()}' "
        )


@pytest.mark.parametrize(
    ("text", "extra", "found"),
    [
        (
            "[project]\ndependencies = ['a']",
            "train,x",
            ["pyproject.toml", "--extra=train", "--extra=x"],
        ),
        ("[tool.ruff]", None, ["requirements.txt"]),
        (
            "[project.optional-dependencies]\ntrain = ['a']",
            "train",
            ["pyproject.toml", "--extra=train"],
        ),
        (
            "[project]\ndynamic = ['dependencies']\n[project.optional-dependencies]",
            None,
            ["requirements.txt"],
        ),
        ("[project", "train", "extra: .*requirements.txt has none; a pyproject.toml may"),
    ],
)
def test_a_project_gives_its_dependencies(
    settings: Settings,
    cluster: Cluster,
    pip: Pip,
    tmp_path: pathlib.Path,
    text: str,
    extra: str | None,
    found: object,
):
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "requirements.txt").write_text("b")
    given = {"name": "mine", "project": str(tmp_path), **({"extra": extra} if extra else {})}
    if isinstance(found, str):
        with pytest.raises(ParameterError, match=f"^{found}"):
            do(settings, "env create", **given)
        return
    do(settings, "env create", **given)
    (call,) = (call for call in pip.calls if "-c" in call)
    at = call.index("-r") + 1
    assert [pathlib.PurePath(word).name for word in call[at : call.index("-r", at)]] == found


@pytest.mark.parametrize("is_own", [True, False])
def test_a_users_file_of_variables_lies_anywhere_and_an_operators_in_the_workspace(
    settings: Settings,
    cluster: Cluster,
    pip: Pip,
    wanted: pathlib.Path,
    tmp_path: pathlib.Path,
    *,
    is_own: bool,
):
    workspace = dataclasses.replace(settings.workspace, unit="trainer/0")
    settings = dataclasses.replace(settings, workspace=workspace, takes_any_script=is_own)
    (tmp_path / "keys.env").write_text("SITE_KEY=x\n")
    (tmp_path / "keys.env").chmod(0o600)
    given = {
        "workload": "smoke",
        "env_file": str(tmp_path / "keys.env"),
        "nodes": 1,
        "dry_run": True,
    }
    if is_own:
        do(settings, "submit", **given)
        return
    with pytest.raises(ParameterError, match=r"^env-file: .* is outside the workspace "):
        do(settings, "submit", **given)


def test_a_submission_with_the_same_requirements_uses_the_same_layer(
    settings: Settings, cluster: Cluster, pip: Pip, wanted: pathlib.Path
):
    (wanted.parent / "train.py").touch()
    given = {"workload": str(wanted.parent / "train.py"), "requirements": str(wanted), "nodes": 1}
    for run in ("first", "second"):
        calls = len(pip.calls)
        do(settings, "submit", run=run, **given)
    assert len(pip.calls) == calls
    first, second = (cluster.job(number).training().environment for number in (40, 41))
    assert first == second
    with pytest.raises(
        ParameterError, match=r"^requirements: environment brings packages, too; omit one of them$"
    ):
        do(settings, "submit", run="third", environment="mine", **given)


def test_an_environment_is_made_once_unless_forced_or_changed(
    settings: Settings, cluster: Cluster, pip: Pip, wanted: pathlib.Path
):
    def create(**more: object) -> int:
        pip.calls.clear()
        do(settings, "env create", **{"name": "mine", "requirements": str(wanted), **more})
        return len(pip.calls)

    assert create()
    (call,) = (call for call in pip.calls if "-c" in call)
    assert call[call.index("-r") + 1] == str(wanted)
    assert len([call for call in pip.calls if "--require-hashes" in call]) == 2, (
        "uv, and below the layer all others'"
    )
    assert create() == 0
    assert create(force=True)
    wanted.write_text("einops>=0.9\n")
    assert create()
    assert create(name="other")


def manifest(
    folder: pathlib.Path, letter: str, *, key: str, name: str = "mine", **more: str
) -> folders.Manifest:
    about = {
        "python": "3.12",
        "torch": "2.13.0",
        "build": "cpu",
        "created": "1",
        "size_bytes": 1,
        "unpacked_bytes": 1,
    }
    identity = {
        "key": key,
        "hash": letter * 16,
        "sha256": letter * 64,
        "name": name,
        "folder": str(folder),
    }
    return folders.Manifest.model_validate({**about, **identity, **more})


def test_the_users_own_goes_before_the_trainers_and_the_newest_first(settings: Settings, pip: Pip):
    key = store.Store(settings).key("cpu")
    own = [manifest(settings.workspace.environments, letter, key=key) for letter in "ab"]
    theirs = manifest(settings.workspace.path / "trainers", "c", key=key)
    alone = manifest(settings.workspace.path / "trainers", "d", key=key, name="shared")
    stale = manifest(settings.workspace.environments, "e", key="0" * 16, name="stale")
    contents = folders.Contents((theirs, alone, *own, stale), {}, is_writable=True)
    assert store.Store(settings).named(contents, "mine") is own[0]
    assert store.Store(settings).named(contents, "shared") is alone
    for name, what in {
        "x": "x does not exist; known: mine, shared, stale",
        "stale": "stale was made by another release of ddp",
    }.items():
        with pytest.raises(ParameterError) as caught:
            store.Store(settings).named(contents, name)
        assert (
            str(caught.value) == f"environment: {what}; ddp env create --requirements FILE {name}"
        )


@pytest.mark.parametrize("has_cpu_build", [True, False])
def test_environments_are_listed_shown_and_removed(
    settings: Settings, cluster: Cluster, pip: Pip, wanted: pathlib.Path, has_cpu_build: bool
):
    pip.cpu_wheel = has_cpu_build
    do(settings, "env create", name="mine", requirements=str(wanted))
    listed = do(settings, "env list")
    assert listed["count"] == "2"
    rows = {line.split()[0]: line for line in listed["environments"].splitlines()}
    assert rows["NAME"].split() == [
        "NAME",
        "HASH",
        "ON",
        "TORCH",
        "BUILD",
        "PYTHON",
        "MIB",
        "OWNER",
        "CREATED",
    ]
    row, base = rows["mine"], rows["-"]
    assert (row.split()[2], row.split()[-2]) == (base.split()[1], settings.workspace.user)
    assert (" 2.13.0+cpu  cpu  " if has_cpu_build else " 2.13.0  cpu (default build)  ") in row
    archive = pathlib.Path(do(settings, "env show", name="mine")["environment"])
    assert archive.is_file()
    removed = do(settings, "env remove", name="mine")
    assert removed == {"name": "mine", "removed": archive.name.removesuffix(".tar.zst")}
    assert not archive.exists()
    assert do(settings, "env list")["count"] == "1"
    for verb in ("env show", "env remove"):
        with pytest.raises(
            ParameterError,
            match=f"^name: {settings.workspace.user} has no environment mine; ddp env list$",
        ):
            do(settings, verb, name="mine")


def test_an_image_shares_list_and_names_with_environments(
    settings: Settings, cluster: Cluster, wanted: pathlib.Path
):
    folder = settings.workspace.environments
    image = manifest(
        folder,
        "a",
        key="b" * 16,
        name="torch",
        digest=f"sha256:{'c' * 64}",
        source="oci-archive:t.tar",
    )
    (folder / f"{image.hash}.json").write_text(image.model_dump_json())
    (folder / f"{image.hash}.tar.zst").write_text("x")
    row = do(settings, "env list")["environments"].splitlines()[1]
    assert row.split()[:5] == ["torch", image.hash, "-", "-", "image"]
    assert do(settings, "env show", name="torch")["digest"] == image.digest
    assert store.Store(settings).imported("torch") == settings.workspace.look().images[0]
    assert [
        store.Store(settings).imported(name) for name in (None, "/i/x.sqsh", "nvcr.io#a/b:1")
    ] == [None] * 3
    with pytest.raises(
        ParameterError, match=r"^container-image: x is not imported; known: torch; ddp image import"
    ):
        store.Store(settings).imported("x")
    remedy = "choose another name, or remove it; ddp env remove torch$"
    with pytest.raises(ParameterError, match=rf"^name: torch is an image; {remedy}"):
        do(settings, "env create", name="torch", requirements=str(wanted))
    do(settings, "env remove", name="torch")
    assert do(settings, "env list")["count"] == "0"


def test_an_environment_that_a_job_uses_stays(
    settings: Settings, cluster: Cluster, pip: Pip, wanted: pathlib.Path, tmp_path: pathlib.Path
):
    do(settings, "env create", name="mine", requirements=str(wanted))
    archive = do(settings, "env show", name="mine")["environment"]
    cluster.states = [("PENDING", 0)]
    script = tmp_path / "project" / "train.py"
    script.parent.mkdir()
    script.touch()
    do(settings, "submit", workload=str(script), run="night", environment="mine", nodes=1)
    used = cluster.job(40).training().environment
    assert used is not None
    assert [layer.path == archive for layer in used.layers] == [False, True]
    with pytest.raises(ParameterError, match=r"^name: mine is used by night; ddp cancel night$"):
        do(settings, "env remove", name="mine")
    assert pathlib.Path(archive).is_file()
    cluster.job(40).states = [("COMPLETED", 0)]
    do(settings, "env remove", name="mine")
    assert not pathlib.Path(archive).exists()
