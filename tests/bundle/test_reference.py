"""The generated reference pages are what the charms declare today."""

import pathlib

import pytest

from scripts import reference


@pytest.mark.parametrize("source", reference.charms(), ids=lambda path: path.parent.name)
def test_the_page_is_up_to_date(source: pathlib.Path):
    page = reference.page(source)
    assert page.is_file(), "run tox -e reference"
    assert page.read_text() == reference.render(source), "run tox -e reference"


def test_there_is_no_page_without_a_charm():
    assert {page.stem for page in reference.PAGES.glob("*.md")} == {path.parent.name for path in reference.charms()}
