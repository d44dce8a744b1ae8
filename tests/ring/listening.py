"""Which sockets wait for connections, by what the kernel says of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

LISTENING = "0A"


def listening(pids: Iterable[int] | None = None) -> list[tuple[IPv4Address | IPv6Address, int]]:
    """Address and port of every listening TCP socket in the calling thread's network; of these processes, if given."""
    held = None if pids is None else {inode for pid in pids for inode in sockets_of(pid)}
    found = []
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/thread-self/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == LISTENING and (held is None or fields[9] in held):
                found.append((address_of(address), int(port, 16)))
    return sorted(found, key=str)


def sockets_of(pid: int) -> list[str]:
    """The inodes of a process's sockets."""
    inodes = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.append(target.removeprefix("socket:[").removesuffix("]"))
    return inodes


def address_of(text: str) -> IPv4Address | IPv6Address:
    """The kernel prints an address as words of four bytes, each in this machine's order, which is little-endian."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    data = b"".join(words)
    return IPv4Address(data) if len(data) == 4 else IPv6Address(data)
