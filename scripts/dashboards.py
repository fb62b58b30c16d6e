"""Build the charms' Grafana dashboards from scripts/dashboards.yaml, when a charm is staged.

Built with Grafana's own library (grafana-foundation-sdk). The variables are the same as in every
dashboard of COS: data sources prometheusds and lokids, and Juju's topology.
"""

import json
import pathlib
from typing import Any

import yaml
from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog import encoder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models

PROMETHEUS = models.DataSourceRef(type_val="prometheus", uid="${prometheusds}")
TOPOLOGY = ("juju_model", "juju_model_uuid", "juju_application", "juju_unit")
_MODEL = 'juju_model=~"$juju_model", juju_model_uuid=~"$juju_model_uuid"'
_UNIT = f'{_MODEL}, juju_application=~"$juju_application", juju_unit=~"$juju_unit"'
_MATCHERS = {"<model>": _MODEL, "<unit>": _UNIT, "<run>": f'run=~"$run", user=~"$user", {_UNIT}'}
_HEIGHT, _SMALL = 8, 4
_WIDTHS = {"stat": 4, "graph": 12}

Json = dict[str, Any]
BOARDS: list[Json] = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())


def of(charm: str) -> dict[str, str]:
    """Render the dashboards of a charm: their JSON by the name of its file."""
    found: dict[str, str] = {}
    for board in BOARDS:
        if board["charm"] == charm:
            name = board["uid"].removeprefix("slurm-ddp-")
            found[f"{name}.json"] = render(board)
    return found


def render(board: Json) -> str:
    """Return the dashboard's JSON."""
    built = (
        dashboard.Dashboard(board["title"])
        .uid(board["uid"])
        .description(board["description"])
        .tags(["slurm-ddp"])
    )
    built = built.time("now-6h", "now").refresh("1m").timezone("browser").editable()
    for name, kind in (("prometheusds", "prometheus"), ("lokids", "loki")):
        built = built.with_variable(
            dashboard.DatasourceVariable(name).label(kind.capitalize()).type(kind)
        )
    for name in TOPOLOGY:
        built = built.with_variable(_variable(name, "up"))
    for name, metric in board.get("variables", {}).items():
        built = built.with_variable(_variable(name, f"{metric}{{{_UNIT}}}"))
    for panel in board["panels"]:
        built = built.with_panel(_panel(panel))
    made = built.build()
    for number, one in enumerate(made.panels or [], start=1):
        if isinstance(one, models.Panel):
            one.id_val = number
    return json.dumps(made, cls=encoder.JSONEncoder, indent=1, sort_keys=True) + "\n"


def _variable(name: str, metric: str) -> dashboard.QueryVariable:
    variable = (
        dashboard.QueryVariable(name)
        .label(name.replace("_", " ").capitalize())
        .datasource(PROMETHEUS)
    )
    variable = variable.query(f"label_values({metric}, {name})").refresh(
        models.VariableRefresh.ON_TIME_RANGE_CHANGED
    )
    variable = variable.multi(True).include_all(True).all_value(".*")
    return variable.current(models.VariableOption(text="All", value="$__all", selected=True))


def _panel(panel: Json) -> stat.Panel | timeseries.Panel:
    kind = next(kind for kind in _WIDTHS if kind in panel)
    queries = {
        legend: _expression(text)
        for legend, text in panel.get("queries", {"": panel.get("query", "")}).items()
    }
    if kind == "stat":
        made = (
            stat.Panel()
            .datasource(PROMETHEUS)
            .height(_SMALL)
            .graph_mode(shapes.BigValueGraphMode.AREA)
        )
    else:
        legend = (
            common.VizLegendOptions().show_legend(True).placement(shapes.LegendPlacement.BOTTOM)
        )
        legend = legend.display_mode(shapes.LegendDisplayMode.LIST)
        made = timeseries.Panel().datasource(PROMETHEUS).height(_HEIGHT).legend(legend)
    for letter, (words, expression) in zip("ABCDEF", queries.items(), strict=False):
        made = made.with_target(
            prometheus.Dataquery().expr(expression).legend_format(words).ref_id(letter)
        )
    made = made.title(panel[kind]).description(panel["description"]).unit(panel["unit"])
    return made.span(panel.get("width", _WIDTHS[kind]))


def _expression(text: str) -> str:
    for mark, matchers in _MATCHERS.items():
        text = text.replace(mark, matchers)
    return text
