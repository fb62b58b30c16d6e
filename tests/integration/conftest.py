"""Deploy the bundle once, on the current controller; without a controller the lane fails, in one line."""

import collections.abc
import pathlib
import secrets
import shutil

import clients
import pytest
import yaml
from deployed import DIST, ROOT, Cluster


def pytest_sessionstart(session: pytest.Session) -> None:
    """End the session, as failed, when there is nothing to test on."""
    if problem := _missing():
        pytest.exit(f"integration: {problem}", returncode=1)


def _missing() -> str | None:
    if shutil.which("juju") is None:
        return (
            "no juju client here; sudo snap install juju --channel 3.6/stable, then juju bootstrap"
        )
    if clients.controller_major() is None:
        return "juju has no current controller; juju bootstrap makes one, juju switch chooses one"
    bundle = yaml.safe_load((ROOT / "bundle.yaml").read_text())
    local = {
        pathlib.Path(body["charm"])
        for body in bundle["applications"].values()
        if body["charm"].startswith("./")
    }
    if absent := sorted(str(path) for path in local if not (DIST / path.name).is_file()):
        return f"not packed: {', '.join(absent)}; make pack"
    return None


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> collections.abc.Iterator[Cluster]:
    """The bundle, deployed and active."""
    with clients.connected(request) as client:
        cluster = Cluster(client)
        if "slurmctld" not in cluster.status()["applications"]:
            cluster.deploy()
            if client.major >= 4:
                _give_database(cluster)
        cluster.wait_until_active()
        yield cluster


def _give_database(cluster: Cluster) -> None:
    """Run MariaDB next to slurmdbd and hand it over, as docs/howto/deploy.md does for Juju 4."""
    unit, password = "slurmdbd/0", secrets.token_hex(16)
    cluster.wait_until(lambda: unit in cluster.started(), f"{unit} has a machine", timeout_s=1800)
    cluster.exec(unit, "DEBIAN_FRONTEND=noninteractive apt-get install --yes mariadb-server")
    cluster.exec(
        unit,
        'mariadb -e "CREATE DATABASE slurm_acct_db; '
        f"CREATE USER slurm IDENTIFIED BY '{password}'; GRANT ALL ON slurm_acct_db.* TO slurm;\"",
    )
    secret = cluster.juju(
        "add-secret", "slurm-db", f"db-uri=mysql://slurm:{password}@127.0.0.1:3306"
    ).strip()
    cluster.juju("grant-secret", "slurm-db", "mysql-proxy")
    cluster.juju("config", "mysql-proxy", f"db-uri={secret}")
