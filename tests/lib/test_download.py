"""Downloads from a server of the test's own."""

import contextlib
import http.server
import threading
import typing

import pytest

from slurm_ddp import download


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves ten bytes at every path but /missing, and shows the path that was asked for."""

    asked: typing.ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(404 if self.path == "/missing" else 200)
        self.end_headers()
        self.wfile.write(b"0123456789")

    def log_message(self, format: str, *args: typing.Any) -> None:  # noqa: A002 - as the base class has it
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> typing.Iterator[str]:
    for scheme in ("http", "https", "no"):
        for name in (
            f"{scheme}_proxy",
            f"{scheme.upper()}_PROXY",
            f"JUJU_CHARM_{scheme.upper()}_PROXY",
        ):
            monkeypatch.delenv(name, raising=False)
    Handler.asked.clear()
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def test_a_file_is_downloaded_up_to_its_bound(server: str):
    assert download.fetch(f"{server}/key", most_bytes=10, timeout=10) == b"0123456789"
    for bounds in ({"most_bytes": 9, "timeout": 10}, {"most_bytes": 10, "timeout": -1}):
        with pytest.raises(
            download.TooLargeError, match=r"^127\.0\.0\.1 sends too much, or too slowly$"
        ):
            download.fetch(f"{server}/key", **bounds)


def test_a_failed_download_names_the_host(server: str):
    missing = http.HTTPStatus.NOT_FOUND.phrase
    with pytest.raises(
        download.DownloadError, match=rf"^no download from 127\.0\.0\.1 \(.*{missing}\)$"
    ) as caught:
        download.fetch(f"{server}/missing", most_bytes=10, timeout=10)
    assert not isinstance(caught.value, download.TooLargeError)
    with pytest.raises(
        download.DownloadError, match=r"^no download from 127\.0\.0\.1 \(.*refused\)$"
    ):
        download.fetch("http://127.0.0.1:1/key", most_bytes=10, timeout=10)


def test_the_models_proxy_is_asked(server: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUJU_CHARM_HTTP_PROXY", server)
    with contextlib.suppress(download.DownloadError):
        download.fetch("http://far.invalid/key", most_bytes=10, timeout=10)
    assert Handler.asked == ["http://far.invalid/key"]


def test_a_host_that_the_model_excepts_is_asked_directly(
    server: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUJU_CHARM_HTTP_PROXY", server)
    monkeypatch.setenv("JUJU_CHARM_NO_PROXY", "127.0.0.1,localhost,10.0.0.0/8,.invalid")
    with pytest.raises(download.DownloadError, match=r"^no download from lustre\.invalid \("):
        download.fetch("http://lustre.invalid/key", most_bytes=10, timeout=10)
    assert Handler.asked == []
    with contextlib.suppress(download.DownloadError):
        download.fetch("http://far.test/key", most_bytes=10, timeout=10)
    assert Handler.asked == ["http://far.test/key"]
