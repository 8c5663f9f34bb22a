"""Messages between actors of one node: from hand to hand, as bytes, into the same mailboxes as everything else.

A message that crosses the bus is written, read by the server, written by it, and read: half a millisecond on a small
machine, for nothing if both ends are here. Whether it does follows from the address alone, so that messages of one
actor to another keep their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.bus import BusMessage
from schemas.subjects import hot

if TYPE_CHECKING:
    from runtime.actor import Actor
    from runtime.mailbox import Mailbox


class Neighbours:
    """The mailboxes of one node, by the subjects that they are subscribed to."""

    def __init__(self) -> None:
        """Begin with none."""
        self._mailboxes: dict[str, Mailbox] = {}
        self._stateless: dict[str, tuple[Actor, Mailbox]] = {}
        self.delivered = 0

    def add(self, actor: Actor, mailbox: Mailbox) -> None:
        """Deliver to this actor from now on."""
        self._mailboxes[actor.ref.subject] = self._mailboxes[hot(actor.ref)] = mailbox
        if type(actor).anycast:
            self._stateless[actor.ref.kind] = (actor, mailbox)

    def take(self, subject: str, payload: bytes) -> bool:
        """Deliver to one address; false if it is not of this node."""
        mailbox = self._mailboxes.get(subject)
        if mailbox is None:
            return False
        self._deliver(mailbox, subject, payload)
        return True

    def take_any(self, kind: str, subject: str, payload: bytes) -> bool:
        """Deliver to this node's actor of a stateless kind; false if there is none, or it has something to do.

        One that is busy or stuck so gets its share of the bus's choice and no more, and who asks again asks others.
        """
        found = self._stateless.get(kind)
        if found is None:
            return False
        actor, mailbox = found
        if actor.state != "ready" or not actor.idle or len(mailbox):
            return False
        self._deliver(mailbox, subject, payload)
        return True

    def _deliver(self, mailbox: Mailbox, subject: str, payload: bytes) -> None:
        self.delivered += 1
        mailbox.put(BusMessage(subject, payload))
