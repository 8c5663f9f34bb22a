"""The table of prefixes that are found again."""

from __future__ import annotations

from kvstore.popular import Popular


def test_hits_are_counted_by_the_first_block() -> None:
    """The most tokens and the last time are kept; the order is that of hits, then of time."""
    table = Popular()
    for at, (head, tokens) in enumerate([(b"a", 32), (b"b", 16), (b"a", 64), (b"c", 16), (b"a", 48)]):
        table.hit(head, b"owner", tokens, float(at))

    assert [(p.head, p.tokens, p.hits, p.last) for p in table.top(2)] == [(b"a", 64, 3, 4.0), (b"c", 16, 1, 3.0)]


def test_the_table_is_bounded() -> None:
    """What was found longest ago is forgotten first, however often it was found."""
    table = Popular(3)
    for at in range(10):
        table.hit(b"often", b"", 16, float(at))
    for at in range(10, 13):
        table.hit(bytes([at]), b"", 16, float(at))

    assert len(table) == 3 and [p.hits for p in table.top(9)] == [1, 1, 1]
