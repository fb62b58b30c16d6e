"""`mirror`: copy a checkpoint to a bucket, and prove by reading it back that the copy is the same.

Credentials are variables of the environment, as each cloud's own tools read them (obstore:
AWS_ACCESS_KEY_ID, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_NAME and so on).
"""

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import typing
import urllib.parse

from ddptrain.ground import errors

MARK = "mirrored.json"  # next to the copy, written last: files, sizes and SHA-256
_CHUNK_BYTES = 8 << 20
_CONCURRENCY = 4
_LAST = "manifest.json"  # makes a checkpoint of ours whole
_RETRIES = {"max_retries": 3, "retry_timeout": datetime.timedelta(seconds=30)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("checkpoint", type=pathlib.Path, help="folder or file of a checkpoint")
    parser.add_argument("--url", required=True, help="where to: s3://BUCKET/PREFIX, gs://, az://")


def check(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options. Raises UserError if the checkpoint does not exist."""
    if not args.checkpoint.exists():
        raise errors.UserError(f"{args.checkpoint}: no such file or folder")
    return args


def run(args: argparse.Namespace) -> int:
    """Copy and verify; raises UserError if the bucket refuses, or the copy differs."""
    obstore = errors.need("obstore", "mirror")
    files = _files(args.checkpoint)
    before = _stamps(files)
    try:
        store = _open(args.url)
        copied = {name: _copy(obstore, store, name, path) for name, path in files.items()}
        if _stamps(_files(args.checkpoint)) != before:
            raise errors.UserError(f"{args.checkpoint} changed while it was copied")
        obstore.put(store, MARK, json.dumps({"files": copied}, indent=1).encode())
    except errors.UserError:
        raise
    except Exception as e:  # obstore's errors share no class that is narrower
        first = " ".join(str(e).split())[:300] or type(e).__name__
        raise errors.UserError(f"{_bare(args.url)}: {first}") from e
    num_bytes = sum(size for size, _ in before.values())
    print(json.dumps({"files": len(copied), "bytes": num_bytes}))
    return 0


def _files(checkpoint: pathlib.Path) -> dict[str, pathlib.Path]:
    """Return the files of a checkpoint by the names of their copies, the manifest last."""
    if checkpoint.is_file():
        return {checkpoint.name: checkpoint}
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    paths.sort(key=lambda path: path.name == _LAST)
    return {path.relative_to(checkpoint).as_posix(): path for path in paths}


def _stamps(files: dict[str, pathlib.Path]) -> dict[str, tuple[int, int]]:
    stamps: dict[str, tuple[int, int]] = {}
    for name, path in files.items():
        about = path.stat()
        stamps[name] = (about.st_size, about.st_mtime_ns)
    return stamps


def _open(url: str) -> typing.Any:
    """Open the folder in a bucket that a URL names."""
    from obstore.store import from_url

    options: dict[str, typing.Any] = {"retry_config": _RETRIES}
    if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        options["client_options"] = {"allow_http": True}
    if urllib.parse.urlsplit(url).scheme == "file":
        options = {"mkdir": True}
    return from_url(url, **options)


def _copy(
    obstore: typing.Any, store: typing.Any, name: str, path: pathlib.Path
) -> dict[str, object]:
    """Copy a file, read the copy back, and return its size and SHA-256. Raises UserError."""
    obstore.put(store, name, path, chunk_size=_CHUNK_BYTES, max_concurrency=_CONCURRENCY)
    here = _digest(_read(path))
    there = _digest(obstore.get(store, name).stream(min_chunk_size=_CHUNK_BYTES))
    if here != there:
        raise errors.UserError(f"the copy of {path} differs from it; it is copied again later")
    size, sha256 = here
    return {"bytes": size, "sha256": sha256}


def _read(path: pathlib.Path) -> typing.Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _digest(chunks: typing.Iterable[typing.Any]) -> tuple[int, str]:
    digest = hashlib.sha256()
    size = 0
    for chunk in chunks:
        view = memoryview(chunk)
        digest.update(view)
        size += view.nbytes
    return size, digest.hexdigest()


def _bare(url: str) -> str:
    """Return a URL without a query, which may hold a signature."""
    return url.partition("?")[0]
