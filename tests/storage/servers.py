"""Real servers for the tests of this lane, each on a free port of the loopback, in a new folder.

Databases refuse to run as root: started by root, they run as the accounts of Debian's packages.
"""

import collections.abc
import contextlib
import dataclasses
import html
import os
import pathlib
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import typing
import urllib.parse
import urllib.request

PASSWORD = 'p@ss:/?#%word "x"'
USER = "jfs"
_PATIENCE_S = 60.0


class ServerError(Exception):
    """A server did not come up."""


@dataclasses.dataclass
class Server:
    """A running server. `stop` and `start` play an outage: port and data stay."""

    argv: list[str]
    directory: pathlib.Path
    port: int
    account: str | None = None
    env: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def address(self) -> str:
        """Return HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; return when it takes connections."""
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen[bytes](
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(self.directory)}
                | self.env,
                **_identity(self.account),
            )
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            time.sleep(0.05)
        log_text = (self.directory / "log").read_text(errors="replace")
        self.stop()
        raise ServerError(f"{self.argv[0]} does not come up: {log_text[-2000:]}")

    def stop(self) -> None:
        """Stop it in any state."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(20)
            self.process = None


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def folder(account: str | None = None) -> collections.abc.Generator[pathlib.Path]:
    """Make a folder that a server's account can use; remove it in the end."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="slurm-ddp-storage-"))
    try:
        path.chmod(0o711)
        if account is not None and os.geteuid() == 0:
            found = pwd.getpwnam(account)
            os.chown(path, found.pw_uid, found.pw_gid)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def running(server: Server) -> collections.abc.Generator[Server]:
    """Run a server while the block lasts."""
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _identity(account: str | None) -> dict[str, typing.Any]:
    """Return Popen's arguments for an account, if this process may switch to another."""
    if account is None or os.geteuid() != 0:
        return {}
    found = pwd.getpwnam(account)
    return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}


def _as(account: str, *argv: str, stdin: str = "", timeout: float = 120) -> str:
    options: dict[str, typing.Any] = {"capture_output": True, "text": True, "timeout": timeout}
    done = subprocess.run(argv, input=stdin, cwd="/", check=False, **options, **_identity(account))
    if done.returncode != 0:
        raise ServerError(f"{argv[0]} exited {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def _redis_quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _redis(
    directory: pathlib.Path, *lines: str, port: int, sentinel: bool = False, bind: str = "127.0.0.1"
) -> Server:
    config = directory / "redis.conf"
    config.write_text(
        "\n".join([f"dir {directory}", f"bind {bind}", "daemonize no", *lines]) + "\n"
    )
    config.chmod(0o600)
    argv = [
        shutil.which("redis-server") or "redis-server",
        str(config),
        *(["--sentinel"] if sentinel else []),
    ]
    return Server(argv, directory, port)


@contextlib.contextmanager
def redis(
    *, tls: "Certificates | None" = None, user: str = "", bind: str = "127.0.0.1"
) -> collections.abc.Generator[Server]:
    """Run Redis with a password: the default user's, or an ACL user's with the default user off."""
    port = free_port()
    lines = ["appendonly yes", "appendfsync everysec", 'save ""', "maxmemory-policy noeviction"]
    if user:
        lines += ["user default off", f"user {user} on ~* &* +@all {_redis_quoted('>' + PASSWORD)}"]
    else:
        lines.append(f"requirepass {_redis_quoted(PASSWORD)}")
    if tls is None:
        lines.append(f"port {port}")
    else:
        files = {"cert": tls.certificate, "key": tls.key, "ca-cert": tls.authority}
        lines += [f"tls-{name}-file {path}" for name, path in files.items()]
        lines += ["port 0", f"tls-port {port}", "tls-auth-clients optional"]
    with folder() as directory, running(_redis(directory, *lines, port=port, bind=bind)) as server:
        yield server


@contextlib.contextmanager
def sentinel(master: Server) -> collections.abc.Generator[Server]:
    """Run a Sentinel that watches `master` under the name mymaster, without its own password."""
    port = free_port()
    lines = [
        f"port {port}",
        "protected-mode no",
        f"sentinel monitor mymaster 127.0.0.1 {master.port} 1",
        f"sentinel auth-pass mymaster {_redis_quoted(PASSWORD)}",
    ]
    with (
        folder() as directory,
        running(_redis(directory, *lines, port=port, sentinel=True)) as server,
    ):
        yield server


def redis_cli(server: Server, *words: str) -> str:
    """Read Redis' answer to a command."""
    done = subprocess.run(
        ["redis-cli", "-h", "127.0.0.1", "-p", str(server.port), *words],
        env=os.environ | {"REDISCLI_AUTH": PASSWORD},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout.strip()


@contextlib.contextmanager
def mariadb() -> collections.abc.Generator[Server]:
    """Run MariaDB with a database `jfs` and an account for it."""
    account = "mysql" if os.geteuid() == 0 else None
    with folder(account) as directory:
        port, data = free_port(), directory / "data"
        common = ["--no-defaults", f"--datadir={data}"]
        install = shutil.which("mariadb-install-db") or "mariadb-install-db"
        _as("mysql", install, *common, "--auth-root-authentication-method=normal", "--skip-test-db")
        socket_path = directory / "s"
        argv = [
            shutil.which("mariadbd") or "/usr/sbin/mariadbd",
            *common,
            f"--socket={socket_path}",
            f"--port={port}",
        ]
        argv += [
            "--bind-address=127.0.0.1",
            "--innodb-buffer-pool-size=16M",
            "--innodb-log-file-size=8M",
        ]
        argv += [
            "--skip-name-resolve",
            f"--pid-file={directory / 'pid'}",
            "--innodb-flush-method=fsync",
        ]
        with running(Server(argv, directory, port, account)) as server:
            statements = (
                f"CREATE DATABASE jfs; CREATE USER '{USER}'@'%' IDENTIFIED BY '{PASSWORD}';"
                f"GRANT ALL ON `jfs%`.* TO '{USER}'@'%';"
            )
            _as(
                "mysql",
                "mariadb",
                "--no-defaults",
                f"--socket={socket_path}",
                "--user=root",
                stdin=statements,
            )
            yield server


@contextlib.contextmanager
def postgres(*, tls: "Certificates | None" = None) -> collections.abc.Generator[Server]:
    """Run PostgreSQL with a database `jfs` and an account for it; with `tls`, it takes nothing else."""
    account = "postgres" if os.geteuid() == 0 else None
    binaries = sorted(
        pathlib.Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name)
    )
    if not binaries:
        raise ServerError("no PostgreSQL here: scripts/setup.sh storage")
    with folder(account) as directory:
        port, data = free_port(), directory / "data"
        _as(
            "postgres",
            str(binaries[-1] / "initdb"),
            "-D",
            str(data),
            "-U",
            "admin",
            "--auth=trust",
            "--no-sync",
        )
        kind = "hostssl" if tls else "host"
        hba = data / "pg_hba.conf"
        hba.write_text(f"local all admin trust\n{kind} all {USER} 127.0.0.1/32 scram-sha-256\n")
        argv = [
            str(binaries[-1] / "postgres"),
            "-D",
            str(data),
            "-p",
            str(port),
            "-k",
            str(directory),
        ]
        argv += ["-c", "listen_addresses=127.0.0.1", "-c", "shared_buffers=16MB", "-c", "fsync=off"]
        if tls:
            for name, path in (("server.crt", tls.certificate), ("server.key", tls.key)):
                target = data / name
                target.write_bytes(path.read_bytes())
                target.chmod(0o600)
                if account is not None:
                    found = pwd.getpwnam(account)
                    os.chown(target, found.pw_uid, found.pw_gid)
            argv += ["-c", "ssl=on"]
        with running(Server(argv, directory, port, account)) as server:
            psql = [
                "psql",
                "-h",
                str(directory),
                "-p",
                str(port),
                "-U",
                "admin",
                "-d",
                "postgres",
                "-v",
                "ON_ERROR_STOP=1",
            ]
            for _ in range(50):
                try:
                    _as("postgres", *psql, stdin=f"CREATE USER {USER} PASSWORD '{PASSWORD}';")
                    break
                except ServerError as e:
                    if "starting up" not in str(e):
                        raise
                    time.sleep(0.1)
            _as("postgres", *psql, stdin=f"CREATE DATABASE jfs OWNER {USER};")
            yield server


def postgres_database(server: Server) -> str:
    """Make a database; return its name."""
    name = f"jfs_{os.urandom(4).hex()}"
    client = [
        "psql",
        "-h",
        str(server.directory),
        "-p",
        str(server.port),
        "-U",
        "admin",
        "-d",
        "postgres",
    ]
    _as("postgres", *client, "-v", "ON_ERROR_STOP=1", stdin=f"CREATE DATABASE {name} OWNER {USER};")
    return name


@dataclasses.dataclass(frozen=True)
class Certificates:
    """An authority that no system knows, and a server's certificate by it, good for 127.0.0.1 and localhost."""

    authority: pathlib.Path
    certificate: pathlib.Path
    key: pathlib.Path


def certificates(directory: pathlib.Path) -> Certificates:
    """Make an authority and a server's certificate."""
    found = Certificates(directory / "ca.pem", directory / "server.pem", directory / "server.key")
    authority_key, request, extensions = (
        directory / "ca.key",
        directory / "server.csr",
        directory / "extensions",
    )
    extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    signed_by = ("-CA", found.authority, "-CAkey", authority_key, "-CAcreateserial")
    authority = (
        "-keyout",
        authority_key,
        "-out",
        found.authority,
        "-days",
        "2",
        "-subj",
        "/CN=test CA",
    )
    for words in (
        ("req", "-x509", *curve, *authority),
        ("req", *curve, "-keyout", found.key, "-out", request, "-subj", "/CN=127.0.0.1"),
        (
            "x509",
            "-req",
            "-in",
            request,
            "-out",
            found.certificate,
            "-days",
            "2",
            "-extfile",
            extensions,
            *signed_by,
        ),
    ):
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=60)
    for path in (directory, found.authority, found.certificate, found.key):
        path.chmod(
            0o755 if path.is_dir() else 0o644
        )  # the servers' accounts read them; they are worth nothing
    return found


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket on an S3 server over HTTP, and the keys that open it; others are refused."""

    server: Server
    name: str
    access_key: str
    secret_key: str
    next_keys: tuple[str, str] = ("", "")  # open it too

    @property
    def url(self) -> str:
        """Return its address in path style."""
        return f"http://{self.server.address}/{self.name}"


@contextlib.contextmanager
def s3(bind: str = "127.0.0.1") -> collections.abc.Generator[Bucket]:
    """Run moto's server with one bucket, and an IAM user whose keys it asks for."""
    port = free_port()
    with folder() as directory:
        argv = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", bind, "-p", str(port)]
        # The first calls need no keys: they make the user, its policy, its keys and the bucket
        env = {"INITIAL_NO_AUTH_ACTION_COUNT": "5", "PYTHONDONTWRITEBYTECODE": "1"}
        with running(Server(argv, directory, port, env=env)) as server:

            def iam(**words: str) -> str:
                body = urllib.parse.urlencode({"Version": "2010-05-08", **words}).encode()
                headers = {
                    "Authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/iam/aws4_request"
                }
                request = urllib.request.Request(
                    f"http://{server.address}/", data=body, headers=headers
                )
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return str(answer.read().decode())

            iam(Action="CreateUser", UserName=USER)
            policy = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":["s3:*","iam:*"],"Resource":"*"}]}'
            iam(Action="PutUserPolicy", UserName=USER, PolicyName="all", PolicyDocument=policy)

            def key() -> tuple[str, str]:
                made = iam(Action="CreateAccessKey", UserName=USER)
                found = (
                    re.search(rf"<{tag}>([^<]+)</{tag}>", made)
                    for tag in ("AccessKeyId", "SecretAccessKey")
                )
                access, secret = (html.unescape(match[1]) if match else "" for match in found)
                return access, secret

            first, second = key(), key()
            request = urllib.request.Request(f"http://{server.address}/train", method="PUT")
            urllib.request.urlopen(request, timeout=30).close()
            yield Bucket(server, "train", *first, next_keys=second)
