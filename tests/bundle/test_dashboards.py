"""The queries of dashboards and pages return series on a real Prometheus."""

import collections.abc
import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import deployments
import documents
import observability
import pytest
import yaml

from scripts import dashboards

BOARDS = [json.loads(dashboards.render(board)) for board in dashboards.BOARDS]
_NOT_OURS = {  # documented by JuiceFS and by NVIDIA's DCGM exporter
    "juicefs_fuse_read_size_bytes_sum": ("mp",),
    "juicefs_fuse_written_size_bytes_sum": ("mp",),
    "juicefs_blockcache_hits": ("mp",),
    "juicefs_blockcache_miss": ("mp",),
    "juicefs_object_request_errors": ("mp",),
    "DCGM_FI_DEV_GPU_UTIL": ("gpu", "Hostname"),
    "DCGM_FI_DEV_FB_USED": ("gpu", "Hostname"),
    "DCGM_FI_DEV_GPU_TEMP": ("gpu", "Hostname"),
}
_GRAFANA = {"$__rate_interval": "5m", "$__range": "1h"}
_VALUES = {"Hostname": "node-0", "state": None, "severity": "error", "reason": "check"}
_ONES = {"slurm_ddp_run_running", "slurm_ddp_node_held"}
_STATES = ("pending", "running", "requeued", "failed")
_BUNDLE = yaml.safe_load(deployments.BUNDLE.read_text())["applications"]
LOGS = {name: f"/var/log/juju/unit-{name}-0.log" for name in _BUNDLE}


def queries() -> list[tuple[str, str, str]]:
    """Return (dashboard, panel, expression) of each query of Prometheus."""
    return [
        (board["title"], panel["title"], target["expr"])
        for board in BOARDS
        for panel in board["panels"]
        if panel["datasource"]["type"] == "prometheus"
        for target in panel["targets"]
    ]


def typed() -> list[tuple[str, str]]:
    """Return (page, expression) of each query of Prometheus or Loki that a page has as code."""
    code = re.compile(r"`(?:text\n)?((?:slurm_ddp_\w|\{\w+=)[^`\n]*)\n?`")
    return [
        (documents.named(page), text)
        for page in documents.PAGES
        for text in code.findall(page.read_text())
    ]


def samples(end: int) -> collections.abc.Iterator[str]:
    """Yield two hours of every metric, as OpenMetrics text, and a series for each log that Loki would have."""
    yield from (f'log{{filename="{path}"}} 1 {end}' for path in LOGS.values())
    for name, labels in {**observability.NAMES, **_NOT_OURS}.items():
        for state in _STATES if "state" in labels else ("error",):
            values = {
                label: _VALUES.get(label) or (state if label == "state" else "x")
                for label in labels
            }
            values |= observability.TOPOLOGY | {"instance": "node-0"}
            text = ",".join(f'{label}="{value}"' for label, value in values.items())
            for number, at in enumerate(range(end - 7200, end + 1, 60)):
                yield f"{name}{{{text}}} {1 if name in _ONES else number + 1} {at}"
    yield "# EOF"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> collections.abc.Iterator[tuple[str, int]]:
    """Start Prometheus on samples of every metric; yield its address and the samples' last second."""
    if not (shutil.which("prometheus") and shutil.which("promtool")):
        pytest.fail("no prometheus here: scripts/setup.sh test", pytrace=False)
    folder, end = tmp_path_factory.mktemp("prometheus"), int(time.time()) // 60 * 60 - 60
    (folder / "samples").write_text("\n".join(samples(end)) + "\n")
    argv = [
        "promtool",
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        folder / "samples",
        folder / "data",
    ]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    (folder / "prometheus.yml").write_text("{}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        "--log.level=error",
    ]
    flags += [f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.time=1d"]
    process = subprocess.Popen(["prometheus", *flags])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=2):
                break
            assert process.poll() is None, "prometheus ended"
            time.sleep(0.25)
        else:
            pytest.fail("prometheus is not ready")
        yield url, end
    finally:
        process.terminate()
        process.wait(timeout=20)


def ask(server: tuple[str, int], expression: str) -> list[Any]:
    for variable, value in _GRAFANA.items():
        expression = expression.replace(variable, value)
    expression = re.sub(r'"\$[a-z]\w+"', '".*"', expression)
    assert "$" not in expression.replace('"$1"', ""), expression
    url, end = server
    query = urllib.parse.urlencode({"query": expression, "time": end})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=10) as answer:
            return json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as e:
        pytest.fail(f"{expression}: {e.read().decode()}")


@pytest.mark.parametrize("query", queries(), ids=lambda query: f"{query[0]}: {query[1]}")
def test_every_query_returns_series(query: tuple[str, str, str], server: tuple[str, int]):
    assert ask(server, query[2]), query[2]


@pytest.mark.parametrize("query", typed(), ids=": ".join)
def test_every_query_of_a_page_returns_series(query: tuple[str, str], server: tuple[str, int]):
    assert ask(server, query[1]), query[1]


def test_the_page_s_query_of_logs_finds_those_of_our_charms(server: tuple[str, int]):
    (query,) = [
        text for _, text in typed() if "filename" in text
    ]  # Loki's selectors are written as Prometheus'
    ours = {path for name, path in LOGS.items() if _BUNDLE[name]["charm"].startswith("./")}
    assert {one["metric"]["filename"] for one in ask(server, query)} == ours


def test_the_page_names_every_dashboard():
    page = (deployments.ROOT / "docs" / "howto" / "observe.md").read_text()
    assert sorted(re.findall(r"\| Grafana, \*(.+?)\* \|", page)) == sorted(
        board["title"] for board in BOARDS
    )


def test_every_dashboard_is_of_a_charm():
    assert sum(len(dashboards.of(charm)) for charm in observability.CHARMS) == len(
        dashboards.BOARDS
    )


def test_every_variable_is_declared():
    assert all(len(board["uid"]) <= 40 for board in BOARDS)  # Grafana's limit
    for board in BOARDS:
        names = {one["name"] for one in board["templating"]["list"]}
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"]))) - {
            "__rate_interval",
            "__range",
            "1",
        }
        assert used <= names
        assert {"prometheusds", "lokids", *dashboards.TOPOLOGY} <= names  # COS has these


def test_every_metric_of_ours_is_on_a_dashboard():
    text = " ".join(expression for *_, expression in queries())
    assert {name for name in observability.NAMES if name not in text} == set()
