"""What is asked of NVML, with a library in its place that has cards, and refuses as NVML does."""

import collections.abc
import json
import typing

import pytest
from nvml_double import LOST, Card, Library

from gpu import nvml
from scripts import nvml as gpu_nvml


def card(name: str, minor: int, bus_id: str, **more: object) -> Card:
    return {"name": name, "minor": minor, "bus": bus_id.encode(), **more}


def probed(*cards: Card) -> dict[str, typing.Any]:
    library = Library(list(cards))
    with nvml.opened(library) as opened:
        answer = gpu_nvml.probe(opened)
    assert library.is_shut
    return answer


def printed(
    library: Library, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> collections.abc.Mapping[str, typing.Any]:
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda _: library)
    assert gpu_nvml.main(["gpus"]) == 0
    return json.loads(capsys.readouterr().out)


def test_one_card():
    assert probed(card("Quadro RTX 6000", 0, "00000000:1B:00.0", cpus=(0, 1, 64, 70))) == {
        "driver": "580.159.04",
        "gpus": [
            {
                "name": "Quadro RTX 6000",
                "minor": 0,
                "bus_id": "00000000:1B:00.0",
                "uuid": "GPU-0",
                "cpus": [0, 1, 64, 70],
                "memory_bytes": 80 << 30,
                "mig": False,
                "instances": [],
                "links": [-1],
            }
        ],
    }


def test_links_between_cards_are_counted_lane_by_lane():
    ids = [f"00000000:0{i}:00.0" for i in range(4)]
    cards = [
        card(
            "NVIDIA A100-SXM4-40GB",
            3 - i,
            ids[i],
            lanes=[ids[j].lower().encode() for j in range(4) if j != i for _ in "ab"],
        )
        for i in range(4)
    ]
    gpus = probed(*cards)["gpus"]
    assert [gpu["links"] for gpu in gpus] == [[-1, 2, 2, 2], [2, -1, 2, 2], [2, 2, -1, 2], [2, 2, 2, -1]]
    assert [gpu["minor"] for gpu in gpus] == [3, 2, 1, 0]


def test_links_to_a_switch_and_links_that_are_down_count_for_nothing():
    switch = b"00000000:C0:00.0"
    cards = [card("NVIDIA H100 80GB HBM3", i, f"00000000:0{i}:00.0", lanes=(switch, None, switch)) for i in range(2)]
    assert [gpu["links"] for gpu in probed(*cards)["gpus"]] == [[-1, 0], [0, -1]]


def test_what_a_card_does_not_support_is_left_out():
    (gpu,) = probed(card("Tesla T4", 0, "00000000:01:00.0", cpus=None, instances={}))["gpus"]
    assert (gpu["cpus"], gpu["mig"], gpu["instances"]) == (None, True, [])


@pytest.mark.parametrize(("code", "broken"), [(9, False), (12, False), (18, True), (999, True)])
def test_nvml_that_does_not_start(
    code: int, broken: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert printed(Library([], init=code), monkeypatch, capsys) == {"error": f"error {code}", "broken": broken}


def test_nvml_that_fails_half_way(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for library in (Library([], count=LOST), Library([card("A", 0, "0", lost=True)])):
        assert printed(library, monkeypatch, capsys) == {"error": f"error {LOST}", "broken": True}
        assert library.is_shut


def test_mig_instances_are_listed_in_order_whatever_holes_there_are():
    instances = {i: card(f"NVIDIA H100 80GB HBM3 MIG {i}g.20gb", 7 + i, "", gi=i) for i in (1, 2)}
    (gpu,) = probed(card("NVIDIA H100 80GB HBM3", 0, "00000000:01:00.0", instances=instances))["gpus"]
    assert gpu["instances"] == [
        {"name": "NVIDIA H100 80GB HBM3 MIG 1g.20gb", "gpu_instance": 1, "compute_instance": 0, "uuid": "GPU-8"},
        {"name": "NVIDIA H100 80GB HBM3 MIG 2g.20gb", "gpu_instance": 2, "compute_instance": 0, "uuid": "GPU-9"},
    ]
