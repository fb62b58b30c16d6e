"""What is asked of NVML, with a module in its place that has cards, and refuses as NVML does."""

import dataclasses
import typing

import pytest

from gpu import nvml_probe

NOT_SUPPORTED, INVALID_ARGUMENT, FUNCTION_NOT_FOUND, NOT_FOUND = 3, 2, 13, 6


class NVMLError(Exception):
    def __init__(self, value: int, text: str = "an error") -> None:
        super().__init__(text)
        self.value = value


@dataclasses.dataclass
class Pci:
    busId: str  # noqa: N815 - NVML's name


@dataclasses.dataclass
class Memory:
    total: int


@dataclasses.dataclass
class Card:
    name: str
    minor: int
    bus_id: str
    cpus: tuple[int, ...] | None = (0, 1)
    lanes: tuple[str | None, ...] | None = None  # where each NVLink leads; None for one that is down
    mig: bool | None = None
    instances: tuple["Card", ...] = ()
    gi: int = 0


@dataclasses.dataclass
class Nvml:
    cards: list[Card]
    init_error: NVMLError | None = None
    count_error: NVMLError | None = None
    is_shut: bool = False
    NVMLError: typing.ClassVar = NVMLError
    NVML_ERROR_NOT_SUPPORTED: int = NOT_SUPPORTED
    NVML_ERROR_INVALID_ARGUMENT: int = INVALID_ARGUMENT
    NVML_ERROR_FUNCTION_NOT_FOUND: int = FUNCTION_NOT_FOUND
    NVML_ERROR_NOT_FOUND: int = NOT_FOUND

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's names, here and below
        if self.init_error:
            raise self.init_error

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_shut = True

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        if self.count_error:
            raise self.count_error
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetName(self, card: Card) -> str:  # noqa: N802
        return card.name

    def nvmlDeviceGetMinorNumber(self, card: Card) -> int:  # noqa: N802
        return card.minor

    def nvmlDeviceGetPciInfo(self, card: Card) -> Pci:  # noqa: N802
        return Pci(card.bus_id)

    def nvmlDeviceGetUUID(self, card: Card) -> str:  # noqa: N802
        return f"GPU-{card.minor}"

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Memory:  # noqa: N802
        return Memory(80 << 30)

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:  # noqa: N802
        if card.mig is None:
            raise NVMLError(NOT_SUPPORTED)
        return [int(card.mig), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:  # noqa: N802
        if index == 0 or index > len(card.instances):  # the first place is a hole
            raise NVMLError(NOT_FOUND)
        return card.instances[index - 1]

    def nvmlDeviceGetGpuInstanceId(self, card: Card) -> int:  # noqa: N802
        return card.gi

    def nvmlDeviceGetComputeInstanceId(self, card: Card) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetCpuAffinity(self, card: Card, words: int) -> list[int]:  # noqa: N802
        if card.cpus is None:
            raise NVMLError(NOT_SUPPORTED)
        assert words * 64 >= 8192
        return [sum(1 << cpu % 64 for cpu in card.cpus if cpu // 64 == word) for word in range(2)]

    def nvmlDeviceGetNvLinkState(self, card: Card, link: int) -> int:  # noqa: N802
        if card.lanes is None:
            raise NVMLError(NOT_SUPPORTED)
        if link >= len(card.lanes):
            raise NVMLError(INVALID_ARGUMENT)
        return int(card.lanes[link] is not None)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, card: Card, link: int) -> Pci:  # noqa: N802
        assert card.lanes is not None
        remote = card.lanes[link]
        assert remote is not None
        return Pci(remote)


def test_one_card():
    nvml = Nvml([Card("Quadro RTX 6000", 0, "00000000:1B:00.0", cpus=(0, 1, 64, 70))])
    assert nvml_probe.probe(nvml) == {
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
    assert nvml.is_shut


def test_links_between_cards_are_counted_lane_by_lane():
    ids = [f"00000000:0{i}:00.0" for i in range(4)]
    cards = [
        Card(
            "NVIDIA A100-SXM4-40GB",
            3 - i,
            ids[i],
            lanes=tuple(ids[j].lower() for j in range(4) if j != i for _ in "ab"),
        )
        for i in range(4)
    ]
    gpus: typing.Any = nvml_probe.probe(Nvml(cards))["gpus"]
    assert [gpu["links"] for gpu in gpus] == [[-1, 2, 2, 2], [2, -1, 2, 2], [2, 2, -1, 2], [2, 2, 2, -1]]
    assert [gpu["minor"] for gpu in gpus] == [3, 2, 1, 0]


def test_links_to_a_switch_and_links_that_are_down_count_for_nothing():
    switch = "00000000:C0:00.0"
    cards = [Card("NVIDIA H100 80GB HBM3", i, f"00000000:0{i}:00.0", lanes=(switch, None, switch)) for i in range(2)]
    gpus: typing.Any = nvml_probe.probe(Nvml(cards))["gpus"]
    assert [gpu["links"] for gpu in gpus] == [[-1, 0], [0, -1]]


def test_what_a_card_does_not_support_is_left_out():
    gpus: typing.Any = nvml_probe.probe(Nvml([Card("Tesla T4", 0, "00000000:01:00.0", cpus=None, mig=True)]))["gpus"]
    assert (gpus[0]["cpus"], gpus[0]["mig"]) == (None, True)


@pytest.mark.parametrize(("value", "broken"), [(9, False), (12, False), (18, True), (999, True)])
def test_nvml_that_does_not_start(value: int, broken: bool):
    answer = nvml_probe.probe(Nvml([], init_error=NVMLError(value, "Driver/library version mismatch")))
    assert answer == {"error": "Driver/library version mismatch", "broken": broken}


def test_nvml_that_fails_half_way():
    nvml = Nvml([], count_error=NVMLError(15, "GPU is lost"))
    assert nvml_probe.probe(nvml) == {"error": "GPU is lost", "broken": True}
    assert nvml.is_shut


def test_mig_instances_are_told_in_order_whatever_holes_there_are():
    instances = tuple(Card(f"NVIDIA H100 80GB HBM3 MIG {i}g.20gb", 7 + i, "", gi=i) for i in (1, 2))
    gpus: typing.Any = nvml_probe.probe(
        Nvml([Card("NVIDIA H100 80GB HBM3", 0, "00000000:01:00.0", mig=True, instances=instances)])
    )["gpus"]
    assert gpus[0]["instances"] == [
        {"name": "NVIDIA H100 80GB HBM3 MIG 1g.20gb", "gpu_instance": 1, "compute_instance": 0, "uuid": "GPU-8"},
        {"name": "NVIDIA H100 80GB HBM3 MIG 2g.20gb", "gpu_instance": 2, "compute_instance": 0, "uuid": "GPU-9"},
    ]
