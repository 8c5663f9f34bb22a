"""The merged metrics of all nodes."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from edge.metrics import merge
from tests.support.edge_peer import chat, edge_setup


def node_text(count: int) -> str:
    """Return the page of a node that has counted something, with labels that look like syntax."""
    registry = CollectorRegistry()
    Counter("headrace_things", "Things.", ["name"], registry=registry).labels('a"b}c\\d\ne f').inc(count)
    Histogram("headrace_wait_seconds", "Waits.", registry=registry, buckets=(1.0,)).observe(0.5)
    return generate_latest(registry).decode()


def test_samples_of_all_nodes_stand_under_one_head() -> None:
    """Each sample names its node; a family is described once; the page can be parsed, values unchanged."""
    page = merge({"n-1": node_text(1), "n-0": node_text(2), "n-2": "headrace_bare 5\n"})

    families = {f.name: f for f in text_string_to_metric_families(page)}
    things = {s.labels["node"]: s.value for s in families["headrace_things"].samples if s.name.endswith("_total")}
    assert things == {"n-0": 2.0, "n-1": 1.0}
    assert families["headrace_things"].samples[0].labels["name"] == 'a"b}c\\d\ne f'
    assert len([s for s in families["headrace_wait_seconds"].samples if s.name.endswith("_bucket")]) == 4
    assert families["headrace_bare"].samples[0].labels == {"node": "n-2"}
    heads = [line for line in page.splitlines() if line.startswith("#")]
    assert len(heads) == len(set(heads))
    assert len([h for h in heads if h.startswith("# TYPE headrace_wait_seconds ")]) == 1


def test_no_nodes_make_an_empty_page() -> None:
    """Not a page with a blank line."""
    assert merge({}) == ""
    assert merge({"n": ""}) == ""


@pytest.mark.anyio
async def test_the_page_shows_every_node_and_what_the_edge_counted() -> None:
    """Requests by route and status, times to tokens, requests in flight; concurrent scrapes are one question."""
    async with edge_setup() as s:
        await s.http.post("/v1/chat/completions", json=chat())
        await s.http.get("/nope")
        queries = await s.system.tap("control.metrics")
        page = await s.http.get("/metrics")
        same = await asyncio.gather(*(s.edge.metrics_page() for _ in range(3)))

        assert len(queries) == 2 and len(set(same)) == 1
        text = page.text
        assert page.headers["content-type"].startswith("text/plain")
        nodes = {sample.labels["node"] for family in text_string_to_metric_families(text) for sample in family.samples}
        assert nodes == {"edge", "peer-0", "rest"}
        for line in (
            'headrace_http_requests_total{node="edge",route="/v1/chat/completions",status="200"} 1.0',
            'headrace_http_requests_total{node="edge",route="unmatched",status="404"} 1.0',
            'headrace_time_to_first_token_seconds_count{node="edge"} 1.0',
            'headrace_inter_token_latency_seconds_count{node="edge"} 2.0',
            'headrace_edge_requests_in_flight{node="edge",actor="edge-0"} 0.0',
        ):
            assert line in text
        assert 'le="0.0005"' in text and 'le="0.001"' in text


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_node_that_does_not_answer_delays_the_page_a_little_and_no_more() -> None:
    """The others are shown."""
    async with edge_setup() as s:
        s.system.freeze(s.rest)
        async with asyncio.timeout(10):
            text = (await s.http.get("/metrics")).text

    assert 'node="peer-0"' in text and 'node="rest"' not in text
