"""Resume is two-phase: nobody touches live state before everybody has voted, and no rank falls back alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from lastgood.coordinator.messages import AttemptHead, LoadRequest, MemberId
from lastgood.coordinator.restore import Candidate, Restored, ResumeTerms, restore
from lastgood.storage.errors import (
    FingerprintError,
    IntegrityError,
    ResumeError,
    SnapshotError,
    StagingError,
    WrongRunError,
)
from lastgood.storage.layout import shard_path
from lastgood.storage.manifest import Manifest, MemberRecord, RoleRecord, ShardRecord, digest_of_blocks

MEMBERS = {"n1": (MemberId("actor", 0),), "n2": (MemberId("actor", 1),)}
FACTS = {"actor.world_size": 2, "rows": 100}


class Port:
    """One node's stager, as restore sees it."""

    def __init__(self, story: list[str], name: str) -> None:
        self.story = story
        self.name = name
        self.refuses: dict[str, Exception] = {}  # attempt -> what load raises
        self.breaks: Exception | None = None  # what apply raises

    async def load(self, epoch: int, head: AttemptHead, request: LoadRequest, deadline_s: float, members: Any) -> None:
        self.story.append(f"{self.name} loads {head.attempt}")
        if head.attempt in self.refuses:
            raise self.refuses[head.attempt]

    async def apply(self, epoch: int, head: AttemptHead, deadline_s: float, members: Any) -> None:
        self.story.append(f"{self.name} applies {head.attempt}")
        if self.breaks is not None:
            raise self.breaks

    async def forget(self, epoch: int) -> None:
        self.story.append(f"{self.name} forgets")


def candidate(attempt: str, step: int, facts: Mapping[str, object] = FACTS, run: str = "run") -> Candidate:
    block = "0" * 64
    shard = ShardRecord(
        role="actor",
        rank=0,
        component="model",
        path=shard_path("actor", 0, "model"),
        nbytes=1,
        block_bytes=1,
        blocks=(block,),
        digest=digest_of_blocks([block]),
        node="n",
    )
    manifest = Manifest(
        run=run,
        attempt=attempt,
        step=step,
        epoch=1,
        sequence=step,
        kind="scheduled",
        created_at="2031-05-06T07:08:09.123Z",
        roles={"actor": RoleRecord(world_size=1, components=("model",))},
        members=(MemberRecord(role="actor", rank=0, node="n"),),
        participants=("n",),
        shards=(shard,),
        fingerprint=dict(facts),  # pyright: ignore[reportArgumentType]
    )
    return Candidate(manifest.to_bytes(), f"step {step}")


class Scene:
    def __init__(self) -> None:
        self.story: list[str] = []
        self.return_s = 0.0
        self.ports = {name: Port(self.story, name) for name in ("n1", "n2")}

    def restore(
        self, *candidates: Candidate, now: Mapping[str, object] = FACTS, allow: tuple[str, ...] = ()
    ) -> Restored:
        terms = ResumeTerms("run", now, allow, {})
        return asyncio.run(restore(candidates, terms, self.ports, MEMBERS, 1, lambda: 10.0, self.return_s))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_live_state_is_touched_only_after_every_node_has_voted(scene: Scene) -> None:
    assert scene.restore(candidate("A2", 2), candidate("A1", 1)).attempt == "A2"
    assert scene.story[:2] == ["n1 loads A2", "n2 loads A2"]
    assert scene.story[2:4] == ["n1 applies A2", "n2 applies A2"]


def test_one_node_that_cannot_read_a_checkpoint_rejects_it_for_all(scene: Scene) -> None:
    scene.ports["n2"].refuses["A2"] = IntegrityError("one flipped byte", path="x")
    restored = scene.restore(candidate("A2", 2), candidate("A1", 1))
    assert (restored.attempt, len(restored.rejected)) == ("A1", 1)
    assert "one flipped byte" in restored.rejected[0]
    assert not any("applies A2" in line for line in scene.story)
    assert scene.story.index("n1 forgets") < scene.story.index("n1 loads A1")


def test_a_member_that_dies_while_loading_is_an_error_and_no_reason_to_fall_back(scene: Scene) -> None:
    scene.ports["n1"].refuses["A2"] = SnapshotError("actor:0 died")
    with pytest.raises(SnapshotError, match="actor:0 died"):
        scene.restore(candidate("A2", 2), candidate("A1", 1))
    assert not any("applies" in line or "A1" in line for line in scene.story)


def test_a_changed_fingerprint_is_refused_before_anybody_reads_unless_it_is_allowed(scene: Scene) -> None:
    with pytest.raises(FingerprintError, match="rows"):
        scene.restore(candidate("A2", 2), now={**FACTS, "rows": 90})
    assert scene.story == []
    assert scene.restore(candidate("A2", 2), now={**FACTS, "rows": 90}, allow=("rows",)).step == 2


def test_another_runs_checkpoint_is_refused(scene: Scene) -> None:
    with pytest.raises(WrongRunError, match="'other'"):
        scene.restore(candidate("A2", 2, run="other"))
    assert scene.story == []


def test_when_nothing_is_whole_the_error_lists_what_was_tried(scene: Scene) -> None:
    for attempt in ("A1", "A2"):
        scene.ports["n1"].refuses[attempt] = IntegrityError(f"{attempt} is rotten", path="x")
    with pytest.raises(ResumeError, match="A2 is rotten") as caught:
        scene.restore(Candidate(b"garbage", "step 3"), candidate("A2", 2), candidate("A1", 1))
    assert len(caught.value.facts["rejected"]) == 3
    assert not any("applies" in line for line in scene.story)


def test_a_failure_while_writing_live_state_says_that_it_may_be_mixed(scene: Scene) -> None:
    scene.ports["n2"].breaks = RuntimeError("no room")
    with pytest.raises(ResumeError, match="may be mixed"):
        scene.restore(candidate("A2", 2), candidate("A1", 1))


class Away:
    """A stager that is being restarted: it answers nothing, then its members are not back yet, then all is well."""

    def __init__(self, tries: int) -> None:
        self.tries = tries

    def __call__(self, story: list[str]) -> Exception | None:
        self.tries -= 1
        if self.tries < 0:
            return None
        story.append("n2 is away")
        return StagingError("actor:1 is not registered with the stager of node n2", away=True)


def test_a_stager_that_is_being_restarted_is_waited_for_and_reading_begins_anew(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lastgood.coordinator.restore.RETRY_S", 0.0)
    scene.return_s = 60.0
    away, load = Away(2), scene.ports["n2"].load

    async def late(*arguments: Any) -> None:
        if error := away(scene.story):
            raise error
        await load(*arguments)

    scene.ports["n2"].load = late  # type: ignore[method-assign]
    assert scene.restore(candidate("A2", 2)).attempt == "A2"
    assert scene.story[:6] == ["n1 loads A2", "n2 is away"] * 2 + ["n1 loads A2", "n2 loads A2"]


def test_a_stager_that_stays_away_is_told_with_what_was_touched_and_what_to_do(scene: Scene) -> None:
    scene.ports["n2"].refuses["A2"] = StagingError("stager:n2 does not answer load", away=True)
    with pytest.raises(ResumeError, match="No live state was touched; resume again"):
        scene.restore(candidate("A2", 2), candidate("A1", 1))
    assert not any("applies" in line or "A1" in line for line in scene.story)
