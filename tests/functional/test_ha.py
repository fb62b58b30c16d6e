"""Two controllers on a shared filesystem: overlays/ha.yaml, as in docs/howto/deploy.md."""

import typing

import pytest

from functional.conftest import MODEL, REPOSITORY, Cluster, deployed, eventually
from functional.test_bundle_runs import check_settled

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]
PRIMARY = "slurmctld/0"
BRISK = "applications: {slurmctld: {options: {slurm-conf-parameters: SlurmctldTimeout=15}}}\n"


@pytest.fixture(scope="module")
def ha(tmp_path_factory: pytest.TempPathFactory) -> typing.Iterator[Cluster]:
    """Deploy the bundle with two controllers, in parallel with the other tests' cluster."""
    brisk = tmp_path_factory.mktemp("ha") / "brisk.yaml"
    brisk.write_text(BRISK)
    overlays = [f"--overlay={file}" for file in (REPOSITORY / "overlays" / "ha.yaml", brisk)]
    bundle = str(REPOSITORY / "bundle.yaml")
    with deployed(
        Cluster(f"{MODEL[:4]}ha"), lambda one: one.ctl("deploy", bundle, *overlays, timeout=1200)
    ) as one:
        yield one


def check_controllers(one: Cluster, primary: str, backup: str) -> None:
    """Wait until a login host sees the controllers so, and one of them answers it."""

    def check() -> None:
        lines = one.exec("sackd/0", "scontrol", "ping").out.splitlines()
        found = [line.rpartition(" ")[2] for line in lines if line.startswith("Slurmctld(")]
        assert found == [primary, backup]
        assert one.exec("sackd/0", "timeout", "5", "sinfo").code == 0

    eventually(check)


def test_the_backup_takes_over_and_runs_jobs_until_the_primary_responds(ha: Cluster):
    check_settled(ha, 20)
    check_controllers(ha, "UP", "UP")
    ha.on(PRIMARY, "systemctl", "stop", "slurmctld")
    check_controllers(ha, "DOWN", "UP")
    assert len(ha.on("sackd/0", "srun", "--nodes=2", "hostname").splitlines()) == 2
    gpu = ha.beside(PRIMARY, "slurm-gpu-controller")
    ha.ok("update-status", gpu)
    assert ha.units()[gpu]["workload-status"]["current"] == "active", (
        "its Slurm commands reach the backup"
    )
    number = ha.on("sackd/0", "sbatch", "--parsable", "--wrap", "sleep 20")
    ha.on(PRIMARY, "systemctl", "start", "slurmctld")
    check_controllers(ha, "UP", "UP")
    assert f"JobId={number} " in ha.on("sackd/0", "scontrol", "show", "job", number), (
        "the primary knows the job"
    )
    assert ha.on(PRIMARY, "readlink", "/etc/slurm") == "/srv/slurmctld-statefs/etc/slurm"
