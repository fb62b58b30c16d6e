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

import pytest

from sandbox import gpus, hosts, image, network
from sandbox.guest import mock_gpus
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
def test_a_host_resolves_itself_and_no_other(one: hosts.Host, two: hosts.Host):
    assert output(one, "getent ahostsv4 one | grep STREAM; getent hosts localhost").split() == [
        one.address,
        "STREAM",
        "one",
        "::1",
        "localhost",
    ]
    assert output(two, f"getent hosts {two.address}").split() == [two.address, "two"]
    for name in ("two", "slurmd-0", "juju-2586ad-3"):
        begin = time.monotonic()
        for database in ("hosts", "ahosts"):
            assert one.run(["/usr/bin/getent", database, name], check=False).returncode == 2, name
        assert time.monotonic() - begin < 4, name  # a name server that does not respond would take 6 s each
    assert reaches(two, one)


@needs_root
def test_commands_have_a_clean_environment(one: hosts.Host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_SECRET", "of this machine")
    monkeypatch.setenv("JUJU_CONTEXT_ID", "x")
    names = {line.partition("=")[0] for line in output(one, "env").splitlines()}
    assert names - {"http_proxy", "https_proxy", "no_proxy"} == {"PATH", "LANG", "HOME", "PWD"}


@needs_root
def test_commands_that_fail_say_so_in_one_line(one: hosts.Host):
    with pytest.raises(SandboxError) as error:
        one.run(["/bin/sh", "-c", "echo first >&2; echo 'the reason' >&2; exit 3"])
    assert str(error.value) == "one: /bin/sh exited 3: the reason"
    assert one.run(["/bin/false"], check=False).returncode == 1


@needs_root
def test_a_command_that_takes_too_long_is_ended_inside_too(one: hosts.Host):
    with pytest.raises(SandboxError, match=r"^one: /bin/sleep: no answer within 0\.5 s$"):
        one.run(["/bin/sleep", "4711"], timeout=0.5)
    assert eventually(lambda: one.run(["/usr/bin/pgrep", "-f", "sleep 4711"], check=False).stdout == "")


@needs_root
def test_a_host_without_gpus_shows_none_whatever_this_machine_has(one: hosts.Host):
    script = "ls /proc/driver; cat /sys/bus/pci/devices/*/vendor | grep -c 0x10de; ls /dev | grep -c nvidia; true"
    assert output(one, script) == "0\n0"


@needs_root
def test_a_host_knows_when_it_was_booted_itself(one: hosts.Host):
    """slurmctld tells a reboot by this; hosts that share their machine's would never seem rebooted."""
    if subprocess.run(["unshare", "--time", "--boottime=-1", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this kernel, or this container, allows no time namespace")
    code = (
        "import time, ctypes; info = ctypes.create_string_buffer(256); ctypes.CDLL(None).sysinfo(info);"
        "print(open('/proc/uptime').read().split()[0], time.clock_gettime(time.CLOCK_BOOTTIME),"
        " ctypes.c_long.from_buffer(info).value)"
    )
    command = f'python3 -c "{code}"'
    first = [float(word) for word in output(one, command).split()]
    assert max(first) - min(first) <= 2
    begin = time.monotonic()
    one.reboot()
    again = [float(word) for word in output(one, command).split()]
    assert max(again) <= time.monotonic() - begin + 2
    assert output(one, "readlink /proc/self/ns/time") == output(one, "readlink /proc/1/ns/time")


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
    assert model.recover(show) == ["one", "two"]
    assert output(one, "cat /root/f") == "kept"
    assert reaches(two, one)
    assert model.recover(show) == []


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


@needs_root
def test_a_host_that_cannot_be_made_says_why(model: hosts.Hosts, tmp_path: pathlib.Path):
    four = model.create("four", binds={"/x": str(tmp_path)}, progress=show)
    four.kill()
    tmp_path.rmdir()
    with pytest.raises(SandboxError, match=rf"^four: {tmp_path} does not exist"):
        four.start(show)
    tmp_path.mkdir()
    model.destroy_host("four")


@needs_root
def test_a_host_of_another_version_of_the_sandbox_is_removed(tmp_path: pathlib.Path):
    model = hosts.Hosts("old", tmp_path)
    record = model.directory / "hosts" / "lone" / "host.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"machine": "sd00000000-lone", "gpus": {"count": 1, "model": "Mock GPU"}}))
    model.destroy()
    assert not model.directory.exists()


# --- cgroups ----------------------------------------------------------------------------------------------------------


CGROUP_V2 = pathlib.Path("/sys/fs/cgroup/cgroup.controllers").exists()
# How Slurm confines a job: with 64 MB of memory and without /dev/nvidia0. systemd does it the same way on version 2.
IN_V1 = r"""
for controller in memory devices cpuset freezer; do mkdir /sys/fs/cgroup/$controller/job_1 || exit 1; done
for file in cpuset.cpus cpuset.mems; do cat /sys/fs/cgroup/cpuset/$file > /sys/fs/cgroup/cpuset/job_1/$file; done
echo 64M > /sys/fs/cgroup/memory/job_1/memory.limit_in_bytes
echo "c 195:0 rwm" > /sys/fs/cgroup/devices/job_1/devices.deny
for group in /sys/fs/cgroup/*/job_1; do echo $$ > $group/cgroup.procs || exit 1; done
exec /bin/sh -c "$1"
"""
IN_V2 = """
exec systemd-run --quiet --pipe --wait --property=MemoryMax=64M --property=MemorySwapMax=0 --property=AllowedCPUs=0 \\
    --property=DevicePolicy=closed --property='DeviceAllow=/dev/nvidia1 rw' /bin/sh -c "$1"
"""
JOB = """
for card in 0 1; do LC_ALL=C cat /dev/nvidia$card 2>&1 | cut -d: -f3; done
python3 -c 'bytearray(200_000_000)' || echo $?
"""


@needs_root
def test_cgroups_in_a_host_confine_a_job_until_the_next_boot(two: hosts.Host):
    confined = two.run(["/bin/sh", "-c", IN_V2 if CGROUP_V2 else IN_V1, "sh", JOB]).stdout
    # No driver responds behind a mock device: that opening it was allowed shows in ENXIO
    assert [line.strip() for line in confined.splitlines()] == [
        "Operation not permitted",
        "No such device or address",
        "137",
    ]
    two.reboot()
    assert output(two, "find /sys/fs/cgroup -name 'job_1'") == ""


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


def test_addresses_are_given_again_when_they_are_free():
    net = network.Network("br", "10.77.3.0/24")
    assert str(net.gateway) == "10.77.3.1"
    assert net.address([]) == "10.77.3.10"
    assert net.address(["10.77.3.10", "10.77.3.12"]) == "10.77.3.11"
    with pytest.raises(SandboxError, match=r"^no free address in 10\.77\.3\.0/24$"):
        net.address([str(address) for address in net.subnet])


# --- the image --------------------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty cache, for images whose building takes no time; returns the folder of the layers."""
    for name, value in (("CACHE", tmp_path), ("PIP_CACHE", tmp_path / "pip"), ("ENVIRONMENTS", tmp_path / "env")):
        monkeypatch.setattr(image, name, value)
    monkeypatch.setattr(image, "_KEYRING", pathlib.Path("/etc/passwd"))
    monkeypatch.setattr(image.shutil, "which", lambda *_, **__: "/bin/true")
    monkeypatch.setattr(image, "_system_recipe", lambda: {"system": 1})
    monkeypatch.setattr(image, "_pip_conf", lambda: image._PipConf("", ()))
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


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
        (CommandError("mmdebstrap failed"), SandboxError, "image: mmdebstrap failed"),
    ],
)
def test_an_interrupted_build_never_counts(
    images: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    raised: type[BaseException],
    message: str,
):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(image, "_build_system", fail)
    with pytest.raises(raised, match=message or None):
        image.ensure_image(show)
    assert [path.name for path in images.iterdir()] == [".lock"]


def test_a_step_is_never_silent_and_ends_in_its_first_error_or_at_its_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(image, "_HEARTBEAT_S", 0.2)
    lines: list[str] = []
    with pytest.raises(CommandError, match=r"^image: step failed \(4\): E: no such package$"):
        image._step(
            "image: step", ["/bin/sh", "-c", "echo E: no such package; sleep 1; echo E: bye; exit 4"], lines.append
        )
    assert lines[0] == "image: step"
    assert any(line.endswith(": E: no such package") for line in lines[1:])
    with pytest.raises(CommandError, match=r"^image: step: not done within 0 s$"):
        image._step("image: step", ["/bin/sh", "-c", "sleep 100 & wait"], show, timeout_s=0.3)


def test_pips_configuration_reaches_guests_and_uv(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    wheels, simple = tmp_path / "wheels", tmp_path / "index" / "simple"
    wheels.mkdir()
    simple.mkdir(parents=True)
    listing = [
        f"global.find-links='{tmp_path}/nowhere'",
        f"global.extra-index-url='file://{simple} https://example.org/simple'",
        "global.cert='/somewhere/else.pem'",
        "global.trusted-host='example.org'",
        f":env:.find-links='{wheels}'",
        "freeze.timeout='10'",
        "broken line",
    ]
    monkeypatch.setattr(uv, "_config_list", lambda: listing)
    for name in ("UV_INDEX", "UV_FIND_LINKS", "UV_HTTP_TIMEOUT", "UV_INSECURE_HOST", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    uv.pip_settings.cache_clear()
    image._pip_conf.cache_clear()
    settings, environment = image._pip_conf(), uv.environment()
    uv.pip_settings.cache_clear()
    image._pip_conf.cache_clear()
    assert settings.folders == (tmp_path / "index", wheels)
    lines = settings.text.splitlines()
    assert f"extra-index-url = file://{simple} https://example.org/simple" in lines
    assert f"find-links = {wheels}" in lines
    assert "cert = /etc/ssl/certs/ca-certificates.crt" in lines
    assert not any(line.startswith("timeout") for line in lines)
    assert environment["UV_INDEX"] == f"file://{simple} https://example.org/simple"
    assert environment["UV_FIND_LINKS"] == str(wheels)
    assert environment["SSL_CERT_FILE"] == "/somewhere/else.pem"
    assert environment["UV_INSECURE_HOST"] == "example.org"
    assert "UV_HTTP_TIMEOUT" not in environment


def test_only_old_layers_that_no_host_uses_are_removed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    images, models = tmp_path / "images", tmp_path / "models"
    for name in ("current", "used", "recent", "old"):
        (images / name / "tree").mkdir(parents=True)
        os.utime(images / name, (0, 0) if name != "recent" else None)
    (images / ".lock").touch()
    record = models / "m" / "hosts" / "h" / "host.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"layers": [str(images / "used" / "tree")]}))
    monkeypatch.setattr(image, "HOSTS", models)
    image._prune(images, {"current"})
    assert sorted(path.name for path in images.iterdir()) == [".lock", "current", "recent", "used"]


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


# --- mock GPUs --------------------------------------------------------------------------------------------------------


def test_lists_and_masks_of_cpus_have_the_kernels_form():
    assert mock_gpus.ranges("0-3,8,10-11") == [(0, 3), (8, 8), (10, 11)]
    assert mock_gpus.mask([0, 1]) == "3"
    assert mock_gpus.mask([*range(32, 64)]) == "ffffffff,00000000"
    assert mock_gpus.mask([4, 68]) == "10,00000000,00000010"
