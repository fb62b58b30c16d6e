"""The servers of this lane themselves: what they refuse, the other tests build on."""

import subprocess

import pytest
import servers


def test_redis_asks_for_the_password(redis: servers.Server):
    assert servers.redis_cli(redis, "ping") == "PONG"
    port = ["-p", str(redis.port)]
    done = subprocess.run(["redis-cli", *port, "ping"], capture_output=True, text=True, timeout=20, check=False)
    assert "NOAUTH" in done.stdout + done.stderr


def test_redis_speaks_tls_when_it_has_certificates(tls: servers.Certificates):
    with servers.redis(tls=tls, user=servers.USER) as server:
        assert servers.redis_cli(server, "ping", user=servers.USER, tls=tls) == "PONG"


@pytest.mark.parametrize("database", ["mariadb", "postgres"])
def test_databases_come_back_with_what_they_had(database: str, request: pytest.FixtureRequest):
    server: servers.Server = request.getfixturevalue(database)
    server.stop()
    server.start()
    assert server.process is not None and server.process.poll() is None
