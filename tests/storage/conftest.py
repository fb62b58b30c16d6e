"""Fixtures with real servers: one of each kind for a module, and a juicefs to query them."""

import collections.abc
import pathlib

import pytest
import servers

from scripts import fetch_juicefs


@pytest.fixture(scope="session")
def program() -> pathlib.Path:
    """Return the juicefs that the repository pins."""
    return fetch_juicefs.fetch()


@pytest.fixture(scope="session")
def before() -> pathlib.Path:
    """Return the juicefs before the pinned one, which clients may still run."""
    return fetch_juicefs.fetch(fetch_juicefs.BEFORE)


@pytest.fixture(scope="session")
def tls() -> collections.abc.Iterator[servers.Certificates]:
    """Return certificates by an authority that this machine does not know."""
    with servers.folder() as directory:
        yield servers.certificates(directory)


@pytest.fixture(scope="module")
def redis() -> collections.abc.Iterator[servers.Server]:
    with servers.redis() as server:
        yield server


@pytest.fixture(scope="module")
def postgres() -> collections.abc.Iterator[servers.Server]:
    with servers.postgres() as server:
        yield server


@pytest.fixture(scope="module")
def bucket() -> collections.abc.Iterator[servers.Bucket]:
    with servers.s3() as found:
        yield found
