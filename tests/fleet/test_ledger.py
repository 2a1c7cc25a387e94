"""The load ledger: every reservation is released exactly once, whatever happens to it."""

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from litellm_prefix_router.fleet.ledger import LoadLedger
from litellm_prefix_router.index.contract import ReplicaLoad


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_counts_from_dispatch_to_end():
    ledger = LoadLedger(Clock())
    key = ledger.reserve("chat", "a", prefill_tokens=100, active_tokens=300)
    assert ledger.load("a") == ReplicaLoad(1, 100, 300)
    assert ledger.first_token(key) == 0.0
    assert ledger.load("a") == ReplicaLoad(1, 0, 300)
    assert ledger.first_token(key) is None
    assert ledger.release(key)
    assert not ledger.release(key)
    assert ledger.loads() == {}


def test_what_nobody_releases_expires():
    clock = Clock()
    ledger = LoadLedger(clock, ttl_s=60)
    ledger.reserve("chat", "a", prefill_tokens=5, active_tokens=5)
    clock.now = 30
    young = ledger.reserve("chat", "a", prefill_tokens=7, active_tokens=7)
    clock.now = 61
    assert ledger.expire() == 1
    assert ledger.load("a") == ReplicaLoad(1, 7, 7)
    ledger.release(young)
    assert ledger.loads() == {} and ledger.expired == 1


class LedgerMachine(RuleBasedStateMachine):
    open_keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = LoadLedger(Clock())
        self.model: dict[int, tuple[str, int, int]] = {}

    @rule(target=open_keys, name=st.sampled_from("abcd"), prefill=st.integers(0, 99), active=st.integers(0, 99))
    def reserve(self, name, prefill, active):
        key = self.ledger.reserve("chat", name, prefill_tokens=prefill, active_tokens=active)
        self.model[key] = (name, prefill, active)
        return key

    @rule(key=open_keys)
    def first_token(self, key):
        self.ledger.first_token(key)
        if key in self.model:
            name, _, active = self.model[key]
            self.model[key] = (name, 0, active)

    @rule(key=consumes(open_keys), times=st.integers(1, 3))
    def release(self, key, times):
        for _ in range(times):
            self.ledger.release(key)
        self.model.pop(key, None)

    @invariant()
    def sums_agree(self):
        for name in "abcd":
            held = [entry for entry in self.model.values() if entry[0] == name]
            expected = ReplicaLoad(len(held), sum(e[1] for e in held), sum(e[2] for e in held))
            assert self.ledger.load(name) == expected


TestLedgerMachine = LedgerMachine.TestCase
