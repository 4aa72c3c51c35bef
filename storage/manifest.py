"""The files that lie at rest beside the tensors, as models (file_model.py). A Manifest that can be constructed is
whole: its validators hold every rule that can be checked without looking at the files.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    PrivateAttr,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)
from typing_extensions import Self

from .file_model import (
    Count,
    Counts,
    FileModel,
    Metric,
    Name,
    Names,
    Nodes,
    Part,
    Rank,
    Sha256,
    Text,
    Utc,
    as_tuple,
    broken,
    canonical,
    check_version,
    load_json,
    version_in,
)
from .layout import RESERVED, shard_path


class Chunk(Part):
    """One box of a (possibly sharded) tensor, and where its bytes lie in the file. Fields in the order of names."""

    begin: Count  # byte range in the shard file, end exclusive
    dtype: Text  # torch's or numpy's name without a prefix: "bfloat16", "uint16"
    end: Count
    fqn: Text  # path of the tensor in the component's tree, dotted as users know it from state dicts
    global_shape: Counts
    offsets: Counts  # of this box in the global tensor, in elements
    sizes: Counts  # in elements

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not len(self.global_shape) == len(self.offsets) == len(self.sizes):
            raise ValueError(f"chunk {self.fqn}: global_shape, offsets and sizes differ in length")
        if any(o + s > g for o, s, g in zip(self.offsets, self.sizes, self.global_shape, strict=True)):
            raise ValueError(f"chunk {self.fqn}: {self.sizes} at {self.offsets} is outside of {self.global_shape}")
        if self.begin > self.end:
            raise ValueError(f"chunk {self.fqn}: byte range {self.begin}-{self.end}")
        return self


def blocks_in(nbytes: int, block_bytes: int) -> int:
    """How many blocks a file of `nbytes` has."""
    return -(-nbytes // block_bytes)


def digest_of_blocks(blocks: tuple[str, ...] | list[str]) -> str:
    """The digest of a file from its blocks' hex digests: SHA-256 over the concatenated binary ones (as S3 does)."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, blocks))).hexdigest()


class ShardRecord(Part):
    """One shard file: whose it is, how long, and the digest of every block. Fields in the order of names."""

    block_bytes: Annotated[int, Field(ge=1)]
    blocks: Annotated[tuple[Sha256, ...], BeforeValidator(as_tuple)]
    chunks: Annotated[tuple[Chunk, ...], BeforeValidator(as_tuple)] = ()
    component: Name
    digest: Sha256
    nbytes: Count
    node: Text  # durable identity of the staging directory that wrote it
    path: Text  # inside the attempt's directory; always layout.shard_path(role, rank, component)
    rank: Rank
    role: Name

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.role in RESERVED:
            raise ValueError(f"role {self.role} is the name of a file of every checkpoint")
        expected = shard_path(self.role, self.rank, self.component)
        if self.path != expected:
            raise ValueError(f"path {self.path!r} is not the place of this shard, {expected}")
        if len(self.blocks) != blocks_in(self.nbytes, self.block_bytes):
            raise ValueError(
                f"{self.path}: {len(self.blocks)} block digests for {self.nbytes} bytes in blocks of {self.block_bytes}"
            )
        if self.digest != digest_of_blocks(self.blocks):
            raise ValueError(f"{self.path}: digest is not that of the blocks")
        for chunk in self.chunks:
            if chunk.end > self.nbytes:
                raise ValueError(f"{self.path}: chunk {chunk.fqn} ends at byte {chunk.end} of {self.nbytes}")
        return self


class RoleRecord(Part):
    """What a role consists of: ranks 0..world_size-1, each with all components."""

    world_size: Annotated[int, Field(ge=1, le=10**9)]
    components: Names

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.components)) != len(self.components):
            raise ValueError(f"components named twice: {self.components}")
        return self


class MemberRecord(Part):
    """One member's word at the snapshot. Fields in the order of names."""

    node: Text
    rank: Rank
    role: Name
    updates: Count | None = None  # optimizer updates so far; None without an optimizer


class Head(Part):
    """What names an attempt: its id and its place in the order of checkpoints (epoch, sequence)."""

    attempt: Name
    step: Count
    epoch: Count
    sequence: Count


class Parent(Head):
    """The checkpoint that this one grew from."""


class Manifest(FileModel):
    """manifest.json: everything that an attempt consists of. The list of its files is exact; strangers are ignored.

    It carries no digest of itself, and keeps the format version that was read: its bytes' digest stands in COMPLETED.
    """

    what = "manifest"

    run: Name
    attempt: Name
    step: Count
    epoch: Count
    sequence: Count
    kind: Text  # messages.SaveKind's value
    tag: Name | None = None
    reason: Text = ""
    requested_by: Text = ""
    requests: Annotated[tuple[Text, ...], BeforeValidator(as_tuple)] = ()  # ids: each is served once, over restarts
    created_at: Utc
    parent: Parent | None = None
    roles: dict[Name, RoleRecord]
    members: Annotated[tuple[MemberRecord, ...], BeforeValidator(as_tuple)]
    participants: Nodes  # nodes whose accept the commit needs: all that hold shards
    shards: Annotated[tuple[ShardRecord, ...], BeforeValidator(as_tuple)]
    metrics: dict[Text, Metric] = Field(default_factory=dict)
    fingerprint: dict[Text, JsonValue] = Field(default_factory=dict)
    versions: dict[Text, Text] = Field(default_factory=dict)

    @field_validator("format_version", mode="before")
    @classmethod
    def _known_version(cls, value: Any) -> Any:
        check_version(value, cls.what, cls.what)
        return value

    @classmethod
    def _read(cls, content: dict[str, Any], data: bytes, where: str) -> Self:
        version_in(content, cls.what, where)
        return cls.model_validate_json(data)  # faster than from the content, for many members

    @field_validator("fingerprint")
    @classmethod
    def _plain(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
        return value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.roles:
            raise ValueError("it names no role")
        if len(set(self.participants)) != len(self.participants):
            raise ValueError(f"participants named twice: {self.participants}")
        reserved = RESERVED & self.roles.keys()
        if reserved:
            raise ValueError(f"roles are named as files of every checkpoint: {sorted(reserved)}")
        total = sum(record.world_size for record in self.roles.values())
        if len(self.members) != total:  # first, so that an absurd world size costs no memory
            raise ValueError(f"{len(self.members)} members for roles of {total} ranks in all")
        members = {(role, rank) for role, record in self.roles.items() for rank in range(record.world_size)}
        _same_set("members", [(m.role, m.rank) for m in self.members], members)
        owed = {(role, rank, name) for role, rank in members for name in self.roles[role].components}
        _same_set("shards", [(s.role, s.rank, s.component) for s in self.shards], owed)
        folded = {s.path.casefold() for s in self.shards}
        if len(folded) != len(self.shards):
            raise ValueError("two shards differ only in the case of their letters")
        nodes = {shard.node for shard in self.shards}
        if nodes != set(self.participants):
            raise ValueError(
                f"participants {sorted(self.participants)} are not the nodes of the shards {sorted(nodes)}"
            )
        return self

    def to_bytes(self) -> bytes:
        """The same canonical bytes; the two long lists are written by pydantic itself, several times faster.

        That is canonical because their models hold only text, counts and lists of them, in fields that are declared in
        the order of their names.
        """
        texts = {name: canonical(value) for name, value in self.model_dump(mode="json", exclude=_LONG).items()}
        texts["members"] = _MEMBERS.dump_json(self.members).decode()
        texts["shards"] = _SHARDS.dump_json(self.shards).decode()
        return ("{" + ",".join(f'"{name}":{texts[name]}' for name in sorted(texts)) + "}\n").encode()

    @property
    def head(self) -> Head:
        return Head(attempt=self.attempt, step=self.step, epoch=self.epoch, sequence=self.sequence)

    def shards_of(self, node: str) -> tuple[ShardRecord, ...]:
        """The shards that `node` wrote."""
        return tuple(shard for shard in self.shards if shard.node == node)


_LONG = {"members", "shards"}
_MEMBERS = TypeAdapter(tuple[MemberRecord, ...])
_SHARDS = TypeAdapter(tuple[ShardRecord, ...])


def _same_set(what: str, found: list[Any], owed: set[Any]) -> None:
    have = set(found)
    if len(have) != len(found):
        doubled = [item for item, times in collections.Counter(found).items() if times > 1]
        raise ValueError(f"{what} stand in it twice: {_some(doubled)}")
    if have != owed:
        problems = [f"lacks {_some(owed - have)}"] if owed - have else []
        problems += [f"does not expect {_some(have - owed)}"] if have - owed else []
        raise ValueError(f"{what}: the roles' declaration {' and '.join(problems)}")


def _some(items: Any) -> str:
    listed = sorted(items)
    return ", ".join(":".join(map(str, item)) for item in listed[:5]) + (
        f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    )


class Completed(FileModel):
    """COMPLETED: the proof that the attempt is committed. The same bytes, at step level, are the step's pointer."""

    what = "COMPLETED"

    run: Name
    attempt: Name
    step: Count
    epoch: Count
    sequence: Count
    manifest_sha256: Sha256  # of manifest.json's bytes
    kind: Text
    tag: Name | None = None
    participants: Nodes
    committed_at: Utc

    @classmethod
    def of(cls, manifest: Manifest, manifest_bytes: bytes, committed_at: str) -> Completed:
        """The marker for a manifest; `manifest_bytes` are the very bytes that lie in manifest.json."""
        return cls(
            run=manifest.run,
            attempt=manifest.attempt,
            step=manifest.step,
            epoch=manifest.epoch,
            sequence=manifest.sequence,
            manifest_sha256=hashlib.sha256(manifest_bytes).hexdigest(),
            kind=manifest.kind,
            tag=manifest.tag,
            participants=manifest.participants,
            committed_at=committed_at,
        )

    @property
    def head(self) -> Head:
        return Head(attempt=self.attempt, step=self.step, epoch=self.epoch, sequence=self.sequence)


Pointer = Completed  # global_step_N/COMPLETED is a copy of the COMPLETED of the attempt it points to


class Tombstone(FileModel):
    """Stands in COMPLETED's place of an attempt that was collected, for ever: a late writer cannot complete it."""

    what = "tombstone"

    tombstone: Literal[True] = True
    run: Name
    attempt: Name
    step: Count
    epoch: Count
    sequence: Count
    reason: Text
    deleted_at: Utc


def read_completed(data: bytes, *, where: str) -> Completed | Tombstone:
    """Reads what stands under an attempt's COMPLETED. Raises IntegrityError (FormatVersionError) for garbage."""
    content = load_json(data, Completed.what, where)
    if "tombstone" in content:
        return Tombstone.from_bytes(data, where=where)
    return Completed.from_bytes(data, where=where)


def newest_first(completed: Iterable[Completed]) -> list[Completed]:
    """The newest commit of each step, those the pointers lead to; the newest of all first."""
    by_step: dict[int, Completed] = {}
    for one in sorted(completed, key=lambda one: (one.epoch, one.sequence)):
        by_step[one.step] = one
    return sorted(by_step.values(), key=lambda one: (one.epoch, one.sequence), reverse=True)


class Latest(FileModel):
    """latest.json: the newest checkpoint. On file systems a hint; truth is the COMPLETEDs."""

    what = "latest.json"

    path: Text  # of the attempt's directory, relative to the run's: global_step_400/<attempt>
    global_step: Count
    epoch: Count
    sequence: Count
    attempt: Name
    manifest_sha256: Sha256
    committed_at: Utc
    durable_at: Utc | None = None

    @classmethod
    def of(cls, completed: Completed, durable_at: str | None = None) -> Latest:
        return cls(
            path=f"global_step_{completed.step}/{completed.attempt}",
            global_step=completed.step,
            epoch=completed.epoch,
            sequence=completed.sequence,
            attempt=completed.attempt,
            manifest_sha256=completed.manifest_sha256,
            committed_at=completed.committed_at,
            durable_at=durable_at,
        )


class Record(FileModel):
    """records/<attempt>.json: a participant's write-once word on an attempt."""

    what = "record"
    sealed_apart = ("manifest",)  # it is long, and manifest_sha256 is of its very bytes

    state: Literal["accept", "refuse"]
    head: Head
    reason: Text | None = None  # of a refuse: a sentence
    manifest: Text | None = None  # of an accept: the manifest's JSON text, byte for byte
    manifest_sha256: Sha256 | None = None  # of that text
    _content: Manifest | None = PrivateAttr(None)  # what that text says: it is long, and is read once

    @classmethod
    def accept(cls, head: Head, manifest: bytes, content: Manifest | None = None) -> Record:
        """An accept that holds these very bytes. `content`: what they say, for a caller that has read them."""
        sha256 = hashlib.sha256(manifest).hexdigest()
        facts = {"state": "accept", "head": head, "manifest": manifest.decode("utf-8"), "manifest_sha256": sha256}
        return cls.model_validate(facts, context=content)

    @model_validator(mode="after")
    def _agrees(self, info: ValidationInfo) -> Self:
        if isinstance(info.context, Manifest):
            self._content = info.context
        if self.state == "accept":
            if self.manifest is None:
                raise ValueError("an accept without the manifest")
            if hashlib.sha256(self.manifest.encode("utf-8")).hexdigest() != self.manifest_sha256:
                raise ValueError("the manifest in it has another digest than was accepted")
            if self.read_manifest(where="the record").head != self.head:
                raise ValueError("the manifest in it is another attempt's")
        elif self.manifest is not None or not self.reason:
            raise ValueError("a refuse has a reason and no manifest")
        return self

    def read_manifest(self, *, where: str) -> Manifest:
        """The manifest of an accept. Raises IntegrityError when it has none or it is broken."""
        if self.manifest is None:
            raise broken(self.what, where, f"a {self.state} holds no manifest")
        if self._content is None:
            self._content = Manifest.from_bytes(self.manifest.encode("utf-8"), where=where)
        return self._content


class StagedList(FileModel):
    """staged.json: what one node wrote for an attempt, durable before it is acknowledged."""

    what = "staged list"

    run: Name
    head: Head
    node: Text
    shards: Annotated[tuple[ShardRecord, ...], BeforeValidator(as_tuple)]


class DurableNote(FileModel):
    """DURABLE: this node knows that the store's COMPLETED for the attempt stands."""

    what = "durable note"

    head: Head
    noted_at: Utc


class LedgerEntry(FileModel):
    """ledger/<epoch>-<sequence>.json in the store: this commit happened, and these nodes hold it."""

    what = "ledger entry"

    run: Name
    attempt: Name
    step: Count
    epoch: Count
    sequence: Count
    nodes: Nodes
    manifest_sha256: Sha256
    committed_at: Utc


class NodeIdentity(FileModel):
    """node.json: the durable name of a staging directory (Ray's node ids change)."""

    what = "node identity"

    node: Annotated[Text, Field(min_length=1)]


class EpochNote(FileModel):
    """epoch.json (the highest epoch a stager has seen) and epochs/<n> in the store (who claimed it)."""

    what = "epoch note"

    epoch: Count
    owner: Text = ""  # token of the claimant: a claim of unknown outcome is read back and compared
    noted_at: Utc | None = None


class Owner(FileModel):
    """owner.json in the store: which coordinator leads the run, refreshed while it lives."""

    what = "owner"

    run: Name
    owner: Text  # token of the coordinator's incarnation
    epoch: Count
    address: Text  # for people: cluster, host, process
    heartbeat_at: Utc
    interval_s: Annotated[float, Field(gt=0)]  # between heartbeats; stale after several of them
