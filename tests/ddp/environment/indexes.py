"""Package indexes on the loopback, of wheels of a few bytes."""

import base64
import collections.abc
import contextlib
import functools
import hashlib
import http.server
import pathlib
import socket
import threading
import zipfile

TORCH = """\
import types
__version__ = "{version}"
version = types.SimpleNamespace(cuda=None)
cuda = types.SimpleNamespace(is_available=lambda: False)
"""


def make_wheel(
    index: pathlib.Path,
    name: str,
    version: str,
    *,
    requires: str = "",
    files: collections.abc.Mapping[str, str] | None = None,
) -> pathlib.Path:
    """Put a wheel into an index's folder.

    Torch's has the modules that an environment is checked for.
    """
    modules = {
        f"{name}/__init__.py": TORCH.format(
            version=version if "+" in version else f"{version}+cu130"
        ),
        f"{name}/distributed/__init__.py": "",
    }
    files = files or (
        {**modules, "torch/distributed/run.py": ""}
        if name == "torch"
        else {f"{name}.py": f"__version__ = '{version}'"}
    )
    about = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        **files,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = index / name / f"{name}-{version}-py3-none-any.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        records = ""
        for file, text in files.items():
            member = zipfile.ZipInfo(file)
            member.external_attr = 0o100755 << 16
            archive.writestr(member, text)
            digest = (
                base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
                .decode()
                .rstrip("=")
            )
            records += f"{file},sha256={digest},{len(text.encode())}\n"
        archive.writestr(f"{about}/RECORD", f"{records}{about}/RECORD,,\n")
    return path


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, as an index and, for any host, as a proxy."""

    def translate_path(self, path: str) -> str:
        return super().translate_path("/" + path.split("/", 3)[3] if "://" in path else path)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        pass


@contextlib.contextmanager
def serve(folder: pathlib.Path) -> collections.abc.Generator[str]:
    """Serve the folders below a folder as package indexes; yield the URL."""
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder))
    ) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def hang() -> collections.abc.Generator[str]:
    """Yield the URL of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def unused() -> str:
    """Return a URL that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}"
