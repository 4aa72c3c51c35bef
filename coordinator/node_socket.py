"""Calls between lastgood's processes on one node, over a socket in a folder that is the user's alone (mode 0700).

A step and a stall are made of these calls, and a call of Ray's to an actor with an event loop takes milliseconds:
agents call their stager, the coordinator calls the stager of its own node, a driver on that node calls the coordinator.
Whoever may open the folder may call. One call at a time on a connection; whoever calls at the same time has a
connection of their own.

A frame is its length (4 bytes, little-endian) and a pickle of (method, arguments) or (result, error). It goes from one
live process of the user to another and is never kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ..storage.errors import LastgoodError, StagingError

log = logging.getLogger("lastgood.node")

NAME = "calls"
_LENGTH = struct.Struct("<I")
_BACKLOG = 128
_AGAIN_S = 1.0


@contextlib.contextmanager
def _within(folder: Path) -> Iterator[str]:
    """The socket's path by way of the open directory: a socket's path may have 107 bytes, and the directory is ours.

    Raises PermissionError when it is not: of a name that was known and is free again anybody can make a folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{folder} is not uid {os.geteuid()}'s alone")
        yield f"/proc/self/fd/{descriptor}/{NAME}"
    finally:
        os.close(descriptor)


class SocketServer:
    """The end that answers. Lives on the event loop on which it is opened; `target` has the named methods.

    It takes connections in by itself: one that asyncio's own server has accepted when that is closed (3.11) stays open
    and unread, and its agent waits.
    """

    def __init__(
        self,
        folder: Path,
        target: object,
        methods: Collection[str],
        who: str = "stager",
        failure: type[LastgoodError] = StagingError,
    ) -> None:
        """`who` answers here; what it raises that is no error of lastgood is told as a `failure`."""
        self.folder = folder
        self._who = who
        self._failure = failure
        self._target = target
        self._methods = frozenset(methods)
        self._listening: socket.socket | None = None
        self._connections: dict[socket.socket, asyncio.Task[None]] = {}
        self._closed = False

    async def open(self) -> None:
        """Begins to listen, once. Raises StagingError, also when it is closed already."""
        if self._closed:
            raise StagingError(f"this {self._who} has ended; look for the one that follows it (it had {self.folder})")
        if self._listening is None:
            self._listening = self._listener()
            self._watch()

    def _watch(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().add_reader(self._listening, self._take_in, self._listening)

    def _listener(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        try:
            with _within(self.folder) as path:
                listener.bind(path)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise StagingError(
                f"no socket can be made in {self.folder}: {error}. Nothing was changed. It must be a folder of "
                f"uid {os.getuid()} alone (image_root, on a tmpfs).",
                path=str(self.folder),
                errno=error.errno,
            ) from error
        return listener

    def _take_in(self, listener: socket.socket) -> None:
        """In one go, without an await: a connection is never between two hands when the server closes."""
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return  # it has gone again
        except OSError as error:  # too many open files: it stays at the door, and would be announced without end
            log.error("a process of this node cannot be taken in (%s); again in %.0f s", error, _AGAIN_S)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(_AGAIN_S, self._watch)
            return
        connection.setblocking(False)
        self._connections[connection] = asyncio.ensure_future(self._serve(connection))

    def close(self) -> None:
        """Hears no more; whoever waits for an answer is cut off, whatever the call that it waits for does."""
        self._closed = True
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        for connection, serving in self._connections.items():
            serving.cancel()
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    async def _serve(self, connection: socket.socket) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            while not self._closed:
                method, arguments = pickle.loads(await _read(reader))  # noqa: S301 - from the user's own process
                writer.write(_framed(await self._answer(method, arguments)))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the process is gone, or this one ends
        except Exception:
            log.exception("a process of this node sent what is no call; its connection was closed")
        finally:
            self._connections.pop(connection, None)
            (connection if writer is None else writer).close()

    async def _answer(self, method: str, arguments: tuple[Any, ...]) -> tuple[Any, LastgoodError | None]:
        if method not in self._methods:
            return None, self._failure(f"a {self._who} answers no {method!r} to the processes of its node")
        try:
            return await getattr(self._target, method)(*arguments), None
        except LastgoodError as error:
            return None, error
        except Exception as error:
            log.exception("%s failed", method)
            return None, self._failure(
                f"the {self._who} could not {method}: {type(error).__name__}: {error}. The previous checkpoint stands; "
                f"look at the {self._who}'s log in Ray's dashboard."
            )


class NodeSocket:
    """The end that asks. `call` from any thread. A process forked from its maker's makes connections of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._idle: list[socket.socket] = []
        self._pid = os.getpid()

    def call(self, method: str, timeout_s: float, *arguments: object) -> Any:
        """Raises OSError or EOFError when nobody is there or it is silent, or the error that it answers with."""
        if os.getpid() != self._pid:  # two processes on one connection would take each other's answers
            self._idle, self._pid = [], os.getpid()
        connection = self._idle.pop() if self._idle else self._connect(timeout_s)
        try:
            connection.settimeout(timeout_s)
            connection.sendall(_framed((method, arguments)))
            length = _LENGTH.unpack(_receive(connection, _LENGTH.size))[0]
            result, error = pickle.loads(_receive(connection, length))  # noqa: S301 - from the user's own process
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        if error is not None:
            raise error
        return result

    def _connect(self, timeout_s: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout_s)
            with _within(self.folder) as path:
                connection.connect(path)
        except BaseException:
            connection.close()
            raise
        return connection


class NodeLine:
    """As NodeSocket, for the one event loop on which it is used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def call(self, method: str, *arguments: object) -> Any:
        """Raises OSError or EOFError when nobody is there, or the error that it answers with. Its caller bounds it."""
        reader, writer = self._idle.pop() if self._idle else await self._connect()
        try:
            writer.write(_framed((method, arguments)))
            result, error = pickle.loads(await _read(reader))  # noqa: S301 - from the user's own process
        except BaseException:  # also cancelled: nobody else must be given the answer that is still to come
            writer.close()
            raise
        self._idle.append((reader, writer))
        if error is not None:
            raise error
        return result

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        with _within(self.folder) as path:
            return await asyncio.open_unix_connection(path)


def _framed(message: object) -> bytes:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


async def _read(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(_LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0])


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    content = bytearray(nbytes)
    left = memoryview(content)
    while left:
        count = connection.recv_into(left)
        if not count:
            raise EOFError("the connection was closed at its other end")
        left = left[count:]
    return bytes(content)
