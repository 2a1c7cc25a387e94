"""LiteLLM's deployments as pools and replicas.

A deployment is a replica of ours if its provider talks to an engine that the user runs (`hosted_vllm/`) or if its
`model_info.prefix_router` says so; a model group is a pool if it has at least two distinct replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...fleet.pool import Pool, Replica
from ...settings import Settings, SettingsError

ENGINE_PROVIDERS = frozenset({"hosted_vllm", "vllm"})
REPLICA_OPTIONS = frozenset({"events", "replay"})


@dataclass(frozen=True, slots=True)
class DeploymentMap:
    """Which replica each deployment is, and the pools they form."""

    pools: Mapping[str, Pool] = field(default_factory=dict)
    """Model group -> pool."""
    replica_of: Mapping[str, str] = field(default_factory=dict)
    """Deployment id -> replica id."""
    signature: tuple[str, ...] = ()


def signature_of(model_list: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Changes when deployments come, go or are edited (LiteLLM gives an edited one a new id, or the address shows)."""
    return tuple(f"{_deployment_id(d)}={(d.get('litellm_params') or {}).get('api_base')}" for d in model_list)


def read_deployments(model_list: Sequence[Mapping[str, Any]], settings: Settings) -> DeploymentMap:
    """Pools and replicas of a model list. Raises SettingsError for an option that cannot be used."""
    groups: dict[str, dict[str, Replica]] = {}
    replica_of: dict[str, str] = {}
    for deployment in model_list:
        replica = _as_replica(deployment)
        if replica is None:
            continue
        group = deployment.get("model_name")
        if not isinstance(group, str):
            continue
        groups.setdefault(group, {})[replica.replica_id] = replica
        replica_of[_deployment_id(deployment)] = replica.replica_id
    pools = {}
    for group, replicas in groups.items():
        if len(replicas) < 2:
            continue
        pool = Pool(name=group, replicas=replicas)
        pool.settings = settings.models.get(group) or settings.models.get(pool.model) or pool.settings
        pools[group] = pool
    return DeploymentMap(pools, replica_of, signature_of(model_list))


def _deployment_id(deployment: Mapping[str, Any]) -> str:
    return str((deployment.get("model_info") or {}).get("id", ""))


def deployment_replica(deployment: Mapping[str, Any], known: DeploymentMap) -> str | None:
    """Replica id of a deployment, None if it is not one of ours."""
    return known.replica_of.get(_deployment_id(deployment))


def _as_replica(deployment: Mapping[str, Any]) -> Replica | None:
    params = deployment.get("litellm_params") or {}
    options = (deployment.get("model_info") or {}).get("prefix_router")
    model = params.get("model")
    api_base = params.get("api_base")
    if options is False or not isinstance(model, str):
        return None
    provider, _, engine_model = model.partition("/")
    if not engine_model:
        provider, engine_model = params.get("custom_llm_provider") or "", model
    if provider not in ENGINE_PROVIDERS and options is None:
        return None
    name = deployment.get("model_name")
    if not isinstance(api_base, str) or not api_base.startswith(("http://", "https://")):
        if options is None:
            return None
        raise SettingsError(f"model_list: deployment of {name!r} has model_info.prefix_router but no http(s) api_base")
    if options not in (None, True) and not isinstance(options, Mapping):
        raise SettingsError(f"model_list: model_info.prefix_router of {name!r} must be a mapping (or false)")
    options = options if isinstance(options, Mapping) else {}
    unknown = set(options) - REPLICA_OPTIONS
    if unknown:
        raise SettingsError(
            f"model_list: model_info.prefix_router of {name!r} has unknown option {sorted(unknown)[0]!r}; "
            f"known: {', '.join(sorted(REPLICA_OPTIONS))}"
        )
    if "*" in engine_model:
        return None
    address = api_base.rstrip("/").removesuffix("/v1")
    return Replica(
        replica_id=address,
        address=address,
        model=engine_model,
        events=options.get("events"),
        replay=options.get("replay"),
    )
