"""Download a file of bounded size, through the proxy of the model if it has one for the host."""

import http.client
import time
import urllib.error
import urllib.parse
import urllib.request

from slurm_ddp import proxies
from slurm_ddp.commands import last_line


class DownloadError(Exception):
    """The download failed. `str()` is one line that names the host."""


class TooLargeError(DownloadError):
    """The host sends more than was expected, or too slowly."""


def fetch(url: str, *, most_bytes: int, timeout: float) -> bytes:
    """Download `url`.

    Raises `DownloadError`; `TooLargeError` beyond `most_bytes` or `timeout` seconds.
    """
    host = urllib.parse.urlsplit(url).hostname
    content, end = bytearray(), time.monotonic() + timeout
    try:
        with urllib.request.build_opener(proxies.ModelProxies()).open(url, timeout=20) as answer:
            while block := answer.read(1 << 20):
                content += block
                if len(content) > most_bytes or time.monotonic() > end:
                    raise TooLargeError(f"{host} sends too much, or too slowly")
    except (OSError, http.client.HTTPException) as e:  # urllib's errors are among the first
        if isinstance(e, urllib.error.HTTPError):
            e.close()
        reason = e.reason if isinstance(e, urllib.error.URLError) else e
        raise DownloadError(f"no download from {host} ({last_line(str(reason))})") from e
    return bytes(content)
