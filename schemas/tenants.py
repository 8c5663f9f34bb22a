"""Whose request it is: the tenant's name, and the digest of it that is all the store ever sees.

Nothing here authenticates. A header names the tenant only if `tenant_header` says so, which is for instances behind
something that checks who asks and sets the header itself.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping

from schemas.errors import BadRequest

DEFAULT_TENANT = "default"
MAX_TENANT = 128
OWNER_NBYTES = 8
SHARED = bytes(OWNER_NBYTES)  # the owner of blocks that name none


def tenant_of(headers: Mapping[str, str], header: str) -> str:
    """Return the tenant that a request's headers name.

    Args:
        headers: by name in lower case, or by any case if the mapping does not mind.
        header: which one; empty: none is looked at.

    Raises:
        BadRequest: if it is empty, too long or not printable; its value is not repeated.
    """
    value = headers.get(header.lower()) if header else None
    if value is None:
        return DEFAULT_TENANT
    if not 1 <= len(value) <= MAX_TENANT or not all(" " < c <= "~" for c in value):
        raise BadRequest(f"the tenant's name must be 1 to {MAX_TENANT} printable characters without blanks")
    return value


def owner_in(field: bytes) -> bytes:
    """Return the owner that a message names, `SHARED` if what it names is none."""
    return field if len(field) == OWNER_NBYTES else SHARED


@functools.lru_cache(maxsize=4096)
def owner_of(tenant: str) -> bytes:
    """Return the digest, 8 bytes, by which the store knows a tenant: it counts by it and cannot tell the name."""
    return hashlib.blake2b(tenant.encode(), digest_size=OWNER_NBYTES, person=b"headrace tenant").digest()
