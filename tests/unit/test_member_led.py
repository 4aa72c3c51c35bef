"""What all ranks of a member-led run do together, against a coordinator without Ray."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from lastgood.coordinator import gathering
from lastgood.coordinator.grants import CutAt, GiveUp, Grants, GrantTo
from lastgood.coordinator.messages import Grant, Line, MemberId
from lastgood.coordinator.outcomes import Missing
from lastgood.storage.errors import LastgoodError, StagingError, StoreError, UsageError, WindowClosedError
from lastgood.workers.pace import Pace
from tests.unit.led_world import Led, run, until
from tests.unit.memory_world import manual


async def begin(w: Led, generation: str, **more: Any) -> tuple[str, Line]:
    membership = await w.join(generation)
    line = (await asyncio.gather(w.resume(0, membership, **more), w.resume(1, membership, **more)))[0]
    return membership, line


def close(
    w: Led, rank: int, membership: str, step: int, timeout_s: float = 5.0, save_last: bool = True
) -> asyncio.Future[Any]:
    led = w.service.member_led
    return asyncio.ensure_future(led.close(MemberId("actor", rank), membership, step, save_last, timeout_s))


def test_close_of_a_new_group_saves_its_last_step_though_the_group_before_it_died_in_close() -> None:
    async def scene() -> None:
        w = Led(save_freq=2)
        await w.start()
        first, line = await begin(w, "a")
        w.end(1, line)
        w.end(2, line)
        await until(lambda: any(c.durable for c in w.service.checkpoints()))
        await asyncio.gather(close(w, 0, first, 2), close(w, 1, first, 2))
        for rank in (0, 1):  # both are killed before rank 0 can end the service
            w.ports[rank].die(rank)
        await w.service.nodes.refresh()
        second, line = await begin(w, "b")
        assert line.restored is not None
        assert line.restored.step == 2
        w.end(3, line)
        (drained, _), _ = await asyncio.gather(close(w, 0, second, 3), close(w, 1, second, 3))
        assert drained.drained
        assert [c.step for c in w.service.checkpoints()] == [3, 2]
        await w.service.end()

    run(scene())


def test_a_resume_begins_when_all_ranks_of_the_new_group_have_asked_though_one_of_the_last_group_had() -> None:
    async def scene() -> None:
        w = Led(save_freq=2)
        await w.start()
        _, line = await begin(w, "a")
        w.end(1, line)
        w.end(2, line)
        await until(lambda: any(c.durable for c in w.service.checkpoints()))
        for rank in (0, 1):
            w.ports[rank].die(rank)
        second = await w.join("b")
        w.resume(0, second)  # rank 1 dies before it asks, and the launcher starts all anew
        await asyncio.sleep(0.3)
        for rank in (0, 1):
            w.ports[rank].die(rank)
        third = await w.join("c")
        for port in w.ports:
            port.log.clear()
        early = w.resume(1, third)
        await asyncio.sleep(0.5)
        assert not early.done()
        assert "apply" not in w.ports[0].log, "rank 0 has not called resume yet, and its state was written"
        line = (await asyncio.gather(early, w.resume(0, third)))[0]
        assert line.restored.step == 2
        await w.service.end()

    run(scene())


def test_a_resume_is_given_its_own_time_though_one_of_the_last_group_waits() -> None:
    async def scene() -> None:
        w = Led()
        await w.start()
        first = await w.join("a")
        w.resume(0, first, deadline_s=2.0)
        await asyncio.sleep(1.5)
        for rank in (0, 1):
            w.ports[rank].die(rank)
        second = await w.join("b")
        early = w.resume(0, second, deadline_s=2.0)
        await asyncio.sleep(1.0)
        await asyncio.gather(early, w.resume(1, second, deadline_s=2.0))
        await w.service.end()

    run(scene())


def test_close_waits_for_a_rank_whose_stager_was_restarted() -> None:
    async def scene() -> None:
        w = Led(save_freq=100)
        await w.start()
        membership, line = await begin(w, "a")
        w.end(1, line)
        first = close(w, 0, membership, 1)
        await asyncio.sleep(0.2)
        port = w.ports[1]  # the stager of rank 1's node is killed and comes back; the agent registers in a moment
        registered, port.registered = port.registered, {}
        port.incarnation += 1
        await w.service.nodes.refresh()
        await asyncio.sleep(0.5)
        port.registered = registered
        await w.service.nodes.refresh()
        assert not first.done(), first
        await asyncio.gather(first, close(w, 1, membership, 1))
        assert [c.step for c in w.service.checkpoints()] == [1]
        await w.service.end()

    run(scene())


def test_a_resume_whose_deadline_passes_names_who_was_late() -> None:
    async def scene() -> None:
        w = Led(save_freq=2)
        await w.start()
        membership, line = await begin(w, "a")
        w.end(1, line)
        w.end(2, line)
        await until(lambda: any(c.durable for c in w.service.checkpoints()))

        async def load(epoch: int, head: Any, request: Any, deadline_s: float, members: Any) -> None:
            await asyncio.sleep(deadline_s)
            raise LastgoodError("actor:1 (pid 1, node n2) has not finished it: order load")

        w.ports[1].load = load  # type: ignore[method-assign]
        asked = [w.resume(rank, membership, line.key, 2, deadline_s=1.0) for rank in (0, 1)]
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert all("actor:1 (pid 1, node n2) has not finished it" in str(error) for error in told), told
        await w.service.end()

    run(scene())


def test_a_close_that_cannot_be_durable_in_time_tells_what_lags() -> None:
    async def scene() -> None:
        w = Led(save_freq=2)
        await w.start()
        membership, line = await begin(w, "a")
        w.store.down = True
        w.end(1, line)
        w.end(2, line)
        await until(lambda: any(c.committed for c in w.service.checkpoints()))
        told = await asyncio.gather(*(close(w, rank, membership, 2, 1.5) for rank in (0, 1)), return_exceptions=True)
        for each in told:
            assert isinstance(each, tuple), each
            assert not each[0].drained
            assert "step 2" in each[0].lagging[0]
        w.store.down = False
        await w.service.end()

    run(scene())


def test_a_last_step_that_cannot_be_saved_tells_why() -> None:
    async def scene() -> None:
        w = Led(save_freq=100)
        await w.start()
        membership, line = await begin(w, "a")
        w.end(1, line)
        w.ports[1].fail["reopen"] = WindowClosedError("actor:1: no window is open")
        told = await asyncio.gather(*(close(w, rank, membership, 1) for rank in (0, 1)), return_exceptions=True)
        for each in told:
            assert "actor:1: no window is open" in str(each)
            assert "end_step(1) once more" not in str(each)  # a rank cannot
        await w.service.end()

    run(scene())


def test_ranks_that_ended_at_different_steps_are_told_how_to_end_and_can() -> None:
    async def scene() -> None:
        w = Led(save_freq=2)
        await w.start()
        membership, line = await begin(w, "a")
        w.end(1, line)
        w.end(2, line)
        await until(lambda: any(c.durable for c in w.service.checkpoints()))
        told = await asyncio.gather(*(close(w, rank, membership, 3 + rank) for rank in (0, 1)), return_exceptions=True)
        for each in told:
            assert "actor:0 after step 3, actor:1 after step 4" in str(each)
            assert "Call close(save_last=False) on every rank" in str(each)
        asked = (close(w, rank, membership, 3 + rank, save_last=False) for rank in (0, 1))
        assert [drained.drained for drained, _ in await asyncio.gather(*asked)] == [True, True]
        await w.service.end()

    run(scene())


def test_a_rank_that_stalled_once_and_goes_on_as_fast_as_the_others_is_waited_for_again() -> None:
    """No collective holds the ranks together: what one rank lags behind, it lags for ever unless a cut waits for it."""
    a, b = MemberId("actor", 0), MemberId("rollout", 0)
    line = Line(1, 1, ("m",), 0)
    gather_s, step_s, save_freq = 20.0, 1.0, 10
    now = 0.0
    paces = {member: Pace(lambda: now) for member in (a, b)}
    grants = Grants(paces, 0, gather_s)
    ended = {a: 0, b: 0}
    busy_until: dict[MemberId, float | None] = {a: step_s, b: 60.0}  # b's first step takes a minute, once
    for member, pace in paces.items():
        pace.open(line)
        grants.report(member, 0, None, now)
    cuts: list[Any] = []
    while now < 300.0:
        now += 0.25
        while True:
            decision = grants.decide(now, lambda step: step % save_freq == 0, False)
            if decision is None:
                break
            if isinstance(decision, GrantTo):
                for pace in paces.values():
                    pace.take(Grant(line, decision.step, decision.tell_at), 1)
            else:
                cuts.append(decision)
                if isinstance(decision, CutAt):
                    grants.cut_done(decision.step)
        for member, pace in paces.items():
            busy = busy_until[member]
            if busy is not None and now >= busy:  # its step has ended
                ended[member] += 1
                busy_until[member] = None
                if not pace.covers(ended[member]) or pace.wants_report(ended[member]):
                    grants.report(member, ended[member], step_s, now)
            if busy_until[member] is None and pace.covers(ended[member]):
                busy_until[member] = now + step_s
    assert isinstance(cuts[-1], CutAt), f"{b} has ended {ended[b]} steps, {a} {ended[a]}, and: {cuts[-4:]}"
    assert sum(isinstance(cut, GiveUp) for cut in cuts) < 6


def test_a_save_that_met_an_update_and_waits_is_no_failure() -> None:
    async def scene() -> None:
        w = Led(on_failure="abort", save_freq=100)
        await w.start()
        _, line = await begin(w, "a")
        w.ports[0].updating = True  # rank 0 is in its first update; nobody has reported yet
        await w.service.save(manual("r1"))
        await asyncio.sleep(0.2)
        assert not w.driver._outcomes["r1"].failed  # it waits for the next cut
        w.end(1, line)
        await until(lambda: w.ports[0].granted_step >= 2)
        w.end(w.ports[0].granted_step + 1, line)
        await until(lambda: any(c.committed for c in w.service.checkpoints()))
        await asyncio.sleep(0.2)
        told = [o for pace in w.ports[0].paces.values() for o in pace.outcomes()]
        assert not any(o.stop for o in told), told
        assert not any(o.failures for o in told), told
        await w.service.end()

    run(scene())


def test_save_first_saves_the_first_step_that_ends_and_the_next_one_only_when_that_failed() -> None:
    async def scene() -> None:
        w = Led(save_freq=None, save_first=True)
        await w.start()
        _, line = await begin(w, "a", mode="none")
        for port in w.ports:
            port.slow_s["stage"] = 1.0
        w.ports[1].fail["stage"] = StagingError("n2 has no room")
        w.end(1, line)
        await until(lambda: w.driver.core.foreground is not None)
        assert not w.service.is_due(2)
        await until(lambda: w.driver.core.foreground is None)
        assert w.service.is_due(2)
        for step in range(2, 6):
            w.end(step, line)
            await until(lambda step=step: w.ports[0].granted_step >= step)
        await until(lambda: bool(w.service.checkpoints()))
        assert len({attempt.head.step for attempt in w.driver.core.attempts.values()}) == 2
        assert not w.service.is_due(9)
        await w.service.end()

    run(scene())


def test_a_failure_that_stops_training_stops_all_ranks_at_one_step_that_none_has_passed() -> None:
    async def scene() -> None:
        w = Led(on_failure="abort", save_freq=100)
        await w.start()
        _, line = await begin(w, "a")
        w.end(1, line)
        await until(lambda: w.ports[0].granted_step > 1)
        granted = w.ports[0].granted_step
        w.service.telling._failed.append(("step 1: disk full", True))  # the beat tells it
        paces = [pace for port in w.ports for pace in port.paces.values()]
        await until(lambda: all(pace.grant is not None and pace.grant.outcome is not None for pace in paces))
        told = [[step for step in range(1, granted + 3) if any(o.stop for o in p.outcomes(step))] for p in paces]
        assert told == [[granted + 1]] * 2
        await w.service.end()

    run(scene())


def test_ranks_of_a_coordinator_that_was_taken_over_are_told_before_the_next_save() -> None:
    async def scene() -> None:
        w = Led()
        await w.start()
        _, line = await begin(w, "a")
        w.end(1, line)
        await asyncio.sleep(0.3)
        with contextlib.suppress(LastgoodError):
            w.driver.fence("epoch 2 was claimed in the store by a newer coordinator")
        for step in range(2, 6):
            w.end(step, line)
            await asyncio.sleep(0.7)
        told = [o for pace in w.ports[0].paces.values() for o in pace.outcomes()]
        assert any(o.stop for o in told), told

    run(scene())


def test_a_role_that_an_earlier_group_had_is_not_waited_for() -> None:
    async def scene() -> None:
        w = Led()
        await w.start()
        await w.join("a", role="critic")
        for rank in (0, 1):
            w.ports[rank].die(rank, "critic")
        await w.service.nodes.refresh()
        second = await w.join("b")
        await asyncio.gather(w.resume(0, second, deadline_s=2.0), w.resume(1, second, deadline_s=2.0))
        await w.service.end()

    run(scene())


def test_a_cut_is_saved_though_a_node_comes_back_with_a_commit_of_that_step_by_another_line() -> None:
    async def scene() -> None:
        w = Led(save_freq=2)
        away = w.ports.pop()  # n2 holds a commit that the store has not heard of, and is away
        await w.start()
        first = await w.join("a", size=1)
        line = await w.resume(0, first)
        w.store.down = True
        w.end(1, line, [0])
        w.end(2, line, [0])
        await until(lambda: any(c.committed for c in w.service.checkpoints()))
        await w.kill()
        old, w.store.down = w.ports[0], False
        assert [key for key in w.store.objects if "ledger" in key] == []
        w.ports = [away]  # another machine takes over
        await w.start()
        assert w.service.epoch == 2
        second = await w.join("b", size=1)
        line = await w.resume(0, second)
        assert line.restored is None
        old.die(0)
        w.ports.append(old)  # the first is back
        await w.service.nodes.refresh()
        assert [c.step for c in w.service.checkpoints() if c.committed] == [2]
        w.end(1, line, [0])
        w.end(2, line, [0])
        await until(lambda: w.ports[0].granted_step > 2)
        assert w.ports[0].granted is not None
        told = w.ports[0].granted.outcome
        assert told is not None
        assert told.saved is not None
        await until(lambda: any(c.attempt == told.saved and c.committed for c in w.service.checkpoints()))
        saved = next(c for c in w.service.checkpoints() if c.attempt == told.saved)
        assert saved.epoch == 2, f"{told} names the commit of the abandoned line"
        await w.service.end()

    run(scene())


def test_a_second_role_is_refused_while_the_first_one_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "GONE_S", 0.2)

    async def scene() -> None:
        w = Led()
        await w.start()
        membership = await w.join("a")
        with pytest.raises(UsageError, match=r"actor:0 pid 1.*one role.*for role critic"):
            await w.join("c", role="critic")
        await asyncio.gather(w.resume(0, membership), w.resume(1, membership))  # nothing was touched
        await w.service.end()

    run(scene())


def test_a_coordinator_that_dies_between_two_answers_to_resume_tells_the_other_the_same() -> None:
    async def scene() -> None:
        w = Led(return_deadline_s=3.0)
        await w.start()
        membership, line = await begin(w, "a")  # rank 0 has its answer; that to rank 1 is lost
        await w.kill()
        hello = w.ports[1].hello
        late = asyncio.Event()

        async def slow(epoch: int, declarations: Any) -> Any:
            if not late.is_set():
                raise LastgoodError("busy")
            return await hello(epoch, declarations)

        w.ports[1].hello = slow  # type: ignore[method-assign]
        await w.start()
        asked = w.resume(1, membership, deadline_s=5.0)
        await asyncio.sleep(0.3)
        late.set()
        await w.service.nodes.refresh()
        assert (await asked).key == line.key
        await w.service.end()

    run(scene())


async def saved_and_joined_again(w: Led) -> str:
    """Steps 2 and 4 are durable, both ranks were killed, and others have taken their place."""
    await w.start()
    _, line = await begin(w, "a")
    for step in range(1, 5):
        w.end(step, line)
        if step % 2 == 0:
            await until(lambda step=step: any(c.durable and c.step == step for c in w.service.checkpoints()))
    for rank in (0, 1):
        w.ports[rank].die(rank)
    await w.service.nodes.refresh()
    return await w.join("b")


def both(w: Led, membership: str, mode: Any) -> asyncio.Future[list[Any]]:
    return asyncio.gather(*(w.resume(rank, membership, mode=mode) for rank in (0, 1)), return_exceptions=True)


@pytest.mark.parametrize("killed", [False, True])
def test_a_resume_after_one_that_failed_is_not_answered_with_what_the_failed_one_restored(killed: bool) -> None:
    async def scene() -> None:
        w = Led(save_freq=2)
        membership = await saved_and_joined_again(w)
        w.ports[1].fail["grant"] = StagingError("n2 is busy")
        told = await both(w, membership, "auto")
        assert all("Call resume again" in str(error) for error in told), told
        if killed:
            await w.kill()
            await w.start()
        await w.service.nodes.refresh()
        await asyncio.sleep(1.0)  # the beat and the look at deadlines have passed
        if not killed:
            assert w.service.member_led.status() is None, "a resume that failed began a line"
        told = await both(w, membership, 2)
        assert [line.step for line in told] == [2, 2]
        assert w.ports[0].step == 2
        await w.service.end()

    run(scene())


def test_a_resume_that_its_coordinator_did_not_survive_is_done_once() -> None:
    async def scene() -> None:
        w = Led(save_freq=2)
        membership = await saved_and_joined_again(w)
        asked = both(w, membership, 2)
        await until(lambda: w.ports[1].granted is not None and w.ports[1].granted.line.crew == (membership,))
        await w.kill()
        asked.cancel()
        loads = [port.log.count("load") for port in w.ports]
        await w.start()
        told = await both(w, membership, 2)  # the client repeats its call
        assert [line.step for line in told] == [2, 2]
        assert [port.log.count("load") for port in w.ports] == loads
        await w.service.end()

    run(scene())


class _Link:
    """A coordinator that answers from a table: method -> function of its arguments."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    def call(self, method: str, *arguments: Any, timeout_s: float, again: str | None = None) -> Any:
        self.asked.append((method, arguments))
        return self.answers[method](*arguments)


class _Stager:
    def tell(self, report: Any, *, again: bool = False) -> None:
        pass


def _led_member(link: Any, **options: Any) -> Any:
    import torch

    from lastgood.client.member import LedMember
    from lastgood.coordinator.options import Options
    from lastgood.workers.member import Member

    settings = Options(run="run", store="/nowhere/store", staging="/nowhere/staging", **options)
    stager: Any = _Stager()
    return LedMember(settings, link, stager, Member.of("actor", 0, 2, {"model": torch.nn.Linear(2, 2)}), "m1")


def test_what_ray_train_names_may_have_been_collected_since(tmp_path: Any) -> None:
    from pathlib import Path

    from lastgood.client import train_pointer
    from lastgood.coordinator.catalog import Checkpoint, Standing
    from lastgood.coordinator.messages import AttemptHead
    from lastgood.coordinator.retention import collect_remotely
    from lastgood.storage.store import FileStore
    from lastgood.storage.verify import open_checkpoint
    from tests.unit.memory_world import PATHS
    from tests.unit.storage_samples import completed_of

    store, head = FileStore(tmp_path / "store"), AttemptHead("A3", 3, 1, 3)
    completed = completed_of(3, "A3")
    store.create_exclusive(PATHS.completed(3, "A3"), completed.to_bytes())
    collect_remotely(store, PATHS, head, "retention")
    (tmp_path / "pointers").mkdir()
    found = Checkpoint(3, "A3", 1, 3, Standing.DURABLE)
    place = train_pointer.write(tmp_path / "pointers", str(tmp_path / "store"), "run", found)

    class Named:
        def as_directory(self) -> Any:
            return contextlib.nullcontext(str(place))

    def resume(member: Any, membership: str, after: Any, mode: Any, terms: Any) -> Line:
        if mode != "auto":
            open_checkpoint(Path(mode))  # as Service._candidates does
        return Line(1, 1, ("m1",), 6)

    member = _led_member(_Link(resume_together=resume))
    member.resume(Named())
    assert member.next_step == 7


def test_a_rank_whose_group_was_replaced_is_told_so_and_does_not_train_on_for_nothing() -> None:
    from lastgood.storage.errors import MembershipError

    def gone(*_: Any) -> Any:
        raise MembershipError("actor:0 is no longer a member of run run")

    member = _led_member(
        _Link(resume_together=lambda *_: Line(1, 1, ("m1",), 0), still_counts=gone), return_deadline_s=0.5
    )
    member.resume()
    with pytest.raises(MembershipError, match="no longer a member"):
        for step in range(1, 10):
            outcome = member.end_step(step)
            assert not outcome.failures or "has not been heard" not in outcome.failures[0], outcome


def test_a_new_coordinator_collects_nothing_before_it_has_committed() -> None:
    async def scene() -> None:
        w = Led(save_freq=1)
        await w.start()
        _, line = await begin(w, "a")
        for step in (1, 2, 3):
            await until(lambda step=step: w.ports[0].granted_step >= step - 1)
            w.end(step, line)
            await until(lambda step=step: sum(c.durable for c in w.service.checkpoints()) >= step)
        await w.kill()
        w.options = w.options.model_copy(update={"save_total_limit": 1})
        await w.start()
        await asyncio.sleep(0.5)
        assert [c.step for c in w.service.checkpoints()] == [3, 2, 1]
        await w.service.end()

    run(scene())


def test_why_a_stager_does_not_answer_is_told_to_whoever_misses_its_members() -> None:
    async def scene() -> None:
        w = Led(save_freq=2)
        await w.start()
        membership, _ = await begin(w, "a")
        assert w.service.nodes.missing() == Missing()
        hello, why = w.ports[1].hello, "node n2 does not see run/epochs/1 in the store: mount it there"

        async def blind(epoch: int, declarations: Any) -> Any:
            raise StoreError(why)

        w.ports[1].hello = blind  # type: ignore[method-assign]
        w.ports[0].die(0)
        await w.service.nodes.refresh()
        missing = w.service.nodes.missing()
        assert missing.members == ("actor:0",) and [why in sentence for sentence in missing.why] == [True]
        w.ports[1].hello = hello  # type: ignore[method-assign]
        w.ports[0].register(0, "a-p0", membership)
        await w.service.nodes.refresh()
        assert w.service.nodes.missing() == Missing()
        await w.service.end()

    run(scene())
