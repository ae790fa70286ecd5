"""The routes. A generation passes through `answer`, whatever its dialect:

    body -> parse_json -> fields.read -> Reply (prompt ids, rules) -> open_run -> events -> chunks of a stream, or one JSON

Rendering and tokenising run in a worker thread, so that a long prompt does not hold up other streams.
Proven by tests/test_server_openai.py, tests/test_stream.py and tests/test_load.py.
"""
import asyncio
import hmac
import logging
import time
from dataclasses import dataclass, field

from aiohttp import web

from ..config import EngineConfig
from ..errors import ContextOverflow, EngineStopped
from .bridge import open_run
from .chat import ChatReply
from .completions import CompletionReply
from .fields import parse_json, read, unknown
from .refusals import BadKey, Loading, UnknownModel, refuse_in_json
from .reply import Reply
from .stream import stream
from .text import detokenize, tokenize, tokenizer_info

log = logging.getLogger("qwentin.server")

MAX_BODY = 64 * 2**20       # bytes; a 262,144-token prompt as JSON is about 2 MB
BODY_S = 60.0               # a body that takes longer to arrive is refused
MAX_NAMES = 200             # unknown field names remembered, each logged once


@dataclass
class Service:
    """What the routes serve: the engine once it is loaded, and whether the process is on its way out."""
    config: EngineConfig
    engine: object = None
    stopping: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    ignored: set[str] = field(default_factory=set)

    def ready(self):
        """The engine. Raises Loading or EngineStopped."""
        if self.stopping:
            raise EngineStopped("The server is shutting down.")
        if self.engine is None:
            raise Loading()
        return self.engine

    def note_ignored(self, names: list[str]) -> None:
        for name in names:
            if name not in self.ignored and len(self.ignored) < MAX_NAMES:
                self.ignored.add(name)
                log.info("ignoring the unknown field %r (logged once)", name[:60])


SERVICE = web.AppKey("service", Service)


def make_app(service: Service) -> web.Application:
    app = web.Application(middlewares=[refuse_in_json, require_key], client_max_size=MAX_BODY)
    app[SERVICE] = service
    app.router.add_get("/", index)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{id:.+}", model)
    app.router.add_post("/v1/chat/completions", generate(ChatReply))
    app.router.add_post("/v1/completions", generate(CompletionReply))
    app.router.add_post("/tokenize", convert(tokenize))
    app.router.add_post("/detokenize", convert(detokenize))
    app.router.add_get("/tokenizer_info", info)
    return app


@web.middleware
async def require_key(request: web.Request, handler):
    """The bearer token on every route but /health, compared in constant time."""
    key = request.app[SERVICE].config.api_key
    if key and request.path != "/health":
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key.encode())
        if scheme.lower() != "bearer" or not same:
            raise BadKey()
    return await handler(request)


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises aiohttp's 413 or 408."""
    if (request.content_length or 0) > MAX_BODY:
        raise web.HTTPRequestEntityTooLarge(MAX_BODY, request.content_length)
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout() from None


def generate(dialect: type[Reply]):
    """The handler of a generating route."""
    async def handler(request: web.Request) -> web.StreamResponse:
        return await answer(request, dialect)
    return handler


async def answer(request: web.Request, dialect: type[Reply]) -> web.StreamResponse:
    """Serve one generation; leaving early, for whatever reason, cancels it."""
    service = request.app[SERVICE]
    engine = service.ready()
    raw = await read_body(request)
    reply, ignored = await asyncio.to_thread(prepare, dialect, raw, engine, service.config.model_name)
    service.note_ignored(ignored)
    try:
        async with open_run(engine, reply.requests) as run:
            if reply.body.stream:
                return await stream(request, run, reply, service.config.keepalive_s)
            async for number, event in run.events():
                reply.collect(number, event)
    except ContextOverflow as error:
        error.param = dialect.prompt_field
        raise
    return web.json_response(reply.whole())


def prepare(dialect: type[Reply], raw: bytes, engine, model: str) -> tuple[Reply, list[str]]:
    """The reply that a body asks for, and the names in the body that mean nothing. Raises RequestError."""
    body = parse_json(raw)
    return dialect(read(dialect.body_type, body), engine, model), unknown(dialect.body_type, body)


def convert(function):
    """The handler of a route that turns one JSON object into another with the tokenizer alone."""
    async def handler(request: web.Request) -> web.Response:
        engine = request.app[SERVICE].ready()
        raw = await read_body(request)
        return web.json_response(await asyncio.to_thread(lambda: function(parse_json(raw), engine)))
    return handler


async def index(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    return web.json_response({"name": "qwentin", "model": service.config.model_name,
                              "routes": ["/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize",
                                         "/tokenizer_info", "/health"]})


async def health(request: web.Request) -> web.Response:
    """200 when requests are served; 503 while loading, while shutting down and after the engine died."""
    service = request.app[SERVICE]
    status = service.engine.status() if service.engine is not None else {}
    word = "stopping" if service.stopping else "loading" if service.engine is None else status.get("status", "ok")
    return web.json_response({**status, "status": word, "model": service.config.model_name},
                             status=200 if word == "ok" else 503)


def model_object(service: Service) -> dict:
    return {"id": service.config.model_name, "object": "model", "created": service.started, "owned_by": "qwentin",
            "max_model_len": service.ready().max_model_len}


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [model_object(request.app[SERVICE])]})


async def model(request: web.Request) -> web.Response:
    found, asked = model_object(request.app[SERVICE]), request.match_info["id"]
    if asked != found["id"]:
        raise UnknownModel(asked, found["id"])
    return web.json_response(found)


async def info(request: web.Request) -> web.Response:
    return web.json_response(tokenizer_info(request.app[SERVICE].ready()))
