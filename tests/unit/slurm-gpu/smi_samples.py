"""Answers of `nvidia-smi -q -x`, written for these tests after the elements of nvsmi_device_v12.dtd. No captures."""

import typing

HEALTHY = {  # a card with everything that a data-centre card reports
    "gpu_recovery_action": "None",
    "fabric/state": "Completed",
    "fabric/status": "Success",
    "mig_mode/current_mig": "Disabled",
    "clocks_event_reasons/clocks_event_reason_hw_thermal_slowdown": "Not Active",
    "clocks_event_reasons/clocks_event_reason_hw_power_brake_slowdown": "Not Active",
    "ecc_errors/volatile/sram_correctable": "0",
    "ecc_errors/volatile/sram_uncorrectable_parity": "0",
    "ecc_errors/volatile/sram_uncorrectable_secded": "0",
    "ecc_errors/volatile/dram_correctable": "17",
    "ecc_errors/volatile/dram_uncorrectable": "0",
    "ecc_errors/aggregate/dram_uncorrectable": "3",
    "ecc_errors/aggregate/sram_threshold_exceeded": "No",
    "ecc_errors/channel_repair_pending": "No",
    "ecc_errors/tpc_repair_pending": "No",
    "retired_pages/pending_retirement": "N/A",
    "retired_pages/double_bit_retirement/retired_count": "60",
    "retired_pages/multiple_single_bit_retirement/retired_count": "3",
    "remapped_rows/remapped_row_corr": "0",
    "remapped_rows/remapped_row_unc": "1",
    "remapped_rows/remapped_row_pending": "No",
    "remapped_rows/remapped_row_failure": "No",
    "pci/pci_gpu_link_info/link_widths/max_link_width": "16x",
    "pci/pci_gpu_link_info/link_widths/current_link_width": "8x",
}
# A workstation card of an older driver: the new elements are missing, the rest is not supported.
BARE = {
    "fabric/state": "N/A",
    "ecc_errors/volatile/sram_uncorrectable": "N/A",
    "ecc_errors/volatile/dram_uncorrectable": "N/A",
    "remapped_rows": "N/A",
    "retired_pages/pending_retirement": "N/A",
    "clocks_event_reasons/clocks_event_reason_hw_thermal_slowdown": "N/A",
}


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
        f"<{name}>{_elements(value) if isinstance(value, dict) else value}</{name}>\n" for name, value in tree.items()
    )
