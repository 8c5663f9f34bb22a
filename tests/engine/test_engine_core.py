"""The engine's core with a runner that checks every block at every step."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import EOS, Time, expected, make_core, plain, prompt, run, sequence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core import EngineCore, NeverFits
from engine.plan import BatchPlan, Sampled
from engine.scheduler import Scheduler
from engine.scripted_runner import ScriptedRunner
from engine.sequence import Key, Phase
from kvstore.handoff import copy_blocks
from kvstore.pool import attach
from schemas.errors import BadRequest, Overloaded, from_info
from schemas.record import Sampling


def test_a_sequence_gets_its_ids_and_its_blocks_come_back(tmp_path: Path) -> None:
    """Ids arrive one per step, the end says `length`, and nothing stays in use."""
    core, ends = make_core(tmp_path), []
    core.add(sequence("a", prompt(50), max_tokens=20))

    ids = run(core, each=lambda result: ends.extend(result.ended))

    assert ids[Key("a", 0)] == expected(prompt(50), 20)
    assert ends == [(Key("a", 0), "length")]
    assert core.pool.in_use == 0 and core.load()["running"] == 0


def test_an_end_token_stops_unless_it_is_ignored(tmp_path: Path) -> None:
    """EOS is emitted, ends the sequence with `stop`, and counts as any other id with `ignore_eos`."""
    core, ends = make_core(tmp_path, script=lambda p, c, i, s: EOS if i == 3 else 50), []
    core.add(sequence("stops", prompt(5), max_tokens=8))
    core.add(sequence("goes-on", prompt(5), max_tokens=8, ignore_eos=True))

    ids = run(core, each=lambda result: ends.extend(result.ended))

    assert ids[Key("stops", 0)] == [50, 50, 50, EOS]
    assert len(ids[Key("goes-on", 0)]) == 8
    assert dict(ends) == {Key("stops", 0): "stop", Key("goes-on", 0): "length"}


def test_a_full_context_ends_with_length(tmp_path: Path) -> None:
    """A sequence never exceeds what the pool can hold, even alone."""
    core = make_core(tmp_path, num_blocks=4)
    core.add(sequence("a", prompt(60), max_tokens=500))

    ids = run(core)

    assert len(ids[Key("a", 0)]) == 4
    assert core.pool.in_use == 0


@pytest.mark.parametrize("length", [64, 65, 500])
def test_what_never_fits_is_refused_at_once(tmp_path: Path, length: int) -> None:
    """A prompt that leaves no room for one id is a bad request with both numbers, and nothing is allocated."""
    core = make_core(tmp_path, num_blocks=4)

    with pytest.raises(NeverFits, match=rf"{length} tokens .* 64 tokens") as caught:
        core.add(sequence("a", prompt(length)))

    assert from_info(caught.value.info()).status == 400
    assert not core.has_work and core.pool.in_use == 0


def test_bad_sequences_are_refused_by_name(tmp_path: Path) -> None:
    """No ids, ids outside the vocabulary, a key in use and a full queue each raise a typed error."""
    core = make_core(tmp_path, max_waiting=1)
    for ids in ([], [-1], [2000]):
        with pytest.raises(BadRequest):
            core.add(sequence("bad", ids))
    core.add(sequence("a", prompt(5)))

    with pytest.raises(BadRequest, match="runs already"):
        core.add(sequence("a", prompt(5)))
    with pytest.raises(Overloaded):
        core.add(sequence("b", prompt(5)))

    assert list(run(core)) == [Key("a", 0)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 60)), min_size=2, max_size=8), st.integers(10, 14))
def test_preemption_changes_no_id(tmp_path: Path, shapes: list[tuple[int, int]], num_blocks: int) -> None:
    """In a pool too small for all, sequences are computed again and still get the ids of an undisturbed run."""
    core = make_core(tmp_path, num_blocks=num_blocks)
    try:
        for number, (length, tokens) in enumerate(shapes):
            core.add(sequence(f"s{number}", prompt(length, number), max_tokens=tokens))

        ids = run(core)

        for number, (length, tokens) in enumerate(shapes):
            assert ids[Key(f"s{number}", 0)] == expected(prompt(length, number), tokens)
        assert core.pool.in_use == 0
    finally:
        core.pool.close()


def test_preemption_happens_and_is_counted(tmp_path: Path) -> None:
    """Two long answers in a pool for one and a half make the younger one wait."""
    core = make_core(tmp_path, num_blocks=9)
    core.add(sequence("old", prompt(30, 1), max_tokens=90))
    core.add(sequence("young", prompt(30, 2), max_tokens=90))
    order: list[Key] = []

    ids = run(core, each=lambda result: order.extend(key for key, _ in result.ended))

    assert core.load()["preempted"] > 0
    assert order == [Key("old", 0), Key("young", 0)]
    assert ids[Key("young", 0)] == expected(prompt(30, 2), 90)


def test_a_prompt_met_again_is_not_computed_again(tmp_path: Path) -> None:
    """Full blocks of an earlier prompt are found; the last token is always computed; other salts find nothing."""
    core, cached = make_core(tmp_path), {}
    core.add(sequence("cold", prompt(64)))
    run(core, each=lambda result: cached.update(result.cached))
    cold = core.statistics()["tokens_total"]
    core.add(sequence("warm", prompt(64)))
    core.add(sequence("longer", prompt(64) + [7]))
    core.add(sequence("salted", prompt(64), salt="x"))

    ids = run(core, each=lambda result: cached.update(result.cached))

    assert cached == {Key("cold", 0): 0, Key("warm", 0): 48, Key("longer", 0): 64, Key("salted", 0): 0}
    assert ids[Key("warm", 0)] == expected(prompt(64), 20)
    assert core.statistics()["tokens_total"] - cold == (16 + 1 + 64) + 3 * 19


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_warm_equals_cold_at_every_block_edge(tmp_path: Path, length: int) -> None:
    """Whatever the length, the second run finds whole blocks short of the last token, and gives the same ids."""
    core, cached = make_core(tmp_path), {}
    core.add(sequence("cold", prompt(length)))
    cold = run(core)
    core.add(sequence("warm", prompt(length)))

    warm = run(core, each=lambda result: cached.update(result.cached))

    assert warm[Key("warm", 0)] == cold[Key("cold", 0)]
    assert cached == {Key("warm", 0): (length - 1) // 16 * 16}


def test_choices_of_one_prompt_compute_it_once(tmp_path: Path) -> None:
    """Equal prompts that arrive together: the first computes, the others wait for its blocks and share them."""
    core = make_core(tmp_path)
    for choice in range(4):
        core.add(sequence("n", prompt(100), choice=choice, max_tokens=10))

    ids = run(core)

    assert core.statistics()["tokens_total"] == 100 + 3 * 4 + 4 * 9
    for choice in range(4):
        assert ids[Key("n", choice)] == expected(prompt(100), 10, choice)


def test_outputs_are_kept_for_later_prompts_only_when_asked(tmp_path: Path) -> None:
    """Blocks that decode wrote are found by a follow-up prompt with `cache_outputs`, and not without."""
    for wish, found in ((False, 16), (True, 48)):
        core, cached = make_core(tmp_path, name=f"e{wish}", cache_outputs=wish), {}
        core.add(sequence("first", prompt(20), max_tokens=40))
        answer = run(core)[Key("first", 0)]
        core.add(sequence("next", prompt(20) + answer, max_tokens=3))

        run(core, each=lambda result, c=cached: c.update(result.cached))

        assert cached[Key("next", 0)] == found


def test_a_resumed_sequence_continues_at_its_index(tmp_path: Path) -> None:
    """With outputs at the start, the next id is the one that an undisturbed run gives at that index."""
    core = make_core(tmp_path)
    whole = expected(prompt(40), 20)
    core.add(sequence("a", prompt(40), outputs=whole[:7]))

    assert run(core)[Key("a", 0)] == whole[7:]


def test_a_sequence_that_comes_complete_ends_without_a_step(tmp_path: Path) -> None:
    """Resumed with its last id there already, it is reported as ended and nothing is computed."""
    core = make_core(tmp_path)
    core.add(sequence("full", prompt(40), outputs=[50, 51], max_tokens=2))
    core.add(sequence("stopped", prompt(40), outputs=[50, EOS], handoff=True))

    result = core.step()

    assert result.ended == [(Key("full", 0), "length"), (Key("stopped", 0), "stop")]
    assert result.num_tokens == 0 and not core.has_work


# --- hand-off ---------------------------------------------------------------------------------------


def hand_over(source: EngineCore, dest: EngineCore, name: str, ids: list[int], n: int, outputs: list[int]) -> None:
    """Compute a prompt on one engine and let another one continue, the way the actors do."""
    key = Key(name, 0)
    source.add(sequence(name, ids, handoff=True, num_first=n, outputs=list(outputs)))
    blocks = dest.reserve(key, len(ids) + len(outputs), n)
    assert blocks is not None
    result = source.step()
    while not result.held:
        result = source.step()
    [(held_key, first)] = result.held
    held = result.held_blocks[key]
    assert held_key == key and [one.choice for one in first] == list(range(n))
    assert source.pool.check(held.refs) and held.num_tokens == len(ids) + len(outputs)
    copy_blocks(
        attach(source.pool.handle()), held.refs, attach(dest.pool.handle()), dest.refs(key), should_stop=lambda: False
    )
    starts = [sequence(name, ids, choice=one.choice, outputs=[*outputs, one.id]) for one in first]
    dest.activate(starts, blocks, held.num_tokens)
    dest.check_integrity()
    assert source.release(key) and not source.release(key)


@pytest.mark.parametrize("length", [1, 16, 37, 100])
@pytest.mark.parametrize("n", [1, 3])
def test_two_engines_give_the_ids_of_one(tmp_path: Path, length: int, n: int) -> None:
    """Prefill here, decode there, for one and several choices: the same ids; blocks return on both sides."""
    source, dest = make_core(tmp_path, name="source"), make_core(tmp_path, name="dest")

    hand_over(source, dest, "a", prompt(length), n, [])
    ids = run(dest)

    for choice in range(n):
        assert ids[Key("a", choice)] == expected(prompt(length), 20, choice)[1:]
    assert source.pool.in_use == dest.pool.in_use == 0
    assert dest.statistics()["tokens_total"] == n * 19, "nothing is computed again"


def test_a_resumed_prompt_is_handed_over_with_its_outputs(tmp_path: Path) -> None:
    """After a failover the outputs' KV is computed by prefill and continued by decode."""
    source, dest = make_core(tmp_path, name="source"), make_core(tmp_path, name="dest")
    whole = expected(prompt(37), 20)

    hand_over(source, dest, "a", prompt(37), 1, whole[:6])

    assert run(dest)[Key("a", 0)] == whole[7:]


def test_choices_without_a_block_for_their_copy_compute_those_tokens_again(tmp_path: Path) -> None:
    """Copy-on-write needs a block per choice; a full pool costs a few tokens, not the request."""
    source = make_core(tmp_path, name="source")
    dest = make_core(tmp_path, name="dest", num_blocks=3)

    hand_over(source, dest, "a", prompt(40), 3, [])
    ids = run(dest)

    for choice in range(3):
        ids_wanted = expected(prompt(40), 8, choice)[1:]
        assert ids[Key("a", choice)][:7] == ids_wanted
    assert dest.pool.in_use == 0


def test_a_first_id_that_ends_the_answer_is_reported_by_the_receiving_engine(tmp_path: Path) -> None:
    """An EOS as first id: decode ends that choice at once and frees its blocks."""
    source = make_core(tmp_path, name="source", script=lambda p, c, i, s: EOS)
    dest = make_core(tmp_path, name="dest")

    hand_over(source, dest, "a", prompt(20), 1, [])

    assert dest.step().ended == [(Key("a", 0), "stop")]
    assert dest.pool.in_use == 0


def test_a_reservation_waits_for_room_and_is_idempotent(tmp_path: Path) -> None:
    """Without room `None` says: later. The same key gets the same blocks. What never fits is refused."""
    core = make_core(tmp_path, num_blocks=8)

    blocks = core.reserve(Key("a", 0), 80)
    again = core.reserve(Key("a", 0), 80)

    assert blocks is not None and blocks == again and len(blocks) == 5
    assert core.reserve(Key("b", 0), 80) is None
    with pytest.raises(NeverFits):
        core.reserve(Key("c", 0), 128)
    assert core.abort(Key("a", 0)) and core.reserve(Key("b", 0), 80) is not None


def test_activating_what_was_not_reserved_is_refused(tmp_path: Path) -> None:
    """A late or wrong transfer starts nothing and changes nothing."""
    core = make_core(tmp_path)
    blocks = core.reserve(Key("a", 0), 20)
    assert blocks is not None

    for seqs, named, count in (
        ([sequence("b", prompt(20), outputs=[5])], blocks, 20),
        ([sequence("a", prompt(20), outputs=[5])], [63, 62], 20),
        ([sequence("a", prompt(20), outputs=[5])], blocks, 40),
        ([sequence("a", prompt(20))], blocks, 20),
    ):
        with pytest.raises(BadRequest):
            core.activate(seqs, named, count)

    core.check_integrity()
    assert core.load()["expected"] == 1 and not core.has_work


def test_reservations_leave_the_oldest_room_to_finish(tmp_path: Path) -> None:
    """Blocks that cannot be preempted never take what the oldest running sequence may still need."""
    core = make_core(tmp_path, num_blocks=20)
    core.add(sequence("old", prompt(16), max_tokens=128))
    core.step()

    taken = 0
    while core.reserve(Key(f"r{taken}", 0), 32) is not None:
        taken += 1

    assert 0 < taken <= 5
    assert len(run(core)[Key("old", 0)]) == 127


def test_what_waits_here_is_not_kept_waiting_by_hand_offs(tmp_path: Path) -> None:
    """Blocks that come free go to the head of the queue before they are lent to new reservations."""
    core = make_core(tmp_path, num_blocks=16)
    core.add(sequence("runs", prompt(60, 1), max_tokens=40))
    core.step()
    core.step()
    core.add(sequence("waits", prompt(190, 2), max_tokens=2))
    refused = core.reserve(Key("new", 0), 48)
    first: list[str] = []

    run(core, each=lambda result: first.extend(key.request_id for key, _ in result.ended))

    assert refused is None and first == ["runs", "waits"]
    assert core.reserve(Key("new", 0), 48) is not None


# --- endings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", list(Phase))
def test_abort_in_every_phase_returns_all_blocks(tmp_path: Path, phase: Phase) -> None:
    """Whatever a sequence is doing, an abort frees its blocks at once, and a second one is harmless."""
    core, key = make_core(tmp_path), Key("a", 0)
    match phase:
        case Phase.WAITING:
            core.add(sequence("a", prompt(100)))
        case Phase.RUNNING:
            core.add(sequence("a", prompt(100)))
            core.step()
        case Phase.HELD:
            core.add(sequence("a", prompt(20), handoff=True))
            assert core.step().held
        case Phase.EXPECTED:
            core.reserve(key, 100)
        case Phase.FINISHED:
            core.add(sequence("a", prompt(20), max_tokens=1))
            assert core.step().ended

    known = core.abort(key)

    assert known is (phase is not Phase.FINISHED)
    assert not core.abort(key)
    core.check_integrity()
    assert core.pool.in_use == 0 and not core.has_work
    assert core.load()["running"] == core.load()["waiting"] == core.load()["expected"] == core.load()["held"] == 0


def test_blocks_of_an_aborted_transfer_wait_for_their_writer(tmp_path: Path) -> None:
    """Until the writer confirms, its blocks are neither free nor in use; then they are free."""
    core = make_core(tmp_path, num_blocks=8)
    blocks = core.reserve(Key("a", 0), 100)
    assert blocks is not None

    core.abort(Key("a", 0), writer="job-1")
    core.check_integrity()

    assert core.load()["blocks_quarantined"] == 7 and core.load()["blocks_in_use"] == 0
    assert core.reserve(Key("b", 0), 32) is None
    assert core.absolve("job-1") == 7 and core.absolve("job-1") == 0
    assert core.reserve(Key("b", 0), 32) is not None
    core.check_integrity()


def test_an_expired_sequence_is_dropped_without_a_step(tmp_path: Path) -> None:
    """Past its deadline, waiting or running, a sequence ends as `expired` and nothing is computed for it."""
    time = Time()
    core = make_core(tmp_path, time=time, scheduler=Scheduler(16, 128, 1, 48))
    core.add(sequence("running", prompt(20), deadline=1001.0))
    core.add(sequence("waiting", prompt(20, 3), deadline=1001.0))
    core.step()
    time.at = 1001.0

    result = core.step()

    assert set(result.ended) == {(Key("running", 0), "expired"), (Key("waiting", 0), "expired")}
    assert result.num_tokens == 0 and core.pool.in_use == 0 and not core.has_work


# --- faults -----------------------------------------------------------------------------------------


def test_a_damaged_block_fails_its_own_sequence_only(tmp_path: Path) -> None:
    """The checking runner sees bytes that changed; neighbours go on; the block is not found by later prompts."""
    core = make_core(tmp_path)
    core.add(sequence("hurt", prompt(40, 1)))
    core.add(sequence("fine", prompt(40, 2)))
    core.step()
    core.pool.view()[core.refs(Key("hurt", 0))[0].index * core.pool.block_nbytes] ^= 1

    result = core.step()
    core.check_integrity()

    assert [key for key, _ in result.failed] == [Key("hurt", 0)] and "does not hold" in result.failed[0][1]
    assert run(core)[Key("fine", 0)] == expected(prompt(40, 2), 20)[2:]
    core.add(sequence("again", prompt(40, 1)))
    assert run(core)[Key("again", 0)] == expected(prompt(40, 1), 20)
    assert core.pool.in_use == 0


def test_a_runner_that_raises_fails_that_batch_and_the_engine_lives(tmp_path: Path) -> None:
    """All sequences of the step fail with the message, blocks come back, and later ones run."""

    class Fragile(ScriptedRunner):
        broken = True

        def execute(self, plan: BatchPlan) -> list[Sampled]:
            if self.broken:
                raise FloatingPointError("bad numbers")
            return super().execute(plan)

    runner = Fragile(plain, vocab_size=2000, max_context=1024)
    core = make_core(tmp_path, runner=runner)
    core.add(sequence("a", prompt(40)))

    result = core.step()
    runner.broken = False
    core.add(sequence("b", prompt(40)))

    assert result.crash == "FloatingPointError: bad numbers"
    assert result.failed == [(Key("a", 0), "FloatingPointError: bad numbers")]
    assert run(core)[Key("b", 0)] == expected(prompt(40), 20)
    assert core.pool.in_use == 0


def test_a_runner_that_forgets_a_row_fails_that_row(tmp_path: Path) -> None:
    """A sequence never waits for an id that does not come."""

    class Forgetful(ScriptedRunner):
        def execute(self, plan: BatchPlan) -> list[Sampled]:
            return [one for one in super().execute(plan) if one.key.request_id != "lost"]

    core = make_core(tmp_path, runner=Forgetful(plain, vocab_size=2000, max_context=1024))
    core.add(sequence("lost", prompt(5)))
    core.add(sequence("kept", prompt(6)))

    result = core.step()

    assert [key for key, _ in result.failed] == [Key("lost", 0)]
    assert [item.key for item in result.items] == [Key("kept", 0)]


# --- the store --------------------------------------------------------------------------------------


def test_computed_prompt_blocks_are_offered_once_and_stay_until_written(tmp_path: Path) -> None:
    """Candidates name hash, parent and block; they are pinned from the call on; a cached prompt offers nothing."""
    core = make_core(tmp_path)
    core.add(sequence("a", prompt(40), max_tokens=2))
    run(core)

    candidates = core.stored_candidates()

    assert len(candidates) == 2 and candidates[1].parent == candidates[0].hash
    assert core.pool.in_use == 2 and core.stored_candidates() == []
    core.written([c.block for c in candidates])
    core.add(sequence("b", prompt(40), max_tokens=2))
    run(core)
    assert core.stored_candidates() == [] and core.pool.in_use == 0


def test_a_sequence_starts_after_its_stored_prefix_is_loaded(tmp_path: Path) -> None:
    """While blocks are loaded it does not start; then they count as cached, and the ids are the same."""
    source, dest = make_core(tmp_path, name="source"), make_core(tmp_path, name="dest")
    source.add(sequence("a", prompt(70), max_tokens=1))
    run(source)
    stored = source.stored_candidates()
    cached: dict[Key, int] = {}
    dest.add(sequence("b", prompt(70)))

    wanted, parents = dest.want_load(Key("b", 0)), dest.load_parents(Key("b", 0))
    blocks = dest.begin_load(Key("b", 0), 3)
    assert blocks is not None and not dest.has_work
    copy_blocks(
        attach(source.pool.handle()),
        source.pool.refs([c.block for c in stored[:3]]),
        attach(dest.pool.handle()),
        dest.pool.refs(blocks),
        should_stop=lambda: False,
    )
    assert dest.load()["queued_tokens"] == 70
    loaded = dest.load_prefix(Key("b", 0), blocks, wanted[:3])
    assert dest.load()["queued_tokens"] == 70 - 48
    dest.check_integrity()
    ids = run(dest, each=lambda result: cached.update(result.cached))

    assert wanted == [c.hash for c in stored] and parents == [c.parent for c in stored]
    assert loaded == 48 and cached == {Key("b", 0): 48}
    assert ids[Key("b", 0)] == expected(prompt(70), 20)
    assert dest.pool.in_use == 0


def test_a_queue_counts_what_is_still_to_be_computed(tmp_path: Path) -> None:
    """A prompt that the pool holds is not waited for as if it were new: refusals are predicted from this."""
    core = make_core(tmp_path)
    core.add(sequence("first", prompt(100), max_tokens=1))
    run(core)
    core.add(sequence("again", prompt(100), max_tokens=1))
    core.add(sequence("other", prompt(100, 5), max_tokens=1))

    load = core.load()

    assert load["queued_tokens"] == (100 - 96) + 100
    assert load["queues"] == [["default", 0, 104]]
    core.check_integrity()
    core.abort(Key("other", 0))
    assert core.load()["queued_tokens"] == 4
    run(core)
    assert core.load()["queued_tokens"] == 0


def test_a_load_that_fails_or_is_aborted_leaves_nothing_behind(tmp_path: Path) -> None:
    """Giving a load up lets the sequence compute its prompt; aborting the sequence quarantines what is written."""
    core = make_core(tmp_path)
    core.add(sequence("a", prompt(70)))
    core.add(sequence("b", prompt(70, 5)))
    core.begin_load(Key("a", 0), 3)
    core.begin_load(Key("b", 0), 4)

    core.abandon_load(Key("a", 0))
    core.abort(Key("b", 0), writer="job")

    core.check_integrity()
    assert core.load()["blocks_quarantined"] == 4
    assert run(core)[Key("a", 0)] == expected(prompt(70), 20)
    core.absolve("job")
    assert core.pool.in_use == 0 and core.pool.num_quarantined == 0


def test_an_answer_does_not_depend_on_what_else_runs(tmp_path: Path) -> None:
    """The same request alone and among others in a busy pool gets the same ids, seeded or greedy."""
    core = make_core(tmp_path, num_blocks=40, scheduler=Scheduler(16, 64, 8, 32))
    shapes = [(5 + 9 * i % 70, 5 + 11 * i % 40) for i in range(20)]
    for number, (length, tokens) in enumerate(shapes):
        core.add(sequence(f"s{number}", prompt(length, number), max_tokens=tokens))

    ids = run(core)

    for number, (length, tokens) in enumerate(shapes):
        assert ids[Key(f"s{number}", 0)] == [
            plain(prompt(length, number), 0, index, Sampling()) for index in range(tokens)
        ]
