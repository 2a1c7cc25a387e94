"""From a request body to what the engine is to do: prompts, lengths, labels, and the errors the engine answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .block_cache import Labels
from .config import SimConfig
from .tokenizer import BadPrompt, SimTokenizer

DEFAULT_MAX_TOKENS_OPTIONS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class ApiError(Exception):
    """An answer other than 200, in the engine's shape."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def body(self) -> dict[str, Any]:
        """JSON object of the answer."""
        kinds = {400: "BadRequestError", 404: "NotFoundError"}
        kind = kinds.get(self.status, "InternalServerError")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True, slots=True)
class Job:
    """One API call, checked."""

    model: str
    prompts: Sequence[Sequence[int]]
    choices: int
    """Answers wanted for each prompt."""
    max_tokens: int
    stop: bool
    """The answer ends by itself (with the end of turn) rather than at the limit."""
    stream: bool
    include_usage: bool
    return_token_ids: bool
    labels: Labels
    lora_path: str | None
    read_cache: bool
    report_hits: bool


class BodyReader:
    """Checks bodies for one replica. Every method raises ApiError for what the engine refuses."""

    def __init__(self, config: SimConfig, tokenizer: SimTokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._loras = {name: (position + 1, path) for position, (name, path) in enumerate(config.lora_modules.items())}
        # The engine would not start with a context that its memory cannot hold.
        self.max_model_len = min(config.max_model_len, (config.num_blocks - 1) * config.block_size)

    def chat_prompt(self, body: Mapping[str, Any]) -> list[int]:
        """Token ids of a body with messages."""
        try:
            ids = self._tokenizer.chat(body)
        except BadPrompt as error:
            raise ApiError(400, str(error)) from None
        return self._truncated(ids, body)

    def text_prompts(self, body: Mapping[str, Any], *, name: str = "prompt") -> list[list[int]]:
        """Token ids of a body with a prompt: text, ids, or a list of either."""
        prompt = body.get(name)
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
            prompts: list[Any] = [prompt]
        elif isinstance(prompt, list) and prompt:
            prompts = prompt
        else:
            raise ApiError(400, f"{name} must be text, token ids, or a non-empty list of these", name)
        special = bool(body.get("add_special_tokens", True))
        out = []
        for item in prompts:
            if isinstance(item, str):
                ids = self._tokenizer.encode(item, add_special_tokens=special)
            elif isinstance(item, list) and all(isinstance(token, int) for token in item):
                ids = item
                if item and not 0 <= min(item) <= max(item) < self._tokenizer.size:
                    raise ApiError(400, f"Token id {max(item)} is out of vocabulary", name)
            else:
                raise ApiError(400, f"{name} must be text, token ids, or a non-empty list of these", name)
            out.append(self._truncated(ids, body))
        return out

    def job(self, body: Mapping[str, Any], prompts: Sequence[Sequence[int]], headers: Mapping[str, str]) -> Job:
        """The rest of a body whose prompts are known."""
        model = body.get("model") or self._config.model_name
        if model != self._config.model_name and model not in self._loras:
            aliases = ", ".join((self._config.model_name, *self._loras))
            raise ApiError(404, f"The model `{model}` does not exist. Valid aliases: {aliases}.", "model")
        stream = bool(body.get("stream", False))
        stream_options = body.get("stream_options")
        if stream_options and not stream:
            raise ApiError(400, "Stream options can only be defined when `stream=True`.", "stream_options")
        if body.get("prompt_logprobs") is not None and stream:
            raise ApiError(400, "`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        limit, stop = self._limit(body, prompts)
        lora_id, lora_path = self._loras.get(model, (None, None))
        xargs = body.get("vllm_xargs") or {}
        session = body.get("session_id") or headers.get("x-session-id") or xargs.get("session_id")
        return Job(
            model=model,
            prompts=prompts,
            choices=self._positive(body, "n", 1),
            max_tokens=limit,
            stop=stop,
            stream=stream,
            include_usage=bool(isinstance(stream_options, Mapping) and stream_options.get("include_usage")),
            return_token_ids=bool(body.get("return_token_ids", False)),
            labels=Labels(lora_id, model if lora_id else None, self._salt(body), session),
            lora_path=lora_path,
            read_cache=body.get("prompt_logprobs") is None,
            report_hits=xargs.get("kv_cache_report_mode") == "full",
        )

    def _limit(self, body: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> tuple[int, bool]:
        """(tokens of each answer, whether it ends by itself)."""
        room = self.max_model_len
        for prompt in prompts:
            if not prompt:
                raise ApiError(400, "The decoder prompt cannot be empty")
            if len(prompt) >= self.max_model_len:
                raise ApiError(
                    400,
                    f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt "
                    f"contains {len(prompt)} input tokens. Please reduce the length of the input prompt. "
                    f"(parameter=input_tokens, value={len(prompt)})",
                    "input_tokens",
                )
            room = min(room, self.max_model_len - len(prompt))
        for name in DEFAULT_MAX_TOKENS_OPTIONS:
            if body.get(name) is not None:
                limit = self._positive(body, name, 1)
                if limit > room:
                    raise ApiError(
                        400, f"{name}={limit} is too large: the prompt leaves room for {room} tokens of the model's "
                        f"context of {self.max_model_len}. (parameter={name}, value={limit})", name,
                    )  # fmt: skip
                return limit, False
        return min(self._config.default_max_tokens, room), not body.get("ignore_eos", False)

    @staticmethod
    def _positive(body: Mapping[str, Any], name: str, default: int) -> int:
        value = body.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ApiError(400, f"{name} must be at least 1, got {value!r}.", name)
        return value

    @staticmethod
    def _salt(body: Mapping[str, Any]) -> str | None:
        salt = body.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise ApiError(
                400, "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)",
                "cache_salt",
            )  # fmt: skip
        return salt

    def _truncated(self, ids: list[int], body: Mapping[str, Any]) -> list[int]:
        keep = body.get("truncate_prompt_tokens")
        if keep is None:
            return ids
        if not isinstance(keep, int) or keep < -1 or keep == 0 or keep > self.max_model_len:
            raise ApiError(400, f"truncate_prompt_tokens cannot be {keep!r}", "truncate_prompt_tokens")
        return ids[-(self.max_model_len if keep == -1 else keep) :]
