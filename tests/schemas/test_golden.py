"""Golden bytes: the wire format is what it was. `python tests/schemas/test_golden.py --regen` writes them anew.

Regenerate only for a message that is new, or together with a new `PROTOCOL_VERSION`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest

from schemas import messages as m
from schemas.codec import PROTOCOL_VERSION, DecodeError, decode, encode, encode_hot, split
from schemas.errors import EngineFailed
from schemas.items import (
    ACKS,
    FRAMES,
    ITEMS,
    Ack,
    Item,
    ItemBatch,
    TextItem,
    acks_body,
    frame,
    items_body,
    parse_acks,
    parse_items,
)
from schemas.record import Fence, Record, ReplyTo, Sampling, Strike
from schemas.subjects import Ref

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden_messages.json"

EDGE = Ref("edge", "edge", "e0e0e0e0e0e0e0e0")
OWNER = Ref("admission", "light-0", "a0a0a0a0a0a0a0a0")
BACKUP = Ref("admission", "light-1", "c0c0c0c0c0c0c0c0")
PREFILL = Ref("prefill", "prefill-0", "b0b0b0b0b0b0b0b0")
DECODE = Ref("decode", "decode-0", "d0d0d0d0d0d0d0d0")
DETOK = Ref("detokenize", "light-1", "c0c0c0c0c0c0c0c0")
FENCE = Fence(1, "light-0.a0a0a0a0a0a0a0a0", 2)
DEADLINE = 1767225600.5
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ERROR = EngineFailed("logits are not finite").info()
RECORD = Record(
    request_id="5f0c",
    tenant="default",
    api="chat",
    model="tiny",
    n=2,
    sampling=Sampling(temperature=0.5, seed=7, max_tokens=32, stop=["\n"]),
    stream=True,
    created=1767225000,
    deadline=DEADLINE,
    reply=ReplyTo(subject="actor.edge.edge.e0e0e0e0e0e0e0e0"),
    owner=OWNER,
    edge_epoch=EDGE.epoch,
    traceparent=TRACE,
    prompt_ids=[[1, 504, 70000]],
)
PENALIZED = RECORD.model_copy(
    update={
        "sampling": Sampling(
            temperature=0.5,
            seed=7,
            max_tokens=32,
            presence_penalty=0.5,
            frequency_penalty=-0.25,
            repetition_penalty=1.25,
            logit_bias={504: -100.0, 70000: 1.5},
            allowed_token_ids=[5, 504, 70000],
            min_tokens=3,
        )
    }
)
HEAD: dict[str, Any] = {"request_id": "5f0c", "fence": FENCE, "deadline": DEADLINE, "traceparent": TRACE}
POOL = m.PoolHandle(
    kind="shm", path="/dev/shm/headrace-default-decode-0", nbytes=4096, block_nbytes=256, layout="scripted-1",
    epoch=DECODE.epoch, host="host-a",
)  # fmt: skip
BLOCKS = [m.BlockRef(index=3, generation=1), m.BlockRef(index=300, generation=70000)]
H1, H2 = bytes(range(32)), bytes(range(32, 64))

EXAMPLES: list[m.Message] = [
    m.Submit(
        request_id="5f0c", api="chat", body={"model": "tiny", "messages": [{"role": "user", "content": "Hi \u010f"}]},
        reply=RECORD.reply, deadline=DEADLINE, accept_by=1767225002.0, term=1, edge_epoch=EDGE.epoch, seed=7,
        created=1767225000, outputs=[[5, 6], []],
    ),  # fmt: skip
    m.SubmitCancel(request_id="5f0c", reason="cancel"),
    m.CancelAck(request_id="5f0c"),
    m.Keep(**HEAD, record=RECORD.model_copy(update={"backup": BACKUP}), body={"messages": []}, max_tokens=32),
    m.Kept(**HEAD),
    m.Release(request_ids=["5f0c", "5f0d"]),
    m.Released(request_ids=["5f0c", "5f0d"]),
    m.Orphan(**HEAD, record=RECORD, source=DECODE),
    m.Claim(**HEAD),
    m.Unclaimed(**HEAD, ended=True),
    m.Tokenize(**HEAD, api="chat", body={"messages": []}, limit=2048, max_tokens=32, reply=OWNER),
    m.Tokenized(**HEAD, prompt_ids=[[1, 504, 70000]], elapsed_s=0.25),
    m.Open(**HEAD, record=RECORD),
    m.Opened(**HEAD),
    m.FenceIds(**HEAD),
    m.FencedIds(**HEAD, known=True, outputs=[[5, 6], [7]], finished=[1], ended=False),
    m.Finished(**HEAD, prompt_tokens=3, completion_tokens=9, cached_tokens=0, finish_reasons=["stop", "length"],
               first_item_at=12.5, ended_at=1767225003.25),  # fmt: skip
    m.FinishedAck(**HEAD),
    m.Stalled(**HEAD, next=[4, 5]),
    m.Dispatch(**HEAD, record=RECORD, detokenize=DETOK, decode=DECODE, outputs=[[5], []], finished=[0], reply=OWNER),
    m.Dispatched(**HEAD, started=True),
    m.EngineError(**HEAD, error=ERROR),
    m.Redirect(**HEAD, detokenize=DETOK, reply=OWNER),
    m.Redirected(**HEAD, known=False),
    m.Migrate(request_id="5f0c", fence=FENCE, deadline=DEADLINE, to=DECODE, next=FENCE.next(), reply=OWNER),
    m.Migrated(request_id="5f0c", fence=FENCE, next=FENCE.next(), outcome="kept"),
    m.Moved(request_id="5f0c", fence=FENCE.next(), source=PREFILL, outputs=[[11, 12], [13]], acked=[2, 1],
            num_tokens=[21], ends=[[1, "stop"]], unwanted=[1]),  # fmt: skip
    m.Close(**HEAD, reason="fenced", error=ERROR, reply=OWNER),
    m.Closed(**HEAD),
    m.Reserve(**HEAD, record=RECORD, part=0, parts=1, num_tokens=3, choices=[0, 1], outputs=[[], []], detokenize=DETOK,
              source=PREFILL),  # fmt: skip
    m.Reserved(**HEAD, part=0, pool=POOL, blocks=BLOCKS),
    m.TransferJob(**HEAD, job="5f0c.0.1.2", part=0, source=PREFILL, dest=DECODE, source_pool=POOL, dest_pool=POOL,
                  source_blocks=BLOCKS, dest_blocks=BLOCKS, first=[[9, None], [10, None]], expected=[1, 2**63],
                  num_tokens=3, cached_tokens=0),  # fmt: skip
    m.TransferAbort(**HEAD, job="5f0c.0.1.2"),
    m.TransferDone(**HEAD, job="5f0c.0.1.2", part=0, checksums=[1, 2**63], nbytes=512, elapsed_s=0.5),
    m.Transferred(**HEAD, job="5f0c.0.1.2", part=0, source=PREFILL, first=[[9, None], [10, None]], num_tokens=3),
    m.Activated(**HEAD, part=0),
    m.KvLookup(ticket="5f0c.load.1.2", hashes=[H1, H2], parents=[H2, H1], reply=PREFILL),
    m.TransferGrant(ticket="far.1", pool=POOL, blocks=BLOCKS, lease_s=2.75),
    m.PeerQuery(reply=PREFILL),
    m.PeerKey(address="10.0.0.5:40000", key=H1),
    m.KvLoading(ticket="5f0c.load.1.2", wait_s=1.0),
    m.KvFound(ticket="5f0c.load.1.2", pool=POOL, blocks=BLOCKS, checksums=[7, 8], lease_until=99.5),
    m.KvPrefetch(hashes=[b"h" * 32], parents=[b"p" * 32]),
    m.KvRelease(ticket="5f0c.load.1.2"),
    m.KvDamaged(hashes=[H1, H2]),
    m.KvReserve(ticket="w.1", hashes=[H1], parents=[H2], pool=POOL, reply=PREFILL),
    m.KvReserved(ticket="w.1", pool=POOL, positions=[0], blocks=BLOCKS[:1]),
    m.KvCommit(ticket="w.1", ok=False, checksums=[7]),
    m.KvEvents(tier="host", first=70000, ops=b"\x02\x00", hashes=H1 + H2, parents=H2),
    m.PinPrompt(ticket="p.1", api="completion", body={"model": "tiny", "prompt": "x"}, ttl_s=60.0, reply=PREFILL),
    m.PromptPinned(ticket="p.1", pin="pin-1", tokens=40, blocks=2, stored=1, until=1767225060.5),
    m.ChainQuery(ticket="p.1", prompt_ids=[1, 504], tenant="default", reply=PREFILL),
    m.Chain(ticket="p.1", hashes=[H1, H2]),
    m.KvPin(ticket="p.1/0", pin="pin-1", hashes=[H1, H2], owner=b"\x01" * 8, ttl_s=60.0, reply=PREFILL),
    m.KvPinned(ticket="p.1/0", stored=1, until=1767225060.5),
    m.KvUnpin(ticket="u.1", pin="pin-1", reply=PREFILL),
    m.KvUnpinned(ticket="u.1", known=True),
    m.KvFreeze(ticket="f.1", tiers=["host", "disk"], reply=PREFILL),
    m.KvFrozen(ticket="f.1", tiers=["host"]),
    m.KvStatusQuery(ticket="s.1", reply=PREFILL, top=3),
    m.KvStatus(
        ticket="s.1", host="h", lookups=9, found=7,
        tiers=[m.KvTier(kind="host", nbytes=4096, max_nbytes=8192, blocks=2, hits=5, misses=1, stored=3, evicted=1)],
        prefixes=[m.KvPrefix(head=H1, owner=b"\x01" * 8, tokens=32, hits=4, last=1767225000.5)],
        tenants=[m.KvTenant(tier="host", owner=b"\x01" * 8, nbytes=4096, limit=8192)],
    ),
    m.KvDumpQuery(ticket="d.1", tier="host", start=1024, reply=PREFILL),
    m.KvDump(ticket="d.1", tier="host", number=70000, start=1024, total=1025, ops=b"\x02", hashes=H1, parents=H2),
    m.Heartbeat(ref=DECODE, node="decode-0", host="host-a", pid=4711, seq=12, sent_at=1767225000.25, state="ready",
                load={"running": 3, "free_blocks": 500}),  # fmt: skip
    m.ExitNotice(node="decode-0", pid=4711, code=-9, refs=[DECODE]),
    m.SupervisorReport(
        pid=4000,
        children=[
            m.ChildReport(name="decode-0", state="backoff", restarts=2, kills=1, exit_code=-9, exited_at=1767225000.25,
                          reason="no heartbeat for 10.0 s", next_start_s=0.2),
        ],
    ),  # fmt: skip
    m.Drain(target="decode-0"),
    m.MetricsQuery(ticket="q1", reply=EDGE),
    m.MetricsReport(ticket="q1", node="decode-0", text="headrace_up 1\n"),
]

ITEM_BATCHES = [
    ItemBatch("5f0c", FENCE, [Item(0, 4, 504, None), Item(1, 0, 70000, -0.5)], 16, [(0, "length")]),
    ItemBatch("77aa", Fence(0, "o", 0), [Item(0, 0, 5, None)], None, []),
]
ACK_LIST = [Ack("5f0c", FENCE, "ok", [5, -1], 64), Ack("77aa", Fence(0, "o", 0), "done", [], 0)]
FRAME_LIST = [
    frame("5f0c", FENCE, accepted={"id": "5f0c", "seed": 7, "created": 1767225000, "deadline": DEADLINE,
                                   "owner": OWNER.wire()}),  # fmt: skip
    frame("5f0c", FENCE, items=[TextItem(0, 4, 504, " \u010f", None)]),
    frame(
        "5f0c", FENCE, finish=[(0, "stop", 5), (1, "length", 32)],
        terminal={"usage": {"prompt_tokens": 3, "completion_tokens": 37, "cached_tokens": 16}, "items": [5, 32]},
    ),  # fmt: skip
    frame("5f0c", FENCE, terminal={"usage": {}, "items": [], "error": ERROR}),
    frame("5f0c", FENCE),
]


def current() -> dict[str, str]:
    """The bytes that this code writes, in hexadecimal, by type."""
    out = {type(e).__name__: encode(e, OWNER).hex() for e in EXAMPLES}
    out["without a sender"] = encode(m.Closed(request_id="5f0c", fence=FENCE)).hex()
    out["penalties and masks"] = encode(m.Open(**HEAD, record=PENALIZED), OWNER).hex()
    crash = m.ExitNotice(node="decode-0", pid=4711, code=-11, refs=[DECODE], computing=["5f0c", "5f0d"])
    out["a crash"] = encode(crash).hex()
    strikes = [Strike(epoch=DECODE.epoch), Strike(epoch=PREFILL.epoch, alone=True)]
    struck = RECORD.model_copy(update={"strikes": strikes})
    out["strikes"] = encode(m.Keep(**HEAD, record=struck), OWNER).hex()
    out[ITEMS] = encode_hot(ITEMS, DECODE, items_body(ITEM_BATCHES)).hex()
    out[ACKS] = encode_hot(ACKS, DETOK, acks_body(ACK_LIST)).hex()
    out[FRAMES] = encode_hot(FRAMES, DETOK, FRAME_LIST).hex()
    return out


def golden() -> dict[str, str]:
    """The bytes on file."""
    loaded: dict[str, str] = json.loads(GOLDEN.read_text())
    return loaded


def test_every_message_has_an_example() -> None:
    """A new message class needs one, and so does a new field worth pinning."""
    assert {type(e).__name__ for e in EXAMPLES} == set(m.MESSAGES) - {"RequestMessage"}
    assert set(golden()) == set(current())


@pytest.mark.parametrize("name", sorted(current()))
def test_bytes_are_what_they_were(name: str) -> None:
    """A change here breaks running peers: it needs a new protocol version."""
    assert current()[name] == golden()[name]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: type(e).__name__)
def test_golden_bytes_are_understood(example: m.Message) -> None:
    """Decoding gives the message and its sender back."""
    assert decode(bytes.fromhex(golden()[type(example).__name__])) == (example, OWNER)


def test_a_message_may_have_no_sender() -> None:
    """Supervisors and tools have no mailbox."""
    assert decode(bytes.fromhex(golden()["without a sender"])) == (m.Closed(request_id="5f0c", fence=FENCE), None)


def test_penalties_and_masks_cross_the_bus() -> None:
    """Ids stay integers; a record without them says nothing of them, so it is what older nodes wrote."""
    assert decode(bytes.fromhex(golden()["penalties and masks"])) == (m.Open(**HEAD, record=PENALIZED), OWNER)

    plain = encode(m.Open(**HEAD, record=RECORD))
    assert not any(name in plain for name in (b"penalty", b"logit_bias", b"allowed", b"min_tokens"))


def test_strikes_and_what_a_crashed_engine_computed_cross_the_bus() -> None:
    """They survive the owner (R12), and are absent from what has none of them."""
    keep, _ = decode(bytes.fromhex(golden()["strikes"]))
    crash, _ = decode(bytes.fromhex(golden()["a crash"]))

    assert isinstance(keep, m.Keep) and [s.alone for s in keep.record.strikes] == [False, True]
    assert isinstance(crash, m.ExitNotice) and crash.computing == ["5f0c", "5f0d"]
    assert "strikes" not in split(bytes.fromhex(golden()["Keep"]))[3]["record"]


def test_hot_golden_bytes_are_understood() -> None:
    """Items, acknowledgements and frames."""
    _, kind, origin, body = split(bytes.fromhex(golden()[ITEMS]))
    assert (kind, origin, parse_items(body)) == (ITEMS, DECODE.wire(), ITEM_BATCHES)

    _, kind, origin, body = split(bytes.fromhex(golden()[ACKS]))
    assert (kind, origin, parse_acks(body)) == (ACKS, DETOK.wire(), ACK_LIST)

    _, kind, origin, body = split(bytes.fromhex(golden()[FRAMES]))
    assert (kind, origin, body) == (FRAMES, DETOK.wire(), FRAME_LIST)


def test_the_page_on_the_protocol_tells_of_every_message_and_its_example_is_true() -> None:
    """Each class is named in it, and the bytes that it explains are the golden ones."""
    page = (ROOT / "docs" / "protocol.md").read_text()
    block = page.split("An example, `Closed` without a sender:\n\n```\n")[1].split("```")[0]
    bytes_shown = "".join(re.match(r" *((?:[0-9a-f]{2} ?)*)", line)[1] for line in block.splitlines())  # type: ignore[index]

    assert [n for n in (*m.MESSAGES, ITEMS, ACKS, FRAMES) if f"`{n}`" not in page and n != "RequestMessage"] == []
    assert bytes_shown.replace(" ", "") == golden()["without a sender"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: type(e).__name__)
def test_unknown_fields_are_ignored(example: m.Message) -> None:
    """A newer peer may send more; what is known is understood."""
    envelope = msgpack.unpackb(encode(example, OWNER))
    envelope[3]["from_the_future"] = {"x": 1}

    assert decode(msgpack.packb(envelope))[0] == example


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, "1", None])
def test_another_version_is_refused(version: Any) -> None:
    """By name of both versions."""
    envelope = msgpack.unpackb(encode(EXAMPLES[0], OWNER))
    envelope[0] = version

    with pytest.raises(DecodeError, match="protocol version"):
        decode(msgpack.packb(envelope))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"{}",
        msgpack.packb([1, "Closed", None]),
        msgpack.packb({"a": 1}),
        msgpack.packb([1, 7, None, {}]),
        msgpack.packb([1, "Nonsense", None, {}]),
        msgpack.packb([1, "RequestMessage", ["too", "short"], {"request_id": "r", "fence": [0, "o", 0]}]),
        msgpack.packb([1, "Closed", None, {"request_id": "r"}]),
        msgpack.packb([1, "Closed", None, {"request_id": "r", "fence": [1, 2]}]),
        msgpack.packb([1, "Closed", None, None]),
        encode(EXAMPLES[0], OWNER)[:-1],
        encode(EXAMPLES[0], OWNER) + b"\x00",
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    """With one typed error, whatever is wrong."""
    with pytest.raises(DecodeError):
        decode(data)


if __name__ == "__main__":
    if sys.argv[1:] != ["--regen"]:
        sys.exit("usage: python tests/schemas/test_golden.py --regen")
    GOLDEN.write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n")
    print(f"wrote {GOLDEN}")
