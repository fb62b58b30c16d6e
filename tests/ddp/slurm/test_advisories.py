"""Which security fixes a version of Slurm lacks."""

import pytest

from ddp.slurm import advisories


@pytest.mark.parametrize(
    ("version", "dates"),
    [
        ("24.11.5", ["2026-09-02"]),
        ("25.05.8", ["2026-09-02"]),
        ("25.05.9", []),
        ("25.11.2", ["2026-09-02"]),
        ("25.11.8", []),
        ("26.05.3", ["2026-09-02", "2026-10-13"]),
        ("26.05.4", ["2026-10-13"]),
        ("26.05.5", []),
        ("26.05.10", []),
        ("27.05.0", []),
        ("slurm-wlm 24.11.5", ["2026-09-02"]),
        ("", []),
        ("unknown", []),
    ],
)
def test_a_version_lacks_the_fixes_that_came_after_it(version: str, dates: list[str]):
    assert [one.date for one in advisories.missing(version)] == dates


def test_the_fix_of_the_oci_spool_is_known():
    assert advisories.fix_of(advisories.OCI) == ("25.05.9", "25.11.8", "26.05.4")


@pytest.mark.parametrize(
    ("version", "wanted"),
    [("24.11.5", "25.05.9 or 25.11.8 or 26.05.5"), ("25.11.2", "25.11.8 or 26.05.5")],
)
def test_an_upgrade_has_every_fix(version: str, wanted: str):
    assert advisories.upgrade(version) == wanted
    assert not any(advisories.missing(one) for one in wanted.split(" or "))
