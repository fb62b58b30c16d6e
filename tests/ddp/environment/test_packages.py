"""Where packages come from: real uv and pip, and package indexes on the loopback."""

import collections.abc
import dataclasses
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import indexes
import pytest
from cluster import Cluster
from indexes import make_wheel

from ddp.environment import builder, uv
from ddp.node import spec, unpacking
from ddp.settings import Settings
from ddp.workspace import folders
from ddp.workspace.folders import Workspace

ROOT = pathlib.Path(__file__).parents[3]
CPU, DEFAULT = f"{uv.TORCH}+cpu", uv.TORCH
PROGRAM = pathlib.Path(sys.executable).with_name("uv")


@pytest.fixture
def packages(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder of three indexes: the site's has the default build, and uv, which starts the real one."""
    folder = tmp_path / "packages"
    make_wheel(folder / "site", "torch", DEFAULT, requires="cudalib")
    make_wheel(folder / "site", "cudalib", "1")
    make_wheel(folder / "site", "numpy", "2.0")
    make_wheel(folder / "site", "numpy", "1.0")
    make_wheel(folder / "pytorch", "torch", CPU, requires="not-there")
    make_wheel(folder / "more", "torch", CPU)
    return folder


@pytest.fixture
def url(packages: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> collections.abc.Iterator[str]:
    """The indexes' URL; nothing of this machine's settings of pip is used."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(uv, "CONNECT_S", 1)
    with indexes.serve(packages) as url:
        monkeypatch.setattr(uv, "PYTORCH_INDEX", f"{url}/pytorch")
        monkeypatch.setenv("PIP_INDEX_URL", f"{url}/site")
        yield url


@pytest.fixture
def pinned(
    packages: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> pathlib.Path:
    """Pin the uv in the site's index by its hash; return its wheel."""
    script = f'#!/bin/sh\nexec {PROGRAM} "$@"\n'
    wheel = make_wheel(packages / "site", "uv", "0.1", files={"uv-0.1.data/scripts/uv": script})
    monkeypatch.setattr(uv, "PINNED", tmp_path / "uv.txt")
    uv.PINNED.write_text(
        f"uv==0.1 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    )
    return wheel


@pytest.fixture
def installer(url: str, tmp_path: pathlib.Path) -> uv.Uv:
    """uv for a new environment, with pip's settings."""
    subprocess.run(
        [PROGRAM, "venv", "-q", "--no-config", "--python", sys.executable, tmp_path / "env"],
        check=True,
    )
    variables, options = uv.site((sys.executable, "-m", "pip"))
    cache = {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_HTTP_RETRIES": "0"}
    return uv.Uv(str(PROGRAM), str(tmp_path / "env" / "bin" / "python"), cache | variables, options)


def install(installer: uv.Uv, index: str = "") -> list[str]:
    """Install torch for CPUs; return the reported steps."""
    reported: list[str] = []

    def do(text: str, work: collections.abc.Callable[[], None]) -> None:
        reported.append(text)
        work()

    uv.install_cpu_torch(installer, do, index=index)
    return reported


def freeze(python: str | pathlib.Path) -> list[str]:
    """List the packages installed for a Python."""
    argv = [PROGRAM, "pip", "freeze", "-q", f"--python={python}"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()


FIRST = f"installing torch=={CPU}"
SECOND = f"{FIRST} from PyTorch's index, as no configured index has it"
LAST = [
    FIRST,
    SECOND,
    uv.DEFAULT_BUILD.format("torch-index or a wheelhouse"),
    f"installing torch {DEFAULT}",
]


def test_the_configured_indexes_are_first(installer: uv.Uv, packages: pathlib.Path):
    make_wheel(packages / "site", "torch", CPU)
    assert install(installer) == [FIRST]
    assert freeze(installer.python) == [f"torch=={CPU}"]


def test_the_additional_index_is_one_of_them(installer: uv.Uv, url: str):
    assert install(installer, f"{url}/more") == [FIRST]
    assert freeze(installer.python) == [f"torch=={CPU}"]


def test_pytorchs_own_index_is_second_and_gives_torch_alone(installer: uv.Uv):
    assert install(installer) == [FIRST, SECOND]
    assert freeze(installer.python) == [f"torch=={CPU}"]


@pytest.mark.parametrize("pytorch", ["refuses", "hangs", "is empty"])
def test_the_default_build_is_last(
    installer: uv.Uv, pytorch: str, url: str, monkeypatch: pytest.MonkeyPatch
):
    with indexes.hang() as hanging:
        elsewhere = {"refuses": indexes.unused(), "hangs": hanging, "is empty": f"{url}/none"}[
            pytorch
        ]
        monkeypatch.setattr(uv, "PYTORCH_INDEX", elsewhere)
        assert install(installer) == LAST
    assert freeze(installer.python) == ["cudalib==1", f"torch=={DEFAULT}"]


@pytest.mark.parametrize(
    ("refuses", "reason"),
    [
        (False, ""),
        (True, r" \(PyTorch's index: tcp connect error: Connection refused \(os error 111\)\)"),
    ],
)
def test_without_any_torch_the_option_that_helps_is_named(
    installer: uv.Uv,
    packages: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    refuses: bool,
    reason: str,
):
    shutil.rmtree(packages / "pytorch")
    shutil.rmtree(packages / "site" / "torch")
    if refuses:
        monkeypatch.setattr(uv, "PYTORCH_INDEX", indexes.unused())
    with pytest.raises(uv.InstallError) as caught:
        install(installer)
    words = rf"uv: .*torch was not found .*unsatisfiable\.?{reason}; use torch-index or a wheelhouse with torch"
    assert re.fullmatch(words, str(caught.value)), str(caught.value)


def test_a_configured_index_that_fails_is_an_error_and_no_reason_to_download_more(installer: uv.Uv):
    with pytest.raises(
        uv.InstallError,
        match=r"^torch-index: uv: Failed to fetch: .*; correct torch-index, or use a wheelhouse$",
    ) as caught:
        install(installer, indexes.unused().replace("//", "//user:secret@"))
    assert "secret" not in str(caught.value)
    broken = dataclasses.replace(
        installer, variables=installer.variables | {"UV_DEFAULT_INDEX": indexes.unused()}
    )
    with pytest.raises(
        uv.InstallError, match=r"^uv: Failed to fetch: .*Connection refused"
    ) as caught:
        install(broken)
    assert not caught.value.is_unsatisfiable


@pytest.mark.parametrize("way", ["extra-index-url", "find-links", "proxy", "no-index"])
def test_uv_searches_what_pip_is_configured_with(
    way: str,
    url: str,
    packages: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
):
    """In a file and in variables; an index behind a proxy stands for the certificates, too."""
    monkeypatch.delenv("PIP_INDEX_URL")
    settings = {
        "extra-index-url": f"index-url = {url}/site\nextra-index-url =\n    {url}/none\n    {url}/more\n",
        "find-links": f"index-url = {url}/site\nfind-links = {url}/site/numpy {packages}/more/torch\n",
        "proxy": f"index-url = http://packages.invalid/more\nproxy = {url}\n",
        "no-index": f"no-index = true\nfind-links = {packages}/more/torch\n",
    }[way]
    (tmp_path / "pip.conf").write_text(f"[global]\n{settings}")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    installer: uv.Uv = request.getfixturevalue("installer")
    assert ("--no-index" in installer.options) == (way == "no-index")
    assert install(installer) == [FIRST]
    assert freeze(installer.python) == [f"torch=={CPU}"]


def test_variables_replace_files_and_an_empty_one_does_not(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    config = "[global]\nindex-url = https://a\ncert = /a.pem\nproxy = http://a\ntrusted-host = a b\n[install]\ncert = /b.pem\n"
    (tmp_path / "pip.conf").write_text(f"{config}target = /elsewhere\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://b")
    monkeypatch.setenv("PIP_PROXY", "")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    found, options = uv.site((sys.executable, "-m", "pip"))
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://a")
    assert found == proxies | {
        "UV_DEFAULT_INDEX": "https://b",
        "SSL_CERT_FILE": "/b.pem",
        "UV_INSECURE_HOST": "a b",
    }
    assert options == ()
    assert "PIP_TARGET" not in uv.pip_variables()


@pytest.fixture
def request_(
    settings: Settings,
    url: str,
    packages: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
):
    """The inputs of an environment whose locked package is in the site's index."""
    digest = hashlib.sha256(
        (packages / "site/numpy/numpy-2.0-py3-none-any.whl").read_bytes()
    ).hexdigest()
    (settings.payload / "requirements.txt").write_text(f"numpy==2.0 --hash=sha256:{digest}\n")
    monkeypatch.setattr(Workspace, "node_cache", property(lambda _: tmp_path / "nodes"))
    return builder.Request("cpu")


def make(settings: Settings, request: builder.Request) -> folders.Manifest:
    return builder.make(settings, request, "0" * 16, lambda _: None)


@pytest.mark.parametrize(
    ("version", "torch"),
    [(CPU, CPU), pytest.param(DEFAULT, f"{DEFAULT}+cu130", marks=pytest.mark.long)],
)
def test_a_layer_has_what_a_users_requirements_need_beyond_the_environment(
    version: str,
    torch: str,
    settings: Settings,
    request_: builder.Request,
    pinned: pathlib.Path,
    packages: pathlib.Path,
    cluster: Cluster,
    tmp_path: pathlib.Path,
):
    make_wheel(packages / "site", "torch", version)
    if version == DEFAULT:
        shutil.rmtree(packages / "pytorch")
    scripts = {
        "old-1.data/scripts/old": "#!python\nimport old, numpy\nprint(numpy.__version__)\n",
        "old.py": "",
    }
    make_wheel(packages / "site", "old", "1", requires="numpy<2", files=scripts)
    make_wheel(packages / "site", "tool", "1", requires="numpy<2")
    make_wheel(packages / "site", "tool", "0.1")  # it would fit the environment as it is
    make_wheel(packages / "site", "new", "1", requires="numpy>=2")
    made = make(settings, request_)
    assert (made.torch, made.build, made.name) == (torch, "cpu", "")
    argv = ["tar", "--zstd", "-ti", "-f", made.archive]
    listed = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    names = {part for name in listed.splitlines() for part in pathlib.PurePath(name).parts}
    assert {"numpy-2.0.dist-info", "torch", "ddptrain"} <= names
    assert "uv" not in names, "nodes need none"
    assert not (tmp_path / "nodes" / "build").exists(), (
        "neither the build's folder nor uv's cache stays"
    )
    own = tmp_path / "own.txt"
    own.write_text("numpy; python_version > '3'\n-r more.txt\n")
    (tmp_path / "more.txt").write_text("cudalib\nold\n")
    mine = dataclasses.replace(request_, name="mine", requirements=own, sha256="0" * 64, base=made)
    layer = make(settings, mine)
    assert (layer.torch, layer.base, layer.below) == (torch, made.hash, made)
    archives = [spec.Archive(one.archive, one.sha256, 1, "", one.parts) for one in (made, layer)]
    python, _ = unpacking.use(
        spec.Environment(tuple(archives), str(tmp_path / "node"), made.python, ()), "n"
    )
    homes = [tmp_path / "node" / one.hash for one in (layer, made)]
    shown = "import cudalib, numpy, sys, torch; print(numpy.__version__, *(m.__file__ for m in (torch, cudalib)))"
    output = subprocess.run(
        [python, "-I", "-c", shown], check=True, capture_output=True, text=True
    ).stdout.split()
    assert output[0] == "1.0"
    assert [
        pathlib.Path(file).is_relative_to(homes[place])
        for file, place in zip(output[1:], (1, 0), strict=True)
    ]
    assert (
        subprocess.run(
            [homes[0] / "bin" / "old"], check=True, capture_output=True, text=True
        ).stdout
        == "1.0\n"
    )
    assert not [
        path
        for home in homes
        for path in home.glob("bin/*")
        if b"/build/" in path.read_bytes()[:200]
    ]
    (tmp_path / "pyproject.toml").write_text(
        "[project]\nname = 'x'\nversion = '1'\ndependencies = ['tool']\n"
    )
    project = make(
        settings,
        dataclasses.replace(mine, requirements=tmp_path / "pyproject.toml", sha256="1" * 64),
    )
    argv = ["tar", "--zstd", "-ti", "-f", project.archive]
    assert (
        "/tool-1.dist-info/"
        in subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    )
    for text, why in {
        "new\nold\n": r"Because .*new depend on numpy>=2 and .*old depend on numpy<2, .*unsatisfiable",
        "torch==1\n": rf"Because you require torch==1 and torch=={re.escape(version)}, .*unsatisfiable",
        "numpy\n\nnumpy====1\n": rf"Couldn't parse requirement in {own}:3: no such comparison",
    }.items():
        own.write_text(text)
        with pytest.raises(uv.InstallError, match=f"^uv: .*{why}"):
            make(settings, mine)


def test_a_wheelhouse_is_the_only_source_and_brings_uv(
    settings: Settings,
    request_: builder.Request,
    pinned: pathlib.Path,
    packages: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("PIP_INDEX_URL", indexes.unused())
    house = settings.workspace.path / "wheels"
    house.mkdir()
    for wheel in [pinned, *packages.glob("more/*/*.whl"), *packages.glob("site/numpy/*-2.0-*.whl")]:
        shutil.copy(wheel, house)
    request = dataclasses.replace(request_, wheels=str(house))
    assert make(settings, request).torch == CPU
    (house / pinned.name).unlink()
    with pytest.raises(
        uv.InstallError, match=r"^pip: .*No matching distribution found for uv=="
    ) as caught:
        uv.bootstrap(pathlib.Path(sys.executable), settings.workspace.path / "uv", [str(house)])
    assert caught.value.is_unsatisfiable


@pytest.mark.long
def test_the_lanes_get_torch_in_the_same_order(
    url: str, pinned: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    subprocess.run([folders.PYTHON, "-m", "venv", tmp_path / "lane"], check=True)
    python = tmp_path / "lane" / "bin" / "python"
    script = ROOT / "scripts" / "install_torch.py"
    constants = (
        f"uv.PINNED = pathlib.Path({str(uv.PINNED)!r}); uv.PYTORCH_INDEX = {indexes.unused()!r}"
    )
    program = f"import sys, pathlib, runpy; sys.path.insert(0, {str(ROOT / 'lib')!r})\nfrom ddp.environment import uv\n"
    program += f"{constants}\nrunpy.run_path({str(script)!r}, run_name='__main__')\n"
    environ = {**os.environ, "PYTHONPATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(
        [python, "-"], input=program, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[:3] == [
        *(f"torch: {text}" for text in (FIRST, SECOND)),
        f"torch: {uv.DEFAULT_BUILD.format('PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS')}",
    ]
    assert f"torch=={DEFAULT}" in freeze(python)
    again = subprocess.run(
        [python, script], env=environ, capture_output=True, text=True, check=True
    )
    assert again.stdout == ""
