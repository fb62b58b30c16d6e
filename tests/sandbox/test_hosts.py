"""The network and the image of hosts; the functional tests boot, reboot and remove them."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import unittest.mock

import pytest

from sandbox import image, network
from sandbox.store import SandboxError
from scripts import uv
from slurm_ddp.commands import CommandError, Completed

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_a_subnet_is_free_of_routes_and_of_other_models(monkeypatch: pytest.MonkeyPatch):
    routes = [{"dst": word} for word in ("default", "10.77.0.0/23", "10.77.2.5", "192.168.0.0/16")]
    monkeypatch.setattr(network, "run", lambda *_: Completed(0, json.dumps(routes), ""))
    first = network.free_subnet([])
    assert str(first) == "10.77.3.0/24"
    assert str(network.free_subnet([first])) == "10.77.4.0/24"


@pytest.fixture
def images(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty cache, for images whose building takes no time; returns the folder of the layers."""
    for name, value in (
        ("CACHE", tmp_path),
        ("PIP_CACHE", tmp_path / "pip"),
        ("ENVIRONMENTS", tmp_path / "env"),
    ):
        monkeypatch.setattr(image, name, value)
    monkeypatch.setattr(image, "_system_recipe", lambda: {"system": 1})
    monkeypatch.setattr(image, "pip_conf", lambda: ("", ()))
    for step in ("_build_system", "_install_packages", "run_step"):
        monkeypatch.setattr(image, step, lambda *_, **__: None)
    return tmp_path / "images"


def test_a_cached_image_is_not_built_again(images: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    built: list[pathlib.Path] = []
    monkeypatch.setattr(image, "_install_packages", lambda tree, _: built.append(tree))
    (images / ".new-killed").mkdir(parents=True)
    python, system = image.ensure_image(print).layers
    assert image.ensure_image(print).layers == (python, system)
    assert {path.name for path in images.iterdir()} == {
        ".lock",
        python.parent.name,
        system.parent.name,
    }
    shutil.rmtree(python.parent)
    assert image.ensure_image(print).layers == (python, system)
    monkeypatch.setattr(image, "_system_recipe", lambda: {"system": 2})
    assert not {python, system} & set(image.ensure_image(print).layers)
    assert len(built) == 3


@pytest.mark.parametrize(
    ("step", "error", "line", "layers"),
    [
        ("_build_system", KeyboardInterrupt(), "", 0),
        ("_build_system", CommandError("mmdebstrap failed"), "image: mmdebstrap failed", 0),
        (
            "_install_packages",
            uv.InstallError("no index"),
            "image: no index",
            1,
        ),  # the system was complete
    ],
    ids=repr,
)
def test_an_interrupted_build_never_counts(
    images: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: BaseException,
    line: str,
    layers: int,
):
    monkeypatch.setattr(image, step, unittest.mock.Mock(side_effect=error))
    with pytest.raises((KeyboardInterrupt, SandboxError), match=f"^{line}$"):
        image.ensure_image(print)
    assert len([path for path in images.iterdir() if path.name != ".lock"]) == layers


def clone(folder: pathlib.Path, **programs: str) -> None:
    """Copy the scripts that need an index into a clone with other commands of these names."""
    for name in (
        "sandboxctl",
        *(f"scripts/{name}.py" for name in ("__init__", "uv", "fetch_juicefs")),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name, script in programs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


def test_an_index_that_cannot_be_reached_ends_in_one_line_below_uvs_own(tmp_path: pathlib.Path):
    clone(tmp_path, **{"build/venvs/uv/bin/uv": "echo no route to index >&2; exit 2"})
    done = subprocess.run(
        [sys.executable, tmp_path / "scripts/fetch_juicefs.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == [
        "no route to index",
        "juicefs: packages could not be fetched from the indexes of pip's settings (`pip config list`); "
        "uv's message is above",
    ]


def test_sudo_keeps_what_pip_and_uv_read(tmp_path: pathlib.Path):
    same = dict.fromkeys(
        ("scripts/setup.sh", "scripts/venv.sh", "build/venvs/sandbox/bin/python"), ""
    )
    clone(tmp_path, **same, **{"bin/id": "echo 1000", "bin/sudo": "echo $1"})
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    printed = subprocess.run(
        [tmp_path / "sandboxctl"], env=env, capture_output=True, text=True, check=True
    ).stdout
    kept = printed.strip().removeprefix("--preserve-env=").split(",")
    assert len(kept) == len(set(kept))
    assert {f"PIP_{key.upper().replace('-', '_')}" for key in uv._KEYS} <= set(kept)
    assert set(uv._VARIABLES.values()) | {
        "PIP_CONFIG_FILE",
        "UV_FIND_LINKS",
        "REQUESTS_CA_BUNDLE",
    } <= set(kept)
    assert {"SLURM_DDP_PYTHON", "all_proxy", *image.host_proxies()} <= set(kept)


def test_only_old_layers_that_no_host_uses_are_removed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("current", "used", "recent", "old"):
        (tmp_path / "images" / name / "tree").mkdir(parents=True)
        os.utime(tmp_path / "images" / name, (0, 0) if name != "recent" else None)
    record = tmp_path / "models/m/hosts/h/host.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"layers": [f"{tmp_path}/images/used/tree"]}))
    monkeypatch.setattr(image.store, "ROOT", tmp_path / "models")
    image.prune(tmp_path / "images", {"current"})
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == [
        "current",
        "recent",
        "used",
    ]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo E: first; sleep 1; echo E: bye; exit 4", r"failed \(4\): E: first$"),
        ("sleep 100 & wait", "not done within 2 s"),
    ],
)
def test_a_step_is_never_silent_and_ends_in_its_first_error_or_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch, script: str, error: str
):
    monkeypatch.setattr(image, "_HEARTBEAT_S", 0.2)
    lines: list[str] = []
    with pytest.raises(CommandError, match=error):
        image.run_step("image: step", ["/bin/sh", "-c", script], lines.append, timeout_s=2)
    assert len(lines) > 1


@pytest.mark.parametrize(
    ("cert", "bundle"),
    [("global.cert='/somewhere/else.pem'", "/somewhere/else.pem"), ("", "/requests.pem")],
)
def test_pips_configuration_reaches_guests_and_uv(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, cert: str, bundle: str
):
    wheels, simple = tmp_path / "wheels", tmp_path / "index" / "simple"
    wheels.mkdir()
    simple.mkdir(parents=True)
    listing = f"""global.extra-index-url='file://{simple} https://example.org/simple'
{cert}
global.client-cert='/somewhere/own.pem'
:env:.find-links='{wheels}'
freeze.timeout='10'
broken line"""
    monkeypatch.setattr(uv, "_config_list", listing.splitlines)
    for name in (
        "UV_INDEX",
        "UV_FIND_LINKS",
        "UV_HTTP_TIMEOUT",
        "SSL_CERT_FILE",
        "SSL_CLIENT_CERT",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/requests.pem")
    uv.pip_settings.cache_clear()
    (text, folders), environment = image.pip_conf(), uv.environment()
    uv.pip_settings.cache_clear()
    assert folders == (tmp_path / "index", wheels)
    lines = [
        f"extra-index-url = file://{simple} https://example.org/simple",
        f"find-links = {wheels}",
    ]
    assert text.splitlines()[-2:] == lines
    assert "cert = /etc/ssl/certs/ca-certificates.crt" in text
    assert environment["UV_INDEX"] == f"file://{simple} https://example.org/simple"
    assert environment["UV_FIND_LINKS"] == str(wheels)
    assert environment["SSL_CERT_FILE"] == bundle
    assert environment["SSL_CLIENT_CERT"] == "/somewhere/own.pem"
    assert "UV_HTTP_TIMEOUT" not in environment


def test_certificates_are_added_only_where_the_guest_lacks_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    one, other = (
        b"-----BEGIN CERTIFICATE-----\n%s\n-----END CERTIFICATE-----" % name
        for name in (b"one", b"other")
    )
    bundle = tmp_path / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True)
    bundle.write_bytes(b"# comment\n" + one + b"\n")
    monkeypatch.setattr(image, "_host_certificates", lambda: one + b"\n" + other + b"\n")
    image.add_certificates(tmp_path)
    added = list((tmp_path / "usr/local/share/ca-certificates").iterdir())
    assert [path.read_bytes() for path in added] == [other + b"\n"]
