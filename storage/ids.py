"""Ids and times as text. The clock and the randomness come in from outside; the defaults are the machine's.

An id is a ULID: 26 characters, 48 bits of milliseconds then 80 random bits, so that ids sort by the time of their
making for people who list directories. No decision goes by that order (checkpoints are ordered by epoch and sequence).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import datetime, timezone

Clock = Callable[[], float]  # seconds since 1970
RandomBytes = Callable[[int], bytes]  # n -> n random bytes

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base 32: no I, L, O, U


def ulid(clock: Clock = time.time, random_bytes: RandomBytes = os.urandom) -> str:
    """A new id of 26 characters, unique over processes and restarts, valid as a name of a path (layout.NAME)."""
    value = (int(clock() * 1000) & (1 << 48) - 1) << 80 | int.from_bytes(random_bytes(10), "big")
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5))


def new_id(prefix: str, clock: Clock = time.time, random_bytes: RandomBytes = os.urandom) -> str:
    """A new id that says what it names: `<prefix>-<ulid>`."""
    return f"{prefix}-{ulid(clock, random_bytes)}"


def utc_text(seconds: float) -> str:
    """Seconds since 1970 as the text that files hold: `2031-05-06T07:08:09.123Z`, milliseconds, always UTC."""
    moment = datetime.fromtimestamp(seconds, tz=timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"
