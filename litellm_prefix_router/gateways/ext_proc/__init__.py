"""The Envoy gateway: an external processor that names, for each request, the endpoints to try, best first.

`stream` is the protocol of one request without I/O; `server` drives it over gRPC. Nothing in here decides: requests
become RoutingRequests, and the ranking of the Decision becomes Envoy's list of endpoints.
"""
