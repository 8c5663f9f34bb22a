"""The layout: pure, from settings to nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.embedded_nats import BusServer
from headrace.layout import KINDS, cores_of, drain_order, explain, plan_nodes, threads_per_engine
from headrace.nodes import bus_spec, bus_threads, node_spec
from schemas.settings import Settings, load


def plans(**flags: object) -> list[tuple[str, tuple[str, ...]]]:
    return [(p.name, p.kinds) for p in plan_nodes(load(flags, environ={}).settings)]


def test_the_default_is_two_decode_two_light_nodes_a_store_and_an_edge_alone() -> None:
    """Any one node may die and another one can take over, but for the edge."""
    assert plans() == [
        ("kv-0", ("kv", "transfer")),
        ("decode-0", ("decode",)),
        ("decode-1", ("decode",)),
        ("light-0", ("admission", "tokenize", "detokenize")),
        ("light-1", ("admission", "tokenize", "detokenize")),
        ("edge", ("edge",)),
    ]


def test_the_edge_has_light_actors_of_its_own_unless_each_actor_is_alone() -> None:
    """They are not counted: two light nodes are there for everybody."""
    default, isolated = plan_nodes(settings_of()), plan_nodes(settings_of(isolate=True))

    assert [(p.name, p.private) for p in default if p.private] == [("edge", ("admission", "tokenize", "detokenize"))]
    assert not any(p.private for p in isolated)
    argv = node_spec(default[-1], settings_of(bus_url="nats://h:1"), {}, Path("/tmp")).argv
    assert [a for a in argv if "private" in a] == [f"--private={k}" for k in ("admission", "tokenize", "detokenize")]


def test_isolation_gives_each_actor_a_node_and_keeps_two_of_each_light_kind() -> None:
    """One process per actor, with the same actors as before."""
    isolated = plans(isolate=True)

    assert all(len(kinds) == 1 for _, kinds in isolated)
    assert sorted(k for _, kinds in isolated for k in kinds) == sorted(k for _, kinds in plans() for k in kinds)


def test_counts_choose_the_engines() -> None:
    """Roles are counted separately."""
    engines = [name for name, kinds in plans(prefill=0, decode=0, both=3) if kinds == ("both",)]

    assert engines == ["both-0", "both-1", "both-2"]


def test_further_stores_have_nodes_of_their_own_and_share_the_transfer_actor() -> None:
    """They take equal parts of what the host gives; on their way out they are with the first."""
    stores = [(name, kinds) for name, kinds in plans(kv=3) if "kv" in kinds]
    assert stores == [("kv-0", ("kv", "transfer")), ("kv-1", ("kv",)), ("kv-2", ("kv",))]
    assert [name for name, kinds in plans(kv=2, isolate=True) if "transfer" in kinds] == ["transfer-0"]

    assert [p.name for p in drain_order(plan_nodes(settings_of(kv=2)))[-1]] == ["kv-0", "kv-1"]
    assert settings_of(kv=4, host_tier_tokens=1024).num_host_blocks == 16


def test_every_planned_kind_is_a_known_one() -> None:
    """The command line takes what the layout asks for."""
    assert {k for _, kinds in plans(prefill=1, both=1) for k in kinds} == set(KINDS)


def test_the_edge_drains_first_and_the_store_last() -> None:
    """Nothing new comes in before those that hold work are asked to leave."""
    groups = [[p.name for p in group] for group in drain_order(plan_nodes(settings_of(prefill=1)))]

    assert groups == [["edge"], ["light-0", "light-1"], ["prefill-0", "decode-0", "decode-1"], ["kv-0"]]


def test_threads_are_as_set_else_one_per_core() -> None:
    """An explicit number is taken at its word."""
    assert threads_per_engine(load({"threads": 5}, environ={}).settings, cores=2) == 5
    assert threads_per_engine(load({}, environ={}).settings, cores=2) == 2


def settings_of(**flags: object) -> Settings:
    return load(flags, environ={}).settings


def test_engines_may_run_everywhere_unless_told_otherwise() -> None:
    assert cores_of(settings_of(), "decode-1", [0, 1, 2, 3]) == [0, 1, 2, 3]


def test_spread_engines_get_parts_that_do_not_overlap() -> None:
    settings = settings_of(affinity="spread", prefill=1, decode=2)
    parts = [cores_of(settings, name, list(range(7))) for name in ("prefill-0", "decode-0", "decode-1")]
    assert parts == [[0, 1], [2, 3], [4, 5]]


def test_more_engines_than_cores_take_turns() -> None:
    settings = settings_of(affinity="spread", prefill=1, decode=2)
    parts = [cores_of(settings, name, [4, 9]) for name in ("prefill-0", "decode-0", "decode-1")]
    assert parts == [[4], [9], [4]]


def test_nodes_without_engines_are_not_confined() -> None:
    assert cores_of(settings_of(affinity="spread"), "edge", [0, 1]) == [0, 1]


def test_the_layout_is_told_in_words() -> None:
    assert "1 prefill, 2 decode" in explain(settings_of(prefill=1, decode=2, both=0), 4)
    assert "4 threads" in explain(settings_of(), 4)
    assert "one thread each" in explain(settings_of(threads=1), 4)
    assert "its own part of 4 cores" in explain(settings_of(affinity="spread"), 4)


def test_the_embedded_bus_gets_a_quarter_of_the_cores_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert [bus_threads(n) for n in (1, 2, 4, 7, 8, 64)] == [1, 1, 1, 1, 2, 16]
    server = BusServer(Path("nats-server"), tmp_path / "nats.conf", "127.0.0.1", 4222, "token")
    monkeypatch.delenv("GOMAXPROCS", raising=False)
    assert int(bus_spec(server, tmp_path).env["GOMAXPROCS"]) == bus_threads(os.cpu_count() or 1)
    monkeypatch.setenv("GOMAXPROCS", "5")
    assert bus_spec(server, tmp_path).env["GOMAXPROCS"] == "5"
