"""An image of Debian's packages, imported and run by crun: docs/howto/environments.md."""

import collections.abc
import re
import subprocess

import pytest

from functional.conftest import REPOSITORY, Cluster
from functional.test_people import LOGIN, SMALL, Person, person
from functional.training_jobs import until, until_gone
from sandbox import image
from sandbox.hosts import Hosts
from sandbox.store import Store

pytestmark = [pytest.mark.trains, pytest.mark.long, pytest.mark.timeout(1500)]

ARCHIVE, FOREIGN = "/var/tmp/torch.tar", "/var/tmp/foreign.tar"
ROOT = "mmdebstrap --quiet --variant=minbase --include=python3-minimal,libpython3-stdlib"
INSTALL = "apt-get -q update >/dev/null && apt-get -qy --no-install-recommends install"
# A layer of Debian, and one with the jobs' environment; a second image is for another architecture
BUILD = f"""
set -e
cd /var/tmp && mkdir -p layer/opt/env
zstd -dc $(ls -t /mnt/shared/environments/*.tar.zst | head -n 1) | tar -xi -C layer/opt/env
tar -cf env.tar -C layer . && rm -r layer
umoci init --layout oci && umoci new --image oci:torch
umoci config --image oci:torch --architecture arm64
skopeo copy -q oci:oci:torch docker-archive:{FOREIGN}:foreign:1
for layer in root.tar env.tar; do umoci raw add-layer --image oci:torch $layer; rm $layer; done
umoci config --image oci:torch --architecture amd64 \
  --config.env PATH=/opt/env/bin:/usr/bin:/bin --config.env IMAGES=yes --config.env MINE=image
skopeo copy -q oci:oci:torch docker-archive:{ARCHIVE}:torch:1
rm -r oci && chmod 644 {ARCHIVE} {FOREIGN}
"""
TRAIN = """
import os, pathlib, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
DistributedDataParallel(torch.nn.Linear(4, 1))(torch.ones(2, 4)).sum().backward()
rank, saved = dist.get_rank(), pathlib.Path("step")
began = int(saved.read_text()) if saved.exists() else 0
home = torch.__file__.split("/lib")[0], os.access("/opt", os.W_OK), os.getuid()
print(f"rank={rank} of={dist.get_world_size()} {began=}", os.environ["IMAGES"], os.environ["MINE"], *home, flush=True)
for step in range(began, 5 if began else 600):
    stopping = torch.tensor([float(os.path.exists(os.environ["STOP_FILE"]))])
    dist.all_reduce(stopping)
    if rank == 0:
        pathlib.Path("step.new").write_text(str(step + 1))
        os.replace("step.new", saved)
    if stopping:
        break
    time.sleep(0.2)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def alice(cluster: Cluster) -> collections.abc.Iterator[Person]:
    """A user with the files of two images, on a cluster with crun set up as on the page."""
    cluster.action("install-environment", timeout=1500)
    page = (REPOSITORY / "docs/howto/environments.md").read_text()
    conf = page.partition("```text\n")[2].partition("```")[0]
    cluster.on("slurmctld/0", "sh", "-c", f"cat >/etc/slurm/oci.conf <<'END'\n{conf}END\n")
    for unit, packages in {"slurmd/0": "crun", "slurmd/1": "crun", LOGIN: "skopeo umoci"}.items():
        cluster.exec(unit, "sh", "-c", f"{INSTALL} {packages}", timeout=600)
    cluster.on("slurmctld/0", "scontrol", "reconfigure")
    login = Hosts(cluster.model).get(Store(cluster.model).load().host_of(LOGIN))
    with subprocess.Popen([*ROOT.split(), image.SUITE, "-"], stdout=subprocess.PIPE) as root:
        login.popen(["sh", "-c", "cat >/var/tmp/root.tar"], stdin=root.stdout).wait(timeout=900)
    built = cluster.exec(LOGIN, "sh", "-c", BUILD, timeout=900)
    assert (root.returncode, built.code) == (0, 0), built.err
    with person(cluster, "alice", "2001") as one:
        one.does("mkdir -p exp")
        one.writes("exp/train.py", TRAIN)
        yield one
    cluster.on(LOGIN, "rm", ARCHIVE, FOREIGN)
    cluster.on("slurmctld/0", "sh", "-c", "rm /etc/slurm/oci.conf && scontrol reconfigure")


def test_an_image_trains_on_two_nodes_and_resumes(alice: Person):
    imported = alice.json(f"ddp image import --json docker-archive:{ARCHIVE} torch")
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", imported["digest"])
    image = "--container-image torch --accept-risk"  # Slurm is 24.11.5 here
    submit = f"cd exp && ddp submit --json --run boxed {image} --env MINE=job {SMALL} train.py"
    first = alice.json(submit)
    until(alice.cluster, first, "rank=1 of=2")
    alice.does("sleep 3; ddp cancel boxed")
    until_gone(alice.cluster, first)
    done = alice.json(f"{submit} --wait".replace("train.py --wait", "--wait train.py"))
    assert done["state"] == "COMPLETED", done
    output = alice.does(f"cat {done['log']}")
    began = int(re.findall(r"rank=1 of=2 began=(\d+)", output)[-1])
    assert began > 0, output
    assert output.count(f"of=2 began={began} yes job /opt/env False 2001") == 2, output
    assert "unpacked the environment" not in output, "a node keeps what it has unpacked"


def test_each_mistake_is_one_line(alice: Person):
    mistakes = {
        f"image import docker-archive:{FOREIGN} foreign": "source: .* is for arm64, this cluster is amd64; ",
        "image import docker-archive:./none.tar none": "source: ./none.tar cannot be read: No such file",
        f"image import docker-archive:{ARCHIVE} torch": "name: torch exists; .*; ddp env remove torch",
        f"submit --container-image flax {SMALL} exp/train.py": "--container-image: flax is not imported; known: torch; ",
    }
    for command, line in mistakes.items():
        assert re.match(line, alice.refused(f"ddp {command}"))
    risky = alice.json(f"ddp submit --json --container-image torch {SMALL} exp/train.py")
    until(alice.cluster, risky, "Slurm 24.11.5's OCI runtime has CVE-2026-65109, fixed in 25.05.9")
    failed = alice.json(f"ddp submit --json --container-image a/b:1 {SMALL} exp/train.py")
    until(alice.cluster, failed, "or import the image: ddp image import docker://a/b:1 NAME")
    assert re.search(r"(?m)^torch .* image ", alice.does("ddp env list; ddp env remove torch"))
