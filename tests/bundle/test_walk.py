"""The lane docs-walk types every command of README, tutorial and how-tos, but for those in walk.toml."""

import pytest
from test_docs import commands

from functional import pages

LINES = [line for page in pages.PAGES for line in pages.lines(page)]
SHELL = set(
    "cd chmod ddp cp echo git mkdir openssl pipx tar python python3 ~/mlflow/bin/mlflow ~/tb/bin/tensorboard".split()
)


@pytest.mark.parametrize("line", LINES, ids=str)
def test_a_line_is_run_or_listed(line: pages.Line):
    command, *rest = line.words
    if line.reason is None and command in ("juju", "./sandboxctl"):
        assert rest[0] in commands()[r"\./sandboxctl"]
    elif line.reason is None:
        assert command in SHELL


@pytest.mark.parametrize("page", pages.PAGES)
def test_what_is_listed_is_on_its_page(page: str):
    known = {line.text for line in LINES if line.page == page}
    about = pages.WALK["pages"].get(page, {})
    listed = [text for of in pages.WALK["not-run"].values() for text in of.get(page, ())] + about.get("fails", [])
    assert [text for text in listed if text not in known] == []
    assert [shown for shown in about.get("values", {}) if not any(shown in text for text in known)] == []
    assert len(about.get("files", ())) <= len(pages.files(page))


def test_every_page_that_is_listed_exists():
    named = {page for of in pages.WALK["not-run"].values() for page in of} | set(pages.WALK["pages"])
    assert named <= set(pages.PAGES)
