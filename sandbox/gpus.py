"""Mock GPUs of hosts: as text, and as what guest/mock_gpus.py shows."""

import dataclasses
import re
import typing
import uuid

from sandbox.store import SandboxError

_ITEM = re.compile(r"(?:(?P<count>[1-9]\d?) x )?(?P<model>[A-Za-z][^@,]*)")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A mock GPU, beside all CPUs."""

    model: str  # the name that its driver reports, such as `NVIDIA H200`; empty for a slot without a card


def parse(text: str) -> tuple[Gpu, ...]:
    """Return the mock GPUs of a list such as `2 x NVIDIA L40S, Tesla T4`, by slot; `empty` is one without a card."""
    gpus: list[Gpu] = []
    for item in text.split(",") if text not in ("", "0") else []:
        found = _ITEM.fullmatch(item.strip())
        if found is None:
            raise SandboxError(f"mock GPUs {text!r}: write '2 x Mock GPU', 'NVIDIA L40S, empty, Tesla T4', or 0")
        model = "" if found["model"] == "empty" else found["model"]
        gpus += [Gpu(model)] * int(found["count"] or 1)
    return tuple(gpus)


def listing(gpus: tuple[Gpu, ...], machine_id: str) -> list[dict[str, typing.Any]]:
    """Return the cards in the slots of a machine, with the identifiers and bus addresses that they keep."""
    return [
        {
            "model": gpu.model,
            "uuid": f"GPU-{uuid.uuid5(uuid.UUID(machine_id), str(slot))}",
            "bus": f"0000:{0x81 + slot:02x}:00.0",
        }
        for slot, gpu in enumerate(gpus)
        if gpu.model
    ]
