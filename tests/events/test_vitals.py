"""An engine that works and is not heard is told from one that is idle, and a new process from an old one."""

from __future__ import annotations

from litellm_prefix_router.events.vitals import SILENT_TOKENS, Finding, Vitals, VitalsWatch, read_vitals

PAGE = """
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 5000.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 70.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.764e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 30.0
"""


def test_counters_are_read_by_rank():
    assert read_vitals(PAGE, 0) == Vitals(1.764e9, 4000)
    assert read_vitals(PAGE, 1) == Vitals(0.0, 40)
    assert read_vitals(PAGE, 2) is None and read_vitals("", 0) is None


def test_silence_counts_only_while_the_engine_computes():
    watch = VitalsWatch()
    assert watch.look(Vitals(1.0, 100), 7, 1) is Finding.FINE
    for _ in range(5):  # idle
        assert watch.look(Vitals(1.0, 100), 7, 1) is Finding.FINE
    assert watch.look(Vitals(1.0, 100 + SILENT_TOKENS), 7, 1) is Finding.FINE  # frames may be on their way
    assert watch.look(Vitals(1.0, 100 + SILENT_TOKENS), 7, 1) is Finding.SILENT
    assert watch.look(Vitals(1.0, 200 + SILENT_TOKENS), 8, 1) is Finding.FINE
    assert watch.look(Vitals(1.0, 300 + SILENT_TOKENS), 8, 1) is Finding.FINE


def test_another_process_is_noticed_by_its_counters_unless_a_new_connection_told():
    watch = VitalsWatch()
    assert watch.look(Vitals(1.0, 9000), 7, 1) is Finding.FINE
    assert watch.look(Vitals(2.0, 10), 7, 1) is Finding.RESTARTED
    assert watch.look(Vitals(2.0, 20), 7, 1) is Finding.FINE
    assert watch.look(Vitals(3.0, 5), 9, 2) is Finding.FINE  # the tracker has proved its stream since
    unnamed = VitalsWatch()
    assert unnamed.look(Vitals(0.0, 9000), 7, 1) is Finding.FINE
    assert unnamed.look(Vitals(0.0, 10), 7, 1) is Finding.FINE  # a smaller counter alone begins a new count
