"""The excerpts that `make pictures` takes from a demo's output, and its dashboards' drawings."""

import json
import pathlib
import types
import typing
import urllib.parse
import xml.etree.ElementTree

import pytest

from sandbox import demo
from scripts import dashboards, panels, pictures

CHARMS = dashboards.of("ddp-trainer")
PERIOD = panels.Period(1_800_000_000.0, 1_800_000_150.0, 8)
Answer = typing.Callable[[str], list[panels.Json]]


def test_the_demo_s_result_is_what_stands_between_its_progress_and_its_times():
    host = types.SimpleNamespace(
        run=lambda argv, timeout: types.SimpleNamespace(stdout="NODELIST\nslurmd-0\n")
    )
    hosts = typing.cast(typing.Any, types.SimpleNamespace(get=lambda _: host))
    model = typing.cast(typing.Any, types.SimpleNamespace(host_of=lambda unit: unit))
    summary = demo.summarise(
        hosts, model, {"job-id": "7", "state": "COMPLETED"}, {"train on two nodes": 12.5}
    )
    lines = pictures.demo_result(f"trainer/0 install\n{summary}").splitlines()
    assert lines[:5] == ["$ make demo", "...", "Slurm (sinfo):", "  NODELIST", "  slurmd-0"]
    assert lines[-1].split() == ["state", "COMPLETED"]


def drawn(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> str:
    """Draw the dashboards from the series that `answer` gives for each query."""

    def sandboxctl(*words: str) -> bytes:
        if words[-1].startswith(pictures.BOARDS):
            return CHARMS[pathlib.PurePath(words[-1]).name].encode()
        urls = [urllib.parse.urlsplit(word) for word in words if word.startswith("http")]
        asked = [urllib.parse.parse_qs(url.query)["query"][0] for url in urls]
        return b"".join(
            json.dumps({"data": {"result": answer(text)}}).encode() + b"\n" for text in asked
        )

    monkeypatch.setattr(pictures, "sandboxctl", sandboxctl)
    return pictures.dashboards(PERIOD)


def test_panels_with_data_are_drawn_in_their_order(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def answer(query: str) -> list[panels.Json]:
        asked.append(query)
        values = [
            (PERIOD.begin + at, "NaN" if at == 8 else str(at / 150)) for at in range(0, 150, 8)
        ]
        without = "mfu" in query or "doctor" in query
        return (
            [] if without else [{"metric": {"run": "<gpt>", "state": "running"}, "values": values}]
        )

    picture = drawn(monkeypatch, answer)
    boards = [json.loads(CHARMS[f"{name}.json"]) for name in ("training", "run")]
    titles = [panel["title"] for board in boards for panel in board["panels"]]
    root = xml.etree.ElementTree.fromstring(picture)
    texts = ["".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")]
    wanted = [title for title in titles if "MFU" not in title and "doctor" not in title]
    assert [text for text in texts if text in titles] == wanted
    assert {"Slurm DDP training", "Slurm DDP run", "96%", "0.96 s"} <= set(
        texts
    )  # the last value, in its unit
    assert "\N{BLACK RECTANGLE} <gpt>\N{BLACK RECTANGLE} <gpt>, best" in texts
    assert "nan" not in picture.lower()
    assert len(picture) < 300_000
    assert not any("$" in query for query in asked)
    assert 'run=~"pictures", user=~".*"' in asked[-1]


def test_without_data_there_is_no_picture(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(pictures.PictureError, match=r"^[^\n]+no data[^\n]+$"):
        drawn(monkeypatch, lambda _: [])
