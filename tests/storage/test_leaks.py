"""The search for secrets itself: if it missed them, its silence would prove nothing."""

import json
import pathlib
import re
import subprocess
import sys
import time
import urllib.parse

import leaks
import pytest
import servers

SECRET = servers.PASSWORD + "/+?\xfc\\$"


@pytest.mark.parametrize(
    "shown",
    [
        SECRET,
        urllib.parse.quote(SECRET, safe=""),
        re.sub("%..", lambda found: found[0].lower(), urllib.parse.quote(SECRET, safe="")),
        urllib.parse.quote_plus(SECRET),
        json.dumps(SECRET),
        json.dumps({"password": SECRET}, ensure_ascii=False),
    ],
)
def test_a_form_is_found_with_its_place_and_reported_without_the_secret(shown: str):
    places = {"journal": f"before {shown} after", "status": "all is well"}
    found = list(leaks.found_in(places, {"password": SECRET, "other": "somethingElse"}))
    assert found == ["password in journal"]


def test_a_command_line_is_seen_while_it_lasts():
    argv = [sys.executable, "-c", "import time; time.sleep(60)", "--password", "seenByAllOfYou"]
    with (
        pytest.raises(AssertionError, match="command line of"),
        leaks.watched("seenByAllOfYou") as watch,
    ):
        process = subprocess.Popen(argv)
        try:
            while not watch.found and process.poll() is None:
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait(20)


def test_a_file_that_others_read_is_found(tmp_path: pathlib.Path):
    for name, mode in (("open", 0o644), ("closed", 0o600)):
        (tmp_path / name).write_text(f"password={SECRET}")
        (tmp_path / name).chmod(mode)
    assert leaks.in_files(tmp_path, SECRET) == [tmp_path / "open"]
