"""Deploy the bundle once, on the current controller; without a controller the lane fails, in one line."""

import json
import shutil
import subprocess

import pytest
import yaml
from deployed import ROOT, Cluster, OpsTest


def pytest_sessionstart(session: pytest.Session) -> None:
    """End the session, as failed, when there is nothing to test on."""
    if problem := _missing():
        pytest.exit(f"integration: {problem}", returncode=1)


def _missing() -> str | None:
    if shutil.which("juju") is None:
        return "no juju client here; sudo snap install juju --channel 3.6/stable, then juju bootstrap"
    asked = subprocess.run(["juju", "show-controller", "--format", "json"], check=False, capture_output=True, text=True)
    if asked.returncode != 0 or not asked.stdout.strip("{}\n "):
        return "juju has no current controller; juju bootstrap makes one, juju switch chooses one"
    bundle = yaml.safe_load((ROOT / "bundle.yaml").read_text())
    local = {body["charm"] for body in bundle["applications"].values() if body["charm"].startswith("./")}
    if absent := sorted(path for path in local if not (ROOT / path).is_file()):
        return f"not packed: {', '.join(absent)}; make pack"
    return None


@pytest.fixture(scope="module")  # asyncio_mode = auto runs it on the loop of pytest-operator
async def cluster(ops_test: OpsTest) -> Cluster:
    """The bundle, deployed and active. On LXD with the overlay that asks for virtual machines."""
    cluster = Cluster(ops_test)
    if "slurmctld" not in (await cluster.status())["applications"]:
        model = json.loads(await cluster.juju("show-model", "--format", "json"))
        (details,) = model.values()
        overlays = ["--overlay", str(ROOT / "overlays/lxd.yaml")] if details["type"] == "lxd" else []
        await cluster.juju("deploy", str(ROOT / "bundle.yaml"), *overlays)
    await cluster.wait_until_active()
    return cluster
