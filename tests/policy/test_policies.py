"""Policies by table: what each must choose, and that it is a pure function of what it is given."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_prefix_router.policy import POLICIES, Candidate, PolicyInput, policy_named
from litellm_prefix_router.settings import SettingsError


def choose(policy: str, *candidates: Candidate, **more) -> str:
    ranking = policy_named(policy).rank(PolicyInput(candidates=candidates, **more), Random(0))
    return candidates[ranking.order[0]].replica_id


def replica(name: str, **more) -> Candidate:
    return Candidate(replica_id=name, prefill_tokens_per_s=1000.0, **more)


def four(**at) -> list[Candidate]:
    """Four idle replicas; keyword a..d overrides one of them."""
    return [replica(name, **at.get(name, {})) for name in "abcd"]


def test_least_cost_follows_the_match_when_all_are_idle():
    assert choose("least-cost", *four(c={"match_tokens": 800}), prompt_tokens=1000) == "c"


def test_least_cost_leaves_the_match_when_waiting_for_it_costs_more_than_computing_again():
    busy = {"match_tokens": 800, "pending_prefill_tokens": 5000}
    assert choose("least-cost", *four(c=busy), prompt_tokens=1000, backlog_weight=0.0) != "c"


def test_under_load_of_all_a_miss_counts_more():
    """Everyone has 4 s of backlog, the holder 5 s: a miss would delay everybody behind it, so the match still wins."""
    backlog = {name: {"pending_prefill_tokens": 4000} for name in "abd"}
    holder = {"match_tokens": 900, "pending_prefill_tokens": 5000}
    assert choose("least-cost", *four(**backlog, c=holder), prompt_tokens=1000) == "c"
    assert choose("least-cost", *four(**backlog, c=holder), prompt_tokens=1000, backlog_weight=0.0) != "c"


def test_recent_placement_counts_like_a_match():
    assert choose("least-cost", *four(b={"recent_tokens": 640}), prompt_tokens=1000) == "b"


def test_confidence_scales_the_match():
    doubted = {"match_tokens": 1000, "confidence": 0.3}
    assert choose("least-cost", *four(a=doubted, d={"match_tokens": 500}), prompt_tokens=1010) == "d"


def test_a_lower_tier_counts_less_than_gpu_memory():
    in_cpu = {"lower_tokens": {"cpu": 900}}
    assert choose("least-cost", *four(a=in_cpu), prompt_tokens=1000) == "a"
    assert choose("least-cost", *four(a=in_cpu, b={"match_tokens": 900}), prompt_tokens=1000) == "b"


def test_no_room_for_the_prompt_is_waited_for():
    full = {"match_tokens": 900, "capacity_tokens": 4000, "active_tokens": 4000}
    assert choose("least-cost", *four(a=full), prompt_tokens=1000) != "a"


def test_equal_costs_are_spread_at_random():
    chosen = {
        policy_named("least-cost").rank(PolicyInput(candidates=four(), prompt_tokens=100), Random(seed)).order[0]
        for seed in range(50)
    }
    assert chosen == {0, 1, 2, 3}


def test_round_robin_goes_round_whatever_the_order_of_the_candidates():
    candidates = four()
    first = [choose("round-robin", *candidates, sequence=i) for i in range(8)]
    other = [choose("round-robin", *reversed(candidates), sequence=i) for i in range(8)]
    assert first == other == list("abcdabcd")


def test_least_load_takes_fewest_pending_tokens_then_fewest_requests():
    busy = {"pending_prefill_tokens": 10}
    assert choose("least-load", *four(a=busy, b=busy, c={"requests": 3}, d={"requests": 2})) == "d"


def test_consistent_hash_agrees_between_gateways_and_moves_only_the_lost_share():
    keys = range(200)
    before = {key: choose("chwbl", *four(), prefix_key=key) for key in keys}
    assert set(before.values()) == set("abcd")
    assert before == {key: choose("chwbl", *reversed(four()), prefix_key=key) for key in keys}
    without_d = four()[:3]
    after = {key: choose("chwbl", *without_d, prefix_key=key) for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != "d")


def test_consistent_hash_passes_over_an_overloaded_replica():
    home = choose("chwbl", *four(), prefix_key=7)
    loaded = [replica(name, requests=8 if name == home else 0) for name in "abcd"]
    assert choose("chwbl", *loaded, prefix_key=7) != home


def test_an_unknown_policy_is_named_with_the_known_ones():
    with pytest.raises(SettingsError, match=r"no policy is called 'best'; known: .*least-cost"):
        policy_named("best")


@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(
        st.builds(
            Candidate,
            replica_id=st.text(min_size=1, max_size=4),
            match_tokens=st.integers(0, 10**6),
            recent_tokens=st.integers(0, 10**6),
            confidence=st.floats(0, 1),
            requests=st.integers(0, 1000),
            pending_prefill_tokens=st.integers(0, 10**7),
            active_tokens=st.integers(0, 10**7),
            capacity_tokens=st.integers(0, 10**7),
        ),
        min_size=1,
        max_size=9,
    ),
    st.integers(0, 10**6),
    st.integers(),
)
def test_every_policy_ranks_every_candidate_once_and_repeats_itself(name, candidates, prompt_tokens, key):
    given = PolicyInput(candidates=candidates, prompt_tokens=prompt_tokens, prefix_key=key, sequence=abs(key))
    rankings = [policy_named(name).rank(given, Random(3)) for _ in range(2)]
    assert rankings[0] == rankings[1]
    assert sorted(rankings[0].order) == list(range(len(candidates)))
