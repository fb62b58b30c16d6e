"""Our mount of a JuiceFS volume beside a bare `juicefs mount` with defaults of the same volume, and the local disk.

All three on one host in one run, in turns; medians and the spread of five rounds. For a quiet machine, and by name:

    tox -e functional -- -s tests/functional/drill_storage_throughput.py
"""

import json

import pytest

from functional.conftest import Cluster
from functional.storage_faults import APP, MP, client_of, until_right

pytestmark = pytest.mark.timeout(1500)

HOST = "slurmd/1"
# Reads are of a file that the other mount wrote: neither the kernel nor the client has a copy. The local disk's are
# forgotten by the kernel first.
PROGRAM = """
import json, os, pathlib, statistics, sys, time

MIB, FILES, ROUNDS = 128, 200, 5
places = dict(zip(("ours", "bare", "local"), sys.argv[1:]))
block = os.urandom(1 << 20)
found = {}


def timed(kind, place, what, amount):
    begin = time.perf_counter()
    what()
    found.setdefault(kind, {}).setdefault(place, []).append(amount / (time.perf_counter() - begin))


def write(path):
    with open(path, "wb", buffering=0) as file:
        for _ in range(MIB):
            file.write(block)
        os.fsync(file.fileno())


def read(path):
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


def forget(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def make(folder):
    folder.mkdir()
    for number in range(FILES):
        (folder / str(number)).write_bytes(block[:4096])


def stat(folder):
    for number in range(FILES):
        os.stat(folder / str(number))


for turn in range(ROUNDS):
    order = list(places)[turn % 3:] + list(places)[:turn % 3]
    for name in order:
        folder = pathlib.Path(places[name])
        timed("write 128 MiB and sync, MiB/s", name, lambda: write(folder / f"{name}-{turn}"), MIB)
    for name in order:
        writer = {"ours": "bare", "bare": "ours", "local": "local"}[name]
        path = pathlib.Path(places[name]) / f"{writer}-{turn}"
        if name == "local":
            forget(path)
        timed("read what another wrote, MiB/s", name, lambda: read(path), MIB)
        if name == "local":
            forget(path)
        timed("read it again, MiB/s", name, lambda: read(path), MIB)
    for name in order:
        folder = pathlib.Path(places[name]) / f"{name}-{turn}.d"
        timed("make 4 KiB files, 1/s", name, lambda: make(folder), FILES)
        time.sleep(1.1)  # the kernel asks again after a second
        timed("stat them, 1/s", name, lambda: stat(folder), FILES)
    for name in ("ours", "bare", "local"):
        (pathlib.Path(places[name]) / f"{name}-{turn}").unlink()
print(json.dumps(found))
"""
SCRIPT = f"""set -eu
mkdir -p /mnt/bare /var/tmp/throughput {MP}/.throughput
set -a; . /etc/slurm-ddp/{APP}/environment; set +a
url=$(systemctl cat juicefs-{APP}.service | sed -n 's/^ExecStart=//p' | tr ' ' '\\n' | grep '://')
/usr/local/lib/slurm-ddp/{APP}/juicefs mount "$url" /mnt/bare >/tmp/bare.log 2>&1 &
bare=$!
cleanup() {{ umount -l /mnt/bare; kill $bare; rm -rf /var/tmp/throughput {MP}/.throughput /var/jfsCache; rmdir /mnt/bare; }}
trap cleanup EXIT
for _ in $(seq 100); do mountpoint -q /mnt/bare && break; sleep 0.1; done
mountpoint -q /mnt/bare
cat /proc/loadavg >&2
python3 -c "$0" {MP}/.throughput /mnt/bare/.throughput /var/tmp/throughput
cat /proc/loadavg >&2
"""


def test_throughput(cluster: Cluster):
    until_right(cluster, HOST)
    answer = cluster.exec(HOST, "bash", "-c", SCRIPT, PROGRAM, timeout=600)
    assert answer.code == 0, answer.err
    print(f"\nload averages before and after: {answer.err.split(chr(10))}")
    found = json.loads(answer.out)
    for kind, by_place in found.items():
        row = [f"{place} {sorted(v)[len(v) // 2]:.0f} ({min(v):.0f} to {max(v):.0f})" for place, v in by_place.items()]
        print(f"{kind}: {'; '.join(sorted(row))}")
    assert {len(values) for by_place in found.values() for values in by_place.values()} == {5}


def test_the_benchmark_action(cluster: Cluster):
    unit = client_of(cluster, HOST)
    answer = cluster.ctl("run", unit, "benchmark", "size=128", "--format", "json")
    assert answer.code == 0, answer.err
    print(f"\nbenchmark: {json.dumps(json.loads(answer.out)[unit]['results'], indent=1)}")
