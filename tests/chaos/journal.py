"""What a driver did, told line by line in a file that outlives it. One JSON object a line, appended whole."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class Journal:
    """A journal being written. Every entry has `event`, `pid` and `at` (seconds since 1970)."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def tell(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "pid": os.getpid(), "at": time.time(), **facts})
        os.write(self._file, f"{line}\n".encode())  # one write: a killed writer leaves a whole line or none


class Reader:
    """A journal being read while it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.entries: list[Entry] = []

    def news(self) -> list[Entry]:
        """The entries since the last call; they are also added to `entries`."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = [json.loads(line) for line in whole.splitlines()]
        self.entries.extend(found)
        return found
