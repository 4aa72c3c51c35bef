"""What every JSON file of ours has in common, as a base of frozen models. The rule: strict in, canonical out.

Reading refuses unknown fields, wrong types and unknown format versions (both versions are named); writing gives the
same bytes for the same content (sorted keys, no spaces), because digests are taken over them. Nothing read here is
ever executed or imported by name. Every file but the manifest, whose digest stands in COMPLETED, carries a digest of
itself: a flipped bit is damage, never another word.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
from collections.abc import Collection, Iterator
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
)
from typing_extensions import Self

from .errors import FormatVersionError, IntegrityError
from .layout import NAME_PATTERN

FORMAT_VERSION = 2
READ_VERSIONS = (1, 2)  # version 1 had no digests
SEAL = "sha256"  # the field of a file's own digest


def _unicode(text: str) -> str:
    text.encode("utf-8")  # lone surrogates raise UnicodeEncodeError, a ValueError
    return text


def as_tuple(value: Any) -> Any:
    """JSON has lists where the models have tuples."""
    return tuple(value) if isinstance(value, list) else value


def _metric_in(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _metric_out(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


Text = Annotated[str, AfterValidator(_unicode)]
Name = Annotated[str, Field(pattern=rf"^{NAME_PATTERN}\z")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
Utc = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z\z")]  # ids.utc_text makes them
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Rank = Annotated[int, Field(ge=0, lt=10**9)]
Metric = Annotated[
    float, BeforeValidator(_metric_in), PlainSerializer(_metric_out, when_used="json")
]  # JSON has no NaN
Counts = Annotated[tuple[Count, ...], BeforeValidator(as_tuple)]
Names = Annotated[tuple[Name, ...], BeforeValidator(as_tuple)]
Nodes = Annotated[tuple[Text, ...], BeforeValidator(as_tuple)]


class Part(BaseModel):
    """Base of everything in here: strict, frozen, no unknown fields."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


def check_version(found: Any, what: str, where: str, reads: Collection[int] = READ_VERSIONS) -> None:
    """Raises FormatVersionError unless `found` is one of `reads`."""
    if type(found) is not int or found not in reads:
        raise FormatVersionError(
            f"{where}: this {what} has format version {found!r}, and this lastgood reads version "
            f"{' and '.join(map(str, reads))}. Nothing was changed; use the lastgood that wrote it, or a newer one.",
            path=where,
            found=found,
            supported=tuple(reads),
        )


class FileModel(Part):
    """Base of the models that are one file or object each.

    In memory they are of the newest format version, whatever was read.
    """

    what: ClassVar[str] = "file"
    sealed_apart: ClassVar[Collection[str]] = ()  # fields whose digest stands in another field

    format_version: int = FORMAT_VERSION

    @field_validator("format_version", mode="before")
    @classmethod
    def _known_version(cls, value: Any) -> Any:
        check_version(value, cls.what, cls.what, (FORMAT_VERSION,))
        return value

    def to_bytes(self) -> bytes:
        """The file's bytes: canonical JSON in UTF-8 and a newline; equal content gives equal bytes."""
        content = self.model_dump(mode="json")
        return canonical({**content, SEAL: _digest(content, self.sealed_apart)}).encode("utf-8") + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> Self:
        """Reads what to_bytes wrote. `where` (a path or key) is for the error.

        Raises FormatVersionError for another format version, IntegrityError for anything else that is wrong.
        """
        with _no_collection():
            content = load_json(data, cls.what, where)
            try:
                return cls._read(content, data, where)
            except ValidationError as error:
                raise broken(cls.what, where, _first_problems(error)) from error

    @classmethod
    def _read(cls, content: dict[str, Any], data: bytes, where: str) -> Self:
        """What the file says, which has this content. The digest comes first: a damaged version is no other version."""
        seal = content.pop(SEAL, None)
        try:
            sound = seal is None or seal == _digest(content, cls.sealed_apart)
        except (ValueError, RecursionError) as error:
            raise broken(cls.what, where, str(error)) from error
        if not sound:
            raise broken(cls.what, where, "its content has another digest than was written")
        version = version_in(content, cls.what, where)
        if (version == 1) != (seal is None):
            has = "no digest" if seal is None else "a digest"
            raise broken(cls.what, where, f"it has {has}, which files of format version {version} do not")
        return cls.model_validate({**content, "format_version": FORMAT_VERSION})


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection while a file is read: it makes no cycles, and every pass over what was read so far finds
    nothing and costs more than the reading (seen: more than half of the time for a manifest of 10,000 members)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def version_in(content: dict[str, Any], what: str, where: str) -> int:
    """The format version that a file names, which is read here. Raises IntegrityError (FormatVersionError)."""
    if "format_version" not in content:
        raise broken(what, where, "it names no format version")
    check_version(content["format_version"], what, where)
    return content["format_version"]


def _digest(content: dict[str, Any], apart: Collection[str]) -> str:
    """A file's digest of itself: over the canonical JSON of its content, in whatever way that was written."""
    text = canonical({name: value for name, value in content.items() if name not in apart})
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def canonical(content: Any) -> str:
    """One text for one content. Raises ValueError for what JSON has no text for."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def load_json(data: bytes, what: str, where: str) -> dict[str, Any]:
    """The object in a file. Raises IntegrityError for anything else, and for a key that stands in it twice."""
    try:
        content = json.loads(bytes(data).decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise broken(what, where, f"it is not JSON ({error}; {len(data)} bytes)") from error
    if not isinstance(content, dict):
        raise broken(what, where, f"it holds a JSON {type(content).__name__}, not an object")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key stands in it twice")
    return content


def _first_problems(error: ValidationError) -> str:
    problems = [f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg']}" for e in error.errors(include_url=False)]
    return "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")


def broken(what: str, where: str, why: str) -> IntegrityError:
    """The error for a file that is not what was written."""
    return IntegrityError(
        f"{where} is not a whole {what}: {why}. It was left as it is and is not used; "
        "take this checkpoint from another copy, or an earlier checkpoint.",
        path=where,
    )
