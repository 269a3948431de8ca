"""This machine is not reached through a proxy; other hosts are, unless `no_proxy` names them."""

import os
import socket
from urllib.request import proxy_bypass

import httpx
import pytest
from requests.utils import should_bypass_proxies

from rlhf.commands.main import main
from rlhf.launch.proxies import bypass_proxies, is_local_host

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment without proxies, which is restored after the test."""
    for name in VARIABLES:
        for each in (name, name.upper()):
            monkeypatch.setenv(each, "")
            monkeypatch.delenv(each)
    return monkeypatch


def test_hosts_of_this_machine_are_known_by_name_and_address() -> None:
    own = socket.gethostname()
    local = ["localhost", "Localhost.", "a.localhost", "127.0.0.1", "127.255.255.254", "127.1"]
    local += ["0.0.0.0", "::1", "::", "::ffff:127.0.0.1", "::1%lo", own, own.upper()]
    for host in local:
        assert is_local_host(host), host
    other = ["", "example.com", "localhost.example.com", "notlocalhost", "128.0.0.1", "10.0.0.1"]
    other += ["::2", "2001:db8::1", "a" * 300, f"{own}.example.com", "\u00e9\u00e9", "1.2.3.4.5"]
    for host in other:
        assert not is_local_host(host), host


@pytest.mark.parametrize("listed", ["", "a.example, .b.example"])
@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "all_proxy"])
def test_libraries_of_observers_and_of_the_hub_reach_this_machine(
    name: str, listed: str, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv(name, "http://127.0.0.1:9")
    environment.setenv("NO_PROXY", listed)
    assert main(["plugins", "--json"]) == 0
    for host in ("localhost", "127.0.0.1", "0.0.0.0", socket.gethostname()):
        assert proxy_bypass(f"{host}:5000"), host
        assert should_bypass_proxies(f"http://{host}:5000", no_proxy=None), host
        transport = httpx.Client()._transport_for_url(httpx.URL(f"http://{host}:5000"))
        assert type(transport._pool).__name__ == "ConnectionPool", host  # type: ignore[attr-defined]
    assert should_bypass_proxies("http://127.8.0.1", no_proxy=None)
    assert not proxy_bypass("c.example")
    assert bool(proxy_bypass("a.example") and proxy_bypass("c.b.example")) is bool(listed)


def test_the_environment_stays_as_it_is_without_a_proxy_or_if_no_host_has_one(
    environment: pytest.MonkeyPatch,
) -> None:
    bypass_proxies()
    assert "no_proxy" not in os.environ
    environment.setenv("http_proxy", "http://127.0.0.1:9")
    environment.setenv("no_proxy", "*")
    bypass_proxies()
    assert os.environ["no_proxy"] == "*"
    environment.setenv("no_proxy", "a.example")
    bypass_proxies()
    once = os.environ["no_proxy"]
    bypass_proxies()
    assert os.environ["no_proxy"] == once == os.environ["NO_PROXY"]
    assert once.startswith("a.example,localhost,")
