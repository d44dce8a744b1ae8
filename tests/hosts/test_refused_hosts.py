"""Where hosts cannot be made, or are asked for wrongly, the reason is said; none of this needs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from burst_attention import hosts as module
from burst_attention.cli import main
from burst_attention.hosts import Hosts, HostsError, hosts_refusal


@pytest.fixture
def hosts_can_be_made() -> None:
    """These tests run everywhere."""


@pytest.fixture(autouse=True)
def refusals_are_not_remembered() -> Iterator[None]:
    module._try_out.cache_clear()
    yield
    module._try_out.cache_clear()


def not_root(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return "making network namespaces needs root"


def no_linux(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "platform", "darwin")
    return "hosts are network namespaces of Linux, and this is darwin"


def no_tools(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(module, "find_tool", lambda name: None)
    return "no ip and no tc found; install iproute2"


def not_permitted(monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(*arguments: str, **_: object) -> str:
        raise HostsError(f"{' '.join(arguments[:3])}: Operation not permitted")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(module, "find_tool", lambda name: name)
    monkeypatch.setattr(module, "call_tool", refuse)
    return "ip netns add: Operation not permitted"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the last two reasons are Linux's")
@pytest.mark.parametrize("cause", [not_root, no_linux, no_tools, not_permitted], ids=lambda cause: cause.__name__)
def test_the_reason_is_said(cause: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(cause)
    reason = cause(monkeypatch)
    assert hosts_refusal() == reason
    with pytest.raises(HostsError, match=f"no hosts can be made here: {reason}"), Hosts(2):
        pass
    with pytest.raises(SystemExit) as ended:
        main(["hosts", "--", "script.py"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"burst hosts: no hosts can be made here: {reason}\n"


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="count must be from 1 to 200, got 0"):
        Hosts(0)
    with pytest.raises(ValueError, match=r"mbit must be from 0\.01 to 1,000,000, got 0"):
        Hosts(2, mbit=0)
    with pytest.raises(ValueError, match="name must be 1 to 32 letters"):
        Hosts(2, name="a b")
    with pytest.raises(HostsError, match="hosts exist only inside"):
        Hosts(2).cut(0)
