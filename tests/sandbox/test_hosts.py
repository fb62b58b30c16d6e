"""Hosts: booted, reached, rebooted, lost, found again and removed without a trace. Real ones, so as root."""

import collections.abc
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import unittest.mock

import pytest

from sandbox import gpus, hosts, image, network
from sandbox.store import SandboxError
from scripts import uv
from slurm_ddp.run import CommandError, Completed, run

ROOT = pathlib.Path("/var/lib/slurm-ddp-tests")
MODEL = "t"
HERE = pathlib.Path(__file__).resolve().parents[2]
LONG_S = 120  # a deadline for what takes a moment on a machine with nothing else to do

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="boots systemd in containers, which only root can do")


def show(text: str) -> None:
    """Progress, for whoever watches the tests."""
    sys.stderr.write(f"{text}\n")


@pytest.fixture(scope="module")
def model():
    ROOT.mkdir(exist_ok=True)
    model = hosts.Hosts(MODEL, ROOT)
    model.destroy()  # what an interrupted run left
    model.up(show)
    yield model
    model.destroy()
    assert eventually(lambda: not (ROOT / ".trash").exists())  # deleted in the background
    shutil.rmtree(ROOT)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("shared")
    (path / "hello").write_text("from outside\n")
    return path


@pytest.fixture(scope="module")
def one(model: hosts.Hosts, shared: pathlib.Path) -> hosts.Host:
    return model.create("one", binds={"/srv/shared": str(shared)}, progress=show)


@pytest.fixture(scope="module")
def two(model: hosts.Hosts) -> hosts.Host:
    return model.create("two", gpus=(gpus.Gpu("Mock GPU"),) * 2, progress=show)


def output(host: hosts.Host, script: str) -> str:
    return host.run(["/bin/sh", "-c", script]).stdout.strip()


def reaches(host: hosts.Host, other: hosts.Host) -> bool:
    """Whether the host can send something to the other and gets it back, perhaps not at once."""
    script = (
        f"for i in 1 2 3 4 5; do ping -c1 -W10 -q {other.address} >/dev/null && echo reached && break; sleep 1; done"
    )
    return output(host, script) == "reached"


def eventually(check: collections.abc.Callable[[], bool]) -> bool:
    """Whether this comes to hold within a long time."""
    deadline = time.monotonic() + LONG_S
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


# --- hosts ------------------------------------------------------------------------------------------------------------


@needs_root
def test_a_command_that_takes_too_long_is_ended_inside_too(one: hosts.Host):
    with pytest.raises(SandboxError, match=r"^one: /bin/sleep: no answer within 0\.5 s$"):
        one.run(["/bin/sleep", "4711"], timeout=0.5)
    assert eventually(lambda: one.run(["/usr/bin/pgrep", "-f", "sleep 4711"], check=False).stdout == "")


@needs_root
def test_a_command_in_the_host_does_not_hold_up_its_end(one: hosts.Host):
    """systemd stops all processes before it ends them: a parent outside that waits for one must not stop with it."""
    process = one.popen(["/bin/sleep", "1000"])
    one.kill()
    assert process.wait(timeout=LONG_S) != 0
    assert not one.is_running()
    with pytest.raises(SandboxError, match=r"^one does not run$"):
        one.run(["/bin/true"])
    one.start(show)


@needs_root
def test_a_model_recovers_what_a_restart_of_this_machine_took(model: hosts.Hosts, one: hosts.Host, two: hosts.Host):
    output(one, "echo kept > /root/f && sync /root/f")
    one.kill()
    two.kill()
    run("/usr/bin/umount", one.root)
    run("/usr/sbin/ip", "link", "delete", model.network.bridge)
    model.up(show)
    model.recover(show)
    assert output(one, "cat /root/f") == "kept"
    assert reaches(two, one)


@needs_root
def test_a_recycled_pid_is_never_taken_for_the_host(model: hosts.Hosts, two: hosts.Host):
    if pathlib.Path("/run/systemd/system").is_dir():
        pytest.skip("under systemd no pid is recorded")
    two.kill()
    with subprocess.Popen(["/bin/sleep", "1000"]) as stranger:
        boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        (two.directory / "process").write_text(f"{stranger.pid} 1 {boot_id}\n")
        assert not two.is_running()
        two.kill()
        two.start(show)
        assert stranger.poll() is None
        stranger.send_signal(signal.SIGTERM)
    assert two.is_running()


# --- names and network ------------------------------------------------------------------------------------------------


def test_a_subnet_is_free_of_routes_and_of_other_models(monkeypatch: pytest.MonkeyPatch):
    routes = [
        {"dst": "default", "dev": "eth0"},
        {"dst": "10.77.0.0/23"},
        {"dst": "10.77.2.5"},
        {"dst": "192.168.0.0/16"},
    ]
    monkeypatch.setattr(network, "run", lambda *_: Completed(0, json.dumps(routes), ""))
    first = network.free_subnet([])
    assert str(first) == "10.77.3.0/24"
    assert str(network.free_subnet([first])) == "10.77.4.0/24"


# --- the image --------------------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty cache, for images whose building takes no time; returns the folder of the layers."""
    for name, value in (("CACHE", tmp_path), ("PIP_CACHE", tmp_path / "pip"), ("ENVIRONMENTS", tmp_path / "env")):
        monkeypatch.setattr(image, name, value)
    monkeypatch.setattr(image, "_KEYRING", pathlib.Path("/etc/passwd"))
    monkeypatch.setattr(image.shutil, "which", lambda *_, **__: "/bin/true")
    monkeypatch.setattr(image, "_system_recipe", lambda: {"system": 1})
    monkeypatch.setattr(image, "_pip_conf", lambda: ("", ()))
    for step in ("_build_system", "_install_packages", "_step"):
        monkeypatch.setattr(image, step, lambda *_, **__: None)
    return tmp_path / "images"


def test_what_is_cached_is_not_built_again(images: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    built: list[pathlib.Path] = []
    monkeypatch.setattr(image, "_install_packages", lambda tree, _: built.append(tree))
    (images / ".new-killed").mkdir(parents=True)
    python, system = image.ensure_image(show).layers
    assert image.ensure_image(show).layers == (python, system)
    assert {path.name for path in images.iterdir()} == {".lock", python.parent.name, system.parent.name}
    shutil.rmtree(python.parent)
    assert image.ensure_image(show).layers == (python, system)
    monkeypatch.setattr(image, "_system_recipe", lambda: {"system": 2})
    assert not {python, system} & set(image.ensure_image(show).layers)
    assert len(built) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CommandError("mmdebstrap failed")], ids=repr)
def test_an_interrupted_build_never_counts(images: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: BaseException):
    monkeypatch.setattr(image, "_build_system", unittest.mock.Mock(side_effect=error))
    with pytest.raises((KeyboardInterrupt, SandboxError)):
        image.ensure_image(show)
    assert [path.name for path in images.iterdir()] == [".lock"]


def test_only_old_layers_that_no_host_uses_are_removed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("current", "used", "recent", "old"):
        (tmp_path / "images" / name / "tree").mkdir(parents=True)
        os.utime(tmp_path / "images" / name, (0, 0) if name != "recent" else None)
    record = tmp_path / "models/m/hosts/h/host.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"layers": [f"{tmp_path}/images/used/tree"]}))
    monkeypatch.setattr(image.store, "ROOT", tmp_path / "models")
    image._prune(tmp_path / "images", {"current"})
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["current", "recent", "used"]


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
        image._step("image: step", ["/bin/sh", "-c", script], lines.append, timeout_s=2)
    assert len(lines) > 1


def test_pips_configuration_reaches_guests_and_uv(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    wheels, simple = tmp_path / "wheels", tmp_path / "index" / "simple"
    wheels.mkdir()
    simple.mkdir(parents=True)
    listing = [
        f"global.extra-index-url='file://{simple} https://example.org/simple'",
        "global.cert='/somewhere/else.pem'",
        f":env:.find-links='{wheels}'",
        "freeze.timeout='10'",
        "broken line",
    ]
    monkeypatch.setattr(uv, "_config_list", lambda: listing)
    for name in ("UV_INDEX", "UV_FIND_LINKS", "UV_HTTP_TIMEOUT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    uv.pip_settings.cache_clear()
    image._pip_conf.cache_clear()
    (text, folders), environment = image._pip_conf(), uv.environment()
    uv.pip_settings.cache_clear()
    image._pip_conf.cache_clear()
    assert folders == (tmp_path / "index", wheels)
    lines = [f"extra-index-url = file://{simple} https://example.org/simple", f"find-links = {wheels}"]
    assert text.splitlines()[-2:] == lines
    assert "cert = /etc/ssl/certs/ca-certificates.crt" in text
    assert environment["UV_INDEX"] == f"file://{simple} https://example.org/simple"
    assert environment["UV_FIND_LINKS"] == str(wheels)
    assert environment["SSL_CERT_FILE"] == "/somewhere/else.pem"
    assert "UV_HTTP_TIMEOUT" not in environment


def test_certificates_are_added_only_where_the_guest_lacks_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    one, other = (b"-----BEGIN CERTIFICATE-----\n%s\n-----END CERTIFICATE-----" % name for name in (b"one", b"other"))
    bundle = tmp_path / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True)
    bundle.write_bytes(b"# comment\n" + one + b"\n")
    monkeypatch.setattr(image, "_host_certificates", lambda: one + b"\n" + other + b"\n")
    image._add_certificates(tmp_path)
    added = list((tmp_path / "usr/local/share/ca-certificates").iterdir())
    assert [path.read_bytes() for path in added] == [other + b"\n"]
