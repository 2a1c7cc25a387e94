"""One request's ext_proc stream as a state machine without I/O: Envoy's messages in, actions out.

    request headers ──► request body, whole ──► Place ──► placed(decision) ──► response headers ──► body ... end
                        (or in pieces)           │                               │
                                                 └ nothing to choose from:       └ who served it, receipt header,
                                                   continue, or 503              first token, usage, end

Which way the request's body comes is told by the first message (`protocol_config`):

- BUFFERED and the like: headers are answered at once; the body message carries all of it; the answer to it carries the
  endpoints in dynamic metadata. Whatever goes wrong, Envoy goes on without a choice.
- FULL_DUPLEX_STREAMED (the endpoint-picker protocol): nothing is answered until the body has ended; then the headers'
  answer with the endpoints in a header and in metadata, and the body, which Envoy no longer has, in pieces.

A stream that ends early, in any state, ends the request's load: `closed`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from ...decision import RECEIPT_HEADER, Decision
from ...fleet.pool import RANK_HEADER, address_of, rank_of
from ...request import RoutingRequest
from ...settings import Settings
from ..report_mode import XARGS, without_report_mode
from . import wire
from .actions import Action, Finished, FirstToken, HangUp, Place, Reply, Served, Unplaced
from .bodies import edit_object, read_object, salt_of
from .directory import Directory, PoolView
from .health import HealthBook
from .usage import UsageReader, readable

MAX_HEADER_VALUE = 200
"""Characters of a client's header that are used as a key."""
_REQUEST_HEADERS = (":path", "content-encoding", "x-request-id")
_RESPONSE_HEADERS = frozenset({":status", "content-type", "content-encoding"})


class Stream:
    """`route_pool` is the pool that the route's configuration names in the gRPC call's metadata."""

    def __init__(
        self, settings: Settings, directory: Directory, health: HealthBook, route_pool: str | None = None
    ) -> None:
        self._settings = settings
        self._options = settings.envoy
        self._directory = directory
        self._health = health
        self._route_pool = route_pool
        self._started = False
        self.duplex_request = False
        self.duplex_response = False
        self._whole_body = True
        named = (settings.envoy.session_header, settings.envoy.tenant_header)
        self._wanted = (*_REQUEST_HEADERS, *(name.lower() for name in named if name))
        self._headers: Mapping[str, str] = {}
        self._headers_message: wire.Request | None = None
        self._cluster: str | None = None
        self._body = bytearray()
        self._edited = False
        self._view: PoolView | None = None
        self._answering = "request_headers"
        """Kind of the message whose answer carries the decision."""
        self._body_ended = False
        self._trailers = False
        self._placed = False
        self._decision: Decision | None = None
        self._finished = False
        self._usage: UsageReader | None = None
        self._first_token = False

    # --- events ---------------------------------------------------------------------------------------------------

    def receive(self, message: wire.Request) -> list[Action]:
        """The next message from Envoy."""
        if not self._started:
            self._begin(message)
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            return self._request_headers(message)
        if kind == "request_body":
            return self._request_body(message.request_body)
        if kind == "request_trailers":
            return self._request_trailers()
        if kind == "response_headers":
            return self._response_headers(message)
        if kind == "response_body":
            return self._response_body(message.response_body)
        if kind == "response_trailers":
            return [Reply(wire.go_on(kind)), *self._over()]
        return []

    def placed(self, decision: Decision) -> list[Action]:
        """The router's answer to `Place`."""
        view = self._view
        assert view is not None
        self._decision, self._placed = decision, True
        endpoints = view.endpoints(decision.ranking, self._options.list_length)
        actions = self._answer_request(endpoints, rank_of(decision.replica_id))
        if not self._options.audit_response and not self.duplex_request:
            actions.append(HangUp())
        return actions

    def shed(self, retry_message: str) -> list[Action]:
        """Instead of `placed`: the request is refused."""
        self._placed = True
        return [Reply(wire.immediate(429, retry_message))]

    def failed(self, message: wire.Request) -> list[Action]:
        """Something in here broke on this message: what Envoy waits for, so that the request goes on."""
        if not self._placed:
            return self._without_choice("internal_error")
        kind = message.WhichOneof("request")
        if kind == ("response_body" if self.duplex_response else "request_body" if self.duplex_request else ""):
            body = getattr(message, kind)
            return [Reply(r) for r in wire.body_chunks(kind, body.body, body.end_of_stream)]
        return [Reply(wire.go_on(kind))]

    def closed(self) -> list[Action]:
        """The gRPC stream is over, for whatever reason."""
        return self._end()

    # --- request --------------------------------------------------------------------------------------------------

    def _begin(self, message: wire.Request) -> None:
        self._started = True
        if message.HasField("protocol_config"):
            config = message.protocol_config
            self.duplex_request = config.request_body_mode == wire.FULL_DUPLEX
            self.duplex_response = config.response_body_mode == wire.FULL_DUPLEX
            self._whole_body = config.request_body_mode not in (wire.NONE, wire.STREAMED)
        self._headers_message = message
        self._cluster = wire.attribute(message, "xds.cluster_name")

    def _request_headers(self, message: wire.Request) -> list[Action]:
        self._headers = wire.header_map(message.request_headers, self._wanted)
        if message.request_headers.end_of_stream:
            self._body_ended = True
            return self._place()
        if not self._whole_body:
            return self._place()  # the body will not be shown in time
        return [] if self.duplex_request else [Reply(wire.go_on("request_headers"))]

    def _request_body(self, body: Any) -> list[Action]:
        if not self.duplex_request:
            if self._placed:
                return [Reply(wire.go_on("request_body"))]  # STREAMED: placed by the headers
            self._answering = "request_body"
            self._body += body.body
            return self._place()
        if self._placed:  # beyond the size that is looked at: pass it on
            return [Reply(r) for r in wire.body_chunks("request_body", body.body, body.end_of_stream)]
        self._body += body.body
        self._body_ended = body.end_of_stream
        if self._body_ended or len(self._body) > self._looked_at_bytes:
            return self._place()
        return []

    def _request_trailers(self) -> list[Action]:
        if self.duplex_request and not self._placed:
            self._trailers = True
            return self._place()
        return [Reply(wire.go_on("request_trailers"))]

    @property
    def _looked_at_bytes(self) -> int:
        salted = self._options.salt_secret is not None  # a salt is a promise to the tenants, whatever the size
        return self._options.max_message_mb << 20 if salted else self._settings.max_body_bytes

    def _place(self) -> list[Action]:
        path = self._path()
        note = None
        body: dict[str, Any] | None = None
        if self._body and len(self._body) > self._looked_at_bytes:
            note = "body too large to be read"
        elif self._body and not readable(self._headers.get("content-encoding")):
            note = "body is encoded"
        elif self._body:
            body = read_object(bytes(self._body))
            note = None if body is not None else "body is not a JSON object"
        view = self._directory.find(self._route_pool, self._cluster, (body or {}).get("model"))
        if body is not None:
            body = self._edit(body, view)
        if view is None:
            return self._without_choice("unknown_pool")
        self._view = view
        named: Collection[str] = view.endpoint_of
        subset = self._subset()
        if subset is not None:
            named = [view.address_at[endpoint] for endpoint in subset if endpoint in view.address_at]
        addresses = self._health.usable(named, view.draining)
        if not addresses and self.duplex_request:
            return self._refuse()
        candidates = view.replicas_at(addresses or self._health.last_hope(named, view.draining))
        if not candidates:
            return self._refuse() if subset is not None else self._without_choice("no_endpoints")
        return [
            Place(
                RoutingRequest(
                    pool=view.name,
                    path=path,
                    body=body or {},
                    candidates=candidates,
                    request_id=self._headers.get("x-request-id", "")[:MAX_HEADER_VALUE],
                    session=self._session(),
                    max_wait_s=self._options.shed_backlog_s,
                    note=note,
                )
            )
        ]

    def _path(self) -> str:
        path = self._headers.get(":path") or (
            wire.attribute(self._headers_message, "request.path") if self._headers_message is not None else None
        )
        return (path or "/").partition("?")[0].rstrip("/")

    def _session(self) -> str | None:
        name = self._options.session_header
        value = self._headers.get(name.lower()) if name else None
        return value[:MAX_HEADER_VALUE] if value else None

    def _tenant(self) -> str | None:
        options = self._options
        value: Any = None
        if options.tenant_metadata and self._headers_message is not None:
            value = wire.metadata_at(self._headers_message, options.tenant_metadata)
        if value is None and options.tenant_header:
            value = self._headers.get(options.tenant_header.lower())
        return value if isinstance(value, str) and value else None

    def _subset(self) -> tuple[str, ...] | None:
        """The endpoints that the gateway allows; None: it does not say."""
        if self._headers_message is None:
            return None
        value = wire.metadata_at(self._headers_message, (wire.SUBSET_NAMESPACE, wire.SUBSET))
        return None if value is None else wire.endpoint_list(value)

    def _edit(self, body: dict[str, Any], view: PoolView | None) -> dict[str, Any]:
        """Salt and model name as configured, and no wish that would mislead the index; the body as the engine will see
        it."""
        changes: dict[str, Any] = {}
        model = view.sent_model(body.get("model")) if view is not None else None
        if model is not None:
            changes["model"] = model
        secret = self._options.salt_secret
        if secret is not None:
            changes["cache_salt"] = salt_of(self._tenant() or "", secret.get_secret_value())
        arguments = without_report_mode(body)
        if arguments is not None:
            changes[XARGS] = arguments
        if not changes:
            return body
        try:
            self._body = bytearray(edit_object(bytes(self._body), changes))
        except ValueError:  # readers differ in what they forgive: this one's view of it, then
            self._body = bytearray(json.dumps({**body, **changes}).encode())
        self._edited = True
        return {**body, **changes}

    def _without_choice(self, reason: str) -> list[Action]:
        self._placed = True
        return [Unplaced(reason), *self._answer_request("")]

    def _refuse(self) -> list[Action]:
        self._placed = True
        return [Unplaced("no_ready_endpoint"), Reply(wire.immediate(503, "no endpoint is ready"))]

    def _answer_request(self, endpoints: str, rank: str = "") -> list[Action]:
        """Everything that has waited for the decision. `endpoints` "": leave the choice to Envoy; `rank`: pin it."""
        kind = "request_headers" if self.duplex_request else self._answering
        first = wire.go_on(kind)
        common = getattr(first, kind).response
        if endpoints:
            wire.destination(first, endpoints)
            if self.duplex_request:
                wire.set_headers(common, {wire.DESTINATION: endpoints})
            if rank:
                wire.set_headers(common, {RANK_HEADER.lower(): rank})
        if self.duplex_request:
            if self._edited:
                common.header_mutation.remove_headers.append("content-length")
            body, self._body = bytes(self._body), bytearray()
            actions: list[Action] = [Reply(first)]
            if body or not self._body_ended:
                ends = self._body_ended and not self._trailers
                actions += [Reply(r) for r in wire.body_chunks("request_body", body, ends)]
            elif self._headers_message is not None and not self._headers_message.request_headers.end_of_stream:
                actions += [Reply(r) for r in wire.body_chunks("request_body", b"", True)]
            if self._trailers:
                actions.append(Reply(wire.go_on("request_trailers")))
            return actions
        if self._edited:
            common.body_mutation.body = bytes(self._body)
            wire.set_headers(common, {"content-length": str(len(self._body))})
        self._body = bytearray()
        return [Reply(first)]

    # --- response -------------------------------------------------------------------------------------------------

    def _response_headers(self, message: wire.Request) -> list[Action]:
        headers = wire.header_map(message.response_headers, _RESPONSE_HEADERS)
        status = int(headers.get(":status", "0") or 0)
        answer = wire.go_on("response_headers")
        actions: list[Action] = []
        if self._decision is not None and self._view is not None:
            served = _served(message, self._view, self._decision)
            replica_id = self._view.served_by(served, self._decision.replica_id) if served else None
            actions.append(Served(replica_id, status))
            if self._settings.receipt_header:
                receipt = self._decision.receipt.header()
                if replica_id is not None and replica_id != self._decision.replica_id:
                    receipt = f"{receipt}; served={replica_id}"
                wire.set_headers(answer.response_headers.response, {RECEIPT_HEADER: receipt})
            if status == 200 and readable(headers.get("content-encoding")):
                self._usage = UsageReader()
                # only a stream's first piece tells when the prefill was done
                self._first_token = headers.get("content-type", "").startswith("text/event-stream")
        actions.append(Reply(answer))
        if message.response_headers.end_of_stream:
            actions += self._over()
        return actions

    def _response_body(self, body: Any) -> list[Action]:
        actions: list[Action] = []
        if self._usage is not None and body.body:
            self._usage.feed(body.body)
            if self._first_token:
                self._first_token = False
                actions.append(FirstToken())
        if self.duplex_response:
            actions += [Reply(r) for r in wire.body_chunks("response_body", body.body, body.end_of_stream)]
        else:
            actions.append(Reply(wire.go_on("response_body")))
        if body.end_of_stream:
            actions += self._over()
        return actions

    def _over(self) -> list[Action]:
        """The response has ended: Envoy need not be waited for to close the stream, which saves a round of gRPC."""
        return [*self._end(), HangUp()]

    def _end(self) -> list[Action]:
        if self._decision is None or self._finished:
            return []
        self._finished = True
        return [Finished(self._usage.cached_tokens if self._usage is not None else None)]


def _served(message: wire.Request, view: PoolView, decision: Decision) -> str | None:
    """Endpoint that answered, as Envoy or the gateway tells; without word of it, the one that was chosen."""
    told = wire.metadata_at(message, (wire.LB_NAMESPACE, wire.SERVED))
    if isinstance(told, str) and told:
        return told
    attribute = wire.attribute(message, "upstream.address")
    if attribute or wire.FILTER in message.attributes:
        return attribute
    return view.endpoint_of.get(address_of(decision.replica_id))
