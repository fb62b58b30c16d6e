"""Write the pictures of the documentation into docs/images, from a demo in the sandbox.

    pictures.py [LOG]

Runs `./sandboxctl demo`; with LOG, the recorded output of a demo whose deployment is still up, it
starts there. Needs Chromium.

    demo.svg       the result of the demo, in a terminal
    watch.svg      `ddp watch` of a second run while it trains
    dashboard.svg  the trainer's Grafana dashboards of that time, from a Prometheus on its machine
    report.png     the page of `ddp report` about both runs
    loss.png       the loss curve of the second run
"""

import io
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse

import rich.console
import rich.terminal_theme
import rich.text

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "lib")]

from scripts import panels  # noqa: E402

IMAGES = ROOT / "docs" / "images"
RUN, LOGIN, RUNS = "pictures", "sackd/0", "/mnt/shared/runs"
COLUMNS, ROWS = 96, 30
TRAINING = (
    "gpt --steps 1000 --epoch-steps 200"  # some minutes, so that the dashboards show each scrape
)
OVERLAY = ROOT / "scripts" / "pictures.yaml"
BOARDS = "/var/lib/juju/agents/unit-trainer-0/charm/src/cos/dashboards"
PROMETHEUS = "http://127.0.0.1:9090/api/v1/query_range"
SCRAPE_S = 8  # of the collector's stand-in
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_REDRAW = re.compile(r"\r?\x1b\[2K(?:\x1b\[1A\x1b\[2K)+")  # rich.live before each frame
_MODES = re.compile(r"\x1b\[\?\d+[hl]")
_FONT_FACE = re.compile(
    r"\s*@font-face \{.*?\}", re.DOTALL
)  # fetched from the network; viewers have a monospace font


class PictureError(Exception):
    """A picture cannot be made."""


def sandboxctl(*words: str) -> bytes:
    """Run ./sandboxctl and return its output. Raises PictureError."""
    done = subprocess.run(
        [ROOT / "sandboxctl", *words], stdout=subprocess.PIPE, check=False, cwd=ROOT
    )
    if done.returncode:
        raise PictureError(f"./sandboxctl {' '.join(words[:6])}: exit status {done.returncode}")
    return done.stdout


def terminal(name: str, title: str, text: rich.text.Text) -> None:
    """Write the text, as a terminal shows it, to docs/images/NAME.svg."""
    width = max(len(line) for line in text.plain.splitlines())
    console = rich.console.Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True
    )
    console.print(text, crop=False, soft_wrap=True)
    theme = rich.terminal_theme.DIMMED_MONOKAI
    drawn = console.export_svg(title=title, theme=theme, unique_id=name)
    write(f"{name}.svg", _FONT_FACE.sub("", drawn).encode())


def write(name: str, content: bytes) -> None:
    """Write a picture."""
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / name).write_bytes(content)
    print(f"docs/images/{name}: {len(content) / 1000:.0f} kB")


def demo_result(output: str) -> str:
    """Cut the demo's result out of its output: nodes, mounts and the job."""
    result = output[output.rindex("\nSlurm (sinfo):") + 1 : output.rindex("\nTime:")]
    return f"$ make demo\n...\n{result.rstrip()}"


def live_frame(output: str) -> str:
    """Return a frame of `ddp watch` from two thirds into the training."""
    frames = [
        _MODES.sub("", frame).strip("\r\n") for frame in _REDRAW.split(output.replace("\r\n", "\n"))
    ]
    live = [frame for frame in frames if "RUNNING" in frame and "step 0" not in frame]
    if not live:
        raise PictureError(f"ddp watch showed no step of {RUN}")
    return live[len(live) * 2 // 3]


def watch() -> str:
    """Train a run and return what `ddp watch` wrote to its terminal."""
    sandboxctl("exec", LOGIN, "--", "rm", "-rf", f"{RUNS}/{RUN}")
    sandboxctl("ssh", LOGIN, f"ddp submit -N 2 --run {RUN} {TRAINING}")
    view = f"stty cols {COLUMNS} rows {ROWS}; ddp watch {RUN}"
    return sandboxctl(
        "ssh", LOGIN, f"script --quiet --command '{view}' /dev/null </dev/null"
    ).decode(errors="replace")


def newest_demo_run() -> str:
    """Return the name of the demo's run."""
    listed = sandboxctl("exec", LOGIN, "--", "ls", RUNS).decode().split()
    return max(name for name in listed if re.fullmatch(r"gpt-\d{8}-\d{6}", name))


def find_browser() -> str:
    """Find Chromium. Raises PictureError."""
    for name in BROWSERS:
        if browser := shutil.which(name):
            return browser
    raise PictureError("Chromium is missing: apt-get install chromium")


def report(browser: str) -> bytes:
    """Return a screenshot of the page about the demo's run and ours."""
    page = f"/tmp/{RUN}.html"  # noqa: S108 - on the sandbox's host
    sandboxctl("ssh", LOGIN, f"ddp report {newest_demo_run()} {RUN} -o {page}")
    with tempfile.TemporaryDirectory() as folder:
        source, picture = pathlib.Path(folder, "report.html"), pathlib.Path(folder, "report.png")
        source.write_bytes(sandboxctl("exec", LOGIN, "--", "cat", page))
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1100,945",
        ]
        command = [
            browser,
            *flags,
            f"--user-data-dir={folder}/profile",
            f"--screenshot={picture}",
            source.as_uri(),
        ]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
        return picture.read_bytes()


def dashboards(period: panels.Period) -> str:
    """Return the SVG of the trainer's dashboards. Raises PictureError."""
    answered: list[tuple[panels.Json, list[list[panels.Json]]]] = []
    times = {"start": period.begin, "end": period.end, "step": period.scrape_s}
    for name in ("training", "run"):
        board = json.loads(sandboxctl("exec", LOGIN, "--", "cat", f"{BOARDS}/{name}.json"))
        queries = [
            {"query": text, **times} for text in panels.expressions(board, {"run": RUN}, period)
        ]
        urls = [f"{PROMETHEUS}?{urllib.parse.urlencode(query)}" for query in queries]
        lines = sandboxctl(
            "exec", LOGIN, "--", "curl", "-sS", "--fail", "--fail-early", "-w", r"\n", *urls
        )
        answered.append(
            (board, [json.loads(line)["data"]["result"] for line in lines.splitlines()])
        )
    if drawn := panels.draw(answered, period):
        return drawn
    raise PictureError("Prometheus has no data of the trainer's dashboards")


def main(argv: list[str]) -> int:
    """Write all pictures."""
    try:
        browser = find_browser()  # before the minutes that the demo takes
        recorded = pathlib.Path(argv[1]).read_text() if argv[1:] else sandboxctl("demo").decode()
        terminal("demo", "make demo", rich.text.Text(demo_result(recorded)))
        sandboxctl("deploy", "bundle.yaml", "--overlay", str(OVERLAY))
        begin, seen = time.time(), watch()
        write("dashboard.svg", dashboards(panels.Period(begin, time.time(), SCRAPE_S)).encode())
        terminal("watch", f"ddp watch {RUN}", rich.text.Text.from_ansi(live_frame(seen)))
        write("report.png", report(browser))
        write("loss.png", sandboxctl("exec", LOGIN, "--", "cat", f"{RUNS}/{RUN}/loss.png"))
    except PictureError as e:
        print(f"pictures: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
