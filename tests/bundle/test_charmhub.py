"""What Charmhub shows of each charm."""

import xml.etree.ElementTree

import observability
import pytest
import rules
import yaml


@pytest.mark.parametrize("charm", observability.CHARMS)
def test_the_icon_is_a_square_svg_of_100(charm: str):
    icon = xml.etree.ElementTree.parse(rules.ROOT / "charms" / charm / "icon.svg").getroot()
    assert icon.tag == "{http://www.w3.org/2000/svg}svg"
    assert (icon.get("width"), icon.get("height"), icon.get("viewBox")) == ("100", "100", "0 0 100 100")


@pytest.mark.parametrize("charm", observability.CHARMS)
def test_the_page_has_a_title_a_short_summary_and_a_description(charm: str):
    declared = yaml.safe_load((rules.ROOT / "charms" / charm / "charmcraft.yaml").read_text())
    assert declared["title"]
    assert declared["description"]
    assert len(declared["summary"]) <= 78
    assert "\n" not in declared["summary"]
