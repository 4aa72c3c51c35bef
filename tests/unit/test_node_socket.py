"""Calls of a node's processes to its stager over the socket."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from lastgood.coordinator import node_socket
from lastgood.coordinator.node_socket import NodeLine, NodeSocket, SocketServer
from lastgood.storage.errors import SnapshotError, StagingError
from tests.unit.stager_world import Loop

LIMIT_S = 60.0
NAMES = ("echo", "refuse", "fail", "wait", "stubborn")


class Target:
    """What a stager stands for here."""

    def __init__(self) -> None:
        self.waiting = threading.Event()
        self.go = asyncio.Event()
        self.calls = 0

    async def echo(self, *arguments: object) -> tuple[object, ...]:
        return arguments

    async def refuse(self) -> None:
        raise SnapshotError("no room", needed_bytes=7)

    async def fail(self) -> None:
        raise ValueError("a bug")

    async def stubborn(self) -> str:
        """Ends well although it is cancelled, as wait_for does (3.11) when what it waits for has just come."""
        self.calls += 1
        self.waiting.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self.go.wait()
        return "ended"

    async def wait(self) -> str:
        self.waiting.set()
        await self.go.wait()
        return "waited"

    async def secret(self) -> str:
        return "not for agents"


class Place:
    """A folder with a server in it, on a loop of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True)
        self.folder = folder
        self.loop = Loop()
        self.target = Target()
        self.server = SocketServer(folder, self.target, NAMES)
        self.loop.run(self.server.open())

    def close_server(self) -> None:
        async def close() -> None:
            self.server.close()

        self.loop.run(close())

    def let_go(self) -> None:
        self.loop.loop.call_soon_threadsafe(self.target.go.set)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "folder")
    yield made
    made.close_server()
    made.loop.stop()


def test_a_call_is_answered_with_any_content(place: Place) -> None:
    there = NodeSocket(place.folder)
    assert there.call("echo", LIMIT_S, 1, "two", {"three": 3.0}) == (1, "two", {"three": 3.0})
    large = os.urandom(3_000_000)
    assert there.call("echo", LIMIT_S, large) == (large,)


def test_an_error_of_lastgood_arrives_as_itself_and_any_other_as_the_stagers(place: Place) -> None:
    there = NodeSocket(place.folder)
    with pytest.raises(SnapshotError, match="no room") as caught:
        there.call("refuse", LIMIT_S)
    assert caught.value.facts["needed_bytes"] == 7
    with pytest.raises(StagingError, match="ValueError: a bug"):
        there.call("fail", LIMIT_S)
    assert there.call("echo", LIMIT_S, 1) == (1,)


def test_only_what_is_meant_for_agents_can_be_called(place: Place) -> None:
    with pytest.raises(StagingError, match="secret"):
        NodeSocket(place.folder).call("secret", LIMIT_S)


def test_a_folder_deeper_than_a_socket_path_may_be_long(tmp_path: Path) -> None:
    deep = Place(tmp_path / ("a" * 100) / ("b" * 100))
    try:
        assert NodeSocket(deep.folder).call("echo", LIMIT_S, 1) == (1,)
    finally:
        deep.close_server()
        deep.loop.stop()


def test_a_folder_that_others_may_write_to_is_not_trusted(place: Place) -> None:
    place.folder.chmod(0o755)
    with pytest.raises(PermissionError):
        NodeSocket(place.folder).call("echo", LIMIT_S, 1)


def test_a_link_in_the_folders_place_is_not_followed(place: Place, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(place.folder)
    with pytest.raises(OSError):
        NodeSocket(link).call("echo", LIMIT_S, 1)


def test_calls_of_several_threads_do_not_wait_for_each_other(place: Place) -> None:
    there = NodeSocket(place.folder)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(there.call, "wait", LIMIT_S)
        assert place.target.waiting.wait(LIMIT_S)
        assert there.call("echo", LIMIT_S, 1) == (1,)
        place.let_go()
        assert waiting.result(LIMIT_S) == "waited"


def test_a_call_is_cut_off_when_the_stager_closes(place: Place) -> None:
    there = NodeSocket(place.folder)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(there.call, "wait", LIMIT_S)
        assert place.target.waiting.wait(LIMIT_S)
        place.close_server()
        with pytest.raises((OSError, EOFError)):
            waiting.result(LIMIT_S)
    with pytest.raises((OSError, EOFError)):
        there.call("echo", LIMIT_S, 1)


def test_a_closed_stager_answers_nobody_even_when_a_call_swallows_its_end(place: Place) -> None:
    there = NodeSocket(place.folder)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(there.call, "stubborn", LIMIT_S)
        assert place.target.waiting.wait(LIMIT_S)
        place.close_server()
        with pytest.raises((OSError, EOFError)):
            waiting.result(LIMIT_S)
    with pytest.raises((OSError, EOFError)):
        there.call("stubborn", LIMIT_S)
    assert place.target.calls == 1


def test_a_connection_that_was_taken_in_as_the_stager_closed_is_not_served(place: Place) -> None:
    async def close_and_then_serve() -> None:
        place.server.close()
        await place.server._serve(theirs)

    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT_S)
    place.loop.run(close_and_then_serve())
    assert ours.recv(1) == b""
    ours.close()
    with pytest.raises(StagingError, match="has ended"):
        place.loop.run(place.server.open())


def test_a_process_that_cannot_be_taken_in_waits_and_is_announced_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_socket, "_AGAIN_S", 0.05)
    listening = place.server._listening
    assert listening is not None

    class Full:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "too many open files")

        def fileno(self) -> int:
            return listening.fileno()

    async def fail() -> None:
        place.server._take_in(cast("socket.socket", Full()))

    place.loop.run(fail())
    assert NodeSocket(place.folder).call("echo", LIMIT_S, 1) == (1,)  # taken in when it tries again
    assert caplog.text.count("cannot be taken in") == 1


def test_the_late_answer_of_a_call_that_was_given_up_is_nobodys(place: Place) -> None:
    there = NodeSocket(place.folder)
    with pytest.raises(TimeoutError):
        there.call("wait", 0.05)
    place.let_go()
    assert there.call("echo", LIMIT_S, "mine") == ("mine",)


def test_a_forked_process_calls_over_a_connection_of_its_own(place: Place) -> None:
    there = NodeSocket(place.folder)
    assert there.call("echo", LIMIT_S, "before") == ("before",)
    parents = there._idle[0]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            right = there.call("echo", LIMIT_S, "child") == ("child",)
            os.write(writing, b"own" if right and there._idle[0] is not parents else b"shared")
        finally:
            os._exit(0)
    os.close(writing)
    assert os.read(reading, 100) == b"own"
    os.close(reading)
    os.waitpid(child, 0)
    assert there.call("echo", LIMIT_S, "after") == ("after",)


def test_a_loop_calls_as_a_thread_does(place: Place) -> None:
    async def story() -> None:
        there = NodeLine(place.folder)
        assert await there.call("echo", 1, "two") == (1, "two")
        with pytest.raises(SnapshotError, match="no room"):
            await there.call("refuse")
        waiting = asyncio.ensure_future(there.call("wait"))
        assert await asyncio.to_thread(place.target.waiting.wait, LIMIT_S)
        assert await there.call("echo", 3) == (3,)  # does not wait for the other
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        place.let_go()
        assert await there.call("echo", "mine") == ("mine",)  # the late answer was nobody's

        await asyncio.to_thread(place.close_server)
        with pytest.raises((OSError, EOFError)):
            await there.call("echo", 4)
        with pytest.raises((OSError, EOFError)):
            await there.call("echo", 5)

    asyncio.run(story())


def test_a_call_to_one_that_takes_nobody_in_ends_at_its_limit(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as stopped, ThreadPoolExecutor(8) as pool:
        stopped.bind(str(tmp_path / node_socket.NAME))
        stopped.listen(0)  # as a server with a full queue that is stopped
        there = NodeSocket(tmp_path)
        calls = [pool.submit(there.call, "echo", 0.2, number) for number in range(8)]
        for call in calls:
            with pytest.raises((TimeoutError, BlockingIOError)):
                call.result(LIMIT_S)


def test_who_answers_is_named_by_its_errors(tmp_path: Path) -> None:
    place = Place(tmp_path / "folder")
    other = SocketServer(place.folder.parent / "other", place.target, NAMES, "coordinator", SnapshotError)
    other.folder.mkdir(mode=0o700)
    place.loop.run(other.open())
    with pytest.raises(SnapshotError, match="the coordinator could not fail: ValueError"):
        NodeSocket(other.folder).call("fail", LIMIT_S)

    async def close() -> None:
        other.close()

    place.loop.run(close())
    place.close_server()
    place.loop.stop()


def test_what_is_no_call_ends_that_connection_and_nothing_else(place: Place) -> None:
    there = NodeSocket(place.folder)
    assert there.call("echo", LIMIT_S, 1) == (1,)
    there._idle[0].sendall(b"\x04\x00\x00\x00junk")
    with pytest.raises((OSError, EOFError)):
        there.call("echo", LIMIT_S, 2)
    assert there.call("echo", LIMIT_S, 3) == (3,)
