"""Which of several stores a prompt belongs in: even shares, and nothing else moves when one comes or goes."""

from __future__ import annotations

from collections import Counter

import pytest

from kvstore.block import BLOCK_TOKENS, chain_hashes, root_hash
from kvstore.homes import KEY_BLOCKS, fullest, home_key, pinned_at, ranked
from schemas.subjects import Ref

ROOT = root_hash("homes")
KEYS = [root_hash("key", number) for number in range(2000)]


def stores(count: int, epoch: str = "e") -> list[Ref]:
    """So many stores of one host."""
    return [Ref("kv", f"kv-{number}", epoch) for number in range(count)]


def hashes(length: int, *, last: int = 0) -> list[bytes]:
    """The chain of a prompt of so many blocks, of which the last may be another."""
    ids = list(range(length * BLOCK_TOKENS))
    ids[-1] += last
    return chain_hashes(ids, root=ROOT)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_are_even(count: int) -> None:
    """Within a quarter of the mean for two thousand prompts."""
    shares = Counter(ranked(stores(count), key)[0] for key in KEYS)

    assert len(shares) == count
    assert all(abs(share - len(KEYS) / count) < 0.25 * len(KEYS) / count for share in shares.values())


def test_who_joins_takes_its_share_and_nothing_else_moves() -> None:
    """What changes its home goes to the newcomer; so it is the other way round when that leaves."""
    before = {key: ranked(stores(3), key)[0] for key in KEYS}
    after = {key: ranked(stores(4), key)[0] for key in KEYS}
    moved = [key for key in KEYS if before[key] != after[key]]

    assert {after[key] for key in moved} == {stores(4)[3]}
    assert len(moved) < 0.3 * len(KEYS)


def test_a_dead_store_s_share_goes_to_each_prompt_s_next() -> None:
    """The order of the others is as it was."""
    for key in KEYS[:100]:
        order = ranked(stores(4), key)
        assert ranked([store for store in stores(4) if store != order[0]], key) == order[1:]


def test_neither_the_order_in_which_they_are_heard_nor_an_epoch_decides() -> None:
    """A store that was started again has its share again, and all engines agree."""
    for key in KEYS[:100]:
        ids = [store.id for store in ranked(stores(3), key)]
        assert [store.id for store in ranked(stores(3, "another")[::-1], key)] == ids


def test_a_prompt_and_what_goes_on_from_it_have_one_home_once_they_are_long_enough() -> None:
    """Before that the key is the last block that a lookup can name."""
    long = hashes(40)
    keys = {home_key(long, tokens) for tokens in range(KEY_BLOCKS * BLOCK_TOKENS + 1, 40 * BLOCK_TOKENS)}
    assert keys == {long[KEY_BLOCKS - 1]}

    for tokens in range(BLOCK_TOKENS + 1, KEY_BLOCKS * BLOCK_TOKENS + 1):
        lookup, written = long[: (tokens - 1) // BLOCK_TOKENS], long[: tokens // BLOCK_TOKENS]
        assert home_key(lookup, tokens) == home_key(written, tokens) == lookup[-1]


def test_prompts_that_share_a_template_are_spread() -> None:
    """The first blocks are the same; what decides are those behind them."""
    template = list(range(3 * BLOCK_TOKENS))
    homes = Counter()
    for number in range(400):
        ids = template + [number] * (9 * BLOCK_TOKENS)
        homes[ranked(stores(2), home_key(chain_hashes(ids, root=ROOT), len(ids)))[0]] += 1

    assert min(homes.values()) > 150


def test_a_prompt_without_a_full_block_has_no_home() -> None:
    """Nobody stores it."""
    with pytest.raises(ValueError, match="no home"):
        home_key([], 7)


def test_the_fullest_store_is_read_and_among_equals_the_home() -> None:
    """What is not worth asking for counts as nothing."""
    one, two, three = order = stores(3)

    assert fullest(order, {one: 4, two: 9, three: 9}.__getitem__, 2) == two
    assert fullest(order, {one: 4, two: 4, three: 0}.__getitem__, 2) == one
    assert fullest(order, {one: 0, two: 1, three: 1}.__getitem__, 2) == one


def test_a_single_store_is_not_even_looked_at() -> None:
    """As fast as if there could be no other."""

    def never(store: Ref) -> int:
        raise AssertionError(store)

    assert fullest(stores(1), never, 2) == stores(1)[0]


def test_a_prefix_is_pinned_where_all_that_goes_on_from_it_belongs() -> None:
    """In one store, or in all if it is too short to tell."""
    long, short = hashes(KEY_BLOCKS + 1), hashes(KEY_BLOCKS)

    assert pinned_at(stores(3), long) == [ranked(stores(3), long[KEY_BLOCKS - 1])[0]]
    assert pinned_at(stores(3), short) == stores(3)
    assert pinned_at(stores(1), long) == pinned_at(stores(1), short) == stores(1)
