"""The message at a run's end, to a real server: its text, and that it can never fail a run."""

import http.server
import json
import pathlib
import signal
import threading
import time
import typing

import pytest
from job_specs import job_files, make
from script_texts import ENDS, WAITS, stop

from batch_host import Node
from ddp.node import notification

RAISES = "echo 'ValueError: no such column'; exit 1"
KEY = "T0SECRET"


class Server(http.server.ThreadingHTTPServer):
    """A server that keeps the requests posted to it, and answers as a test wants."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posted: list[tuple[str, dict[str, typing.Any]]] = []
        self.status = 200
        self.hangs = threading.Event()
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/notify/{KEY}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server  # type: ignore[assignment]

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        text = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, json.loads(text)))
        if self.server.hangs.is_set():
            self.server.is_over.wait(30)
            return
        self.send_response(self.server.status)
        self.send_header("Location", self.server.url)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:  # type: ignore[override]
        pass


@pytest.fixture
def server() -> typing.Iterator[Server]:
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield found
        found.is_over.set()
        found.shutdown()
        thread.join()


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Node:
    return Node(tmp_path, tmp_path / "shared" / "runs" / "first")


def files(node: Node, url: str, **more: typing.Any) -> dict[str, str]:
    """Return a run's files, whose supervisor reads this URL from a private file."""
    path = node.run_dir.parents[1] / "first.notify"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{url}\n")
    return job_files(make(node.run_dir, notify_path=str(path), **more))


def test_a_run_that_completes_is_posted_once(node: Node, server: Server):
    node.add("srun", "exit 0")
    code, output = node.run(files(node, server.url))
    assert code == 0, output
    ((path, about),) = server.posted
    assert path == f"/notify/{KEY}"
    assert about == {
        "text": "first: completed (job 12)",
        "run": "first",
        "state": "completed",
        "job_id": "12",
        "exit_code": 0,
        "reason": None,
        "run_dir": str(node.run_dir),
        "nodes": "slurmd-[0-1]",
    }
    assert output.splitlines()[-1] == "[NOTIFY] sent"
    assert not (node.run_dir.parents[1] / "first.notify").exists()


def test_a_run_that_fails_says_why(node: Node, server: Server):
    node.add("srun", RAISES)
    code, _ = node.run(files(node, server.url))
    assert code == 1
    ((_, about),) = server.posted
    assert about["state"] == "failed"
    assert about["text"] == "first: failed (job 12, exit code 1): ValueError: no such column"


def test_a_restart_is_no_end(node: Node, server: Server):
    counts = 'echo x >> "$NOTES/attempts"; [ $(wc -l < "$NOTES/attempts") = 2 ] && exit 0; exit 1'
    node.add("srun", counts)
    assert node.run(files(node, server.url, max_restarts=1))[0] == 0
    assert [about["state"] for _, about in server.posted] == ["completed"]


@pytest.mark.parametrize(
    ("number", "state", "posted"),
    [
        pytest.param(signal.SIGUSR1, "RUNNING", [], id="it is requeued"),
        pytest.param(signal.SIGTERM, "CANCELLED", ["cancelled"], id="it is cancelled"),
    ],
)
def test_only_an_end_is_posted(
    node: Node, server: Server, number: signal.Signals, state: str, posted: list[str]
):
    node.add("srun", WAITS + ENDS % "preempted")
    stop(node, files(node, server.url, leaves_outcome=True), number, STATE=state)
    assert [about["state"] for _, about in server.posted] == posted


@pytest.mark.parametrize(("left", "posted"), [("40_0\\n40_1", 0), ("40_1", 1)])
def test_a_sweep_is_posted_at_its_end(node: Node, server: Server, left: str, posted: int):
    (node.run_dir.parent / "first-1" / "control").mkdir(parents=True)
    (node.run_dir.parent / "first-1" / "args").write_text("")
    node.add("srun", "exit 0")
    node.add("squeue", f"printf '{left}\\n'")
    process = node.start(
        files(node, server.url, is_sweep=True), SLURM_ARRAY_JOB_ID="40", SLURM_ARRAY_TASK_ID="1"
    )
    code, output = node.finish(process)
    assert code == 0, output
    assert [about["run"] for _, about in server.posted] == ["first-1"] * posted


@pytest.mark.parametrize("status", [302, 404, 500])
def test_a_server_that_refuses_fails_no_run_and_the_log_has_no_url(
    node: Node, server: Server, status: int
):
    server.status = status
    node.add("srun", "exit 0")
    code, output = node.run(files(node, server.url))
    assert code == 0
    assert len(server.posted) == 1, "a redirect is not followed"
    assert output.splitlines()[-1] == f"[NOTIFY] not sent: the server answered {status}"
    assert KEY not in output


def test_a_place_without_a_server_fails_no_run(node: Node):
    node.add("srun", "exit 0")
    code, output = node.run(files(node, f"http://127.0.0.1:9/{KEY}"))
    assert code == 0
    assert output.splitlines()[-1] == "[NOTIFY] not sent: Connection refused"
    assert KEY not in output


def test_a_server_that_hangs_is_left_in_time(
    server: Server, capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path
):
    server.hangs.set()
    began = time.monotonic()
    notification.send(server.url, {"text": "x"}, {}, timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert "[NOTIFY] not sent: no answer in time" in capfd.readouterr().out


@pytest.mark.long
def test_a_job_ends_although_the_server_hangs(node: Node, server: Server):
    server.hangs.set()
    node.add("srun", "exit 0")
    began = time.monotonic()
    assert node.run(files(node, server.url))[0] == 0
    assert time.monotonic() - began < notification.SEND_S + 20


@pytest.mark.parametrize("url", ["http://[", "http://a b/", "gopher://x", ""])
def test_a_damaged_url_fails_no_run(node: Node, url: str):
    node.add("srun", "exit 0")
    assert node.run(files(node, url))[0] == 0


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("https://hooks.slack.com/services/T/B/X", {"text": "a: 1 &lt; 2 &amp; 3"}),
        ("https://chat.example.org/hooks/xyz", {"text": "a: 1 < 2 & 3"}),
        ("https://example.org/x", {"text": "a: 1 < 2 & 3", "run": "a"}),
    ],
)
def test_a_chat_gets_a_text_alone(url: str, sent: dict[str, str]):
    assert json.loads(notification.body(url, {"text": "a: 1 < 2 & 3", "run": "a"})) == sent


def test_a_job_that_lost_the_file_runs_and_says_so(node: Node):
    node.add("srun", "exit 0")
    given = files(node, "http://x/")
    (node.run_dir.parents[1] / "first.notify").unlink()
    code, output = node.run(given)
    assert code == 0
    assert "submit the run again with notify" in output


def test_it_goes_through_the_jobs_proxy(node: Node, server: Server):
    node.add("srun", "exit 0")
    proxy = server.url.rpartition("/notify")[0]
    given = files(node, f"http://hook.example.org/{KEY}", variables=(("http_proxy", proxy),))
    code, output = node.run(given)
    assert code == 0
    assert [path for path, _ in server.posted] == [f"http://hook.example.org/{KEY}"], output
