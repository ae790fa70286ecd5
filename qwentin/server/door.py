"""The door: what is looked at before any route runs, and how much of a body is let in.

    key       Authorization: Bearer KEY, or x-api-key, on every route that is not marked `keyless` in app.py's table
    origin    a browser's page from elsewhere gets in only if --cors-origins lists it. Without CORS headers its script could
              not read the answer; here its request does not run either, so that no page can make this server work
    body      at most --max-body-mib, there within BODY_S
    answer    a client that takes none of it for UNREAD_S is cut off (by the kernel, where it can)

How long headers may take, and how many, stands in process.py. Proven by tests/test_door.py.
"""
import asyncio
import hmac
import socket
from urllib.parse import urlsplit

from aiohttp import web

from .refusals import BadKey, ForeignOrigin
from .service import SERVICE

BODY_S = 60.0               # a body that takes longer to arrive is refused
UNREAD_S = 60.0
KEYLESS = web.AppKey("keyless", set)        # canonical paths that need no key
ALLOWED_HEADERS = "Authorization, Content-Type, X-API-Key, Anthropic-Version, Anthropic-Beta"
PREFLIGHT_S = "600"         # how long a browser may remember what it was allowed


def has_key(request: web.Request) -> bool:
    """Whether no key is set or the request carries it; compared in constant time."""
    key = request.app[SERVICE].config.api_key
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    given = [request.headers.get("x-api-key", ""), token if scheme.lower() == "bearer" else ""]
    return not key or any(hmac.compare_digest(g.strip().encode("utf-8", "surrogateescape"), key.encode()) for g in given)


def route_of(request: web.Request) -> str | None:
    """The canonical path of the route that the request matched; None if it matched none."""
    resource = request.match_info.route.resource
    return None if resource is None else resource.canonical


@web.middleware
async def require_key(request: web.Request, handler):
    if route_of(request) not in request.app[KEYLESS] and not has_key(request):
        raise BadKey()
    return await handler(request)


def allowed_origin(request: web.Request) -> str | None:
    """The Origin that may read the answer, None if the request names none. Raises ForeignOrigin."""
    origin, listed = request.headers.get("Origin"), request.app[SERVICE].config.origins
    if origin is None or origin in listed or "*" in listed:
        return origin
    if urlsplit(origin).netloc == request.host:         # our own page
        return None
    raise ForeignOrigin(origin)


@web.middleware
async def check_origin(request: web.Request, handler):
    """Answers a preflight itself: browsers send it without a key."""
    origin = allowed_origin(request)
    if origin and request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        return web.Response(status=204, headers={"Access-Control-Allow-Methods": "GET, POST",
                                                 "Access-Control-Allow-Headers": ALLOWED_HEADERS,
                                                 "Access-Control-Max-Age": PREFLIGHT_S})
    return await handler(request)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """On every answer, streams and refusals too."""
    response.headers["X-Content-Type-Options"] = "nosniff"
    if not request.app[SERVICE].config.origins:
        return
    response.headers["Vary"] = "Origin"
    try:
        origin = allowed_origin(request)
    except ForeignOrigin:
        return
    if origin:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "Retry-After"


async def limit_unread(request: web.Request, response: web.StreamResponse) -> None:
    """Without this a client that does not read keeps its socket and its answer for ever: closing waits for the flush."""
    sock = request.transport and request.transport.get_extra_info("socket")
    if sock and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_S * 1000))


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises aiohttp's 413 or 408."""
    most = request.app[SERVICE].config.max_body_mib * 2**20
    if (request.content_length or 0) > most:
        raise web.HTTPRequestEntityTooLarge(most, request.content_length)
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout() from None
