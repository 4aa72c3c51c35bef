"""Each raylet in a network namespace of its own, so that one can be cut off from the others as a cable is.

Needs root and iproute2. Without them `Network.usable()` is false, all raylets share this host's network, and no trial
cuts anything. Namespaces and the bridge carry the token of their world in their names and go with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.nursery.namespaces import HOME, enter


def _ip(*arguments: str, namespace: str | None = None) -> None:
    inside = () if namespace is None else ("-n", namespace)
    subprocess.run(("ip", *inside, *arguments), check=True, capture_output=True, text=True)


class Network:
    """A bridge on this host (slot 0 lives there) and one namespace for each further slot."""

    def __init__(self, token: str, slots: int) -> None:
        """`token`: four characters, unlike that of any other world on this host."""
        self._bridge = f"lgc{token}"
        self._token = token
        self._subnet = _free_subnet()
        self._slots = range(1, slots)
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.address(0)}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for slot in self._slots:
                self._add(slot)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def usable() -> bool:
        """Whether this process may make namespaces here."""
        if os.geteuid() != 0 or shutil.which("ip") is None:
            return False
        name = f"lgctry{os.getpid()}"
        made = subprocess.run(("ip", "netns", "add", name), capture_output=True, check=False).returncode == 0
        if made:
            made = subprocess.run(("ip", "-n", name, "link", "set", "lo", "up"), check=False).returncode == 0
            subprocess.run(("ip", "netns", "delete", name), capture_output=True, check=False)
        return made

    def address(self, slot: int) -> str:
        return f"{self._subnet}.{10 + slot}"

    def interface(self, slot: int) -> str:
        """The interface of a slot, as its own processes see it."""
        return self._bridge if slot == 0 else "eth0"

    def open(self, slot: int) -> int:
        """A descriptor of the slot's namespace; close it."""
        return os.open(HOME if slot == 0 else f"/run/netns/{self._namespace(slot)}", os.O_RDONLY | os.O_CLOEXEC)

    @contextlib.contextmanager
    def inside(self, slot: int) -> Iterator[None]:
        """What the body starts lives in the slot's namespace. Of the calling thread only."""
        home = os.open(HOME, os.O_RDONLY | os.O_CLOEXEC)
        there = self.open(slot)
        try:
            enter(there)
            yield
        finally:
            enter(home)
            os.close(there)
            os.close(home)

    def cut(self, slot: int) -> None:
        """No packet leaves or reaches the slot from now on; nobody is told."""
        _ip("link", "set", self._cable(slot), "down")

    def mend(self, slot: int) -> None:
        _ip("link", "set", self._cable(slot), "up")

    def close(self) -> None:
        for slot in self._slots:
            subprocess.run(("ip", "netns", "delete", self._namespace(slot)), capture_output=True, check=False)
            subprocess.run(("ip", "link", "delete", self._cable(slot)), capture_output=True, check=False)
        subprocess.run(("ip", "link", "delete", self._bridge), capture_output=True, check=False)

    def _add(self, slot: int) -> None:
        namespace, cable = self._namespace(slot), self._cable(slot)
        _ip("netns", "add", namespace)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", cable, "master", self._bridge, "up")
        _ip("link", "set", "lo", "up", namespace=namespace)
        _ip("addr", "add", f"{self.address(slot)}/24", "dev", "eth0", namespace=namespace)
        _ip("link", "set", "eth0", "up", namespace=namespace)

    def _namespace(self, slot: int) -> str:
        return f"lgc{self._token}n{slot}"

    def _cable(self, slot: int) -> str:
        return f"lgc{self._token}v{slot}"


def _free_subnet() -> str:
    taken = subprocess.run(("ip", "-4", "-o", "addr"), check=True, capture_output=True, text=True).stdout
    start = os.getpid() % 250
    for offset in range(250):
        subnet = f"10.77.{(start + offset) % 250}"
        if f" {subnet}." not in taken:
            return subnet
    raise OSError("every subnet 10.77.x is taken on this host")


def netns_of(pid: int) -> int | None:
    """The inode of a process's network namespace; None when it is gone."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return None
