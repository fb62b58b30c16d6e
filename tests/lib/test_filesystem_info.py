import contextlib
import re
import string
import typing
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ddp.interfaces import filesystem_info as fs

# Every byte, UTF-8 or not, as Python keeps it in text
anything = st.one_of(st.text(min_size=1), st.binary(min_size=1).map(lambda raw: raw.decode("utf-8", "surrogateescape")))
hostile = st.text(alphabet=":@/?#%[](),;&=+ '\"$`\\\n\0é", min_size=1)
text = anything | hostile
# Hosts are lower-cased by readers and separated by commas: both are the format's own limits
opaque_host = text.map(
    lambda value: "".join(c.lower() if c in string.ascii_uppercase else c for c in value.replace(",", "-"))
)
path = text.map(lambda value: f"/{value}")
revision = st.none() | st.integers(min_value=0, max_value=10**17)
port = st.none() | st.integers(min_value=1, max_value=65535)
host = st.one_of(
    st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)
secret_id = st.text(alphabet=string.ascii_lowercase + string.digits, min_size=1).map(lambda value: f"secret:{value}")

nfs = st.builds(fs.Nfs, host=host, path=path, port=port)
cephfs = st.builds(
    fs.Cephfs,
    hosts=st.lists(st.tuples(host, port).map(lambda pair: fs.join_address(*pair)), min_size=1).map(tuple),
    user=text,
    fsid=text,
    name=text,
    path=path,
    secret_id=secret_id,
    auth_rev=revision,
)
plain_cephfs = st.builds(fs.Cephfs, hosts=st.just(("m",)), user=text, fsid=text, name=text, path=path, key=text)
lustre = st.builds(fs.Lustre, nids=st.lists(opaque_host, min_size=1).map(tuple), fs_name=text)
juicefs = st.builds(
    fs.Juicefs,
    name=st.from_regex(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]", fullmatch=True),
    hosts=st.lists(st.tuples(host, port).map(lambda pair: fs.join_address(*pair)), min_size=1).map(tuple),
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


@given(nfs | cephfs | plain_cephfs | lustre | juicefs)
def test_every_byte_of_every_component_survives_the_wire(filesystem: fs.Filesystem):
    assert fs.parse(filesystem.uri()) == filesystem


@given(nfs | cephfs | lustre | juicefs)
def test_the_wire_holds_printable_ascii_only(filesystem: fs.Filesystem):
    assert re.fullmatch(r"[!-~]+", filesystem.uri())


@given(cephfs | lustre | nfs)
def test_upstreams_reader_sees_what_we_wrote(filesystem: fs.Filesystem):
    """The steps of upstream's reader (its library filesystem_info, LIBPATCH 3), by the same calls of urllib."""
    result = urllib.parse.urlparse(filesystem.uri(), allow_fragments=False)
    hosts = urllib.parse.unquote(result.hostname or "", errors="surrogateescape")
    assert result.scheme == type(filesystem).__name__.lower()
    assert hosts[0] == "(" and hosts[-1] == ")"
    seen = tuple(hosts[1:-1].split(","))
    strict = bool(result.query)
    lists = urllib.parse.parse_qs(result.query, strict_parsing=strict, errors="surrogateescape")
    options = {key: ",".join(values) for key, values in lists.items()}
    seen_path = urllib.parse.unquote(result.path, errors="surrogateescape")
    match filesystem:
        case fs.Nfs():
            assert seen == (fs.join_address(filesystem.host, filesystem.port),)
            assert seen_path == filesystem.path
        case fs.Lustre():
            assert seen == filesystem.nids
            assert (seen_path, options) == ("/", {"fs-name": filesystem.fs_name})
        case fs.Cephfs():
            assert seen == filesystem.hosts
            assert urllib.parse.unquote(result.username or "", errors="surrogateescape") == filesystem.user
            assert seen_path == filesystem.path
            assert options["auth"] == filesystem.secret_id
            assert (options["fsid"], options["name"]) == (filesystem.fsid, filesystem.name)
        case fs.Juicefs():
            raise AssertionError("not drawn")


@pytest.mark.parametrize(
    ("filesystem", "uri"),
    [
        # upstream.md 3.1: what upstream's own charms put into the databag
        (fs.Nfs(host="192.168.1.254", port=65535, path="/srv"), "nfs://(192.168.1.254%3A65535)/srv"),
        (fs.Nfs(host="fe80::1", port=2049, path="/a b"), "nfs://(%5Bfe80%3A%3A1%5D%3A2049)/a%20b"),
        (
            fs.Cephfs(
                hosts=("10.0.0.1:6789", "10.0.0.2:6789"),
                user="fs-client",
                fsid="354ca7c4-f10d-11ee-93f8-1f85f87b7845",
                name="ceph-fs",
                secret_id="secret:cvq4d2nmp25c77uodvq0",
                auth_rev=1,
            ),
            "cephfs://fs-client@(10.0.0.1%3A6789%2C10.0.0.2%3A6789)/?fsid=354ca7c4-f10d-11ee-93f8-1f85f87b7845"
            "&name=ceph-fs&auth=secret%3Acvq4d2nmp25c77uodvq0&auth-rev=1",
        ),
        (
            fs.Lustre(nids=("192.168.227.11@tcp1", "192.168.227.12@tcp1"), fs_name="lustre"),
            "lustre://(192.168.227.11%40tcp1%2C192.168.227.12%40tcp1)/?fs-name=lustre",
        ),
        (
            fs.Juicefs(
                name="train",
                hosts=("10.0.0.5:6379",),
                engine="redis",
                db="1",
                uuid="1b7c",
                secret_id="secret:x1",
                auth_rev=3,
                bucket="10.0.0.5:2022:/data/",
                storage="sftp",
            ),
            "juicefs://train@(10.0.0.5%3A6379)/?engine=redis&db=1&uuid=1b7c&storage=sftp&bucket=10.0.0.5%3A2022%3A%2Fdata%2F"
            "&auth=secret%3Ax1&auth-rev=3",
        ),
    ],
)
def test_the_wire_format_is_fixed(filesystem: fs.Filesystem, uri: str):
    assert filesystem.uri() == uri
    assert fs.parse(uri) == filesystem


def test_a_plain_key_is_read_and_never_shown():
    filesystem = fs.parse("cephfs://user@(m1)/?fsid=f&name=n&auth=plain%3AAQBx%2BtopSecret%3D%3D")
    assert isinstance(filesystem, fs.Cephfs)
    assert filesystem.key == "AQBx+topSecret=="
    assert "topSecret" not in repr(filesystem)
    assert "topSecret" not in str(filesystem)


def test_hosts_are_read_in_lower_case_and_nothing_else_is():
    filesystem = fs.parse("cephfs://User@(MON1%3A1%2CMon2)/Path?fsid=F&name=N&auth=secret%3AX")
    assert isinstance(filesystem, fs.Cephfs)
    assert filesystem.hosts == ("mon1:1", "mon2")
    assert (filesystem.user, filesystem.path, filesystem.fsid, filesystem.secret_id) == (
        "User",
        "/Path",
        "F",
        "secret:X",
    )


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("", "not a URI"),
        ("nfs:/x", "not a URI"),
        ("nfs://(192.168.1.1:65535)/export", "not a URI of this interface: something is not percent-encoded"),
        ("nfs://(h)/a b", "not a URI of this interface: something is not percent-encoded"),
        ("nfs://(h)/a#b", "not a URI of this interface: something is not percent-encoded"),
        ("nfs://([::1])/a", "not a URI of this interface: something is not percent-encoded"),
        ("nfs://user:topSecret@(h)/a", "not a URI of this interface: something is not percent-encoded"),
        ("nfs://host/a", "the list of hosts is missing"),
        ("nfs://()/a", "the list of hosts is missing"),
        ("nfs://(h%3Atwo)/a", "a port is a number"),
        ("nfs://(h%3A0)/a", "a port is between 1 and 65535"),
        ("nfs://(h%3A65536)/a", "a port is between 1 and 65535"),
        ("nfs://(%5B%3A%3A1)/a", "a host has an open bracket, or something else than a port behind it"),
        ("nfs://(h%2C)/a", None),  # the first host counts
        ("nfs://(%2Ch)/a", "a host is empty, or neither a name nor an address"),
        ("nfs://(h)/a?soft=1", "unknown option 'soft' for nfs"),
        ("nfs://(h)/a?soft", "the options are malformed"),
        ("nfs://(h/24)/a", "a host is empty, or neither a name nor an address"),
        ("nfs://(h)a", "the list of hosts is missing"),
        ("cephfs://u@(m%3Aone)/?fsid=f&name=n&auth=secret%3Ax", "a port is a number"),
        ("cephfs://u@(/0)/?fsid=f&name=n&auth=secret%3Ax", "cephfs: no monitor among the hosts"),
        ("lustre://(n)/", "lustre: option fs-name is missing"),
        ("lustre://(n)/?fs-name=", "option 'fs-name' is empty"),
        ("lustre://(n)/?fs-name=a&fs-name=b", "option 'fs-name' is given twice"),
        ("cephfs://(m)/?fsid=f&name=n&auth=secret%3Ax", "user is empty"),
        ("cephfs://u@(m)/?fsid=f&name=n&auth=topSecret", "cephfs: auth is neither a secret nor a plain key"),
        ("cephfs://u@(m)/?fsid=f&name=n&auth=other%3AtopSecret", "cephfs: auth is neither a secret nor a plain key"),
        ("cephfs://u@(m)/?fsid=f&name=n&auth=secret%3Ax&auth-rev=new", "option auth-rev is not a number"),
        ("juicefs://train@(h)/?engine=sqlite3&uuid=u", "unknown metadata engine 'sqlite3'"),
        ("juicefs://train@(h)/?engine=redis", "juicefs: option uuid is missing"),
        (
            "juicefs://Train@(h)/?engine=redis&uuid=u",
            "a volume's name has 3 to 63 letters a-z, digits and hyphens, with no hyphen at either end",
        ),
        ("juicefs://train@(h)/?engine=redis&uuid=u&auth=plain%3AtopSecret", "juicefs: auth is not a secret"),
        ("juicefs://train@(h)/?engine=redis&uuid=u&tls=false", "option tls is something else than true"),
        ("juicefs://train@(h)/?engine=redis&uuid=u&colour=red", "unknown option 'colour' for juicefs"),
        ("gluster://(h)/v", "unknown filesystem 'gluster'"),
    ],
)
def test_what_is_wrong_is_named_and_the_uri_is_not_quoted(uri: str, message: str | None):
    if message is None:
        fs.parse(uri)
        return
    with pytest.raises(fs.UriError) as caught:
        fs.parse(uri)
    assert str(caught.value) == message
    assert "topSecret" not in repr(caught.value)


# What upstream's charms publish (upstream.md 3.1: the three proxies, ceph-fs), and what its reader makes of it
PUBLISHED = (
    "nfs://(192.168.1.254%3A65535)/srv",
    "nfs://(fs.example.com)/data/a%20b",
    "cephfs://fs-client@(10.0.0.1%3A6789%2C10.0.0.2%3A6789)/?fsid=354ca7c4-f10d-11ee-93f8-1f85f87b7845&name=ceph-fs"
    "&auth=secret%3Acvq4d2nmp25c77uodvq0&auth-rev=1",
    "cephfs://user@(10.0.0.1%3A6789)/sub/dir?fsid=354ca7c4&name=ceph-fs&auth=plain%3AAQBx%3D%3D",
    "lustre://(192.168.227.11%40tcp1%2C192.168.227.12%40tcp1)/?fs-name=lustre",
)


@pytest.mark.parametrize("uri", PUBLISHED)
def test_what_upstream_publishes_comes_back_byte_for_byte(uri: str):
    assert fs.parse(uri).uri() == uri


@pytest.mark.parametrize(
    "uri",
    [
        "nfs://(192.168.1.1:65535)/export",  # the list of hosts is not encoded
        "nfs://192.168.1.1/export",  # there is no list
        "nfs://()/export",
        "lustre://(n)/?fs-name=",  # an empty value
        "lustre://(n)/?fs-name",  # no value
        "lustre://(n)/",  # no name
        "cephfs://u@(m)/?name=n&auth=secret%3Ax",  # no fsid
        "cephfs://u@(m)/?fsid=f&name=n&auth=key",  # auth of no kind
        "ceph://u@(m)/?fsid=f&name=n&auth=secret%3Ax",  # a scheme that its own comments name, and its code does not know
    ],
)
def test_what_upstream_rejects_is_rejected(uri: str):
    with pytest.raises(fs.UriError):
        fs.parse(uri)


@pytest.mark.parametrize(
    ("hosts", "monitors"),
    [
        ("10.0.0.1%3A6789%2C10.0.0.2", (("10.0.0.1", 6789, 1), ("10.0.0.2", 6789, 1))),
        ("10.0.0.1%3A3300", (("10.0.0.1", 3300, 2),)),
        # `ceph mon dump` and mon_host of ceph.conf: upstream's proxy publishes the slash, and its reader refuses it
        ("v2%3A10.0.0.1%3A3300/0", (("10.0.0.1", 3300, 2),)),
        ("10.0.0.1%3A6789/0", (("10.0.0.1", 6789, 1),)),
        (
            "%5Bv2%3A10.0.0.1%3A3300/0%2Cv1%3A10.0.0.1%3A6789/0%5D%2C%5Bv2%3A10.0.0.2%3A3301/0%5D",
            (("10.0.0.1", 3300, 2), ("10.0.0.1", 6789, 1), ("10.0.0.2", 3301, 2)),
        ),
        (
            "%5Bv2%3A%5B2001%3Adb8%3A%3A1%5D%3A3300/0%2Cv1%3A%5B2001%3Adb8%3A%3A1%5D%3A6789/0%5D",
            (("2001:db8::1", 3300, 2), ("2001:db8::1", 6789, 1)),
        ),
        ("v2%3Amon1%2Cv1%3Amon1%2Cany%3Amon2", (("mon1", 3300, 2), ("mon1", 6789, 1), ("mon2", 6789, 1))),
        ("2001%3Adb8%3A%3A1", (("2001:db8::1", 6789, 1),)),
        ("%5B2001%3Adb8%3A%3A1%5D%3A3300", (("2001:db8::1", 3300, 2),)),
        # As mount.ceph(8) takes them in mon_addr
        ("10.0.0.1%3A6789/10.0.0.2%3A6789", (("10.0.0.1", 6789, 1), ("10.0.0.2", 6789, 1))),
        # monitor-hosts="10.0.0.1:6789, 10.0.0.2:6789", which is split at spaces
        ("10.0.0.1%3A6789%2C%2C10.0.0.2%3A6789", (("10.0.0.1", 6789, 1), ("10.0.0.2", 6789, 1))),
    ],
)
def test_monitors_are_read_in_every_form_that_ceph_prints(hosts: str, monitors: tuple[tuple[str, int, int], ...]):
    filesystem = fs.parse(f"cephfs://fs-client@({hosts})/?fsid=f&name=n&auth=secret%3Ax&auth-rev=1")
    assert isinstance(filesystem, fs.Cephfs)
    assert filesystem.monitors() == tuple(fs.Monitor(*monitor) for monitor in monitors)


def test_a_user_with_a_slash_is_read_as_upstream_writes_it():
    filesystem = fs.parse("cephfs://team/a@(m1)/x%20y/z?fsid=f&name=n&auth=secret%3Ax")
    assert isinstance(filesystem, fs.Cephfs)
    assert (filesystem.user, filesystem.hosts, filesystem.path) == ("team/a", ("m1",), "/x y/z")


@pytest.mark.parametrize("uri", [*PUBLISHED, "nfs://(h:1)/topSecret", "cephfs://u@(m)/?auth=plain%3AtopSecret"])
def test_no_uri_is_logged(uri: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(0)
    with contextlib.suppress(fs.UriError):
        fs.parse(uri)
    assert caplog.records == []


@given(st.text() | text.map(lambda value: f"juicefs://{value}") | text.map(lambda value: f"nfs://(h)/{value}"))
def test_any_text_is_a_filesystem_or_a_uri_error_of_one_line(uri: str):
    try:
        fs.parse(uri)
    except fs.UriError as e:
        assert "\n" not in str(e)


def test_an_unknown_scheme_or_option_is_named():
    with pytest.raises(fs.UriError, match=r"^unknown filesystem 'gluster'$"):
        fs.parse("gluster://(h)/v")
    with pytest.raises(fs.UriError, match=r"^unknown option 'nconnect' for nfs$"):
        fs.parse("nfs://(h)/v?nconnect=4")


@pytest.mark.parametrize(
    "build",
    [
        lambda: fs.Nfs(host="h,i", path="/a"),
        lambda: fs.Nfs(host="h", path="relative"),
        lambda: fs.Nfs(host="h", path="/a", port=70000),
        lambda: fs.Lustre(nids=("a,b",), fs_name="x").uri(),
        lambda: fs.Lustre(nids=(), fs_name="x").uri(),
        lambda: fs.Cephfs(hosts=("m",), user="u", fsid="f", name="n"),
        lambda: fs.Juicefs(name="train", hosts=("h:x",), engine="redis", db="1", uuid="u"),
    ],
)
def test_what_cannot_be_written_is_refused(build: typing.Callable[[], object]):
    with pytest.raises(fs.UriError):
        build()


@pytest.mark.parametrize(
    ("address", "pair"),
    [
        ("h", ("h", None)),
        ("h:1", ("h", 1)),
        ("[::1]", ("::1", None)),
        ("[::1]:6379", ("::1", 6379)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
    ],
)
def test_addresses(address: str, pair: tuple[str, int | None]):
    assert fs.split_address(address) == pair
    assert fs.join_address(*pair) == address


def test_addresses_of_the_engine_have_its_port_when_none_is_given():
    volume = fs.Juicefs(name="train", hosts=("a", "b:7000"), engine="postgres", db="x", uuid="u")
    assert volume.addresses() == (("a", 5432), ("b", 7000))


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
    assert fs.JuicefsSecret.from_content(secret.content()) == secret
    for key in fs.JuicefsSecret.names():
        assert re.fullmatch(r"[a-z](?:-?[a-z0-9]){2,}", key)  # Juju, core/secrets/createsecret.go


def test_a_secret_shows_nothing():
    secret = fs.JuicefsSecret.from_content(CONTENT)
    for shown in (repr(secret), str(secret), repr([secret]), f"{secret}"):
        for value in secret.values():
            assert value not in shown
    assert set(secret.values()) == {value for key, value in CONTENT.items() if key not in ("meta-user", "tls-ca")}


def test_keys_may_be_absent_and_unknown_ones_are_ignored():
    secret = fs.JuicefsSecret.from_content({"meta-password": "x", "newer-than-us": "y", "access-key": ""})
    assert secret.content() == {"meta-password": "x"}


def test_a_certificate_is_one():
    with pytest.raises(ValueError, match=r"^tls-ca: a certificate or key in PEM is needed, -----BEGIN \.\.\.$"):
        fs.JuicefsSecret.from_content({"tls-ca": "/etc/ssl/ca.pem"})


@pytest.mark.parametrize("character", ["\n", "\r", "\0"])
def test_a_value_that_no_environment_holds_is_refused_by_its_key(character: str):
    with pytest.raises(ValueError, match=r"^secret-key: line breaks and NUL are not possible here$"):
        fs.JuicefsSecret.from_content({"secret-key": f"top{character}Secret"})
