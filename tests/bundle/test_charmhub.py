"""What Charmhub shows of each charm."""

import observability
import pytest
import rules
import yaml


@pytest.mark.parametrize("charm", observability.CHARMS)
def test_the_page_has_a_title_a_short_summary_and_a_description(charm: str):
    declared = yaml.safe_load((rules.ROOT / "charms" / charm / "charmcraft.yaml").read_text())
    assert declared["title"]
    assert declared["description"]
    assert len(declared["summary"]) <= 78
    assert "\n" not in declared["summary"]
