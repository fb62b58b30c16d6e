"""The metrics of the charms by name and labels; tests of alerts, dashboards and pages take them from here."""

import pathlib
from typing import Any

import rules
import yaml

PLACEHOLDER = "%%juju_topology%%"  # what the collector's side replaces by the application's labels
TOPOLOGY = {"juju_model": "training", "juju_model_uuid": "6e9d", "juju_application": "app", "juju_unit": "app/0"}
CHARMS = sorted(path.parent.name for path in (rules.ROOT / "charms").glob("*/charmcraft.yaml"))

_MOUNT, _VOLUME, _RUN = ("mountpoint", "kind"), ("volume",), ("run", "user")
METRICS: dict[str, dict[str, tuple[str, ...]]] = {
    "shared-filesystem-client": {
        "mount_up": (),
        "mount_healthy": _MOUNT,
        "mount_state_timestamp_seconds": _MOUNT,
        "mount_probe_duration_seconds": _MOUNT,
        "mount_probe_timestamp_seconds": _MOUNT,
        "mount_heals_total": _MOUNT,
        "mount_size_bytes": _MOUNT,
        "mount_available_bytes": _MOUNT,
    },
    "juicefs-server-proxy": {
        "volume_up": _VOLUME,
        "backups_up": _VOLUME,
        "engine_up": _VOLUME,
        "volume_used_bytes": _VOLUME,
        "volume_capacity_bytes": _VOLUME,
        "volume_used_inodes": _VOLUME,
        "volume_sessions": _VOLUME,
        "volume_trash_days": _VOLUME,
        "engine_memory_bytes": _VOLUME,
        "engine_memory_limit_bytes": _VOLUME,
        "volume_backup_timestamp_seconds": _VOLUME,
    },
    "slurm-gpu": {
        "gpu_up": (),
        "gpu_log_up": (),
        "node_up": (),
        "controller_up": (),
        "gpus_expected": ("type",),
        "gpus_detected": ("type",),
        "gpu_health_ok": (),
        "gpu_health_check_timestamp_seconds": (),
        "gpu_xid_errors_total": ("xid", "level"),
        "node_held": ("reason",),
        "gpu_mig_instances": ("profile",),
        "controller_gres_nodes": (),
    },
    "ddp-trainer": {
        "workspace_up": (),
        "runs": ("state",),
        "run_running": _RUN,
        "run_requeues_total": _RUN,
        "run_restarts_total": _RUN,
        "run_failures_total": ("reason",),
        "run_step": _RUN,
        "run_max_steps": _RUN,
        "run_loss": _RUN,
        "run_tokens_per_second": _RUN,
        "run_mfu_ratio": _RUN,
        "run_progress_timestamp_seconds": _RUN,
        "run_checkpoint_timestamp_seconds": _RUN,
        "run_checkpoint_stall_seconds": _RUN,
        "gpu_seconds_total": ("user",),
        "doctor_findings": ("severity",),
        "doctor_timestamp_seconds": (),
    },
}
NAMES = {f"slurm_ddp_{name}": labels for metrics in METRICS.values() for name, labels in metrics.items()}


def files(charm: str, kind: str) -> list[pathlib.Path]:
    """List the files of a charm of one kind: alerts or dashboards."""
    return sorted((rules.ROOT / "charms" / charm / "src" / "cos" / kind).glob("*.*"))


def alerts() -> list[tuple[str, dict[str, Any]]]:
    """Return (charm, rule) of every alert."""
    return [
        (charm, rule)
        for charm in CHARMS
        for path in files(charm, "alerts")
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


def matchers() -> str:
    return ",".join(f'{name}="{value}"' for name, value in TOPOLOGY.items() if name != "juju_unit")
