"""Which downloads go to a proxy, by the lists of Juju's model."""

import ipaddress

import hypothesis
import pytest
from hypothesis import strategies as st

from slurm_ddp import proxies

# The model's settings as a hook has them
MODEL = {
    "JUJU_CHARM_HTTP_PROXY": "http://squid.example.internal:3128",
    "JUJU_CHARM_HTTPS_PROXY": "http://squid.example.internal:3128",
    "JUJU_CHARM_NO_PROXY": "127.0.0.1,localhost,10.0.0.0/8,.example.internal",
}
labels = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
names = st.lists(labels, min_size=2, max_size=4).map(".".join)
addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).filter(
    lambda one: not one.is_loopback and getattr(one, "ipv4_mapped", None) is None
)
ports = st.integers(1, 65535)


def url(host: str, port: int | None = None, scheme: str = "http") -> str:
    place = f"[{host}]" if ":" in host else host
    return f"{scheme}://{place}{f':{port}' if port else ''}/key"


@pytest.mark.parametrize(
    ("address", "is_direct"),
    [
        ("http://10.0.0.2/client-setup-tool", True),
        ("http://lustre.example.internal/key.asc", True),
        ("https://downloads.example.org/juicefs.tar.gz", False),
        ("http://example.internal/key", False),  # as Go has it: a leading dot means names below
        ("http://LUSTRE.Example.Internal./key", True),
        ("http://11.0.0.2/key", False),
        ("http://localhost:8080/", True),
        ("http://[::1]/", True),
        ("http://ten.10.0.0.2.example.org/", False),
    ],
)
def test_the_models_exceptions_are_direct(address: str, is_direct: bool):
    assert proxies.is_direct(address, proxies.avoided(MODEL)) == is_direct


@pytest.mark.parametrize(
    ("environment", "configured", "avoided"),
    [
        ({}, {}, ""),
        ({"http_proxy": "http://a", "HTTPS_PROXY": "http://b", "NO_PROXY": "c"},
         {"http": "http://a", "https": "http://b"}, "c"),
        (MODEL | {"http_proxy": "http://a", "no_proxy": "c"},
         dict.fromkeys(("http", "https"), MODEL["JUJU_CHARM_HTTP_PROXY"]), MODEL["JUJU_CHARM_NO_PROXY"]),
    ],
)  # fmt: skip
def test_the_models_settings_come_before_the_environments(
    environment: dict[str, str], configured: dict[str, str], avoided: str
):
    assert proxies.configured(environment) == configured
    assert proxies.avoided(environment) == avoided


@hypothesis.settings(max_examples=500)
@hypothesis.given(name=names, below=labels, other=names, port=ports)
def test_names_and_suffixes(name: str, below: str, other: str, port: int):
    for entry in (name, name.upper(), f"a.invalid, {name}", f"{name} 10.0.0.1"):
        assert proxies.is_direct(url(name), entry)
        assert proxies.is_direct(url(f"{below}.{name}", port), entry)
    for entry in (f".{name}", f"*.{name}"):
        assert proxies.is_direct(url(f"{below}.{name}"), entry)
        assert not proxies.is_direct(url(name), entry)
    assert not proxies.is_direct(url(f"{below}{name}"), name)
    assert proxies.is_direct(url(other), name) == f".{other}".endswith(f".{name}")
    assert proxies.is_direct(url(other), "*")
    assert not proxies.is_direct(url(other), "")


@hypothesis.settings(max_examples=500)
@hypothesis.given(address=addresses, other=addresses, bits=st.integers(0, 128), name=names)
def test_addresses_and_networks(
    address: proxies.Address, other: proxies.Address, bits: int, name: str
):
    network = ipaddress.ip_network(f"{address}/{min(bits, address.max_prefixlen)}", strict=False)
    listed = f"a.invalid,{network}"
    assert proxies.is_direct(url(str(address)), listed)
    assert proxies.is_direct(url(str(other)), listed) == (other in network)
    assert proxies.is_direct(url(str(address)), str(address))
    assert proxies.is_direct(url(str(other)), str(address)) == (other == address)
    assert not proxies.is_direct(url(name), listed)


@hypothesis.settings(max_examples=300)
@hypothesis.given(host=st.one_of(names, addresses.map(str)), port=ports, other=ports)
def test_an_entry_with_a_port_counts_for_that_port(host: str, port: int, other: int):
    entry = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    assert proxies.is_direct(url(host, port), entry)
    assert proxies.is_direct(url(host, other), entry) == (other == port)
    assert proxies.is_direct(url(host), entry) == (port == 80)
    assert proxies.is_direct(url(host, scheme="https"), entry) == (port == 443)


@hypothesis.settings(max_examples=500)
@hypothesis.given(listed=st.text(max_size=60), host=names)
def test_no_list_is_too_odd(listed: str, host: str):
    assert proxies.is_direct(url(host), listed) in (True, False)
