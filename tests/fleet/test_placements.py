"""Placement memory against a plain model: leading blocks placed within the age."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from litellm_prefix_router.fleet.placements import PlacementMemory
from litellm_prefix_router.prompt.blocks import as_token_ids, chain_hashes


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_matches_whole_prefixes_and_forgets_by_age():
    clock = Clock()
    memory = PlacementMemory(clock)
    memory.place("a", [1, 2, 3])
    assert memory.match("a", [1, 2, 9], 30) == 2
    assert memory.match("b", [1, 2, 3], 30) == 0
    clock.now = 31
    assert memory.match("a", [1, 2, 3], 30) == 0
    assert memory.match("a", [1, 2, 3], 60) == 3


def test_memory_is_bounded_and_the_latest_stays():
    memory = PlacementMemory(Clock(), max_blocks=20)
    for start in range(0, 100, 5):
        memory.place("ab"[start % 2], list(range(start, start + 5)))
        assert len(memory) <= 20
        assert memory.match("ab"[start % 2], list(range(start, start + 5)), 30) == 5
    assert memory.match("a", [0, 1, 2, 3, 4], 30) == 0
    memory.place("a", list(range(1000, 1040)))
    assert len(memory) <= 20 and memory.match("a", list(range(1000, 1040)), 30) == 10


def test_forgetting_a_replica_returns_its_memory():
    memory = PlacementMemory(Clock())
    memory.place("a", [1, 2])
    memory.place("b", [1])
    memory.forget("a")
    assert len(memory) == 1 and memory.match("a", [1, 2], 30) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(0, 20)),
        max_size=20,
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
)
def test_agrees_with_a_scan(placements, asked):
    clock = Clock()
    memory = PlacementMemory(clock)
    model: dict[tuple[str, int], float] = {}
    for name, tokens, pause in placements:
        clock.now += pause
        chain = chain_hashes(as_token_ids(tokens), 1, 0)
        memory.place(name, chain)
        model.update({(name, block): clock.now for block in chain})
    chain = chain_hashes(as_token_ids(asked), 1, 0)
    for name in "abcd":
        expected = 0
        for block in chain:
            if model.get((name, block), -inf) < clock.now - 30:
                break
            expected += 1
        assert memory.match(name, chain, 30) == expected
