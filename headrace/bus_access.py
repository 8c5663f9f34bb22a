"""From settings to a connection: credentials, TLS, and how long to wait for a bus that is not there."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import SecretStr

from schemas.errors import BusUnavailable
from schemas.settings import Settings

if TYPE_CHECKING:
    from runtime.clock import Clock
    from runtime.nats_bus import NatsBus

FIRST_TRY_S = 2.0


class BusAccessError(Exception):
    """Raised when the bus credentials in the settings cannot be used."""


def own_address(bus_url: str) -> str:
    """Return the address of this machine from which it reaches the bus; that of the machine itself if it cannot."""
    first = urlsplit(bus_url.split(",")[0].strip())
    try:
        found = socket.getaddrinfo(first.hostname or "localhost", first.port or 4222, type=socket.SOCK_DGRAM)
        family, kind, number, _, address = found[0]
        with socket.socket(family, kind, number) as probe:
            probe.connect(address)  # chooses a route; nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context for the bus, or None if it is not spoken to by TLS.

    Raises:
        BusAccessError: if a certificate or key cannot be loaded.
    """
    wanted = settings.bus_tls_ca or settings.bus_tls_cert or settings.bus_url.startswith(("tls://", "wss://"))
    if not wanted:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.bus_tls_ca or None)
        if settings.bus_tls_cert:
            context.load_cert_chain(settings.bus_tls_cert, settings.bus_tls_key or None)
    except (OSError, ssl.SSLError) as exc:
        raise BusAccessError(f"TLS files for the bus cannot be loaded: {exc}") from exc
    return context


async def connect(
    settings: Settings,
    *,
    clock: Clock,
    name: str,
    wait_s: float | None = None,
    on_wait: Callable[[str], None] | None = None,
    on_closed: Callable[[], None] | None = None,
) -> NatsBus:
    """Connect to the bus of the settings.

    Args:
        settings: `bus_url` must be set.
        clock: the seam.
        name: what the server calls this connection.
        wait_s: how long to keep trying; `bus_wait_s` if absent.
        on_wait: told once, with a line for people, when the first try has failed.
        on_closed: called if an established connection is lost for good.

    Raises:
        BusUnavailable: if no server accepted the connection in time.
        BusAccessError: if credentials or certificates cannot be read.
    """
    from runtime.nats_bus import NatsBus

    if settings.bus_creds and not Path(settings.bus_creds).is_file():
        raise BusAccessError(f"credentials file {settings.bus_creds} does not exist")
    limit = settings.bus_wait_s if wait_s is None else wait_s
    tls = tls_context(settings)

    async def attempt(timeout_s: float) -> NatsBus:
        return await NatsBus.connect(
            settings.bus_url,
            name=name,
            clock=clock,
            token=secret(settings.bus_token),
            user=settings.bus_user or None,
            password=secret(settings.bus_password),
            creds=settings.bus_creds or None,
            tls=tls,
            connect_timeout_s=timeout_s,
            on_closed=on_closed,
        )

    first = min(FIRST_TRY_S, limit)
    started = clock.now()
    try:
        return await attempt(first)
    except BusUnavailable as exc:
        left = limit - (clock.now() - started)
        if "uthoriz" in str(exc) or left <= 0.1:
            raise
        if on_wait is not None:
            on_wait(f"{exc}; trying for {left:.0f} s more")
    return await attempt(left)


def secret(value: SecretStr | None) -> str | None:
    """Return a secret in clear; an empty one counts as none."""
    return (value.get_secret_value() or None) if value is not None else None
