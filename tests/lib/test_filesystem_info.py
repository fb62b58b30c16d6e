import functools
import pathlib
import re
import string
import typing
import urllib.parse

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slurm_ddp.interfaces import filesystem_info as fs

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

# Every byte, UTF-8 or not, as Python keeps it in text
anything = st.one_of(
    st.text(min_size=1),
    st.binary(min_size=1).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
)
hostile = st.text(alphabet=":@/?#%[](),;&=+ '\"$`\\\n\0é", min_size=1)
text = anything | hostile
path = text.map(lambda value: f"/{value}")
revision = st.none() | st.integers(min_value=0, max_value=10**17)
port = st.none() | st.integers(min_value=1, max_value=65535)
host = st.one_of(
    st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)
secret_id = st.text(alphabet=string.ascii_lowercase + string.digits, min_size=1).map(
    lambda value: f"secret:{value}"
)

juicefs = st.builds(
    fs.Juicefs,
    name=st.from_regex(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]", fullmatch=True),
    hosts=st.lists(st.tuples(host, port).map(lambda pair: fs.join_address(*pair)), min_size=1).map(
        tuple
    ),
    engine=st.sampled_from(fs.ENGINES),
    db=st.just("") | text,
    uuid=text,
    secret_id=st.none() | secret_id,
    auth_rev=revision,
    subdir=path,
    tls=st.booleans(),
    params=st.just("") | text,
    storage=st.just("") | text,
    bucket=st.just("") | text,
    version=st.just("") | text,
    keyless=st.booleans(),
    master=st.just("") | text,
    region=st.just("") | text,
)


@given(juicefs)
def test_every_byte_of_every_component_survives_the_wire(volume: fs.Juicefs):
    assert fs.parse(volume.uri()) == volume
    assert re.fullmatch(r"[!-~]+", volume.uri())


def published(scheme: str, host: str, path: str = "/", user: str = "", /, **options: str) -> str:
    """Write a URI as upstream's library does (filesystem_info, LIBPATCH 3)."""
    quoted = functools.partial(urllib.parse.quote, errors="surrogateescape")
    given = {name.replace("_", "-"): value for name, value in options.items()}
    query = urllib.parse.urlencode(given, errors="surrogateescape")
    place = f"{f'{quoted(user)}@' if user else ''}({quoted(host, safe='')}){quoted(path)}"
    return f"{scheme}://{place}" + (f"?{query}" if query else "")


@given(
    host,
    port,
    path,
    text,
    text,
    text,
    secret_id,
    revision.filter(lambda number: number is not None),
)
def test_endpoints_of_upstream_are_read(
    host: str, port: int | None, path: str, user: str, fsid: str, name: str, secret: str, rev: int
):
    address = fs.join_address(host, port)
    assert fs.parse(published("nfs", address, path)) == fs.Nfs(host, path, port)
    ceph = published(
        "cephfs", address, path, user, fsid=fsid, name=name, auth=secret, auth_rev=str(rev)
    )
    assert fs.parse(ceph) == fs.Cephfs((address,), user, fsid, name, path, secret, rev)
    keyed = published("cephfs", address, path, user, fsid=fsid, name=name, auth=f"plain:{name}")
    assert fs.parse(keyed) == fs.Cephfs((address,), user, fsid, name, path, key=name)
    lustre = published("lustre", f"{address.strip('[]')}@tcp1,b@tcp1", fs_name=name)
    assert fs.parse(lustre) == fs.Lustre((f"{address.strip('[]')}@tcp1", "b@tcp1"), name)


@pytest.mark.parametrize(("uri", "kind", "fields"), CASES["wire"])
def test_the_wire_format_is_fixed(uri: str, kind: str, fields: dict[str, typing.Any]):
    found = fs.parse(uri)
    lists = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    assert found == getattr(fs, kind)(**lists)
    assert not isinstance(found, fs.Juicefs) or found.uri() == uri


def test_a_plain_key_is_read_and_never_shown():
    filesystem = fs.parse("cephfs://user@(m1)/?fsid=f&name=n&auth=plain%3AAQBx%2BtopSecret%3D%3D")
    assert isinstance(filesystem, fs.Cephfs)
    assert filesystem.key == "AQBx+topSecret=="
    assert "topSecret" not in f"{filesystem!r} {filesystem}"


def test_hosts_are_read_in_lower_case_and_nothing_else_is():
    filesystem = fs.parse("cephfs://User@(MON1%3A1%2CMon2)/Path?fsid=F&name=N&auth=secret%3AX")
    assert filesystem == fs.Cephfs(("mon1:1", "mon2"), "User", "F", "N", "/Path", "secret:X")


@pytest.mark.parametrize(("uri", "message"), CASES["the_fault_is_named_and_the_uri_is_not_quoted"])
def test_the_fault_is_named_and_the_uri_is_not_quoted(uri: str, message: str | None):
    if message is None:
        fs.parse(uri)
        return
    with pytest.raises(fs.UriError) as caught:
        fs.parse(uri)
    assert str(caught.value) == message
    assert "topSecret" not in repr(caught.value)


@pytest.mark.parametrize(
    ("hosts", "monitors"), CASES["monitors_are_read_in_every_form_that_ceph_prints"]
)
def test_monitors_are_read_in_every_form_that_ceph_prints(
    hosts: str, monitors: tuple[tuple[str, int, int], ...]
):
    filesystem = fs.parse(f"cephfs://fs-client@({hosts})/?fsid=f&name=n&auth=secret%3Ax&auth-rev=1")
    assert isinstance(filesystem, fs.Cephfs)
    assert filesystem.monitors() == tuple(fs.Monitor(*monitor) for monitor in monitors)


def test_a_user_with_a_slash_is_read_as_upstream_writes_it():
    filesystem = fs.parse("cephfs://team/a@(m1)/x%20y/z?fsid=f&name=n&auth=secret%3Ax")
    assert filesystem == fs.Cephfs(("m1",), "team/a", "f", "n", "/x y/z", "secret:x")


@given(
    st.text()
    | text.map(lambda value: f"juicefs://{value}")
    | text.map(lambda value: f"nfs://(h)/{value}")
)
def test_any_text_is_a_filesystem_or_a_uri_error_of_one_line(uri: str):
    try:
        fs.parse(uri)
    except fs.UriError as e:
        assert "\n" not in str(e)


@pytest.mark.parametrize(
    "build",
    [
        lambda: fs.Nfs(host="h,i", path="/a"),
        lambda: fs.Nfs(host="h", path="relative"),
        lambda: fs.Nfs(host="h", path="/a", port=70000),
        lambda: fs.Juicefs(name="train", hosts=("a", ""), engine="redis", db="1", uuid="u"),
        lambda: fs.Juicefs(name="train", hosts=(), engine="redis", db="1", uuid="u").uri(),
        lambda: fs.Cephfs(hosts=("m",), user="u", fsid="f", name="n"),
        lambda: fs.Juicefs(name="train", hosts=("h:x",), engine="redis", db="1", uuid="u"),
    ],
)
def test_endpoints_that_no_uri_can_hold_are_refused(build: typing.Callable[[], object]):
    with pytest.raises(fs.UriError):
        build()


@pytest.mark.parametrize(("address", "pair"), CASES["addresses"])
def test_addresses(address: str, pair: tuple[str, int | None]):
    assert fs.split_address(address) == tuple(pair)
    assert fs.join_address(*pair) == address


CONTENT = {
    "meta-user": "jfs",
    "meta-password": 'p@ss:/?#%word "x"',
    "access-key": "AK",
    "secret-key": "SK",
    "session-token": "ST",
    "tls-ca": "-----BEGIN CERTIFICATE-----\nAA\n-----END CERTIFICATE-----",
    "tls-key": "-----BEGIN PRIVATE KEY-----\nBB\n-----END PRIVATE KEY-----",
    "google-credentials": '{\n"type": "service_account"\n}',
}


def test_the_secrets_content_round_trips_and_its_keys_suit_juju():
    secret = fs.JuicefsSecret.from_content(CONTENT)
    assert secret.content() == CONTENT
    partial = {"meta-password": "x", "newer-than-us": "y", "access-key": ""}
    assert fs.JuicefsSecret.from_content(partial).content() == {"meta-password": "x"}
    assert fs.JuicefsSecret.from_content(secret.content()) == secret
    for key in fs.JuicefsSecret.names():
        assert re.fullmatch(r"[a-z](?:-?[a-z0-9]){2,}", key)  # Juju, core/secrets/createsecret.go


def test_a_secret_shows_nothing():
    secret = fs.JuicefsSecret.from_content(CONTENT)
    for shown in (repr(secret), str(secret), repr([secret]), f"{secret}"):
        for value in secret.values():
            assert value not in shown
    assert set(secret.values()) == {
        value for key, value in CONTENT.items() if key not in ("meta-user", "tls-ca")
    }


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tls-ca", "/etc/ssl/ca.pem", "a certificate or key in PEM is needed, -----BEGIN ..."),
        *(
            ("secret-key", f"top{one}Secret", "line breaks and NUL are not possible here")
            for one in "\n\r\0"
        ),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_key(key: str, value: str, message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{key}: {message}')}$"):
        fs.JuicefsSecret.from_content({key: value})
