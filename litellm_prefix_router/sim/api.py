"""The HTTP API of a replica: the engine's paths on Starlette."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from . import metrics
from .bodies import ApiError, BodyReader, Job
from .config import SimConfig
from .faults import Faults
from .generation import ConnectionDropped, Generation, Generator
from .rank import EngineDied, Rank
from .shapes import Shape, Usage, messages_body, responses_body
from .tokenizer import SimTokenizer

VERSION = "0.32.0"
Handler = Callable[[HttpRequest], Awaitable[Response]]


class Api:
    """Handlers over the ranks of one replica."""

    def __init__(self, config: SimConfig, tokenizer: SimTokenizer, ranks: list[Rank], faults: Faults) -> None:
        self.started_at = time.time()
        self._config = config
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._faults = faults
        self._reader = BodyReader(config, tokenizer)
        self._generator = Generator(config, tokenizer, ranks, faults)

    def app(self) -> Starlette:
        """The ASGI application."""
        post = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completions,
            "/v1/responses": self._responses,
            "/v1/messages": self._messages,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/reset_prefix_cache": self._reset,
            "/sim/restart": self._restart,
        }
        get = {
            "/health": self._health,
            "/ping": self._health,
            "/version": self._version,
            "/load": self._load,
            "/metrics": self._metrics,
            "/v1/models": self._models,
            "/kv_event_sources": self._event_sources,
            "/server_info": self._server_info,
        }
        routes = [Route(path, self._answering(handler), methods=["POST"]) for path, handler in post.items()]
        routes += [Route(path, self._answering(handler), methods=["GET"]) for path, handler in get.items()]
        routes.append(Route("/ping", self._answering(self._health), methods=["POST"]))
        # Not behind `_answering`: a frozen replica must be thawed by someone.
        routes.append(Route("/sim/fault", self._fault, methods=["GET", "POST"]))
        return Starlette(routes=routes)

    def _answering(self, handler: Handler) -> Handler:
        async def answer(request: HttpRequest) -> Response:
            await self._faults.thawed()
            try:
                return await handler(request)
            except ApiError as error:
                return JSONResponse(error.body(), error.status)
            except EngineDied as error:
                return JSONResponse(ApiError(500, str(error)).body(), 500)

        return answer

    # Generation

    async def _chat(self, request: HttpRequest) -> Response:
        body = await self._generation_body(request)
        return await self._complete(request, body, [await self._chat_prompt(body)], chat=True)

    async def _completions(self, request: HttpRequest) -> Response:
        body = await self._generation_body(request)
        prompts = await asyncio.to_thread(self._reader.text_prompts, body)
        return await self._complete(request, body, prompts, chat=False)

    async def _responses(self, request: HttpRequest) -> Response:
        body = await self._generation_body(request)
        given = body.get("input")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given or [])
        if isinstance(body.get("instructions"), str):
            messages.insert(0, {"role": "system", "content": body["instructions"]})
        job = self._job(request, body, [await self._chat_prompt({**body, "messages": messages})])
        generation = await self._gather(request, job)
        return JSONResponse(responses_body(job, generation.choices[0], self._usage(job, generation)))

    async def _messages(self, request: HttpRequest) -> Response:
        body = await self._generation_body(request)
        messages = list(body.get("messages") or [])
        if body.get("system"):
            messages.insert(0, {"role": "system", "content": body["system"]})
        job = self._job(request, body, [await self._chat_prompt({**body, "messages": messages})])
        generation = await self._gather(request, job)
        return JSONResponse(messages_body(job, generation.choices[0], self._usage(job, generation)))

    async def _complete(
        self, request: HttpRequest, body: Mapping[str, Any], prompts: list[list[int]], *, chat: bool
    ) -> Response:  # fmt: skip
        job = self._job(request, body, prompts)
        shape = Shape(job, chat=chat)
        if job.stream:
            generation = self._generator.start(job, self._rank(request))
            return EventStream(self._chunks(shape, job, generation), generation)
        generation = await self._gather(request, job)
        return JSONResponse(shape.whole(generation.choices, self._usage(job, generation)))

    async def _chunks(self, shape: Shape, job: Job, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        opened = set()
        async for choice, text, tokens in generation.pieces():
            if choice.index not in opened:
                opened.add(choice.index)
                first = shape.first(choice)
                if first is not None:
                    yield first
            yield shape.chunk(choice, text, tokens)
        if job.include_usage:
            yield shape.last(self._usage(job, generation))

    async def _gather(self, request: HttpRequest, job: Job) -> Generation:
        """Run a whole call; a client that goes away ends it and frees what it held."""
        if job.stream:
            raise ApiError(400, "streaming is not simulated on this path", "stream")
        generation = self._generator.start(job, self._rank(request))
        watcher = asyncio.ensure_future(_gone(request.receive))
        work = asyncio.ensure_future(generation.run())
        try:
            await asyncio.wait((watcher, work), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ApiError(499, "the client went away")
            work.result()
            return generation
        finally:
            watcher.cancel()
            work.cancel()
            await asyncio.gather(watcher, work, return_exceptions=True)
            generation.close()

    async def _generation_body(self, request: HttpRequest) -> dict[str, Any]:
        if self._faults.use("fail_requests"):
            raise ApiError(self._faults.fail_status, "this failure was asked for")
        return await self._body(request)

    @staticmethod
    async def _body(request: HttpRequest) -> dict[str, Any]:
        try:
            body = json.loads(await request.body())
        except ValueError as error:
            raise ApiError(400, f"JSON decode error: {error}") from None
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        return body

    def _job(self, request: HttpRequest, body: Mapping[str, Any], prompts: list[list[int]]) -> Job:
        return self._reader.job(body, prompts, request.headers)

    async def _chat_prompt(self, body: Mapping[str, Any]) -> list[int]:
        # In a thread: several ms for a long prompt, and several replicas may share this event loop.
        return await asyncio.to_thread(self._reader.chat_prompt, body)

    def _usage(self, job: Job, generation: Generation) -> Usage:
        return Usage.of(job, generation.choices, self._config.block_size)

    def _rank(self, request: HttpRequest) -> int | None:
        asked = request.headers.get("x-data-parallel-rank")
        if asked is None:
            return None
        if not asked.isdigit() or int(asked) >= len(self._ranks):
            raise ApiError(400, f"data_parallel_rank {asked} is out of range [0, {len(self._ranks)}).")
        return int(asked)

    # Everything else

    async def _tokenize(self, request: HttpRequest) -> Response:
        body = await self._body(request)
        if "messages" in body:
            ids = await self._chat_prompt(body)
        else:
            ids = (await asyncio.to_thread(self._reader.text_prompts, body))[0]
        names = [self._tokenizer.token(token) for token in ids] if body.get("return_token_strs") else None
        limit = self._reader.max_model_len
        return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": names})

    async def _detokenize(self, request: HttpRequest) -> Response:
        tokens = (await self._body(request)).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) and token >= 0 for token in tokens):
            raise ApiError(400, "tokens must be a list of token ids", "tokens")
        return JSONResponse({"prompt": self._tokenizer.decode(tokens, skip_special_tokens=False)})

    async def _reset(self, request: HttpRequest) -> Response:
        results = [rank.engine.reset() for rank in self._ranks]
        return JSONResponse({"success": all(results)})

    async def _health(self, request: HttpRequest) -> Response:
        return Response(status_code=503 if self._faults.unhealthy else 200)

    async def _version(self, request: HttpRequest) -> Response:
        return JSONResponse({"version": VERSION})

    async def _load(self, request: HttpRequest) -> Response:
        return JSONResponse({"server_load": 0})  # what the engine says unless told to count

    async def _metrics(self, request: HttpRequest) -> Response:
        text = metrics.render(self._config, self._ranks, self.started_at)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: HttpRequest) -> Response:
        config = self._config
        cards = [self._card(config.model_name, str(config.model_folder), None, self._reader.max_model_len)]
        cards += [self._card(name, path, config.model_name, None) for name, path in config.lora_modules.items()]
        return JSONResponse({"object": "list", "data": cards})

    def _card(self, name: str, root: str, parent: str | None, limit: int | None) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": int(self.started_at), "owned_by": "vllm"}
        return {**card, "root": root, "parent": parent, "max_model_len": limit, "permission": []}

    async def _event_sources(self, request: HttpRequest) -> Response:
        return JSONResponse({str(rank.number): self._events_config(rank) for rank in self._ranks if rank.publisher})

    def _events_config(self, rank: Rank) -> dict[str, Any]:
        publisher = rank.publisher
        return {
            "enable_kv_cache_events": publisher is not None,
            "publisher": "zmq" if publisher else "null",
            "endpoint": publisher.endpoint if publisher else None,
            "replay_endpoint": publisher.replay_endpoint if publisher else None,
            "buffer_steps": self._config.buffer_steps,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": self._config.topic,
        }

    async def _server_info(self, request: HttpRequest) -> Response:
        config = self._config
        folder = str(config.model_folder)
        info = {
            "model_config": {
                "model": folder,
                "tokenizer": folder,
                "max_model_len": self._reader.max_model_len,
                "served_model_name": config.model_name,
            },
            "cache_config": {
                "block_size": config.block_size,
                "num_gpu_blocks": config.num_blocks,
                "enable_prefix_caching": True,
                "prefix_caching_hash_algo": config.hash_algorithm,
            },
            "parallel_config": {"data_parallel_size": config.data_parallel_size, "data_parallel_rank": 0},
            "kv_events_config": self._events_config(self._ranks[0]),
        }
        as_json = request.query_params.get("config_format") == "json"
        return JSONResponse({"vllm_config": info if as_json else str(info)})

    async def _fault(self, request: HttpRequest) -> Response:
        if request.method == "POST":
            try:
                self._faults.update(await self._body(request))
            except (ApiError, ValueError) as error:
                return JSONResponse(ApiError(400, str(error)).body(), 400)
        return JSONResponse(self._faults.as_dict())

    async def _restart(self, request: HttpRequest) -> Response:
        self.restart()
        return JSONResponse({"restarted": True})

    def restart(self) -> None:
        """Another life of the whole engine process, on the same ports."""
        for rank in self._ranks:
            rank.restart()
        self.started_at = time.time()


class EventStream(Response):
    """Server-sent events of one generation. Ends the generation when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], generation: Generation) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._chunks = chunks
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry. Raises ConnectionDropped where a fault asks for it: the server then closes the connection."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        watcher = asyncio.ensure_future(_gone(receive))
        work = asyncio.ensure_future(self._send_all(send))
        try:
            await asyncio.wait((watcher, work), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            watcher.cancel()
            work.cancel()
            await asyncio.gather(watcher, work, return_exceptions=True)
            self._generation.close()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:  # type: ignore[type-var]
            with suppress(EngineDied):  # the engine ends the stream without an end mark, too
                async for chunk in chunks:
                    text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
                    await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
                return
        raise ConnectionDropped


async def _gone(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
