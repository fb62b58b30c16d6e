import pytest

from slurm_ddp.interfaces import mount_info


def test_the_wire_format_is_upstreams():
    request = mount_info.MountRequest(mountpoint="/srv/slurmctld-statefs")
    databag = {
        "mountpoint": '"/srv/slurmctld-statefs"',
        "noexec": "false",
        "nosuid": "false",
        "nodev": "false",
        "read_only": "false",
    }
    assert mount_info.load(databag) == request


def test_every_field_counts():
    databag = {
        "mountpoint": '"/a b"',
        "noexec": "true",
        "nosuid": "true",
        "nodev": "true",
        "read_only": "true",
        "egress-subnets": "10.0.0.0/8",
    }
    assert mount_info.load(databag) == mount_info.MountRequest(
        mountpoint="/a b", noexec=True, nosuid=True, nodev=True, read_only=True
    )


@pytest.mark.parametrize(
    "databag", [{}, {"egress-subnets": "10.0.0.0/8"}, {"mountpoint": '""'}, {"mountpoint": "null"}, {"noexec": "true"}]
)
def test_no_request_yet(databag: dict[str, str]):
    assert mount_info.load(databag) is None


def test_absent_and_null_fields_are_defaults():
    assert mount_info.load({"mountpoint": '"/srv"', "noexec": "null"}) == mount_info.MountRequest(mountpoint="/srv")


@pytest.mark.parametrize(
    ("databag", "message"),
    [
        ({"mountpoint": "/srv"}, "mountpoint is not JSON"),
        ({"mountpoint": "7"}, "mountpoint: input should be a valid string"),
        (
            {"mountpoint": '"/srv"', "read_only": '"perhaps"'},
            "read_only: input should be a valid boolean, unable to interpret input",
        ),
    ],
)
def test_an_invalid_request_is_one_line(databag: dict[str, str], message: str):
    with pytest.raises(ValueError, match=f"^{message}$"):
        mount_info.load(databag)


def test_the_answer():
    assert mount_info.answer(mounted=True) == {"mounted": "true"}
    assert mount_info.answer(mounted=False) == {"mounted": "false"}
