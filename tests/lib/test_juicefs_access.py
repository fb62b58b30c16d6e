import pathlib
import string
import urllib.parse

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slurm_ddp import juicefs_access
from slurm_ddp.interfaces import filesystem_info as fs

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

PASSWORD = 'p@ss:/?#%word "x"'
DIRECTORY = pathlib.Path("/etc/slurm-ddp/app")
PEM = "-----BEGIN CERTIFICATE-----\nAA\n-----END CERTIFICATE-----\n"
KEY = "-----BEGIN PRIVATE KEY-----\nBB\n-----END PRIVATE KEY-----\n"


def access(url: str, /, **content: str) -> juicefs_access.Access:
    engine, user = juicefs_access.parse(url)
    found = {key.replace("_", "-"): value for key, value in content.items()}
    if user:
        found["meta-user"] = user
    secret = fs.JuicefsSecret.from_content(found)
    juicefs_access.check_secret(engine, secret)
    return juicefs_access.access(engine, secret, directory=DIRECTORY)


@pytest.mark.parametrize(
    ("written", "url", "variable"), CASES["the_url_never_has_the_password_and_the_environment_does"]
)
def test_the_url_never_has_the_password_and_the_environment_does(
    written: str, url: str, variable: str
):
    found = access(written, meta_password=PASSWORD)
    assert found.url == url
    assert found.environment == {variable: PASSWORD}
    assert found.secrets == (PASSWORD,)
    assert PASSWORD not in repr(found)


@pytest.mark.parametrize(("written", "url"), CASES["urls_without_a_password"])
def test_urls_without_a_password(written: str, url: str):
    found = access(written)
    assert (found.url, found.environment) == (url, {})


def test_certificates_go_into_files_that_url_and_environment_name(tmp_path: pathlib.Path):
    path = {key: str(DIRECTORY / f"{key}.pem") for key in ("tls-ca", "tls-cert", "tls-key")}
    quoted = "&".join
    all_three = {"tls_ca": PEM, "tls_cert": PEM, "tls_key": KEY}
    trusted = {"SSL_CERT_FILE": path["tls-ca"]}
    found = access("rediss://h/1", **all_three)
    assert (
        found.url
        == f"rediss://h:6379/1?tls-cert-file={path['tls-cert']}&tls-key-file={path['tls-key']}"
    )
    assert found.environment == trusted
    assert found.files == {
        pathlib.Path(path["tls-ca"]): PEM,
        pathlib.Path(path["tls-cert"]): PEM,
        pathlib.Path(path["tls-key"]): KEY,
    }
    assert access("mysql://u@h/d", tls_ca=PEM).url == "mysql://u@(h:3306)/d?tls=true"
    assert (
        access("mysql://u@h/d?tls=skip-verify", tls_ca=PEM).url
        == "mysql://u@(h:3306)/d?tls=skip-verify"
    )
    postgres = quoted(
        [f"sslcert={path['tls-cert']}", f"sslkey={path['tls-key']}", "sslmode=verify-full"]
    )
    assert access("postgres://u@h/d", **all_three).url == f"postgres://u@h:5432/d?{postgres}"
    tikv = quoted(
        f"{name}={path[key]}"
        for name, key in (("ca", "tls-ca"), ("cert", "tls-cert"), ("key", "tls-key"))
    )
    assert access("tikv://h/p", **all_three).url == f"tikv://h:2379/p?{tikv}"
    etcd = quoted(
        f"{name}={path[key]}"
        for name, key in (("cacert", "tls-ca"), ("cert", "tls-cert"), ("key", "tls-key"))
    )
    assert access("etcd://h/p", **all_three).url == f"etcd://h:2379/p?{etcd}"

    engine, _ = juicefs_access.parse("rediss://h/1")
    secret = fs.JuicefsSecret.from_content({"tls-ca": PEM, "tls-cert": PEM, "tls-key": KEY})
    here = juicefs_access.access(engine, secret, directory=tmp_path / "app")
    assert here.ensure_files()
    assert not here.ensure_files()
    for written in (tmp_path / "app").iterdir():
        assert written.stat().st_mode & 0o7777 == 0o600
    assert {path.name for path in (tmp_path / "app").iterdir()} == {
        "tls-ca.pem",
        "tls-cert.pem",
        "tls-key.pem",
    }


REGION = {"AWS_REGION": "r"}
KEYS = {"access-key": "a", "secret-key": "s", "session-token": "t", "google-credentials": "{}"}


@pytest.mark.parametrize(
    ("store", "keyless", "environment"),
    [
        (
            "s3",
            True,
            {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t"}
            | REGION,
        ),
        ("s3", False, REGION),
        ("minio", True, {"MINIO_ACCESS_KEY": "a", "MINIO_SECRET_KEY": "s", "MINIO_REGION": "r"}),
        (
            "gs",
            True,
            {"GOOGLE_APPLICATION_CREDENTIALS": str(DIRECTORY / "google-credentials.json")},
        ),
        ("file", True, {}),
        ("sftp", False, {}),
    ],
)
def test_the_keys_of_a_store(store: str, keyless: bool, environment: dict[str, str]):
    engine, _ = juicefs_access.parse("redis://h/1")
    secret = fs.JuicefsSecret.from_content(KEYS)
    found = juicefs_access.access(
        engine, secret, directory=DIRECTORY, store=store, keyless=keyless, region="r"
    )
    assert found.environment == environment
    assert list(found.files.values()) == (["{}"] if store == "gs" else [])


@pytest.mark.parametrize(
    ("written", "content", "message"), CASES["credentials_that_have_no_safe_way"]
)
def test_credentials_that_have_no_safe_way(written: str, content: dict[str, str], message: str):
    with pytest.raises(ValueError) as caught:
        access(written, **content)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "url",
    [
        "redis://:topSecret@h/1",
        "redis://u:top@Secret@h/1",
        "mysql://u:topSecret@(h:1)/d",
        "redis://u:topSecret@m,a,b/1",
    ],
)
def test_a_password_in_a_url_is_refused_whatever_is_around_it(url: str):
    with pytest.raises(ValueError) as caught:
        juicefs_access.parse(url)
    assert str(caught.value) == juicefs_access.PASSWORD_HINT


@given(
    st.text()
    | st.text().map(lambda text: f"redis://{text}")
    | st.text().map(lambda text: f"postgres://u@h/{text}")
)
def test_any_text_is_an_engine_or_a_value_error_of_one_line(url: str):
    try:
        juicefs_access.parse(url)
    except ValueError as e:
        assert "\n" not in str(e)


host = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,10}[a-z0-9])?", fullmatch=True) | st.ip_addresses(
    v=6
).map(str)
address = st.tuples(host, st.integers(1, 65535)).map(lambda pair: fs.join_address(*pair))


@given(
    st.builds(
        juicefs_access.Engine,
        kind=st.just("redis"),
        hosts=st.lists(address, min_size=1, max_size=4).map(tuple),
        db=st.integers(0, 15).map(str),
        tls=st.booleans(),
        master=st.just("") | st.from_regex(r"[A-Za-z0-9._-]{1,10}", fullmatch=True),
    ),
    st.none() | st.text(alphabet=string.printable.strip() + "é", min_size=1),
)
def test_a_written_url_reads_back(engine: juicefs_access.Engine, user: str | None):
    assert juicefs_access.parse(engine.url(user)) == (engine, user)


@given(st.text(alphabet=string.printable.strip(), min_size=1, max_size=30))
def test_no_user_changes_what_stands_behind_it(user: str):
    found = urllib.parse.urlsplit(
        juicefs_access.Engine("postgres", ("h:1",), "d").url(user, login=":")
    )
    assert (found.hostname, found.port, found.path) == ("h", 1, "/d")
    assert urllib.parse.unquote(found.username or "") == user
