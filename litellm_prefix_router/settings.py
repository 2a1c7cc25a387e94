"""Every setting, once, with its unit and default. No other file reads the environment or a settings file.

Three sources, strongest first: what the caller passes (LiteLLM's `callback_settings.prefix_router`, a YAML file given
to a command), `PREFIX_ROUTER_*` environment variables, the defaults below.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict


class SettingsError(Exception):
    """A setting that cannot be used: one line that says what to change."""


class ModelSettings(BaseModel):
    """How one model's prompts are tokenized, as its engine does it. The names are the engine's own options."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    tokenizer: str | None = Field(None, description="Folder or Hugging Face id; default: the replica's own model root.")
    chat_template: str | None = Field(None, description="Template text or file; default: the tokenizer's own.")
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    exclude_tools_when_tool_choice_none: bool = False
    engine: Literal["auto", "vllm", "sglang"] = "auto"
    engine_version: str | None = Field(None, description="Default: asked from the replica.")
    tokenizer_mode: Literal["auto", "hf", "mistral", "harmony", "engine"] = "auto"
    max_model_len: int | None = Field(None, ge=1, description="Context in tokens; default: what the engine says.")
    block_size: int | None = Field(None, ge=1, description="Tokens a block; default: what the engine reports.")
    lora_modules: list[str] = Field(default_factory=list, description="Names that are adapters of this model.")


class EndpointSettings(BaseModel):
    """One endpoint of Envoy's cluster, where more than its ip:port has to be said."""

    model_config = ConfigDict(extra="forbid")

    endpoint: str = Field(
        description="ip:port as Envoy's cluster lists it; a name:port is resolved to all its addresses."
    )
    address: str | None = Field(None, description="Base URL of its API without /v1; default: from the endpoint.")
    drain: bool = Field(False, description="Send nothing new there while another endpoint is left.")
    events: str | None = Field(None, description="ZMQ endpoint of its KV events; default: what the engine reports.")
    replay: str | None = Field(None, description="ZMQ endpoint of its replay; default: what the engine reports.")


class EnvoyPoolSettings(BaseModel):
    """One pool of the Envoy gateway: the endpoints of one of Envoy's clusters."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, description="The engine's model name.")
    endpoints: list[str | EndpointSettings] = Field(min_length=1, description="ip:port, name:port, or a mapping.")
    scheme: Literal["http", "https"] = Field("http", description="How to reach the endpoints' own API.")
    rewrite_model: dict[str, str] = Field(
        default_factory=dict, description='Model name in requests -> name sent to the engine; "*": any other name.'
    )


class EnvoySettings(BaseModel):
    """The external processor for Envoy (`prefix-router ext-proc`)."""

    model_config = ConfigDict(extra="forbid")

    listen: str = Field(
        "127.0.0.1:9002",
        description="host:port or unix:///path. Worker n listens on port + n, or at the path with .n appended.",
    )
    workers: int = Field(1, ge=1, le=64, description="Processes, one address each: list them all in Envoy's cluster.")
    tls_certificate: Path | None = Field(None, description="PEM file; with tls_key: serve TLS.")
    tls_key: Path | None = Field(None, description="PEM file.")
    tls_client_ca: Path | None = Field(None, description="PEM file; clients must show a certificate of this CA (mTLS).")
    pools: dict[str, EnvoyPoolSettings] = Field(default_factory=dict, description="By name; best Envoy's cluster name.")
    list_length: int = Field(4, ge=1, description="Endpoints named for a request, best first: for Envoy's retries.")
    audit_response: bool = Field(
        True, description="Follow each response to its end (load, usage); off: leave once the request is placed."
    )
    max_message_mb: int = Field(64, ge=1, description="Largest message from Envoy, MiB: bounds a buffered body.")
    shed_backlog_s: float | None = Field(
        None,
        gt=0,
        description="Answer 429 where even the best replica has more prefill ahead, seconds; default: never.",
    )
    session_header: str | None = Field(
        None, description="Request header with a session's key, by which unreadable bodies are placed."
    )
    tenant_header: str | None = Field(None, description="Request header that names the tenant; must be a trusted one.")
    tenant_metadata: list[str] = Field(
        default_factory=list, description="Path to the tenant in Envoy's metadata: namespace, then keys (JWT claims)."
    )
    salt_secret: SecretStr | None = Field(
        None, description="Set: every JSON body carries its tenant's cache_salt, an HMAC with this secret."
    )
    health_path: str = Field("/health", pattern="^/", description="Path that tells a replica's health.")
    health_interval_s: float = Field(0.5, gt=0, description="Between two probes of a replica that shows no other sign.")
    health_timeout_s: float = Field(2.0, gt=0, description="Bound on a probe's answer.")
    health_timeouts: int = Field(2, ge=1, description="Probes in a row without an answer that make a replica down.")
    eject_failures: int = Field(5, ge=1, description="5xx answers in a row that take a replica out for eject_s.")
    eject_s: float = Field(5.0, ge=0, description="How long.")
    resolve_interval_s: float = Field(2.0, gt=0, description="Between two resolutions of name:port endpoints.")
    shutdown_grace_s: float = Field(30.0, ge=0, description="How long running streams may go on at shutdown.")


class Settings(BaseSettings):
    """All settings. Times carry their unit in the name; sizes are in tokens, blocks or bytes as named."""

    model_config = SettingsConfigDict(env_prefix="PREFIX_ROUTER_", env_nested_delimiter="__", extra="forbid")

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="redis://, rediss://, unix://, redis+sentinel://, redis+cluster://, or memory:// (one process).",
    )
    key_prefix: str = Field("prefix-router", min_length=1, description="First part of every key in Redis.")
    policy: str = Field("least-cost", description="Name of the routing policy.")
    deadline_ms: float = Field(20.0, gt=0, description="Bound on one decision; past it the next best knowledge places.")
    receipt_header: bool = Field(True, description="Add the x-prefix-router response header.")
    embedded_indexer: bool = Field(True, description="Follow engine events in the gateway process that has the lease.")
    startup_wait_s: float = Field(10.0, ge=0, description="How long a starting gateway waits for its tokenizers.")

    prefill_tokens_per_s: float = Field(8000.0, gt=0, description="Prefill rate assumed until it has been measured.")
    backlog_weight: float = Field(2.0, ge=0, description="λ of the cost per second of the fleet's mean backlog.")
    backlog_weight_max: float = Field(20.0, ge=0, description="Upper bound of λ.")
    placement_ttl_s: float = Field(30.0, ge=0, description="How long a placement is remembered beside the index.")
    approximate_ttl_s: float = Field(600.0, ge=0, description="The same for replicas without events.")
    load_lease_s: float = Field(3.0, gt=0, description="Lease on a gateway's published load.")
    load_publish_ms: float = Field(100.0, gt=0, description="Interval between two publications of load.")
    announce_ttl_s: float = Field(30.0, gt=0, description="Lease on a gateway's list of replicas.")
    indexer_lease_s: float = Field(3.0, gt=0, description="Lease of an indexer on a replica.")
    write_batch_blocks: int = Field(512, ge=1, description="Blocks that one write sends: Redis is busy about 1 ms.")
    write_backlog_blocks: int = Field(200_000, ge=1, description="Writes kept for an unreachable Redis, per pool.")
    snapshot_interval_s: float = Field(
        60.0, gt=0, description="How often a tracker's state is saved for its successor."
    )
    replay_timeout_s: float = Field(5.0, gt=0, description="Silence after which an engine's replay counts as failed.")
    vitals_interval_s: float = Field(
        30.0, ge=0, description="Between comparisons of a replica's events with its own counters; 0: never."
    )
    max_blocks_per_replica: int = Field(4_000_000, ge=1, description="Blocks a tracker follows at most.")
    block_ttl_s: float = Field(3600.0, gt=0, description="Lifetime of a block's key; the indexer renews what is held.")
    max_slots: int = Field(4096, ge=8, description="Incarnations a pool can tell apart at once.")
    reservation_ttl_s: float = Field(900.0, gt=0, description="A request in flight is forgotten after this.")

    max_body_bytes: int = Field(8 << 20, gt=0, description="Larger prompts are routed without being tokenized.")
    prompt_cache_mb: int = Field(256, ge=0, description="Memory for rendered and tokenized segments, MiB per process.")
    redis_timeout_ms: float = Field(15.0, gt=0, description="Bound on one Redis round trip of a decision.")
    redis_probe_ms: float = Field(100.0, gt=0, description="First interval of probing a Redis that did not answer.")
    redis_write_timeout_ms: float = Field(2000.0, gt=0, description="Bound on one Redis round trip of an indexer.")
    lookup_max_reads: int = Field(512, ge=0, description="Blocks that a lookup reads at most to find where runs end.")
    models: dict[str, ModelSettings] = Field(default_factory=dict, description="By model (pool) name.")
    metrics_port: int | None = Field(None, description="Serve Prometheus metrics of commands on this port.")
    envoy: EnvoySettings = Field(
        default_factory=lambda: EnvoySettings.model_validate({}), description="The Envoy gateway, see below."
    )


def load_settings(values: Mapping[str, Any] | None = None, *, where: str = "settings") -> Settings:
    """Settings from `values` over the environment over defaults. Raises SettingsError with one clear line."""
    try:
        return Settings(**dict(values or {}))
    except ValidationError as error:
        raise SettingsError(f"{where}: {_explain(error)}") from None
    except TypeError:
        raise SettingsError(f"{where}: expected a mapping of settings") from None


def load_settings_file(path: Path) -> Settings:
    """Settings from a YAML file: either the settings alone or a LiteLLM config with a prefix_router section."""
    import yaml  # not needed on the import path of the gateways

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: not valid YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: expected a mapping of settings")
    section = content
    for outer in ("callback_settings", "litellm_settings"):
        nested = content.get(outer) or {}
        nested = nested.get("callback_settings", nested) if outer == "litellm_settings" else nested
        if isinstance(nested, dict) and "prefix_router" in nested:
            section = nested["prefix_router"] or {}
    return load_settings(section, where=str(path))


_SECRET = re.compile("secret|password|redis_url")
"""Settings whose values no message shows."""


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known = list(ModelSettings.model_fields) if name.startswith("models.") else list(Settings.model_fields)
            close = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known settings: {', '.join(known)}"
            lines.append(f"unknown setting {name!r}{hint}")
        else:
            got = "" if _SECRET.search(name) else f" (got {item['input']!r})"
            lines.append(f"{name}: {item['msg']}{got}")
    return "; ".join(lines)
