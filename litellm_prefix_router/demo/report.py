"""The demo's numbers, for programs (a mapping) and for people (a table)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from ..sim.assets import TINY_MODEL
from ..sim.ideal import ideal_hit_rate
from ..sim.tokenizer import SimTokenizer
from .traffic import Seen

_GATEWAYS = {"litellm": "LiteLLM", "envoy": "Envoy"}


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; 0.0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summarize(seen: Sequence[Seen]) -> dict[str, Any]:
    """One side of the comparison. Shares are of successful requests; times in milliseconds."""
    good = [s for s in seen if s.ok]
    prompt_tokens = sum(s.prompt_tokens for s in good)
    ttft = [s.ttft_ms for s in good]
    replicas = Counter(s.receipt.get("replica", "?") for s in good)
    reasons = Counter(s.receipt.get("reason", "none") for s in good)
    sources = Counter(s.receipt.get("source", "none") for s in good)
    return {
        "requests": len(seen),
        "ok": len(good),
        "hit_rate": round(sum(s.cached_tokens for s in good) / prompt_tokens, 4) if prompt_tokens else 0.0,
        "ttft_p50_ms": round(percentile(ttft, 0.50), 1),
        "ttft_p90_ms": round(percentile(ttft, 0.90), 1),
        "ttft_p99_ms": round(percentile(ttft, 0.99), 1),
        "by_source": {name: round(count / len(good), 4) for name, count in sources.most_common()},
        "by_reason": {name: round(count / len(good), 4) for name, count in reasons.most_common()},
        "by_replica": {name: round(count / len(good), 4) for name, count in sorted(replicas.items())},
        "predicted_exactly": round(_predicted_exactly(good), 4),
    }


def by_gateway(seen: Sequence[Seen]) -> dict[str, Any]:
    """Each gateway's own numbers, and what it hit of conversations whose last turn another gateway had placed."""
    out: dict[str, Any] = {}
    for gateway in sorted({s.gateway for s in seen if s.gateway}):
        mine = [s for s in seen if s.gateway == gateway]
        handed_over = [s for s in mine if s.ok and s.previous_gateway not in ("", gateway)]
        tokens = sum(s.prompt_tokens for s in handed_over)
        out[gateway] = {
            **summarize(mine),
            "handed_over": len(handed_over),
            "handed_over_hit_rate": round(sum(s.cached_tokens for s in handed_over) / tokens, 4) if tokens else 0.0,
        }
    return out


def _predicted_exactly(good: Sequence[Seen]) -> float:
    """Share of the requests whose predicted cached tokens are what the replica reported, where one was predicted."""
    pairs = [
        (int(s.receipt["match"].partition("/")[0]), s.cached_tokens)
        for s in good
        if s.receipt.get("source") == "exact" and "match" in s.receipt
    ]
    return sum(predicted == reported for predicted, reported in pairs) / len(pairs) if pairs else 0.0


def ideal_of(seen: Iterable[Seen], *, usable_blocks: int, block_size: int) -> float:
    """Hit rate of one cache of that size, for the requests in the order in which they were sent."""
    tokenizer = SimTokenizer(TINY_MODEL)
    ordered = sorted((s for s in seen if s.ok), key=lambda s: s.sent_at)
    pairs = ((tokenizer.chat({"messages": s.messages}), tokenizer.encode(s.answer)) for s in ordered)
    return round(ideal_hit_rate(pairs, usable_blocks=usable_blocks, block_size=block_size), 4)


def comparison_table(results: Mapping[str, Any]) -> Table:
    """The two sides beside each other, and how they compare."""
    robin, prefix = results["round_robin"], results["prefix"]
    through = " and ".join(_GATEWAYS[name] for name in results["gateways"])
    table = Table(title=f"The same traffic, twice, through {through}", title_justify="left")
    table.add_column("")
    for name in ("round robin", "prefix routing", ""):
        table.add_column(name, justify="right")
    table.add_row("requests", str(robin["requests"]), str(prefix["requests"]))
    table.add_row("failed", str(robin["requests"] - robin["ok"]), str(prefix["requests"] - prefix["ok"]))
    ideal = results["ideal_hit_rate"]
    share = f"{prefix['hit_rate'] / ideal:.0%} of ideal" if ideal else ""
    table.add_row("cached prompt tokens", f"{robin['hit_rate']:.1%}", f"{prefix['hit_rate']:.1%}", share)
    table.add_row("  with one big cache", "", f"{ideal:.1%}", "the ideal")
    for name in ("p50", "p90", "p99"):
        before, after = robin[f"ttft_{name}_ms"], prefix[f"ttft_{name}_ms"]
        faster = f"{before / after:.1f}× faster" if after else ""
        table.add_row(f"TTFT {name}", f"{before:.0f} ms", f"{after:.0f} ms", faster)
    for i, (a, b) in enumerate(zip(robin["by_replica"].values(), prefix["by_replica"].values(), strict=False), 1):
        table.add_row(f"share of replica {i}", f"{a:.0%}", f"{b:.0%}")
    for source in sorted({*robin["by_source"], *prefix["by_source"]}):
        row = [f"{side['by_source'].get(source, 0):.1%}" for side in (robin, prefix)]
        table.add_row(f"decided by {source}", *row)
    table.add_row("predicted exactly", "", f"{prefix['predicted_exactly']:.1%}")
    for name, side in results.get("prefix_by_gateway", {}).items():
        before = results["round_robin_by_gateway"].get(name, {})
        rates = [f"{numbers.get('handed_over_hit_rate', 0):.1%}" for numbers in (before, side)]
        table.add_row(f"{_GATEWAYS[name]}: cached of", "", "", f"{side['handed_over']} turns")
        table.add_row("  what the other placed", *rates)
    return table
