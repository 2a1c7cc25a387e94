"""The parts without I/O: body edits, usage, health, endpoints."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_prefix_router.fleet.discovery import ReplicaFacts
from litellm_prefix_router.gateways.ext_proc.bodies import edit_object, read_object, salt_of
from litellm_prefix_router.gateways.ext_proc.directory import Directory
from litellm_prefix_router.gateways.ext_proc.health import HealthBook
from litellm_prefix_router.gateways.ext_proc.usage import UsageReader
from litellm_prefix_router.settings import Settings, SettingsError

SCALARS = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.dictionaries(st.text() | st.sampled_from(["model", "cache_salt"]), VALUES), st.text(), st.booleans())
def test_an_edit_changes_what_it_should_and_nothing_else(body, value, ascii_only):
    raw = json.dumps(body, ensure_ascii=ascii_only, indent=1).encode("utf-8", "surrogatepass")
    edited = json.loads(edit_object(raw, {"model": value, "cache_salt": "s"}))
    assert edited == {**body, "model": value, "cache_salt": "s"}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"{}", b'{"model":"m"}'),
        (b' { "a" : [1.00,  {"model": "inner"}] } ', b' { "a" : [1.00,  {"model": "inner"}] ,"model":"m"} '),
        (b'{"model":"x","model":"y"}', b'{"model":"m","model":"m"}'),
        (b'{"model":null,"a":"}"}', b'{"model":"m","a":"}"}'),
    ],
)
def test_edits_by_table(raw, expected):
    assert edit_object(raw, {"model": "m"}) == expected


@pytest.mark.parametrize("raw", [b"[]", b'{"a"', b'{"a":}', b"{,}", b'{"a":1 "b":2}', b'"{}"'])
def test_what_is_no_object_is_refused(raw):
    with pytest.raises(ValueError):
        edit_object(raw, {"model": "m"})


def test_bodies_that_are_no_objects_are_none():
    assert [read_object(raw) for raw in (b"", b"[]", b"1", b"\xff", b"[" * 100_000)] == [None] * 5


def test_salts_differ_by_tenant_and_by_secret():
    assert len({salt_of("a", "s"), salt_of("b", "s"), salt_of("a", "t")}) == 3


@given(st.data())
def test_usage_is_read_however_the_chunks_are_cut(data):
    said = json.dumps({"content": 'so he wrote "cached_tokens": 7 and left', "usage": None})
    usage = json.dumps({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 1234}}})
    raw = f"data: {said}\n\ndata: {usage}\n\ndata: [DONE]\n\n".encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    reader = UsageReader()
    for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        reader.feed(raw[start:stop])
    assert reader.cached_tokens == 1234


def test_text_that_looks_like_usage_is_not_usage():
    reader = UsageReader()
    reader.feed(json.dumps({"content": '"cached_tokens": 7, '}).encode())
    assert reader.cached_tokens is None


def test_usage_of_the_messages_api():
    reader = UsageReader()
    reader.feed(b'{"usage": {"input_tokens": 10, "cache_read_input_tokens": 96}}')
    assert reader.cached_tokens == 96


# --- health -------------------------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> HealthBook:
    book = HealthBook(clock, interval_s=0.5, timeouts=2, eject_failures=3, eject_s=5)
    book.keep(["a", "b"])
    return book


def test_unknown_replicas_may_be_chosen_and_are_asked_at_once(book):
    assert book.usable(("a", "b")) == ("a", "b") and book.due() == ["a", "b"]


def test_a_refused_probe_takes_a_replica_out_until_one_succeeds(book):
    book.probed("a", False)
    assert book.usable(("a", "b")) == ("b",)
    book.responded("a", 200)  # an answer that was on its way proves nothing
    assert not book.is_up("a")
    book.probed("a", True)
    assert book.is_up("a")


def test_only_repeated_silence_takes_a_replica_out(book):
    book.unanswered("a")
    assert book.is_up("a")
    book.unanswered("a")
    assert not book.is_up("a")


def test_a_replica_that_envoy_could_not_reach_is_suspect_until_it_was_asked(book):
    book.probed("a", True)
    assert book.due() == ["b"]
    book.unreachable("a")
    assert not book.is_up("a") and book.due() == ["a", "b"]
    book.probed("a", True)
    assert book.is_up("a")


def test_errors_in_a_row_take_a_replica_out_for_a_while(book, clock):
    for status in (500, 500, 200, 500, 500):
        book.responded("a", status)
    assert book.is_up("a")
    book.responded("a", 502)
    assert not book.is_up("a")
    clock.now += 5
    assert book.is_up("a")


def test_answers_make_probes_needless_for_a_while(book, clock):
    book.responded("a", 200)
    assert book.due() == ["b"]
    clock.now += 0.5
    assert book.due() == ["a", "b"]


def test_the_last_hope_is_whatever_is_least_dead(book):
    book.probed("a", False)
    book.unreachable("b")
    assert book.usable(("a", "b")) == () and book.last_hope(("a", "b")) == ("b",)
    book.probed("b", False)
    assert book.last_hope(("a", "b")) == ("a", "b")


# --- endpoints ----------------------------------------------------------------------------------------------------


def directory(endpoints, **pool) -> Directory:
    pools = {"chat": {"model": "tiny", "endpoints": endpoints, **pool}}
    return Directory(Settings(redis_url="memory://", envoy={"pools": pools}))


def test_names_become_all_their_addresses_and_keep_them():
    found = directory(["pods.example:8000", "10.0.0.9:8000"])
    assert found.names == {"pods.example:8000"}
    assert list(found.pools["chat"].address_at) == ["10.0.0.9:8000"]
    assert found.update({"pods.example:8000": ["10.0.0.1:8000", "10.0.0.2:8000"]})
    assert sorted(found.pools["chat"].address_at) == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.9:8000"]
    assert not found.update({"pods.example:8000": ["10.0.0.1:8000", "10.0.0.2:8000"]})


def test_other_settings_bring_other_endpoints():
    found = directory(["10.0.0.1:8000", "10.0.0.2:8000"])
    drained = {"endpoint": "10.0.0.1:8000", "drain": True}
    pools = {"chat": {"model": "tiny", "endpoints": [drained, "10.0.0.3:8000"]}}
    assert found.configure(Settings(redis_url="memory://", envoy={"pools": pools}))
    assert sorted(found.pools["chat"].address_at) == ["10.0.0.1:8000", "10.0.0.3:8000"]
    assert found.pools["chat"].draining == {"http://10.0.0.1:8000"}
    assert not found.configure(Settings(redis_url="memory://", envoy={"pools": pools}))


def test_an_endpoint_may_have_an_address_of_its_own():
    found = directory([{"endpoint": "10.0.0.1:8000", "address": "http://vllm-0.vllm:8000/v1/"}, "[fd00::1]:8000"])
    view = found.pools["chat"]
    assert view.address_at == {"10.0.0.1:8000": "http://vllm-0.vllm:8000", "[fd00::1]:8000": "http://[fd00::1]:8000"}
    assert view.endpoints(["http://[fd00::1]:8000", "unknown", "http://vllm-0.vllm:8000"], 9) == (
        "[fd00::1]:8000,10.0.0.1:8000"
    )


@pytest.mark.parametrize("endpoint", ["10.0.0.1", "http://10.0.0.1:8000", ":8000", "10.0.0.1:http", "10.0.0.1:0"])
def test_endpoints_that_cannot_be_are_refused(endpoint):
    with pytest.raises(SettingsError, match="ip:port"):
        directory([endpoint])


def test_model_names_are_rewritten_as_the_setting_says():
    view = directory(["10.0.0.1:8000"], rewrite_model={"gpt": "tiny", "lora": "adapter"}).pools["chat"]
    assert [view.sent_model(m) for m in ("gpt", "lora", "tiny", "else", None)] == ["tiny", "adapter", None, None, None]
    view = directory(["10.0.0.1:8000"], rewrite_model={"*": "tiny"}).pools["chat"]
    assert [view.sent_model(m) for m in ("any", "tiny")] == ["tiny", None]


def test_ranks_share_an_endpoint_and_the_pinned_one_goes_along_the_list():
    found = directory(["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"])
    view = found.pools["chat"]
    a, b, c = view.endpoint_of
    for replica, ranks in zip(list(view.pool.replicas.values()), (2, 2, 1), strict=True):
        replica.facts = ReplicaFacts(reachable=True, dp_ranks=ranks)
    view.pool.learned()
    assert view.replicas_at([a, c]) == (f"{a}#0", f"{a}#1", c)
    ranking = [f"{b}#1", f"{b}#0", c, f"{a}#0", f"{a}#1"]
    assert view.endpoints(ranking, 9) == "10.0.0.2:8000,10.0.0.1:8000"  # the third has no rank 1
    assert view.endpoints([c, *ranking], 9) == "10.0.0.3:8000,10.0.0.2:8000,10.0.0.1:8000"
    assert view.served_by("10.0.0.2:8000", f"{b}#1") == f"{b}#1"
    assert view.served_by("10.0.0.1:8000", f"{b}#1") == f"{a}#1"
    assert view.served_by("10.0.0.3:8000", f"{b}#1") == c and view.served_by("10.9.9.9:1", c) is None
