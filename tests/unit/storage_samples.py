"""Trees, records and whole attempts for the storage tests, and the comparison that knows no tolerance."""

from __future__ import annotations

import enum
import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from lastgood.storage.digest import BlockDigests, digest_blocks
from lastgood.storage.leaves import TORCH_DTYPES
from lastgood.storage.manifest import Completed, Manifest, MemberRecord, RoleRecord, ShardRecord
from lastgood.storage.tree import ShardedPiece, register_enum

CREATED = "2031-05-06T07:08:09.123Z"
BLOCK_BYTES = 1000


def sealed(content: dict[str, Any]) -> bytes:
    """A small JSON file of this content with its digest as docs/format.md has it."""
    body = {name: value for name, value in content.items() if name != "sha256"}
    text = json.dumps(
        {name: value for name, value in body.items() if name != "manifest"},
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
    )
    return json.dumps({**body, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


@register_enum
class Color(enum.Enum):
    RED = "red"
    BLUE = ("tuple", 1)


@register_enum
class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


def torch_dtypes() -> list[torch.dtype]:
    """Every dtype that can be stored, of those this torch has."""
    found = [getattr(torch, name, None) for name in TORCH_DTYPES]
    return [dtype for dtype in found if isinstance(dtype, torch.dtype)]


NUMPY_DTYPES = ["?", "<u1", "<u2", ">u4", "<i8", ">i2", "<f2", "<f4", ">f8", "<c8", "<c16", np.dtype("longdouble").str]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of random bits (bools are bools)."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, max(count, 1), np.uint8)
    return torch.from_numpy(data)[:count].view(dtype).view(shape)


def same(left: Any, right: Any) -> bool:
    """Equal in type and in every bit. Order of dict keys counts."""
    if isinstance(left, torch.Tensor):
        return (
            type(right) is torch.Tensor
            and left.dtype == right.dtype
            and left.shape == right.shape
            and bits(left) == bits(right)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, (np.ndarray, np.generic)):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, ShardedPiece):
        return (left.global_shape, left.offsets) == (right.global_shape, right.offsets) and same(
            left.tensor, right.tensor
        )
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    return bool(left == right)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype.itemsize == 1:
        plain = plain.view(torch.uint8)
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


_shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    made = tensor_of(draw(st.sampled_from(torch_dtypes())), draw(_shapes), draw(st.integers(0, 1 << 30)))
    if made.dim() > 1 and draw(st.booleans()):
        made = made.transpose(0, 1)
    if made.dim() and made.shape[0] > 1 and draw(st.booleans()):
        made = made[::2]
    return made


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype, shape = np.dtype(draw(st.sampled_from(NUMPY_DTYPES))), draw(_shapes)
    data = np.random.default_rng(draw(st.integers(0, 1 << 30))).integers(0, 2, (int(np.prod(shape)), dtype.itemsize))
    made = np.ascontiguousarray(data.astype(np.uint8)).reshape(-1).view(dtype).reshape(shape)
    return made.T if draw(st.booleans()) else made


_text = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates too
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(),
    _text,
    st.sampled_from([Color.RED, Color.BLUE, Level.LOW, Level.LOW | Level.HIGH, -0.0, float("nan"), float("-inf")]),
)
_keys = st.one_of(_scalars, st.tuples(_scalars, _scalars))
_leaves = st.one_of(
    _scalars,
    st.binary(max_size=8),
    st.binary(min_size=1025, max_size=1100),
    tensors(),
    arrays(),
    st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1j), torch.bfloat16, torch.quint4x2]),
)
trees = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(_text, inner, max_size=4),
        st.dictionaries(_keys, inner, max_size=4),
    ),
    max_leaves=12,
)


def shard_record(
    data: bytes, role: str = "actor", rank: int = 0, component: str = "model", node: str = "node-a", **changes: Any
) -> ShardRecord:
    """The true record of a shard with these bytes."""
    digests: BlockDigests = digest_blocks(data, BLOCK_BYTES)
    fields: dict[str, Any] = {
        "role": role,
        "rank": rank,
        "component": component,
        "path": f"{role}/rank_{rank:05d}.{component}.safetensors",
        "nbytes": len(data),
        "block_bytes": BLOCK_BYTES,
        "blocks": digests.blocks,
        "digest": digests.digest,
        "node": node,
    }
    return ShardRecord(**{**fields, **changes})


def completed_of(step: int, attempt: str, *, epoch: int = 1, participant: str = "n") -> Completed:
    """COMPLETED of an attempt of run "run" whose sequence is its step."""
    return Completed(
        run="run",
        attempt=attempt,
        step=step,
        epoch=epoch,
        sequence=step,
        manifest_sha256="0" * 64,
        kind="scheduled",
        participants=(participant,),
        committed_at="2031-05-06T07:08:09.123Z",
    )


def manifest_of(shards: list[ShardRecord], **changes: Any) -> Manifest:
    """A whole manifest around shards of roles that are complete."""
    roles: dict[str, RoleRecord] = {}
    for role in dict.fromkeys(shard.role for shard in shards):
        mine = [shard for shard in shards if shard.role == role]
        names = tuple(dict.fromkeys(shard.component for shard in mine))
        roles[role] = RoleRecord(world_size=1 + max(shard.rank for shard in mine), components=names)
    members = {(shard.role, shard.rank): shard.node for shard in shards}
    fields: dict[str, Any] = {
        "run": "qwen",
        "attempt": "attempt-1",
        "step": 400,
        "epoch": 3,
        "sequence": 17,
        "kind": "scheduled",
        "created_at": CREATED,
        "roles": roles,
        "members": tuple(MemberRecord(role=r, rank=n, node=node, updates=5) for (r, n), node in members.items()),
        "participants": tuple(dict.fromkeys(shard.node for shard in shards)),
        "shards": tuple(shards),
    }
    return Manifest(**{**fields, **changes})


def write_attempt(root: Path, shards: dict[str, bytes] | None = None, **changes: Any) -> tuple[Path, Manifest]:
    """A committed attempt on disk: two ranks, two components, each shard with other bytes. Answers (dir, manifest)."""
    contents = shards or {f"{rank}.{name}": bytes([rank, len(name)]) * 1700 for rank in (0, 1) for name in ("m", "opt")}
    records = []
    for name, data in contents.items():
        rank, _, component = name.partition(".")
        records.append(shard_record(data, rank=int(rank), component=component))
    manifest = manifest_of(records, **changes)
    folder = root / manifest.run / f"global_step_{manifest.step}" / manifest.attempt
    for record, data in zip(records, contents.values(), strict=True):
        place = folder / record.path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    completed = Completed.of(manifest, manifest.to_bytes(), CREATED)
    (folder / "COMPLETED").write_bytes(completed.to_bytes())
    return folder, manifest


def run_child(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a process of its own, with only what it needs to import lastgood."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )
