"""What options and the user's secret may hold: each limit at its edges."""

import pathlib

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from slurm_ddp import juicefs_access
from slurm_ddp.interfaces import filesystem_info as fs
from volume import spec

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

RSA = "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nAA\n-----END RSA PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("size", "kib"),
    [("64K", 64), ("64", 64), ("16M", 16384), ("16384K", 16384), ("1M", 1024), ("4096", 4096)],
)
def test_a_block_is_a_power_of_two_up_to_both_ends(size: str, kib: int):
    assert spec.read_format(size, "lz4", 5, 6, 7) == spec.Format(kib, "lz4", 5, 6, 7)


@pytest.mark.parametrize(
    "size",
    ["32K", "63", "32M", "0", "65K", "96K", "3M", "", "-64K", "4m", "1G", "0064KK", "1234567"],
)
def test_other_blocks_are_refused(size: str):
    with pytest.raises(
        ValueError, match=r"^block-size: a power of two between 64K and 16M, like 4M$"
    ):
        spec.read_format(size, "none", 0, 0, 0)


@pytest.mark.parametrize(("storage", "bucket", "taken"), CASES["a_bucket_as_juicefs_takes_it"])
def test_a_bucket_as_juicefs_takes_it(storage: str, bucket: str, taken: str):
    assert spec.read_bucket(storage, bucket) == taken


HOSTS = {  # of the bucket `b`, and whether its name is in the host
    **dict.fromkeys(
        "s3.eu-west-1.amazonaws.com s3.amazonaws.com h:9000 10.0.0.1 ams3.digitaloceanspaces.com".split(),
        "/b",
    ),
    **dict.fromkeys(
        "b.s3.amazonaws.com b.s3.cn-north-1.amazonaws.com.cn b.s3-eu-west-1.amazonaws.com".split(),
        "",
    ),
    **dict.fromkeys(
        "b.c.s3.eu-west-1.amazonaws.com b.ams3.digitaloceanspaces.com b.s3.wasabisys.com".split(),
        "",
    ),
    **dict.fromkeys(
        "storage.googleapis.com s3.fr-par.scw.cloud us-east-1.linodeobjects.com".split(), "/b"
    ),
    **dict.fromkeys(
        "b.storage.googleapis.com b.s3.fr-par.scw.cloud b.us-east-1.linodeobjects.com".split(), ""
    ),
    **dict.fromkeys(
        "fsn1.your-objectstorage.com obs.cn-north-4.myhuaweicloud.com sos-ch-gva-2.exo.io".split(),
        "/b",
    ),
    **dict.fromkeys(
        "b.fsn1.your-objectstorage.com b.obs.cn-north-4.myhuaweicloud.com b.sos-at-1.exo.io".split(),
        "",
    ),
    **dict.fromkeys(
        "0ac.r2.cloudflarestorage.com 0ac.eu.r2.cloudflarestorage.com gateway.storjshare.io".split(),
        "/b",
    ),
    **dict.fromkeys(
        "b.0ac.r2.cloudflarestorage.com b.0ac.eu.r2.cloudflarestorage.com b.gateway.storjshare.io".split(),
        "",
    ),
    **dict.fromkeys(
        "b.s3.us-south.cloud-object-storage.appdomain.cloud b.s3.eu-central-1.ionoscloud.com".split(),
        "",
    ),
}


@hypothesis.given(
    st.sampled_from(sorted(HOSTS)),
    st.lists(st.from_regex(r"[a-z0-9._~-]{1,9}", fullmatch=True), min_size=1),
    st.sampled_from(["/", "%2F"]),
)
def test_a_path_behind_a_bucket_is_refused_and_the_bucket_alone_is_not(
    host: str, path: list[str], slash: str
):
    bucket = f"https://{host}{HOSTS[host]}"
    assert [spec.read_bucket("s3", f"{bucket}{end}") for end in ("", "/")] == [bucket, f"{bucket}/"]
    for storage in ("s3", "minio") if HOSTS[host] else ("s3",):
        for end in ("", "/"):
            with pytest.raises(
                ValueError, match=r"^write it as .*without a path behind the bucket"
            ):
                spec.read_bucket(
                    storage, f"{bucket}{slash if HOSTS[host] else '/'}{'/'.join(path)}{end}"
                )


@pytest.mark.parametrize(("storage", "bucket"), CASES["a_bucket_of_another_form_is_refused"])
def test_a_bucket_of_another_form_is_refused(storage: str, bucket: str):
    with pytest.raises(ValueError, match=r"^write it as "):
        spec.read_bucket(storage, bucket)


def test_the_users_secret():
    content = {"meta-password": "p", "encrypt-key": RSA, "encrypt-passphrase": "x"}
    secret, key = spec.read_credentials(content)
    assert (secret.content(), key) == ({"meta-password": "p", "encrypt-passphrase": "x"}, RSA)
    assert spec.read_credentials({"access-key": "a"}, "me")[0].content() == {
        "meta-user": "me",
        "access-key": "a",
    }
    assert spec.read_credentials({"meta-user": "me"})[0].content() == {"meta-user": "me"}
    assert spec.read_credentials({}) == (fs.JuicefsSecret(), "")


@pytest.mark.parametrize(("content", "message"), CASES["a_secret_that_is_not_possible"])
def test_a_secret_that_is_not_possible(content: dict[str, str], message: str):
    with pytest.raises(ValueError) as caught:
        spec.read_credentials(content)
    assert str(caught.value).startswith(message)


def test_no_key_is_shown():
    volume = spec.Volume(
        "v", juicefs_access.Engine("redis", ("h",), "1"), "s3", "b", keyless=True, encrypt_key=RSA
    )
    assert "PRIVATE" not in repr(volume)
