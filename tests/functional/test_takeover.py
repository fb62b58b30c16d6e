"""An embedded volume outlives its application: a new deployment takes over the kept storage.

Each deployment is on a separate machine, as with a pool whose storage can move.
"""

import pathlib
import re
import subprocess
import typing

import pytest

from functional.conftest import MODEL, REPOSITORY, Answer, Cluster, deployed, eventually
from functional.storage_faults import APP, MP, PROXY

pytestmark = pytest.mark.timeout(1500)
BUNDLE = REPOSITORY / "tests" / "functional" / "takeover.yaml"
CHARM = REPOSITORY / "dist" / "juicefs-server-proxy.charm"
STEPS = ("backing up its metadata", "renewing its keys", "mounting it for a trial")
STORAGE = "/var/lib/juju/storage/volume-0"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> typing.Iterator[Cluster]:
    """Deploy a volume and one host that mounts it, with a file in it."""
    with deployed(
        Cluster(f"{MODEL[:4]}take"), lambda one: one.ctl("deploy", "--once", str(BUNDLE))
    ) as one:
        eventually(lambda: check_mounted(one))
        script = f"cd {MP} && head -c 9000000 /dev/urandom > kept && echo small > small && sha256sum kept small > sums"
        one.on("sackd/0", "bash", "-c", script)
        yield one


def check_mounted(one: Cluster) -> None:
    found = one.exec("sackd/0", "findmnt", "-rno", "SOURCE", MP)
    assert found.out.split() == ["JuiceFS:shared"]


def check_files(one: Cluster) -> None:
    """Check that a client reads the earlier files, and can write."""
    eventually(lambda: check_mounted(one))
    assert one.on("sackd/0", "bash", "-c", f"cd {MP} && sha256sum -c sums && touch new && rm new")


def server_unit(one: Cluster, app: str = PROXY) -> str:
    return next(name for name in one.units() if name.startswith(f"{app}/"))


def server(one: Cluster, app: str = PROXY) -> tuple[str, str]:
    """Return the state and the message of the volume's server."""
    unit = one.units()[server_unit(one, app)]
    return unit["workload-status"]["current"], unit["workload-status"]["message"]


def remove(one: Cluster, app: str = PROXY) -> None:
    one.ok("remove-application", "--no-prompt", app)
    assert re.search(r"volume/0 .*detached", one.ok("storage"))


def bring_back(one: Cluster, app: str, *options: str) -> Answer:
    return one.ctl("deploy", "--once", str(CHARM), app, "--attach-storage", "volume/0", *options)


def mount(one: Cluster, app: str = PROXY) -> None:
    one.ok("integrate", "--once", f"{app}:filesystem", f"{APP}:filesystem")


@pytest.mark.long
@pytest.mark.parametrize("steps", [STEPS[2:], STEPS[:2]], ids=["last", "others"])
def test_a_new_deployment_takes_the_volume_over_although_its_hook_is_killed(
    small: Cluster, steps: tuple[str, ...]
):
    remove(small)
    command = [REPOSITORY / "sandboxctl", "--model", small.model, "deploy", "--once", str(CHARM)]
    left, shown = list(steps), list[str]()
    with subprocess.Popen(
        [*command, "--attach-storage", "volume/0"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as deploy:
        assert deploy.stderr is not None
        for line in deploy.stderr:
            shown.append(line)
            if left and left[0] in line:
                unit = re.findall(rf"{PROXY}/\d+", line)[0]
                small.exec(unit, "pkill", "-KILL", "-f", "/var/lib/sandbox/agent.py")
                left.pop(0)
    text = "".join(shown)
    assert deploy.returncode == 0, text
    assert not left, text
    assert text.count("the host stopped in the middle of the hook") == len(steps), text
    mount(small)
    check_files(small)
    level, message = server(small)
    assert (level, message.split(":")[0]) == ("active", "serving volume shared from this unit")
    name = server_unit(small)
    assert name != f"{PROXY}/0", "Juju goes on counting"
    leftovers = small.on(
        name,
        "bash",
        "-c",
        "cat /proc/mounts; ls -A /run/slurm-ddp; pgrep -fa 'juicefs.*mount' || true",
    )
    assert "trial" not in leftovers
    check_no_secret(small, name)


def check_no_secret(one: Cluster, unit: str) -> None:
    """See that the volume's settings hold the key encrypted, and no report or note holds it."""
    places = f"{STORAGE}/{PROXY} /var/lib/slurm-ddp /etc/slurm-ddp /run/slurm-ddp"
    for secret in one.secrets().values():
        assert one.exec(unit, "grep", "-rlF", "--", secret, *places.split()).out == ""
    kept = one.on(
        unit, "bash", "-c", 'zgrep -hoE \'"SecretKey": *"[^"]*\' /var/lib/slurm-ddp/*/backups/*'
    )
    assert {line.rpartition('"')[2] for line in kept.splitlines()} == {"removed"}


@pytest.mark.long
def test_an_application_of_another_name_asks_for_the_uuid_first(small: Cluster):
    remove(small)
    # The accounts have other numbers on another machine
    kept = pathlib.Path(f"/var/lib/slurm-ddp/{small.model}/storage/volume-0")
    subprocess.run(
        ["chown", "-R", "4321:4321", kept / "metadata", kept / "objects/data"], check=True
    )
    bring_back(small, "pool")
    level, message = server(small, "pool")
    assert level == "blocked"
    (uuid,) = re.findall(r"adopt=([0-9a-f-]{36})", message)
    try:
        mount(small, "pool")
        small.ok("config", "--once", "pool", f"adopt={uuid}")
        check_files(small)
        assert server(small, "pool")[0] == "active"
    finally:
        remove(small, "pool")
    assert bring_back(small, PROXY, "--config", f"adopt={uuid}").code == 0
    mount(small)
    check_files(small)


@pytest.mark.long
def test_storage_with_the_data_of_another_volume_is_refused(small: Cluster):
    remove(small)
    kept = pathlib.Path(
        f"/var/lib/slurm-ddp/{small.model}/storage/volume-0/objects/data/shared/juicefs_uuid"
    )
    text = kept.read_text()
    kept.write_text("11111111-2222-3333-4444-555555555555")
    bring_back(small, PROXY)
    level, message = server(small)
    assert (level, message.split(":")[0]) == ("blocked", "attach all of the storage")
    remove(small)
    kept.write_text(text)
    assert bring_back(small, PROXY).code == 0
    mount(small)
    check_files(small)


@pytest.mark.long
def test_destroy_storage_leaves_none(small: Cluster):
    small.ok("remove-application", "--no-prompt", "--destroy-storage", PROXY)
    assert "volume/" not in small.ok("storage")
    assert "volume/0" in small.ctl("deploy", str(CHARM), "--attach-storage", "volume/0").error
