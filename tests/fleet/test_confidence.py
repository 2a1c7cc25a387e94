"""Responses that contradict the index lower its credit, and when they go on, its replica is to be read anew."""

from __future__ import annotations

import itertools

from litellm_prefix_router.fleet.confidence import CONFIDENCE, DOUBT_AFTER, DOUBT_AGAIN_S, ConfidenceTracker


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def made() -> tuple[ConfidenceTracker, Clock]:
    clock = Clock()
    return ConfidenceTracker(clock, lambda: 1.7e9 + clock.now), clock


def test_mismatches_lower_the_level_and_agreement_restores_it():
    tracker, _ = made()
    levels = []
    for _ in range(8):
        tracker.observe("a", False)
        levels.append(tracker.level("a", "exact"))
    assert list(dict.fromkeys(levels)) == ["exact", "degraded", "stale"]
    assert tracker.level("a", "none") == "none" and tracker.level("b", "exact") == "exact"
    for _ in range(20):
        tracker.observe("a", True)
    assert tracker.level("a", "exact") == "exact"


def test_a_new_incarnation_begins_with_a_clean_sheet_and_an_unknown_one_changes_nothing():
    tracker, _ = made()
    assert tracker.of("a", "exact", 3) == 1.0
    for _ in range(10):
        tracker.observe("a", False)
    assert tracker.of("a", "exact", 3) == tracker.of("a", "exact", 0) == CONFIDENCE["stale"]
    assert tracker.current("a") == "stale"
    assert tracker.of("a", "exact", 4) == 1.0 and tracker.mismatch("a") == 0.0


def test_lasting_mismatches_are_doubts_at_growing_intervals():
    tracker, clock = made()
    for _ in range(DOUBT_AFTER - 1):
        tracker.observe("a", False)
    assert tracker.doubted_at("a") == 0.0
    asked = []
    for _ in range(6 * int(DOUBT_AGAIN_S)):
        clock.now += 1.5
        tracker.observe("a", False)
        if tracker.doubted_at("a") not in asked:
            asked.append(tracker.doubted_at("a"))
    waits = [round(b - a) for a, b in itertools.pairwise(asked)]
    assert waits == [120, 240, 480]
    tracker.forget("a")
    assert tracker.doubted_at("a") == 0.0 and tracker.mismatch("a") == 0.0
