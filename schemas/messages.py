"""Every control message between actors, one class each; the class name is its type on the wire.

Hot messages (items, acks, frames) are not here: they are msgpack arrays, see `schemas/items.py`.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from schemas.record import FenceField, Model, Record, RefField, ReplyTo

MESSAGES: dict[str, type[Message]] = {}


class Message(Model):
    """Base of control messages; subclasses register themselves under their class name."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        MESSAGES[cls.__name__] = cls


class RequestMessage(Message):
    """A message about one request: carries its id, fence, absolute deadline and trace context."""

    request_id: str
    fence: FenceField
    deadline: float = 0.0
    traceparent: str = ""


# --- edge or native client → admission -------------------------------------------------------------


class Submit(Message):
    """A request for admission. `term` rises with each retry under the same id; `accept_by` bounds its validity."""

    request_id: str
    api: str
    body: dict[str, Any]
    tenant: str = "default"
    request_class: str = "interactive"
    reply: ReplyTo
    deadline: float
    accept_by: float
    term: int = 0
    edge_epoch: str = ""
    traceparent: str = ""
    seed: int | None = None  # fixed by the first acceptance; a resubmission repeats it
    created: int | None = None
    outputs: list[list[int]] = []  # ids that the client has already, per choice: an earlier owner died


class SubmitCancel(Message):
    """The client of this request has left."""

    request_id: str
    reason: str = "cancel"


class CancelAck(Message):
    """The owner has seen the cancel (or does not know the request)."""

    request_id: str


# --- admission ↔ admission, and whoever has a record of a dead owner's ------------------------------


class Keep(RequestMessage):
    """Hold this record too, in case its owner dies; answered with `Kept`. `body` is what `Tokenize` would carry."""

    record: Record
    body: dict[str, Any] = {}
    max_tokens: int | None = None


class Kept(RequestMessage):
    """The record is held here; the owner may say `accepted`."""


class Release(Message):
    """These requests have ended: their records need not be held any more; answered with `Released`."""

    request_ids: list[str]


class Released(Message):
    """None of these records is held here."""

    request_ids: list[str]


class Orphan(RequestMessage):
    """The owner of what is held here is gone: who takes it over? To one admission actor after another until claimed.

    A detokenizer is claimed by `Open`, an engine by `Redirect` or `Close`. `fence` is the one held here, `source` the
    engine that runs it, as far as the sender knows.
    """

    record: Record
    source: RefField | None = None


class Claim(RequestMessage):
    """The sender takes this request over, and asks a detokenizer for it: answered with `Orphan` or `Unclaimed`."""


class Unclaimed(RequestMessage):
    """The request is not open here; `ended` if it was, and came to its end."""

    ended: bool = False


# --- admission ↔ tokenize --------------------------------------------------------------------------


class Tokenize(RequestMessage):
    """Render and encode a request's prompts; answered with `Tokenized` to `reply`."""

    api: str
    body: dict[str, Any]
    limit: int = 0  # context window in tokens; 0 when not known
    max_tokens: int | None = None
    reply: RefField


class Tokenized(RequestMessage):
    """Prompt ids, one list per prompt, or an error (see `schemas.errors.from_info`)."""

    prompt_ids: list[list[int]] = []
    error: dict[str, Any] | None = None
    elapsed_s: float = 0.0


# --- admission ↔ detokenize ------------------------------------------------------------------------


class Open(RequestMessage):
    """Own the text of a request: answered with `Opened`."""

    record: Record


class Opened(RequestMessage):
    """The detokenizer holds the request under this fence."""


class FenceIds(RequestMessage):
    """Refuse anything below this fence from now on and say which ids have arrived; answered with `FencedIds`."""


class FencedIds(RequestMessage):
    """Ids held per choice; `known` is false if the request is not open here; `finished` choices want no more."""

    known: bool
    outputs: list[list[int]] = []
    finished: list[int] = []
    ended: bool = False


class Finished(RequestMessage):
    """The detokenizer has ended the request; repeated until `FinishedAck`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: list[str] = []
    error: dict[str, Any] | None = None
    first_item_at: float = 0.0
    ended_at: float = 0.0


class FinishedAck(RequestMessage):
    """The owner has settled the request."""


class Stalled(RequestMessage):
    """No ids for a second; `next` is the next expected index per choice."""

    next: list[int]


# --- admission → engines ---------------------------------------------------------------------------


class Dispatch(RequestMessage):
    """Run a request: in prefill for hand-off to `decode`, or whole on this engine when `decode` is absent.

    `outputs` holds the ids that each choice already has (all empty at first); their KV is computed again. Choices in
    `finished` are not run. After `late_at` (Unix seconds; 0: never) a first token breaks what the request's class was
    promised: an engine that has begun nothing of it by then, or could not be done, refuses it.
    """

    record: Record
    detokenize: RefField
    decode: RefField | None = None
    late_at: float = 0.0
    outputs: list[list[int]] = []
    finished: list[int] = []
    reply: RefField


class Dispatched(RequestMessage):
    """The engine's answer to `Dispatch`: it holds the work, or says why not; decode says `started` after a hand-off."""

    started: bool = False
    error: dict[str, Any] | None = None


class EngineError(RequestMessage):
    """An engine gave a request up (never fits, mismatch, bad numbers); repeated until fenced or closed."""

    error: dict[str, Any]


class Redirect(RequestMessage):
    """Send items of this request to another detokenizer, from index 0; answered with `Redirected`."""

    detokenize: RefField
    reply: RefField


class Redirected(RequestMessage):
    """`known` is false if the engine does not hold the request."""

    known: bool


class Close(RequestMessage):
    """The one verb for cancel, stop, expire, drop and fence-off; idempotent, answered with `Closed`."""

    reason: str
    error: dict[str, Any] | None = None
    reply: RefField | None = None


class Closed(RequestMessage):
    """Nothing of the request is left here (blocks may be quarantined until their writer is done)."""


class Migrate(RequestMessage):
    """Owner to engine: move this request's running sequences to another engine, which gets them under `next`.

    Repeated until they run there (`Dispatched` with `started` under `next`) or `Migrated` says what else became of it.
    """

    to: RefField
    next: FenceField
    reply: RefField


class Migrated(RequestMessage):
    """How a move ended, as its source sees it.

    `outcome`: `moved`; `kept` (it goes on here, and should); `unfit` (it goes on here, and cannot move); `doubtful`
    (the other engine was told to go on and does not answer).
    """

    next: FenceField
    outcome: str


class Moved(RequestMessage):
    """Engine to engine, under the new fence: all blocks of a request lie verified at yours, go on from here.

    `outputs`, `acked` are per choice; `num_tokens` per part. Answered with `Activated` with part -1.
    """

    source: RefField
    outputs: list[list[int]]
    acked: list[int]
    num_tokens: list[int]
    ends: list[list[Any]] = []  # [choice, reason] of those that have ended
    unwanted: list[int] = []


# --- prefill ↔ decode ↔ transfer -------------------------------------------------------------------


class BlockRef(Model):
    """One block of one pool: index and the generation under which it was lent."""

    index: int
    generation: int


class PoolHandle(Model):
    """An exported pool; on a CPU a file that every process of the host may map."""

    kind: str = "shm"
    path: str
    nbytes: int
    block_nbytes: int
    layout: str
    epoch: str
    host: str


class Reserve(RequestMessage):
    """Prefill asks decode for blocks of one part's KV; answered with `Reserved`, perhaps later (back-pressure).

    A part is what one transfer carries: a prompt with all its choices at first, a single choice when resumed.
    `parts` is how many the request has in all; `outputs` are the ids that each of `choices` already has. The first part
    brings in `rest`, as (choice, ids), those of choices that no part has because they are complete: another detokenizer
    will want them.
    """

    record: Record
    part: int
    parts: int
    num_tokens: int
    choices: list[int]
    outputs: list[list[int]]
    detokenize: RefField
    source: RefField
    rest: list[tuple[int, list[int]]] = []


class Reserved(RequestMessage):
    """Destination blocks under a lease that ends with the request's deadline."""

    part: int
    pool: PoolHandle | None = None
    blocks: list[BlockRef] = []
    error: dict[str, Any] | None = None


class TransferJob(RequestMessage):
    """Copy blocks between pools and verify them; then `Transferred` goes to `dest`, `TransferDone` to `source`.

    A job without `first` moves blocks to or from a store: only `TransferDone` follows.
    """

    job: str
    part: int
    source: RefField
    dest: RefField
    source_pool: PoolHandle
    dest_pool: PoolHandle
    source_blocks: list[BlockRef]
    dest_blocks: list[BlockRef]
    first: list[list[Any]] = []  # per choice of the part: [id, logprob]
    expected: list[int] = []  # xxh3 of each source block where it is known already
    ticket: str = ""  # under which a source on another host serves the blocks; empty: the job's name
    num_tokens: int = 0
    cached_tokens: int = 0


class TransferAbort(RequestMessage):
    """Stop a job's writes; `TransferDone` with an error confirms that none can follow."""

    job: str


class TransferDone(RequestMessage):
    """The job is over: no write of it can follow.

    Of a fetch from another host that failed on its way `checksums` are those of the blocks that came, 0 for the others.
    """

    job: str
    part: int
    error: dict[str, Any] | None = None
    checksums: list[int] = []
    nbytes: int = 0
    elapsed_s: float = 0.0


class TransferGrant(Message):
    """The owner of a pool lends blocks under a ticket: serve them to other hosts for `lease_s`, or (none) no longer."""

    ticket: str
    pool: PoolHandle | None = None
    blocks: list[BlockRef] = []
    lease_s: float = 0.0


class PeerQuery(Message):
    """A transfer actor of another host wants to fetch; answered with `PeerKey`."""

    reply: RefField


class PeerKey(Message):
    """Where a host serves blocks, and the key that both sides of a connection must know. For one mailbox alone."""

    address: str
    key: bytes


class Transferred(RequestMessage):
    """A part's KV lies verified in the destination; decode may start. Answered with `Activated` to `source`."""

    job: str
    part: int
    source: RefField
    first: list[list[Any]]
    num_tokens: int
    cached_tokens: int = 0


class Activated(RequestMessage):
    """Decode owns this part's sequences; the source may free its blocks."""

    part: int
    error: dict[str, Any] | None = None


# --- engines ↔ kv ----------------------------------------------------------------------------------


class KvLookup(Message):
    """Pin the longest stored prefix of a chain of block hashes; answered with `KvFound`."""

    ticket: str
    hashes: list[bytes]
    parents: list[bytes] = []
    reply: RefField
    deadline: float = 0.0
    block_s: float = 0.0  # seconds that the asker takes to compute a block; 0: not known
    owner: bytes = b""  # digest of the tenant that asks: what is fetched from another host for it is its own


class KvFound(Message):
    """The first `len(blocks)` hashes are stored and pinned until `KvRelease` or the lease's end."""

    ticket: str
    pool: PoolHandle | None = None
    blocks: list[BlockRef] = []
    checksums: list[int] = []
    lease_until: float = 0.0


class KvLoading(Message):
    """A lookup goes on on the store's disk: `KvFound` follows within `wait_s`, with more blocks if all goes well."""

    ticket: str
    wait_s: float


class KvPrefetch(Message):
    """A hint: somebody is about to look these blocks up; what lies on the disk may be read already. Not answered.

    With `far` they are asked for often: what another host has of them may be copied here when nothing else is fetched.
    """

    hashes: list[bytes]
    parents: list[bytes]
    far: bool = False
    owner: bytes = b""  # digest of the tenant whose the copies will be


class KvRelease(Message):
    """Unpin the blocks of a lookup."""

    ticket: str


class KvDamaged(Message):
    """Copies of these stored blocks did not show their checksums: the store looks at them and drops what is bad."""

    hashes: list[bytes]


class KvReserve(Message):
    """Ask for staging blocks to write; answered with `KvReserved` (fewer or none when the tier is full).

    `owners` are digests of tenants, one for each block; where the list ends, the blocks are nobody's.
    """

    ticket: str
    hashes: list[bytes]
    parents: list[bytes]
    owners: list[bytes] = []
    pool: PoolHandle  # of the writer: the tier takes only blocks of its own layout
    reply: RefField
    deadline: float = 0.0


class KvReserved(Message):
    """Staging blocks for the hashes at `positions` of the request's list (others are stored already)."""

    ticket: str
    pool: PoolHandle | None = None
    positions: list[int] = []
    blocks: list[BlockRef] = []


class KvCommit(Message):
    """The staged blocks are written; each is inserted with its checksum. `ok` false drops them."""

    ticket: str
    ok: bool = True
    checksums: list[int] = []


class KvEvents(Message):
    """Changes number `first`, `first` + 1, … of one of the sender's tiers, on `kv.events.<host>`.

    One byte of `ops` and 32 of `hashes` each, see `kvstore.changes`. Whoever misses a number asks for a dump. Without a
    change it tells where the numbers are.
    """

    tier: str
    first: int
    ops: bytes
    hashes: bytes
    parents: bytes = b""


class KvDumpQuery(Message):
    """What does your tier store, from place `start` of the list on? Answered with `KvDump`.

    All pages of one `ticket` show the tier as of the same change.
    """

    ticket: str
    tier: str
    start: int = 0
    reply: RefField


class PinPrompt(Message):
    """Keep a prompt's stored prefix for a while; answered with `PromptPinned`. To any admission actor.

    `body` has `messages` (chat) or `prompt` (completion), maybe `model` and `cache_salt`. A known `pin` is
    pinned anew.
    """

    ticket: str
    api: str
    body: dict[str, Any]
    ttl_s: float
    tenant: str = "default"
    pin: str = ""  # its id; empty: a new one
    reply: RefField


class PromptPinned(Message):
    """What is pinned until when (Unix seconds): blocks of the prompt, and how many of them are stored now."""

    ticket: str
    pin: str = ""
    tokens: int = 0
    blocks: int = 0
    stored: int = 0
    until: float = 0.0
    error: dict[str, Any] | None = None


class ChainQuery(Message):
    """By which hashes does this engine know the blocks of a prompt? Answered with `Chain`."""

    ticket: str
    prompt_ids: list[int]
    tenant: str
    cache_salt: str = ""
    reply: RefField


class Chain(Message):
    """The hash of each full block of a prompt."""

    ticket: str
    hashes: list[bytes]


class KvPin(Message):
    """Do not evict these blocks for so long, also those that are stored later; answered with `KvPinned`."""

    ticket: str
    pin: str
    hashes: list[bytes]
    owner: bytes
    ttl_s: float
    reply: RefField


class KvPinned(Message):
    """How many of the blocks are stored, and until when (Unix seconds) they are pinned; or why they are not."""

    ticket: str
    stored: int = 0
    until: float = 0.0
    error: dict[str, Any] | None = None


class KvUnpin(Message):
    """End a pin; answered with `KvUnpinned`."""

    ticket: str
    pin: str
    reply: RefField


class KvUnpinned(Message):
    """Whether there was such a pin."""

    ticket: str
    known: bool


class KvFreeze(Message):
    """Take nothing new into these tiers (`host`, `disk`) and whatever is new into the others, until the next one.

    What is stored is served as before. Answered with `KvFrozen`.
    """

    ticket: str
    tiers: list[str]
    reply: RefField


class KvFrozen(Message):
    """Which of the store's tiers take nothing new from now on."""

    ticket: str
    tiers: list[str] = []


class KvStatusQuery(Message):
    """What do you hold, whose is it, and what is it good for? Answered with `KvStatus`. `top` bounds its lists."""

    ticket: str
    reply: RefField
    top: int = 10


class KvTier(Model):
    """One tier of a store: what it holds and may hold, and what it was asked for since its start."""

    kind: str
    nbytes: int = 0
    max_nbytes: int = 0
    blocks: int = 0
    hits: int = 0  # blocks
    misses: int = 0  # blocks
    stored: int = 0  # blocks
    evicted: int = 0  # blocks
    corrupt: int = 0  # blocks
    unhealthy: str = ""
    frozen: bool = False  # takes nothing new


class KvPrefix(Model):
    """A prefix that was found: its first block's hash, most tokens found at once, how often, and when last (Unix)."""

    head: bytes
    owner: bytes
    tokens: int
    hits: int
    last: float


class KvTenant(Model):
    """What a tenant, known by a digest, has in a tier; without `owner`: all that are not listed. `limit` 0: none."""

    tier: str
    owner: bytes = b""
    nbytes: int = 0
    limit: int = 0


class KvPinRow(Model):
    """A pin: the hash of its first block, its blocks, how many of them are stored, and its end (Unix seconds)."""

    pin: str
    owner: bytes
    head: bytes
    blocks: int
    stored: int
    until: float


class KvStatus(Message):
    """State of one store; nothing in it tells a text or a name."""

    ticket: str
    host: str = ""
    lookups: int = 0
    found: int = 0  # lookups that found anything
    tiers: list[KvTier] = []
    prefixes: list[KvPrefix] = []
    tenants: list[KvTenant] = []
    pins: list[KvPinRow] = []


class KvDump(Message):
    """What a tier stored as of its change `number`: places `start`, `start` + 1, … of `total`, packed like changes."""

    ticket: str
    tier: str
    number: int
    start: int
    total: int
    ops: bytes = b""
    hashes: bytes = b""
    parents: bytes = b""


# --- everybody -------------------------------------------------------------------------------------


class Heartbeat(Message):
    """Liveness and load of one actor, every 250 ms."""

    ref: RefField
    node: str
    host: str
    pid: int
    seq: int
    sent_at: float  # Unix seconds
    state: str = "starting"  # starting | ready | draining | failed
    reason: str = ""
    loop_lag_s: float = 0.0
    load: dict[str, Any] = Field(default_factory=dict)
    private: bool = False  # it works for its own node alone: others do not choose it


class ExitNotice(Message):
    """A supervisor saw a node end: none of these incarnations will speak again.

    `computing`: if it crashed, the requests of the step that it was in.
    """

    node: str
    pid: int
    code: int
    refs: list[RefField]
    computing: list[str] = []


class ChildReport(Model):
    """One child of a supervisor: how it is, how it ended last and why, and when it starts again."""

    name: str
    pid: int = 0  # 0: it does not run
    state: str  # stopped | running | backoff | crash_loop
    ready: bool = False
    restarts: int = 0
    kills: int = 0
    exit_code: int | None = None  # of the last exit, negative for a signal; None: it has not ended yet
    exited_at: float = 0.0  # Unix seconds
    reason: str = ""
    next_start_s: float | None = None


class SupervisorReport(Message):
    """A supervisor tells how its children are, every 250 ms; for those who look, nothing depends on it."""

    pid: int
    children: list[ChildReport]


class Drain(Message):
    """Stop taking work, finish or hand over what is held, then leave. `target` is a node or an actor id."""

    target: str


class MetricsQuery(Message):
    """Ask every node for its metrics; each answers with `MetricsReport` to `reply`."""

    ticket: str
    reply: RefField


class MetricsReport(Message):
    """One node's metrics in the Prometheus text format."""

    ticket: str
    node: str
    text: str
