"""The message at the end of a run: one POST of JSON, which never fails the run.

The URL is a secret, as Slack's and Mattermost's are, and never appears in the log.
"""

import json
import urllib.parse

from ddp.node import spool, storage
from ddp.node.started_job import StartedJob

SEND_S = 10.0  # for name, connection, TLS, request and answer together
ENDING_S = 4.0  # while Slurm is about to kill this process
_MAX_TEXT = 1000
# They take a text alone: docs.slack.dev (Sending messages using incoming webhooks) and
# developers.mattermost.com (Incoming webhooks), whose URLs are https://HOST/hooks/KEY
_SLACK = "hooks.slack.com"
_MATTERMOST = "/hooks/"


def message(job: StartedJob, *, state: str, exit_code: int, reason: str) -> dict[str, object]:
    """Return the message on a run that has ended."""
    name = job.spec.run if job.array is None else f"{job.spec.run}-{job.array[1]}"
    text = f"{name}: {state} (job {job.slurm_id})"
    if state == "failed":
        text = f"{name}: failed (job {job.slurm_id}, exit code {exit_code})"
    if reason:
        text += f": {reason}"
    return {
        "text": text[:_MAX_TEXT],
        "run": name,
        "state": state,
        "job_id": job.slurm_id,
        "exit_code": exit_code,
        "reason": reason[:_MAX_TEXT] or None,
        "run_dir": job.run_dir,
        "nodes": job.nodelist,
    }


def body(url: str, about: dict[str, object]) -> bytes:
    """Return the body for a URL; Slack and Mattermost get only the text."""
    parts = urllib.parse.urlsplit(url)
    if parts.hostname == _SLACK:
        text = str(about["text"]).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        about = {"text": text}
    elif parts.path.startswith(_MATTERMOST):
        about = {"text": about["text"]}
    return json.dumps(about).encode()


def send(url: str, about: dict[str, object], env: dict[str, str], timeout_s: float) -> None:
    """Post a message, and log how that went."""
    try:
        status = storage.within(lambda: _post(url, body(url, about), env, timeout_s), timeout_s)
    except Exception as e:  # the run goes on after any error, and its text might show the URL
        why = _reason(e)
    else:
        why = "" if 200 <= status < 300 else f"the server answered {status}"
    spool.write(f"[NOTIFY] not sent: {why}" if why else "[NOTIFY] sent")


def _post(url: str, data: bytes, env: dict[str, str], timeout_s: float) -> int:
    """Post JSON through the job's proxies; return the status. Follows no redirect."""
    import http.client  # most jobs need neither
    import urllib.request

    class NoRedirect(urllib.request.HTTPErrorProcessor):
        def http_response(
            self, request: urllib.request.Request, response: http.client.HTTPResponse
        ) -> http.client.HTTPResponse:
            del request
            return response

        https_response = http_response

    proxies: dict[str, str] = {}
    for scheme in ("http", "https"):
        name = f"{scheme}_proxy"
        if found := env.get(name) or env.get(name.upper()):
            proxies[scheme] = found

    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies), NoRedirect())
    headers = {"Content-Type": "application/json", "User-Agent": "slurm-ddp"}
    request = urllib.request.Request(url, data, headers, method="POST")  # noqa: S310 - http(s), by check_url
    with opener.open(request, timeout=timeout_s) as response:
        return response.status


def _reason(e: Exception) -> str:
    """Return why it failed, without the URL that the error's own text may have."""
    cause = getattr(e, "reason", e)
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return type(cause).__name__
