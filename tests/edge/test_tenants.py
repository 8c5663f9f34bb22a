"""The tenant that a header names reaches whoever runs the request, and only if the instance was told to look at it."""

from __future__ import annotations

import pytest

from edge.generate import Limits
from tests.support.edge_peer import chat, edge_setup

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


async def test_the_header_is_looked_at_only_if_it_is_set() -> None:
    """Anybody can send a header; it means something behind a proxy that sets it."""
    for limits, wanted in ((Limits(), "default"), (Limits(tenant_header="X-Tenant"), "acme")):
        async with edge_setup(limits=limits, listen=False) as s:
            response = await s.http.post(CHAT, json=chat(cache_salt="pepper"), headers={"x-tenant": "acme"})

            assert response.status_code == 200
            assert (s.submits[0].tenant, s.submits[0].body["cache_salt"]) == (wanted, "pepper")


async def test_a_tenant_that_cannot_be_one_is_refused_without_being_repeated() -> None:
    """Empty, too long, with blanks: status 400, nothing is submitted."""
    async with edge_setup(limits=Limits(tenant_header="X-Tenant"), listen=False) as s:
        for value in ("", "secret name", "s" * 129):
            response = await s.http.post(CHAT, json=chat(), headers={"X-Tenant": value})

            assert response.status_code == 400 and "secret" not in response.text
        assert (await s.http.post(CHAT, json=chat(cache_salt=""))).json()["error"]["param"] == "cache_salt"
        assert s.submits == []
