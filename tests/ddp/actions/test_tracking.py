"""Tracking by option: its part of environment and jobs; and the removal of environments."""

from cluster import Cluster
from harness import Trainer
from pip_double import Pip


def test_the_option_brings_the_packages_and_tells_the_jobs(
    trainer: Trainer, cluster: Cluster, pip: Pip
):
    def extras() -> int:
        return sum(
            call[-1].endswith("tracking/requirements.txt") and "--require-hashes" in call
            for call in pip.calls
        )

    trainer.run("submit-ddp", workload="smoke")
    assert extras() == 0
    assert {name for name, _ in cluster.jobs[-1].training().variables} == {"USER", "LOGNAME"}
    trainer.config |= {
        "mlflow-tracking-uri": "http://mlflow.example:5000",
        "tensorboard": True,
        "wandb": True,
    }
    trainer.run("submit-ddp", workload="smoke")
    assert extras() == 1, "another environment is made, with the packages"
    variables = cluster.jobs[-1].training().variables
    flags = {("DDPTRAIN_TENSORBOARD", "1"), ("DDPTRAIN_WANDB", "1")}
    assert set(variables[2:]) == {("MLFLOW_TRACKING_URI", "http://mlflow.example:5000"), *flags}
    trainer.run("submit-ddp", workload="smoke", env="MLFLOW_TRACKING_URI=http://other:1")
    assert "http://mlflow.example:5000" not in dict(cluster.jobs[-1].training().variables).values()
    assert len(list((trainer.workspace / "environments").glob("*.json"))) == 2, "both stay"
