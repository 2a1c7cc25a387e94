"""What replicas say of themselves: an answer that does not come changes nothing that is known."""

from __future__ import annotations

import httpx

from litellm_prefix_router.fleet.discovery import ReplicaFacts, ask_replica

ANSWERS = {
    "/v1/models": {
        "data": [{"id": "base", "root": "org/base", "max_model_len": 4096}, {"id": "lora", "parent": "base"}]
    },
    "/version": {"version": "0.32.0"},
    "/kv_event_sources": {"0": {"endpoint": "tcp://*:1"}, "1": {"endpoint": "tcp://*:2"}},
}
METRICS = 'vllm:cache_config_info{block_size="64",num_gpu_blocks="101"} 1.0'


async def ask(late: tuple[str, ...] = (), absent: tuple[str, ...] = ()) -> ReplicaFacts:
    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path in late:
            raise httpx.ReadTimeout("late")
        if path in absent:
            return httpx.Response(404)
        return httpx.Response(200, text=METRICS) if path == "/metrics" else httpx.Response(200, json=ANSWERS[path])

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        return await ask_replica(client, "http://a")


async def test_one_late_answer_takes_nothing_away() -> None:
    known = await ask()
    assert (known.base_model, known.version, known.block_size, known.dp_ranks) == ("base", "0.32.0", 64, 2)
    assert known.capacity_tokens == 3200 and not known.unanswered
    for path in (*ANSWERS, "/metrics"):
        facts = await ask(late=(path,))
        assert facts.reachable and len(facts.unanswered) == 1
        merged = facts.after(known)
        assert merged.unanswered == facts.unanswered
        for name in ReplicaFacts.__slots__:
            assert name == "unanswered" or getattr(merged, name) == getattr(known, name), (path, name)


async def test_not_found_is_an_answer() -> None:
    facts = (await ask(absent=("/kv_event_sources", "/version"))).after(await ask())
    assert not facts.unanswered and facts.event_sources == {} and facts.version is None and facts.dp_ranks == 1


async def test_a_replica_that_answers_nothing_is_not_reachable() -> None:
    facts = await ask(late=(*ANSWERS, "/metrics"))
    assert not facts.reachable and len(facts.unanswered) == 4
