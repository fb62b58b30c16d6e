import pathlib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kinds import presets

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

KINDS = {
    "nfs": presets.NFS,
    "cephfs": presets.CEPHFS,
    "ceph-fuse": presets.CEPH_FUSE,
    "lustre": presets.LUSTRE,
    "juicefs": presets.JUICEFS,
}


def settings(kind: presets.Kind) -> list[tuple[str, str, str]]:
    """List the options of the defaults and profiles, each with its value and reason."""
    tables = (kind.defaults, *kind.profiles.values())
    return [(name, value, why) for rows in tables for name, (value, why) in rows.items()]


@pytest.mark.parametrize("profile", ("none", "dataset", "checkpoint", "tokens"))
@pytest.mark.parametrize("kind", ["nfs", "cephfs", "lustre"])
def test_a_profile_never_makes_a_mount_that_gives_up(kind: str, profile: str):
    options = presets.merge(KINDS[kind], profile=profile, given="")
    assert not {"soft", "softerr", "localflock", "noflock", "recover_session=no"} & set(options)
    assert kind != "nfs" or "hard" in options


def test_options_win_over_the_profile_and_the_profile_over_the_defaults():
    assert presets.merge(presets.NFS, profile="none", given="")["nconnect"] == "8"
    assert "actimeo" not in presets.merge(presets.NFS, profile="checkpoint", given="")
    options = presets.merge(
        presets.NFS, profile="dataset", given=" nconnect=16 , actimeo=30,,nfsvers=4.1"
    )
    assert (options["nconnect"], options["actimeo"], options["nfsvers"]) == ("16", "30", "4.1")
    assert "vers" not in options  # the older spelling of the same
    assert "noatime" not in presets.merge(presets.NFS, profile="none", given="relatime")


@pytest.mark.parametrize(
    ("kind", "given", "message"), CASES["options_that_lose_data_or_open_a_hole_are_refused_by_name"]
)
def test_options_that_lose_data_or_open_a_hole_are_refused_by_name(
    kind: str, given: str, message: str
):
    with pytest.raises(presets.OptionError) as caught:
        presets.merge(KINDS[kind], profile="none", given=given)
    assert str(caught.value).startswith(message)
    assert "topSecret" not in str(caught.value)


@given(st.text(), st.sampled_from(sorted(KINDS)))
def test_no_text_gets_anything_else_past_the_table(text: str, kind: str):
    try:
        options = presets.merge(KINDS[kind], profile="none", given=text)
    except presets.OptionError as e:
        assert "\n" not in str(e) or "\n" in text
        return
    known = set(KINDS[kind].defaults) | set(KINDS[kind].allowed)
    assert set(options) <= known
    joined = presets.text(options)
    assert joined.isprintable()
    assert " " not in joined


def test_the_guide_shows_every_value_with_its_reason():
    guide = (
        pathlib.Path(__file__).resolve().parents[3] / "docs/reference/mount-options.md"
    ).read_text()
    for table in KINDS.values():
        for name, value, why in settings(table):
            shown = f"{name}={value}" if value else name
            assert f"| `{shown}` | {why} |" in guide
