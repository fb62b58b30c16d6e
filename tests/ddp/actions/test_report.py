"""The report: its elements and curves, and damaged and hostile runs."""

import collections.abc
import datetime
import html.parser
import json
import os
import pathlib
import re

import hypothesis
import hypothesis.strategies as st
import pytest

from ddp.run import folder as folders
from ddp.run import logs
from ddp.run.model import Run
from ddp.view import charts, page

MADE = datetime.datetime(2026, 11, 23, 18, 0, tzinfo=datetime.timezone.utc)  # noqa: UP017 - Python 3.10
MakeRun = collections.abc.Callable[..., pathlib.Path]
# In every place that shows a run's text; each would leave a trace if it were not escaped.
HOSTILE = (
    "<script>window.hacked=1</script>",
    '"><img src=x onerror="window.hacked=1">',
    "</script><script>window.hacked=1</script>",
    "</style><script>window.hacked=1</script>",
    "{{ 7*7 }}{% for x in y %}",
    "'-alert(1)-'",
    "<!--",
    "\u202eevil\x1b[31m\x00",
    "&lt;b&gt;",
    "https://example.org/x.js",
    "\ud800",
)


class Elements(html.parser.HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(*runs: pathlib.Path) -> Elements:
    return Elements(page.page([folders.read(run) for run in runs], made=MADE))


def drawn(found: Elements, runs: list[Run], curve: str, run: int = 0) -> list[tuple[float, float]]:
    """Return the points of a curve on the page, turned back into steps and values."""
    wanted = {"data-run": str(run), "data-curve": curve}
    path = next(
        about["d"] for tag, about in found.tags if tag == "path" and wanted.items() <= about.items()
    )
    chart = next(one for one in charts.make(runs) if curve in [drawn.name for drawn in one.curves])
    pixels = [tuple(map(float, pair.split())) for pair in path.removeprefix("M").split("L")]

    def value(axis: charts.Axis, pixel: float) -> float:
        return axis.low + (pixel - axis.begin) / (axis.end - axis.begin) * (axis.high - axis.low)

    return [(value(chart.x, x), value(chart.y, y)) for x, y in pixels]


def known(folder: pathlib.Path, kind: str, key: str) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r[key]) for r in records if r["kind"] == kind and key in r]


@pytest.mark.parametrize(
    "curve", ["loss", "val_loss", "tokens_per_second", "lr", "memory_mib", "grad_norm"]
)
def test_the_page_draws_what_the_payload_measured(recorded: pathlib.Path, curve: str):
    points = drawn(shown(recorded), [folders.read(recorded)], curve)
    expected = known(recorded, "eval" if curve == "val_loss" else "step", curve)
    assert len(points) == len(expected) > 2
    values = [value for _, value in expected]
    tolerance = (max(values) - min(values)) * 0.002  # a tenth of a pixel, of some 250
    for (step, value), (true_step, true_value) in zip(points, expected, strict=True):
        assert step == pytest.approx(true_step, abs=0.02)
        assert value == pytest.approx(true_value, abs=tolerance)


def test_runs_stand_side_by_side_with_what_differs_marked(
    recorded: pathlib.Path, make_run: MakeRun
):
    config = json.loads((recorded / "config.json").read_text())
    other = make_run(
        "other",
        **{
            "config.json": json.dumps({**config, "lr": 0.01}),
            "metrics.jsonl": "".join(
                json.dumps({"kind": "step", "step": s, "loss": 6 - s / 50}) + "\n"
                for s in range(1, 101)
            ),
            "summary.json": json.dumps(
                {"workload": "gpt", "state": "done", "last_loss": 4.0, "best_loss": 3.0}
            ),
        },
    )
    found, runs = shown(recorded, other), [folders.read(recorded), folders.read(other)]
    assert [value for _, value in drawn(found, runs, "loss", run=1)] == pytest.approx(
        [6 - s / 50 for s in range(1, 101)], abs=0.01
    )
    assert len(drawn(found, runs, "loss", run=0)) == 60
    source = page.page(runs, made=MADE)
    rows = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        for row in re.findall(r'(?s)<tr class="differs">(.*?)</tr>', source)
    ]
    assert ["lr&#8800;", "0.003", "0.01"] in [
        [re.sub("<.*?>", "", cell) for cell in row] for row in rows
    ]
    assert not any(row[0].startswith("width") for row in rows)


def test_a_run_over_slow_links_has_its_sites_and_what_they_exchange(make_run: MakeRun):
    start = {"kind": "start", "step": 0, "time": 1.0, "sites": "a,b c"}
    about = {"sync_share": 0.125, "sync_bytes_per_step": 4e6, "sites": "a,b c"}
    steps = [{"kind": "step", "step": step, "loss": 2.0, "time": 2.0, **about} for step in (1, 2)]
    lines = "".join(json.dumps(record) + "\n" for record in (start, *steps))
    found = shown(make_run("a", **{"metrics.jsonl": lines}))
    assert "site 0: a, b; site 1: c" in found.text
    curves = {attributes.get("data-curve") for _, attributes in found.tags}
    assert {"sync_share", "sync_bytes_per_step"} <= curves


def test_a_hostile_run_stays_text(make_run: MakeRun):
    texts = {f"{word}{number}": word for number, word in enumerate(HOSTILE)}
    lines = "\n".join(HOSTILE)
    records = [
        {"kind": "step", "step": step, "loss": 1.0, **dict.fromkeys(HOSTILE, step)}
        for step in (1, 2, 3)
    ]
    folder = make_run(
        "<img src=x onerror=alert(1)>\"'&",
        **{
            "job.json": json.dumps(
                {
                    "kind": HOSTILE[0],
                    "submitted": HOSTILE[1],
                    "job_id": 5,
                    "request": texts,
                    **texts,
                }
            ),
            "config.json": json.dumps({**texts, "nested": {HOSTILE[2]: {HOSTILE[3]: HOSTILE[0]}}}),
            "summary.json": json.dumps(
                {"ranks": [{"host": word, "device": word} for word in HOSTILE], **texts}
            ),
            "metrics.jsonl": "".join(json.dumps(record) + "\n" for record in records),
            "logs/5.out": lines.replace("\ud800", ""),
            "control/5.hosts": "<b>a</b> b",
            "control/5.failures": "".join("\t".join([word] * 5) + "\n" for word in HOSTILE[:8]),
            "control/5.r0.outcome": json.dumps(
                {"outcome": HOSTILE[0], "error": HOSTILE[1], "step": HOSTILE[2]}
            ),
        },
    )
    (folder / "control" / "5.<script>window.hacked=1<").with_suffix(".outcome").write_text("{}")
    found = shown(folder, folder)
    assert not {"script", "img", "iframe", "object", "embed"} & {tag for tag, _ in found.tags}
    names = {name for _, about in found.tags for name in about}
    assert not [name for name in names if name.startswith("on")] and "src" not in names
    links = {about["href"][:5] for _, about in found.tags if "href" in about}
    assert links <= {"data:", "#run-"}, "the page fetches nothing"
    assert HOSTILE[0] in found.text
    assert "\x1b" not in found.text and "\u202e" not in found.text


START = {
    "kind": "start",
    "step": 0,
    "torch": "2.13.0+cpu",
    "cuda": "none",
    "python": "3.11.2",
    "backend": "gloo",
}


def test_the_recorded_run_is_shown_whole(recorded: pathlib.Path):
    metrics = recorded / "metrics.jsonl"
    metrics.write_text(json.dumps(START) + "\n" + metrics.read_text())
    run = folders.read(recorded)
    assert (run.name, run.kind, run.job_id, run.state, run.why) == (
        "gpt-20261123",
        "gpt",
        8,
        "COMPLETED",
        "",
    )
    assert run.notes == ()
    assert [(a.name, a.outcome, a.step) for a in run.attempts] == [
        ("7.r0", "failed", ""),
        ("8.r0", "done", "60"),
    ]
    failed, done = run.attempts
    assert failed.why.startswith("the loss is nan, the gradients' norm nan at step 2")
    assert (
        failed.began is not None
        and failed.ended is not None
        and done.began is not None
        and done.ended is not None
    )
    assert (failed.ended - failed.began, done.ended - done.began) == (11, 19)
    assert [(f.attempt, f.fault, f.node) for f in run.failures] == [("7.r0", "parameters", "-")]
    assert {
        "nodes": "slurmd-0, slurmd-1",
        "devices": "2 x cpu",
        "backend": "gloo",
        "torch": "2.13.0+cpu",
        "environment": "5c9e7d1f0a3b",
    }.items() <= run.cluster.items()
    assert run.figures["last_loss"] == pytest.approx(3.16144, abs=1e-5)
    assert (run.settings["lr"], run.settings["width"], run.settings["time_limit"]) == (
        "0.003",
        "32",
        "1:00:00",
    )
    assert "run_dir" not in run.settings
    log = logs.last_lines(run)
    assert log[-1].endswith("elapsed_s=12.9492")
    source = page.page([run], made=MADE, logs=[log])
    for text in (
        "2026-11-23 17:01:10",
        "00:00:11",
        "parameters",
        "lower --lr",
        "slurmd-0, slurmd-1",
        "COMPLETED",
    ):
        assert text in source, text


def test_requeues_and_restarts_come_in_their_order(make_run: MakeRun):
    folder = make_run()
    for number, name in enumerate(("12.r0", "12.r0t1", "12.r1", "12.r10", "12.r10t2")):
        path = folder / "control" / f"{name}.outcome"
        path.write_text('{"outcome": "preempted", "step": 5}')
        os.utime(path, (1000 + number // 2, 1000 + number // 2))
    run = folders.read(folder)
    assert [attempt.name for attempt in run.attempts] == [
        "12.r0",
        "12.r0t1",
        "12.r1",
        "12.r10",
        "12.r10t2",
    ]
    assert (run.state, run.why) == ("PREEMPTED", "saved at step 5")


def test_an_empty_folder_makes_a_page(make_run: MakeRun):
    run = folders.read(make_run())
    assert run.state == "UNKNOWN"
    assert "measured nothing yet" in page.page([run], made=MADE)
    assert "No runs" in page.page([], made=MADE)


def test_damaged_files_are_named(make_run: MakeRun):
    folder = make_run(
        **{
            "job.json": "{",
            "config.json": "[1]",
            "summary.json": b"\xff\xfe\x00",
            "metrics.jsonl": 'x\n{"step": 1, "loss": 2.5}\n{"st',
        }
    )
    run = folders.read(folder)
    assert [note.split(" ")[0] for note in run.notes] == [
        "job.json",
        "summary.json",
        "metrics.jsonl:",
        "config.json",
    ]
    assert run.metrics.series["loss"].points(5) == [(1, 2.5)]
    assert "config.json cannot be read: not a JSON object" in page.page([run], made=MADE)


def test_not_a_number_is_shown_and_breaks_nothing(make_run: MakeRun):
    losses = ("5.0", "4.0", "NaN", "3.0", "NaN", "-Infinity")
    lines = [
        f'{{"kind": "step", "step": {step}, "loss": {loss}, "lr": Infinity}}\n'
        for step, loss in enumerate(losses, 1)
    ]
    folder = make_run(
        **{
            "metrics.jsonl": "".join(lines),
            "summary.json": '{"last_loss": NaN, "best_loss": Infinity, "steps": 6, "mfu": -Infinity}',
        }
    )
    found = shown(folder, folder)
    assert [round(value, 2) for _, value in drawn(found, [folders.read(folder)], "loss")] == [
        5.0,
        4.0,
        3.0,
    ]
    assert "not a finite number from step 5 on" in found.text
    assert not [about for _, about in found.tags if re.search("nan|inf", about.get("d", ""))]


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
NUMBERS = (
    st.floats()
    | st.integers(-(10**400), 10**400)
    | st.sampled_from([0.0, 5e-324, 1e-310, 1e299, -1e299, 1e16, 1e16 + 2])
)
RECORDS = st.lists(
    st.fixed_dictionaries(
        {"step": NUMBERS | st.integers(0, 50), "loss": NUMBERS},
        optional={
            "kind": st.sampled_from(["step", "eval"]),
            "val_loss": NUMBERS,
            "time": NUMBERS,
            "lr": JSON,
        },
    ),
    max_size=12,
)
KEYS = {
    "job_id": JSON,
    "request": JSON,
    "choice": JSON,
    "ranks": JSON,
    "state": JSON,
    "outcome": JSON,
    "nodes": JSON,
    "elapsed_s": NUMBERS,
}


@hypothesis.settings(
    max_examples=30,  # a picture takes a tenth of a second
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    objects=st.lists(st.fixed_dictionaries({}, optional=KEYS) | JSON, min_size=4, max_size=4),
    records=RECORDS,
    noise=st.binary(max_size=40),
)
@hypothesis.example(
    objects=[{}, {}, {}, {}],
    records=[{"step": 0.0, "loss": 0.0}, {"step": 5e-324, "loss": 5e-324}],
    noise=b"",
)
def test_whatever_the_files_hold_there_is_a_page(
    make_run: MakeRun, objects: list[object], records: list[object], noise: bytes
):
    names = ("job.json", "config.json", "summary.json", "control/5.r0.outcome")
    texts: dict[str, str | bytes] = {
        name: json.dumps(value) for name, value in zip(names, objects, strict=True)
    }
    texts["metrics.jsonl"] = (
        "".join(json.dumps(record) + "\n" for record in records).encode() + noise
    )
    texts |= {"control/5.failures": noise, "control/5.hosts": noise, "logs/5.out": noise}
    run = folders.read(make_run(**texts))
    source = page.page([run, run], made=MADE)
    source.encode()
    assert not re.search(r'(?:d|x1|x|y)="[^"]*(?:nan|inf)', source)


def test_many_steps_make_a_small_page(make_run: MakeRun, tmp_path: pathlib.Path):
    folder = make_run()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 100_001):
            loss = (
                9.25 if step == 76_543 else 0.0625 if step == 12_345 else 1.5 + 3 / (1 + step / 1e5)
            )
            file.write(
                f'{{"kind": "step", "step": {step}, "epoch": 1, "loss": {loss}, "lr": 0.0003, "grad_norm": 1.5,'
                f' "tokens": {step * 1024}, "tokens_per_second": {1e5 + step % 997}, "time": {1.7e9 + step}}}\n'
            )
    run = folders.read(folder)
    source = page.page([run], made=MADE)
    assert len(source) < 1_000_000
    (loss,) = charts.make([run])[0].curves
    points = dict(loss.points)
    assert (points[76_543], points[12_345]) == (9.25, 0.0625)
    assert (min(points), max(points)) == (1, 100_000)


def test_axes_have_readable_ticks():
    values = (0, 0.003, 2.5, 1500, 15000, 2.5e6, 1e-9, 3e9, -2e4, 1e20)
    texts = "0 0.003 2.5 1500 15k 2.5M 1e-09 3G -20k 1e+20"
    assert " ".join(charts.number_text(value) for value in values) == texts
    for low, high in (
        (0.0, 1.0),
        (1.0, 60.0),
        (4.26, 5.71),
        (1e-9, 1e-3),
        (-3.0, 5e5),
        (1e16, 1e16 + 4),
    ):
        ticks = charts.Axis(low, high, 0, 100).ticks
        assert 2 <= len(ticks) <= 24, (low, high)
        assert all(-0.1 <= at <= 100.1 for at, _ in ticks)
