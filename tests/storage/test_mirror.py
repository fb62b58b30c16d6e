"""The payload's command mirror against a real S3 server: copied, read back, and refused in one line."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import servers

ROOT = pathlib.Path(__file__).parents[2]
pytest.importorskip("obstore")


def mirror(bucket: servers.Bucket, checkpoint: pathlib.Path, **more: str) -> tuple[int, str]:
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT / "payload"),
        "AWS_ENDPOINT_URL": f"http://{bucket.server.address}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": bucket.access_key,
        "AWS_SECRET_ACCESS_KEY": bucket.secret_key,
        **more,
    }
    url = f"s3://{bucket.name}/runs/night/{checkpoint.name}"
    argv = [sys.executable, "-m", "ddptrain", "mirror", str(checkpoint), "--url", url]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


def held(bucket: servers.Bucket) -> dict[str, bytes]:
    """Return the objects below the run's prefix, read by another client."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        bucket.name,
        prefix="runs/night",
        endpoint=f"http://{bucket.server.address}",
        region="us-east-1",
        access_key_id=bucket.access_key,
        secret_access_key=bucket.secret_key,
        client_options={"allow_http": True},
    )
    names = [one["path"] for batch in obstore.list(store) for one in batch]
    return {name: bytes(obstore.get(store, name).bytes()) for name in names}


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a checkpoint with a file of several parts of an upload."""
    folder = tmp_path / "epoch-0001"
    (folder / "dcp").mkdir(parents=True)
    (folder / "dcp" / "__0_0.distcp").write_bytes(os.urandom(20 << 20))
    (folder / "manifest.json").write_text("{}")
    return folder


def test_a_checkpoint_is_in_the_bucket_byte_for_byte_with_a_list(
    bucket: servers.Bucket, checkpoint: pathlib.Path
):
    code, output = mirror(bucket, checkpoint)
    assert code == 0, output
    found = held(bucket)
    listed = json.loads(found.pop("epoch-0001/mirrored.json"))["files"]
    own = {f"epoch-0001/{name}": (checkpoint / name).read_bytes() for name in listed}
    assert found == own
    assert set(listed) == {"dcp/__0_0.distcp", "manifest.json"}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "s3://train/runs/night/epoch-0001: "),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "s3://train/runs/night/epoch-0001: "),
    ],
)
def test_a_bucket_that_refuses_is_named_in_one_line_without_a_secret(
    bucket: servers.Bucket,
    checkpoint: pathlib.Path,
    more: dict[str, str],
    text: str,
):
    code, output = mirror(bucket, checkpoint, **more)
    assert code == 2, output
    (line,) = [line for line in output.splitlines() if "[FATAL]" in line]
    assert text in line
    assert bucket.secret_key not in output
    assert "Traceback" not in output
