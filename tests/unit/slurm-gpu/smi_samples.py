"""Samples of `nvidia-smi -q -x`, written after nvsmi_device_v12.dtd. No captures."""

import pathlib
import typing

import yaml

_SAMPLES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())
HEALTHY: dict[str, str] = _SAMPLES[
    "healthy"
]  # a card with everything that a data-centre card reports
BARE: dict[str, str] = _SAMPLES[
    "bare"
]  # an older driver's workstation card: elements are missing or not supported


def answer(*cards: dict[str, str], attached: int | None = None) -> str:
    """Print such cards as nvidia-smi does."""
    body = "".join(gpu(i, values) for i, values in enumerate(cards))
    count = len(cards) if attached is None else attached
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        f"<driver_version>580.159.04</driver_version>\n<attached_gpus>{count}</attached_gpus>\n{body}</nvidia_smi_log>\n"
    )


def gpu(index: int, values: dict[str, str]) -> str:
    """Return one card's element; the keys of `values` are paths below it."""
    tree: dict[str, typing.Any] = {}
    for path, value in values.items():
        *folders, leaf = path.split("/")
        at = tree
        for folder in folders:
            at = at.setdefault(folder, {})
        at[leaf] = value
    return f'<gpu id="00000000:{index + 1:02X}:00.0">\n{_elements(tree)}</gpu>\n'


def _elements(tree: dict[str, typing.Any]) -> str:
    return "".join(
        f"<{name}>{_elements(value) if isinstance(value, dict) else value}</{name}>\n"
        for name, value in tree.items()
    )
