"""What options and the user's secret may hold: each limit at its edges."""

import pathlib

import pytest
import yaml

from slurm_ddp import juicefs_access
from slurm_ddp.interfaces import filesystem_info as fs
from volume import spec

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

RSA = "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nAA\n-----END RSA PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("size", "kib"), [("64K", 64), ("64", 64), ("16M", 16384), ("16384K", 16384), ("1M", 1024), ("4096", 4096)]
)
def test_a_block_is_a_power_of_two_up_to_both_ends(size: str, kib: int):
    assert spec.read_format(size, "lz4", 5, 6, 7) == spec.Format(kib, "lz4", 5, 6, 7)


@pytest.mark.parametrize(
    "size", ["32K", "63", "32M", "0", "65K", "96K", "3M", "", "-64K", "4m", "1G", "0064KK", "1234567"]
)
def test_other_blocks_are_refused(size: str):
    with pytest.raises(ValueError, match=r"^block-size: a power of two between 64K and 16M, like 4M$"):
        spec.read_format(size, "none", 0, 0, 0)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_the_compressions(compression: str):
    assert spec.read_format("4M", compression, 0, 0, 0).compression == compression
    with pytest.raises(ValueError, match=r"^compression: one of none, lz4, zstd$"):
        spec.read_format("4M", f"{compression}2", 0, 0, 0)


@pytest.mark.parametrize(("option", "at"), [("capacity", 0), ("inodes", 1), ("trash-days", 2)])
def test_a_limit_is_not_negative(option: str, at: int):
    limits = [0, 0, 0]
    limits[at] = -1
    with pytest.raises(ValueError, match=rf"^{option}: 0 or more$"):
        spec.read_format("4M", "none", *limits)


def test_nothing_is_no_limit():
    assert spec.read_format("4M", "none", 0, 0, 0) == spec.Format(trash_days=0)


@pytest.mark.parametrize(("storage", "bucket", "taken"), CASES["a_bucket_as_juicefs_takes_it"])
def test_a_bucket_as_juicefs_takes_it(storage: str, bucket: str, taken: str):
    assert spec.read_bucket(storage, bucket) == taken


@pytest.mark.parametrize(("storage", "bucket"), CASES["a_bucket_of_another_form_is_refused"])
def test_a_bucket_of_another_form_is_refused(storage: str, bucket: str):
    with pytest.raises(ValueError, match=r"^write it as "):
        spec.read_bucket(storage, bucket)


def test_the_kinds_of_stores():
    for storage in juicefs_access.KEYLESS_STORES:
        spec.check_storage(storage)
        with pytest.raises(ValueError, match=r"^remove the keys from it"):
            spec.read_bucket(storage, "https://key:topSecret@h/b")
    with pytest.raises(ValueError, match=r"^one of s3, minio, gs, file$"):
        spec.check_storage("sftp")


def test_the_users_secret():
    content = {"meta-password": "p", "encrypt-key": RSA, "encrypt-passphrase": "x"}
    secret, key = spec.read_credentials(content)
    assert (secret.content(), key) == ({"meta-password": "p", "encrypt-passphrase": "x"}, RSA)
    assert spec.read_credentials({"access-key": "a"}, "me")[0].content() == {"meta-user": "me", "access-key": "a"}
    assert spec.read_credentials({"meta-user": "me"})[0].content() == {"meta-user": "me"}
    assert spec.read_credentials({}) == (fs.JuicefsSecret(), "")


@pytest.mark.parametrize(("content", "message"), CASES["a_secret_that_is_not_possible"])
def test_a_secret_that_is_not_possible(content: dict[str, str], message: str):
    with pytest.raises(ValueError) as caught:
        spec.read_credentials(content)
    assert str(caught.value).startswith(message)


def test_a_user_is_named_once():
    with pytest.raises(ValueError, match=r"^meta-user: metadata-url already names the user: remove one of the two$"):
        spec.read_credentials({"meta-user": "me"}, "you")


@pytest.mark.parametrize(("storage", "example"), CASES["how_a_bucket_is_written"])
def test_how_a_bucket_is_written(storage: str, example: str):
    with pytest.raises(ValueError) as caught:
        spec.read_bucket(storage, "x")
    assert str(caught.value) == f"write it as {example}"


def test_no_key_is_shown():
    volume = spec.Volume("v", juicefs_access.Engine("redis", ("h",), "1"), "s3", "b", keyless=True, encrypt_key=RSA)
    assert "PRIVATE" not in repr(volume)


def test_the_credentials_reach_engine_and_store():
    engine = juicefs_access.Engine("redis", ("h:6379",), "1")
    secret = fs.JuicefsSecret.from_content({"meta-password": "p", "access-key": "a", "secret-key": "s"})
    volume = spec.Volume("shared", engine, "minio", "http://h/b", keyless=True, region="r")
    there = pathlib.Path("/d")
    assert volume.access(secret, directory=there).environment == {
        "REDIS_PASSWORD": "p",
        "MINIO_ACCESS_KEY": "a",
        "MINIO_SECRET_KEY": "s",
        "MINIO_REGION": "r",
    }
    kept = spec.Volume("shared", engine, "minio", "http://h/b", keyless=False)
    assert kept.access(secret, directory=there).environment == {"REDIS_PASSWORD": "p"}
