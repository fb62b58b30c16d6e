"""Mock GPUs of hosts: as text, and as what guest/mock_gpus.py shows."""

import dataclasses
import re

from sandbox.store import SandboxError

_ITEM = re.compile(r"(?:(?P<count>[1-9]\d?) x )?(?P<model>[A-Za-z][^@,]*?)(?: @ (?P<node>\d))?")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A mock GPU.

    Attributes:
        model: the name that its driver reports, such as `NVIDIA H200`; "" for an empty slot.
        numa_node: its NUMA node, of a host that divides its CPUs evenly among the nodes;
            None if all CPUs are near it.
    """

    model: str
    numa_node: int | None = None


def parse(text: str) -> tuple[Gpu, ...]:
    """Return the mock GPUs that a text lists, by slot.

    An example is `2 x NVIDIA L40S, Tesla T4`. `@ 1` after a model is the card's NUMA node; `empty`
    is a slot without a card.
    """
    gpus: list[Gpu] = []
    for item in text.split(",") if text not in ("", "0") else []:
        found = _ITEM.fullmatch(item.strip())
        if found is None:
            raise SandboxError(
                f"mock GPUs {text!r}: write '2 x Mock GPU', 'NVIDIA L40S @ 0, empty, Tesla T4 @ 1' (@: NUMA node), or 0"
            )
        model = "" if found["model"] == "empty" else found["model"]
        gpus += [Gpu(model, int(found["node"]) if found["node"] else None)] * int(
            found["count"] or 1
        )
    return tuple(gpus)
