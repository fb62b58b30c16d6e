"""`import torch` from a folder on JuiceFS whose metadata engine is across a network; runs on a host with the volume.

    python3 far.py MILLISECONDS PYTHON TURNS

A second client of the volume, with JuiceFS' defaults, reaches the engine through a relay that keeps every answer back.
PYTHON is the interpreter's path below the volume's root. Prints one JSON object: the `round_trip_s` that the relay was
seen to make of a question to the engine, and the `seconds` of each turn's import; the first turn fills caches.
"""

# pyright: basic
import json
import os
import pathlib
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

PROGRAM = "import time; b = time.perf_counter(); import torch; print(time.perf_counter() - b)"


def main() -> int:
    """Mount, measure, unmount."""
    away_s, python, turns = float(sys.argv[1]) / 1000, sys.argv[2], int(sys.argv[3])
    words, environment = client()
    (url,) = (word for word in words if "://" in word)
    address = re.search(r"([^/@]+):(\d+)/", url)
    if address is None:
        sys.exit("far: the volume's metadata engine has no address with a port")
    host, port = address.groups()
    near = relay(host, int(port), away_s)
    far = url.replace(f"{host}:{port}/", f"127.0.0.1:{near}/")
    with tempfile.TemporaryDirectory(prefix="far-") as scratch:
        mountpoint = pathlib.Path(scratch, "volume")
        mountpoint.mkdir()
        cache = pathlib.Path(scratch, "cache")
        argv = [words[0], "mount", "--no-usage-report", "--cache-dir", str(cache), far, str(mountpoint)]
        with pathlib.Path(scratch, "log").open("w") as log:
            mount = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
        try:
            for _ in range(300):
                if mountpoint.is_mount():
                    break
                time.sleep(0.1)
            else:
                sys.exit(pathlib.Path(scratch, "log").read_text()[-500:])
            command = ["runuser", "-u", "ubuntu", "--", str(mountpoint / python), "-c", PROGRAM]
            os.chmod(scratch, 0o711)  # noqa: PTH101
            seconds = [
                float(subprocess.run(command, cwd="/", check=True, capture_output=True, text=True).stdout)
                for _ in range(turns)
            ]
            trip = round_trip(near) - round_trip(int(port), host)
        finally:
            subprocess.run(["umount", str(mountpoint)], check=False)
            mount.terminate()
            mount.wait(30)
    print(json.dumps({"round_trip_s": trip, "seconds": seconds}))
    return 0


def client() -> tuple[list[str], dict[str, str]]:
    """Return the command of the client that systemd runs here, and its environment with the secrets in it."""
    (unit,) = pathlib.Path("/etc/systemd/system").glob("juicefs-*.service")
    text = unit.read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    (file,) = re.findall(r"^EnvironmentFile=(.*)$", text, re.MULTILINE)
    found = dict(os.environ)
    for line in pathlib.Path(file).read_text().splitlines():
        name, separator, value = line.partition("=")
        if separator:
            found[name] = "".join(shlex.split(value))
    return shlex.split(command.replace("%%", "%")), found


def relay(host: str, port: int, away_s: float) -> int:
    """Pass connections on to an address, everything `away_s` late; return the port that it listens on."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            here, _ = listener.accept()
            there = socket.create_connection((host, port))
            for end in (here, there):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=carry, args=(here, there, 0.0), daemon=True).start()
            threading.Thread(target=carry, args=(there, here, away_s), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def carry(source: socket.socket, target: socket.socket, late_s: float) -> None:
    """Hand on what comes, late."""
    try:
        while chunk := source.recv(1 << 20):
            if late_s:
                time.sleep(late_s)
            target.sendall(chunk)
    except OSError:
        pass
    finally:
        target.close()


def round_trip(port: int, host: str = "127.0.0.1") -> float:
    """Return the median time of a question to the engine, in seconds; Redis answers PING also without a password."""
    taken = []
    with socket.create_connection((host, port)) as connection:
        for _ in range(50):
            began = time.perf_counter()
            connection.sendall(b"PING\r\n")
            connection.recv(4096)
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    sys.exit(main())
