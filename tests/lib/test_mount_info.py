import pathlib

import pytest
import yaml

from slurm_ddp.interfaces import mount_info

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())


def test_every_field_counts():
    flags = ("noexec", "nosuid", "nodev", "read_only")
    for written, value in (("true", True), ("false", False), ("null", False)):
        databag = {"mountpoint": '"/a b"', "egress-subnets": "10.0.0.0/8"} | dict.fromkeys(
            flags, written
        )
        assert mount_info.load(databag) == mount_info.MountRequest(
            mountpoint="/a b", **dict.fromkeys(flags, value)
        )


@pytest.mark.parametrize(
    "databag",
    [
        {},
        {"egress-subnets": "10.0.0.0/8"},
        {"mountpoint": '""'},
        {"mountpoint": "null"},
        {"noexec": "true"},
    ],
)
def test_no_request_yet(databag: dict[str, str]):
    assert mount_info.load(databag) is None


@pytest.mark.parametrize(("databag", "message"), CASES["an_invalid_request_is_one_line"])
def test_an_invalid_request_is_one_line(databag: dict[str, str], message: str):
    with pytest.raises(ValueError, match=f"^{message}$"):
        mount_info.load(databag)


def test_the_answer():
    assert mount_info.answer(mounted=True) == {"mounted": "true"}
    assert mount_info.answer(mounted=False) == {"mounted": "false"}
