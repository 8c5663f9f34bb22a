"""A request's identity, its fence and its record: all that is needed to run it anywhere."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from schemas.subjects import Ref


class Fence(NamedTuple):
    """Who may command a sequence: compared as (term, owner, n); receivers keep the highest."""

    term: int
    owner: str
    n: int

    def next(self) -> Fence:
        """Return the fence of the owner's next try."""
        return Fence(self.term, self.owner, self.n + 1)

    @property
    def before(self) -> Fence:
        """The highest fence below this one: what is over where this one may still come."""
        return Fence(self.term, self.owner, self.n - 1)

    @property
    def label(self) -> str:
        """The whole fence in a word, for names of what is done under it: two owners may share term and number."""
        return f"{self.term}.{self.owner}.{self.n}"


def _ref(value: Any) -> Any:
    return Ref(*value) if isinstance(value, (list, tuple)) else value


def _fence(value: Any) -> Any:
    return Fence(*value) if isinstance(value, list) else value


RefField = Annotated[Ref, BeforeValidator(_ref), PlainSerializer(lambda r: [r.kind, r.id, r.epoch], list[str])]
FenceField = Annotated[Fence, BeforeValidator(_fence), PlainSerializer(list, list[Any])]


class Model(BaseModel):
    """Base of everything that crosses the bus: frozen, unknown fields ignored (newer peers may send them)."""

    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)


class Sampling(Model):
    """How to choose tokens. `seed` is always set once a request is admitted.

    What is left at its default does not travel, so records of before a field decode, and their bytes are the same.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False
    stop: list[str] = []
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] = []  # empty: all
    min_tokens: int = 0


class ReplyTo(Model):
    """Where frames go: an edge's mailbox (frames of many requests together) or a native client's inbox."""

    subject: str
    mode: Literal["mailbox", "inbox"] = "mailbox"
    encoding: Literal["msgpack", "json"] = "msgpack"


class Strike(Model):
    """An engine crashed while it computed a request: which incarnation, and whether it computed nothing else."""

    epoch: str
    alone: bool = False


class Record(Model):
    """Everything needed to run a request on any set of actors.

    `prompt_ids` is empty until tokenized; choice `c` belongs to prompt `c // n`.
    """

    request_id: str
    tenant: str = "default"
    request_class: Literal["interactive", "agent", "batch"] = "interactive"
    api: Literal["chat", "completion"] = "chat"
    model: str = ""
    body: dict[str, Any] = {}
    n: int = 1
    sampling: Sampling = Sampling()
    stream: bool = False
    created: int = 0
    deadline: float = 0.0  # absolute, Unix seconds
    reply: ReplyTo
    owner: RefField
    backup: RefField | None = None  # an admission actor that holds this record too
    edge_epoch: str = ""
    traceparent: str = ""
    reserved_tokens: int = 0  # quota reservation, for keepers
    cache_salt: str = ""
    warm: bool = False  # its KV is stored while it runs, so that a survivor loads it
    prompt_ids: list[list[int]] = []
    strikes: list[Strike] = []  # engines that crashed while they computed it

    @property
    def num_choices(self) -> int:
        """How many sequences the request has."""
        return max(1, len(self.prompt_ids)) * self.n
