"""Prefill rates: noise must not decide, real differences must."""

from litellm_prefix_router.fleet.prefill_rate import PrefillRates


def measure(rates: PrefillRates, name: str, tokens_per_s: float, times: int = 20) -> None:
    for _ in range(times):
        rates.observe(name, 1000, 1000 / tokens_per_s)


def test_replicas_that_are_alike_count_as_alike():
    rates = PrefillRates(8000)
    for name, rate in (("a", 4000), ("b", 5000), ("c", 6000)):
        measure(rates, name, rate)
    assert {rates.rate(name) for name in "abcd"} == {5000}


def test_a_slower_kind_is_known_by_its_own_rate_once_it_is_sure():
    rates = PrefillRates(8000)
    for name in "abc":
        measure(rates, name, 8000)
    measure(rates, "d", 1000, times=2)
    assert rates.rate("d") == 8000
    measure(rates, "d", 1000)
    assert round(rates.rate("d")) == 1000 and rates.rate("a") == 8000


def test_short_prompts_measure_nothing():
    rates = PrefillRates(8000)
    rates.observe("a", 10, 5.0)
    assert rates.rate("a") == 8000
