"""Write the Grafana dashboards of the charms: charms/*/src/cos/dashboards/*.json.

    python scripts/dashboards.py             write them
    python scripts/dashboards.py --check     say which are out of date, and exit 1 if one is

Built with Grafana's own library (grafana-foundation-sdk). The variables are those that COS gives every dashboard:
data sources prometheusds and lokids, and Juju's topology.
"""

import collections.abc
import dataclasses
import json
import pathlib
import sys

from grafana_foundation_sdk.builders import common, dashboard, logs, loki, prometheus, stat, timeseries
from grafana_foundation_sdk.cog import encoder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROMETHEUS = models.DataSourceRef(type_val="prometheus", uid="${prometheusds}")
LOKI = models.DataSourceRef(type_val="loki", uid="${lokids}")
TOPOLOGY = ("juju_model", "juju_model_uuid", "juju_application", "juju_unit")
_MODEL = 'juju_model=~"$juju_model", juju_model_uuid=~"$juju_model_uuid"'
_UNIT = f'{_MODEL}, juju_application=~"$juju_application", juju_unit=~"$juju_unit"'
_RUN = f'run=~"$run", user=~"$user", {_UNIT}'
_LOGS = "/var/log/slurm-ddp/.+[.]log"  # which the exporters of ddp-trainer write
_HEIGHT, _SMALL, _WIDTH = 8, 4, 24


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel; `queries` are (legend, expression), a series is drawn for each label in the legend."""

    title: str
    description: str
    unit: str  # one of Grafana's unit ids
    queries: tuple[tuple[str, str], ...]
    width: int = 12
    is_stat: bool = False
    is_log: bool = False


@dataclasses.dataclass(frozen=True)
class Board:
    """One dashboard, in the folder of its charm; `variables` are (name, a metric with that label)."""

    charm: str
    uid: str
    title: str
    description: str
    panels: tuple[Panel, ...]
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def path(self) -> pathlib.Path:
        """Where its JSON lies."""
        return (
            ROOT / "charms" / self.charm / "src" / "cos" / "dashboards" / f"{self.uid.removeprefix('slurm-ddp-')}.json"
        )


def _of(name: str, labels: str = _UNIT) -> str:
    return f"slurm_ddp_{name}{{{labels}}}"


def _in(name: str, label: str, value: str) -> str:
    matchers = f'{label}="{value}", {_UNIT}'
    return f"sum({_of(name, matchers)})"


def _age(name: str, labels: str = _UNIT) -> str:
    return f"time() - {_of(name, labels)}"


def _stat(title: str, description: str, unit: str, expression: str, width: int = 4) -> Panel:
    return Panel(title, description, unit, (("", expression),), width, is_stat=True)


def _graph(title: str, description: str, unit: str, *queries: tuple[str, str]) -> Panel:
    return Panel(title, description, unit, queries)


_TRAINING = Board(
    "ddp-trainer",
    "slurm-ddp-training",
    "Slurm DDP training",
    "All runs of the cluster.",
    (
        _stat("Running", "Runs of which a job is running now.", "short", _in("runs", "state", "running")),
        _stat("Pending", "Runs whose job waits for nodes.", "short", _in("runs", "state", "pending")),
        _stat("Requeued", "Runs that wait to start again.", "short", _in("runs", "state", "requeued")),
        _stat("Failed", "Runs that failed in the last hour.", "short", _in("runs", "state", "failed")),
        _stat(
            "Findings of doctor",
            "Errors that ddp doctor found last.",
            "short",
            _in("doctor_findings", "severity", "error"),
        ),
        _stat(
            "Age of doctor's findings",
            "Time since ddp doctor ran last.",
            "s",
            f"max({_age('doctor_timestamp_seconds')})",
        ),
        _graph(
            "Runs by state",
            "Runs that are queued, run, or ended in the last hour.",
            "short",
            ("{{state}}", f"sum by (state) ({_of('runs')})"),
        ),
        _graph(
            "GPUs in use",
            "GPUs that jobs hold, by user: the rate of their GPU seconds.",
            "short",
            ("{{user}}", f"sum by (user) (rate({_of('gpu_seconds_total')}[$__rate_interval]))"),
        ),
        _graph(
            "GPU hours",
            "GPU hours by user in the time that is shown.",
            "h",
            ("{{user}}", f"sum by (user) (increase({_of('gpu_seconds_total')}[$__range])) / 3600"),
        ),
        _graph(
            "Failures by reason",
            "Failed attempts in an hour: mistake, program, node, filesystem or network.",
            "short",
            ("{{reason}}", f"sum by (reason) (increase({_of('run_failures_total')}[1h]))"),
        ),
        _graph(
            "Requeues and restarts",
            "Starts again in an hour, by run.",
            "short",
            ("{{run}} requeues", f"sum by (run) (increase({_of('run_requeues_total')}[1h]))"),
            ("{{run}} restarts", f"sum by (run) (increase({_of('run_restarts_total')}[1h]))"),
        ),
        _graph("Tokens per second", "Of all ranks, by run.", "short", ("{{run}}", _of("run_tokens_per_second"))),
        _graph(
            "Time since the last step",
            "A run that is running and makes no step is stalled.",
            "s",
            ("{{run}}", f"{_age('run_progress_timestamp_seconds')} and {_of('run_running')} == 1"),
        ),
        _graph("Findings of doctor over time", "By severity.", "short", ("{{severity}}", _of("doctor_findings"))),
        _graph(
            "Workspace answers",
            "0: the runs could not be read, and what is shown is old.",
            "bool",
            ("{{juju_unit}}", _of("workspace_up")),
        ),
    ),
)
_ONE_RUN = Board(
    "ddp-trainer",
    "slurm-ddp-run",
    "Slurm DDP run",
    "One run: its progress, speed and checkpoints.",
    (
        _stat("Step", "Last step.", "short", f"max({_of('run_step', _RUN)})"),
        _stat(
            "Done",
            "Share of the steps that are made.",
            "percentunit",
            f"max({_of('run_step', _RUN)} / {_of('run_max_steps', _RUN)})",
        ),
        _stat("Loss", "Loss of the last step.", "none", f"max({_of('run_loss', _RUN)})"),
        _stat(
            "MFU", "Share of the GPUs' peak that the model uses.", "percentunit", f"max({_of('run_mfu_ratio', _RUN)})"
        ),
        _stat(
            "Last step ago", "Time since the last step.", "s", f"max({_age('run_progress_timestamp_seconds', _RUN)})"
        ),
        _stat(
            "Checkpoint ago",
            "Age of the last complete checkpoint: what a failure costs.",
            "s",
            f"max({_age('run_checkpoint_timestamp_seconds', _RUN)})",
        ),
        _graph("Loss over time", "Loss of the last step of each scrape.", "none", ("{{run}}", _of("run_loss", _RUN))),
        _graph("Steps", "Steps made; flat where the run stalls or waits.", "short", ("{{run}}", _of("run_step", _RUN))),
        _graph("Speed", "Tokens per second of all ranks.", "short", ("{{run}}", _of("run_tokens_per_second", _RUN))),
        _graph(
            "MFU over time",
            "Share of the GPUs' peak that the model uses.",
            "percentunit",
            ("{{run}}", _of("run_mfu_ratio", _RUN)),
        ),
        _graph(
            "Stall of a checkpoint",
            "How long the last save held up the training.",
            "s",
            ("{{run}}", _of("run_checkpoint_stall_seconds", _RUN)),
        ),
        _graph(
            "Requeues and restarts of the run",
            "Since it was submitted.",
            "short",
            ("requeues", _of("run_requeues_total", _RUN)),
            ("restarts", _of("run_restarts_total", _RUN)),
        ),
        Panel(
            "Events",
            "Checkpoints, failures, restarts, requeues and the end, as the run's log has them.",
            "none",
            (("", f'{{filename=~"{_LOGS}", {_MODEL}}} | logfmt | run=~"$run" | user=~"$user"'),),
            _WIDTH,
            is_log=True,
        ),
    ),
    (("user", "slurm_ddp_run_step"), ("run", "slurm_ddp_run_step")),
)
_MOUNTS = Board(
    "shared-filesystem-client",
    "slurm-ddp-mounts",
    "Slurm DDP storage mounts",
    "The mounts of all machines.",
    (
        _stat(
            "Mounts that fail", "Mounts whose last probe failed.", "short", f"sum({_of('mount_healthy')} == bool 0)", 6
        ),
        _stat("Mounts", "Mounts that are kept.", "short", f"count({_of('mount_healthy')})", 6),
        _stat(
            "Repairs",
            "Repairs in the time that is shown.",
            "short",
            f"sum(increase({_of('mount_heals_total')}[$__range]))",
            6,
        ),
        _stat(
            "Oldest probe",
            "Time since a mount was probed; it grows where a keeper does not run.",
            "s",
            f"max({_age('mount_probe_timestamp_seconds')})",
            6,
        ),
        _graph(
            "Healthy",
            "1: the mount passed its last probe.",
            "bool",
            ("{{instance}} {{mountpoint}}", _of("mount_healthy")),
        ),
        _graph(
            "Probe",
            "How long the last write and read took.",
            "s",
            ("{{instance}} {{mountpoint}}", _of("mount_probe_duration_seconds")),
        ),
        _graph(
            "In this state",
            "How long the mount works, or does not.",
            "s",
            ("{{instance}} {{mountpoint}}", _age("mount_state_timestamp_seconds")),
        ),
        _graph(
            "Used",
            "Share of the filesystem that is used.",
            "percentunit",
            ("{{mountpoint}}", f"max by (mountpoint) (1 - {_of('mount_available_bytes')} / {_of('mount_size_bytes')})"),
        ),
        _graph(
            "JuiceFS: read and written",
            "By the client on each machine, as JuiceFS counts it.",
            "Bps",
            ("{{instance}} read", f"rate(juicefs_fuse_read_size_bytes_sum{{{_UNIT}}}[$__rate_interval])"),
            ("{{instance}} written", f"rate(juicefs_fuse_written_size_bytes_sum{{{_UNIT}}}[$__rate_interval])"),
        ),
        _graph(
            "JuiceFS: cache hits",
            "Share of the reads that the node's cache served.",
            "percentunit",
            (
                "{{instance}}",
                f"rate(juicefs_blockcache_hits{{{_UNIT}}}[$__rate_interval]) / "
                f"(rate(juicefs_blockcache_hits{{{_UNIT}}}[$__rate_interval])"
                f" + rate(juicefs_blockcache_miss{{{_UNIT}}}[$__rate_interval]))",
            ),
        ),
        _graph(
            "JuiceFS: errors of the object store",
            "Requests that failed.",
            "reqps",
            ("{{instance}}", f"sum by (instance) (rate(juicefs_object_request_errors{{{_UNIT}}}[$__rate_interval]))"),
        ),
        _graph(
            "Keeper's files readable", "0: the mount's metrics are missing.", "bool", ("{{juju_unit}}", _of("mount_up"))
        ),
    ),
)
_VOLUME = Board(
    "juicefs-server-proxy",
    "slurm-ddp-volume",
    "Slurm DDP volume",
    "The JuiceFS volume, as its metadata engine reports it.",
    (
        _stat("Bytes used", "Bytes in the volume.", "bytes", f"max({_of('volume_used_bytes')})"),
        _stat("Limit", "Bytes that the volume may hold.", "bytes", f"max({_of('volume_capacity_bytes')})"),
        _stat("Files", "Files and folders.", "short", f"max({_of('volume_used_inodes')})"),
        _stat("Sessions", "Clients that have it mounted.", "short", f"max({_of('volume_sessions')})"),
        _stat("Trash", "Days that deleted files are kept.", "d", f"max({_of('volume_trash_days')})"),
        _stat(
            "Backup ago",
            "Time since the metadata was backed up; empty where it never was.",
            "s",
            f"time() - (max({_of('volume_backup_timestamp_seconds')}) > 0)",
        ),
        _graph(
            "Used",
            "Bytes in the volume, and its limit.",
            "bytes",
            ("{{volume}} used", f"max by (volume) ({_of('volume_used_bytes')})"),
            ("{{volume}} limit", f"max by (volume) ({_of('volume_capacity_bytes')})"),
        ),
        _graph(
            "Files over time",
            "Files and folders.",
            "short",
            ("{{volume}}", f"max by (volume) ({_of('volume_used_inodes')})"),
        ),
        _graph(
            "Sessions over time",
            "Clients that have it mounted.",
            "short",
            ("{{volume}}", f"max by (volume) ({_of('volume_sessions')})"),
        ),
        _graph(
            "Memory of the engine",
            "Of the embedded Redis; its limit is 0 where there is none.",
            "bytes",
            ("{{instance}} used", _of("engine_memory_bytes")),
            ("{{instance}} limit", _of("engine_memory_limit_bytes")),
        ),
        _graph(
            "Sources answer",
            "0: what the metrics are read from does not answer.",
            "bool",
            ("{{juju_unit}} volume", _of("volume_up")),
            ("{{juju_unit}} backups", _of("backups_up")),
            ("{{juju_unit}} engine", _of("engine_up")),
        ),
    ),
)
_DCGM = f'label_replace({{__name__="%s", {_MODEL}}}, "instance", "$1", "Hostname", "(.+)")'
_GPUS = Board(
    "slurm-gpu",
    "slurm-ddp-gpus",
    "Slurm DDP GPUs",
    "The cards of all nodes, and what slurm-gpu does about them. DCGM's panels need NVIDIA's exporter.",
    (
        _stat(
            "GPUs missing",
            "GPUs that nodes registered with Slurm and that do not work.",
            "short",
            f"sum({_of('gpus_expected')} - {_of('gpus_detected')})",
            6,
        ),
        _stat("GPUs", "GPUs that work.", "short", f"sum({_of('gpus_detected')})", 6),
        _stat(
            "Nodes held",
            "Nodes that are kept from new jobs.",
            "short",
            f"sum(max by (instance) ({_of('node_held')}))",
            6,
        ),
        _stat(
            "Nodes in gres.conf",
            "Nodes whose lines the controller has.",
            "short",
            f"max({_of('controller_gres_nodes')})",
            6,
        ),
        _graph(
            "GPUs by type",
            "Those that work; registered ones as a second line.",
            "short",
            ("{{type}} work", f"sum by (type) ({_of('gpus_detected')})"),
            ("{{type}} registered", f"sum by (type) ({_of('gpus_expected')})"),
        ),
        _graph(
            "Held",
            "1: the node is kept from new jobs for this reason.",
            "bool",
            ("{{instance}} {{reason}}", f"max by (instance, reason) ({_of('node_held')})"),
        ),
        _graph(
            "Xids",
            "Errors that the driver logged since boot, by number and what the health check makes of them.",
            "short",
            ("{{instance}} Xid {{xid}} ({{level}})", _of("gpu_xid_errors_total")),
        ),
        _graph("Health check", "1: the last one found no fault.", "bool", ("{{instance}}", _of("gpu_health_ok"))),
        _graph(
            "Age of the health check",
            "Time since the last one.",
            "s",
            ("{{instance}}", _age("gpu_health_check_timestamp_seconds")),
        ),
        _graph(
            "MIG instances", "By profile.", "short", ("{{profile}}", f"sum by (profile) ({_of('gpu_mig_instances')})")
        ),
        _graph(
            "DCGM: utilisation", "Of each card.", "percent", ("{{instance}} {{gpu}}", _DCGM % "DCGM_FI_DEV_GPU_UTIL")
        ),
        _graph(
            "DCGM: memory in use", "Of each card.", "decmbytes", ("{{instance}} {{gpu}}", _DCGM % "DCGM_FI_DEV_FB_USED")
        ),
        _graph(
            "DCGM: temperature", "Of each card.", "celsius", ("{{instance}} {{gpu}}", _DCGM % "DCGM_FI_DEV_GPU_TEMP")
        ),
        _graph(
            "DCGM: utilisation of held nodes",
            "Jobs that still run on nodes which take no new ones.",
            "percent",
            (
                "{{instance}} {{gpu}}",
                f"{_DCGM % 'DCGM_FI_DEV_GPU_UTIL'} and on (instance) max by (instance) ({_of('node_held')}) == 1",
            ),
        ),
        _graph(
            "Sources answer",
            "0: what the metrics are read from does not answer.",
            "bool",
            ("{{instance}} driver", _of("gpu_up")),
            ("{{instance}} log", _of("gpu_log_up")),
            ("{{instance}} node", _of("node_up")),
            ("{{instance}} controller", _of("controller_up")),
        ),
    ),
)
BOARDS = (_TRAINING, _ONE_RUN, _MOUNTS, _VOLUME, _GPUS)


def render(board: Board) -> str:
    """Return the dashboard's JSON."""
    built = dashboard.Dashboard(board.title).uid(board.uid).description(board.description).tags(["slurm-ddp"])
    built = built.time("now-6h", "now").refresh("1m").timezone("browser").editable()
    for name, kind in (("prometheusds", "prometheus"), ("lokids", "loki")):
        built = built.with_variable(dashboard.DatasourceVariable(name).label(kind.capitalize()).type(kind))
    first = next(iter(dict(board.variables).values()), "up")
    for name in TOPOLOGY:
        built = built.with_variable(_variable(name, "up"))
    for name, _ in board.variables:
        built = built.with_variable(_variable(name, f"{first}{{{_UNIT}}}"))
    for panel in board.panels:
        built = built.with_panel(_panel(panel))
    made = built.build()
    for number, one in enumerate(made.panels or [], start=1):
        if isinstance(one, models.Panel):
            one.id_val = number
    return json.dumps(made, cls=encoder.JSONEncoder, indent=1, sort_keys=True) + "\n"


def _variable(name: str, metric: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).label(name.replace("_", " ").capitalize()).datasource(PROMETHEUS)
    variable = variable.query(f"label_values({metric}, {name})").refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    variable = variable.multi(True).include_all(True).all_value(".*")
    return variable.current(models.VariableOption(text="All", value="$__all", selected=True))


def _panel(panel: Panel) -> stat.Panel | timeseries.Panel | logs.Panel:
    if panel.is_log:
        log = logs.Panel().datasource(LOKI).show_time(True)
        log = log.with_target(loki.Dataquery().expr(panel.queries[0][1]).ref_id("A"))
        return log.title(panel.title).description(panel.description).height(_HEIGHT).span(panel.width).unit(panel.unit)
    if panel.is_stat:
        made = stat.Panel().height(_SMALL).graph_mode(shapes.BigValueGraphMode.AREA)
    else:
        legend = common.VizLegendOptions().show_legend(True).placement(shapes.LegendPlacement.BOTTOM)
        made = timeseries.Panel().height(_HEIGHT).legend(legend.display_mode(shapes.LegendDisplayMode.LIST))
    made = made.title(panel.title).description(panel.description).unit(panel.unit).span(panel.width)
    made = made.datasource(PROMETHEUS)
    for letter, (legend_format, expression) in zip("ABCDEF", panel.queries, strict=False):
        made = made.with_target(prometheus.Dataquery().expr(expression).legend_format(legend_format).ref_id(letter))
    return made


def stale() -> collections.abc.Iterator[pathlib.Path]:
    """Yield the files that are not as this program writes them, and those that it does not write."""
    known = {board.path: render(board) for board in BOARDS}
    yield from (path for path, text in known.items() if not path.is_file() or path.read_text() != text)
    yield from sorted(set((ROOT / "charms").glob("*/src/cos/dashboards/*.json")) - set(known))


def main() -> int:
    """Write or check all dashboards."""
    if "--check" in sys.argv[1:]:
        found = list(stale())
        print("\n".join(f"{path.relative_to(ROOT)}: out of date; run tox -e reference" for path in found))
        return int(bool(found))
    for board in BOARDS:
        board.path.parent.mkdir(parents=True, exist_ok=True)
        board.path.write_text(render(board))
    return 0


if __name__ == "__main__":
    sys.exit(main())
