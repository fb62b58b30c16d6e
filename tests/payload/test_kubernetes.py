"""The command of Kubernetes' pods with the real torchrun: two pods here, one gloo rank each."""

# pyright: basic, reportPrivateImportUsage=false
import os
import pathlib
import subprocess
import sys

import conftest
import pytest
import ranks
import yaml

from ddp.submit import kubernetes


@pytest.mark.long
def test_two_pods_meet_and_train(tmp_path: pathlib.Path):
    run = kubernetes.Run(
        name="night",
        image="torch:2",
        command=("--module", "ddptrain", "smoke", "--run-dir", str(tmp_path)),
        nodes=2,
        memory_mb=1024,
        workspace=str(tmp_path),
        run_dir=str(tmp_path),
        claim="shared",
        python_path=(str(conftest.PAYLOAD),),
    )
    _, job = yaml.safe_load_all(kubernetes.render(run))
    container = job["spec"]["template"]["spec"]["containers"][0]
    env = {
        one["name"]: one.get("value", "8f0c").replace("$(RUN_ATTEMPT_ID)", "8f0c")
        for one in container["env"]
    }
    # The names of the headless Service resolve in a cluster only
    env |= {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port())}
    argv = [word.replace("$$", "$") for word in (*container["command"], *container["args"])]
    pods = [
        subprocess.Popen(
            argv, env=env | {"JOB_COMPLETION_INDEX": str(index)}, stdout=subprocess.PIPE, text=True
        )
        for index in range(2)
    ]
    outputs = [pod.communicate(timeout=200)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    assert "improved=yes" in "".join(outputs)  # c10d may give rank 0 to either pod
    assert any(tmp_path.glob("logs/*/attempt_0/*/stdout.log"))
