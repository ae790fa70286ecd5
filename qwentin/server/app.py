"""The routes. A generation passes through `answer`, whatever its dialect:

    body -> parse_json -> fields.read -> Reply (prompt ids, rules) -> open_run -> events -> chunks of a stream, or one JSON

Rendering and tokenising run in a worker thread, so that a long prompt does not hold up other streams.
Proven by tests/test_server_openai.py, tests/test_stream.py and tests/test_load.py.
"""
import asyncio
import hmac
import json
import logging
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from ..config import EngineConfig
from ..errors import ContextOverflow, EngineStopped
from .bridge import Run, open_run
from .chat import ChatReply
from .completions import CompletionReply
from .fields import parse_json, read, unknown
from .messages import MessagesReply, count_tokens
from .metrics import Metrics, Record
from .refusals import BadKey, Loading, NotFound, refuse_in_json
from .reply import Reply
from .responses import ResponsesReply
from .stream import stream, stream_failure
from .text import detokenize, tokenize, tokenizer_info

log = logging.getLogger("qwentin.server")

MAX_BODY = 64 * 2**20       # bytes; a 262,144-token prompt as JSON is about 2 MB
BODY_S = 60.0               # a body that takes longer to arrive is refused
MAX_NOTES = 200             # lines remembered, each logged once


@dataclass
class Service:
    """What the routes serve: the engine once it is loaded, and whether the process is on its way out."""
    config: EngineConfig
    engine: object = None
    stopping: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    noted: set[str] = field(default_factory=set)

    def __post_init__(self):
        self.metrics = Metrics(self.status)

    def ready(self):
        """The engine. Raises Loading or EngineStopped."""
        if self.stopping:
            raise EngineStopped("The server is shutting down.")
        if self.engine is None:
            raise Loading()
        return self.engine

    def status(self) -> dict:
        """The engine's; {} while there is none."""
        return {} if self.engine is None else self.engine.status()

    def note(self, lines: list[str]) -> None:
        """Log each line once."""
        for line in lines:
            if line not in self.noted and len(self.noted) < MAX_NOTES:
                self.noted.add(line)
                log.info("%s (logged once)", line)


SERVICE = web.AppKey("service", Service)


def make_app(service: Service) -> web.Application:
    app = web.Application(middlewares=[refuse_in_json, require_key], client_max_size=MAX_BODY)
    app[SERVICE] = service
    app.router.add_get("/", index)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{id:.+}", model)
    app.router.add_post("/v1/chat/completions", generate(ChatReply))
    app.router.add_post("/v1/completions", generate(CompletionReply))
    app.router.add_post("/v1/responses", generate(ResponsesReply))
    app.router.add_get("/v1/responses/{id}", stored_response)
    app.router.add_post("/v1/messages", generate(MessagesReply))
    app.router.add_post("/v1/messages/count_tokens", convert(count_tokens))
    app.router.add_post("/tokenize", convert(tokenize))
    app.router.add_post("/detokenize", convert(detokenize))
    app.router.add_get("/tokenizer_info", info)
    return app


@web.middleware
async def require_key(request: web.Request, handler):
    """The key on every route but /health, as a bearer token or in x-api-key, compared in constant time."""
    key = request.app[SERVICE].config.api_key
    if key and request.path != "/health":
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = [request.headers.get("x-api-key", ""), token if scheme.lower() == "bearer" else ""]
        if not any(hmac.compare_digest(g.strip().encode("utf-8", "surrogateescape"), key.encode()) for g in given):
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
        route = request.match_info.route.resource.canonical
        with request.app[SERVICE].metrics.watch(route) as record:
            return await answer(request, dialect, record)
    return handler


async def answer(request: web.Request, dialect: type[Reply], record: Record) -> web.StreamResponse:
    """Serve one generation; leaving early, for whatever reason, cancels it."""
    service = request.app[SERVICE]
    engine = service.ready()
    raw = await read_body(request)
    reply, unknown_names = await asyncio.to_thread(prepare, dialect, raw, engine, service.config.model_name)
    service.note([f"ignoring the unknown field {name[:60]!r}" for name in unknown_names] + reply.notes)
    try:
        async with open_run(engine, reply.requests) as run:
            record.usages = run.usages
            response = await (streamed if reply.body.stream else collected)(request, run, reply, record)
            record.left = run.open and record.error is None
    except ContextOverflow as error:
        error.param = dialect.prompt_field
        if not (reply.body.stream and dialect.overflow_in_stream):
            raise
        record.error = error
        return await stream_failure(request, reply, error)
    if record.status == 200:
        log.info("%s: %s", reply.requests[0].id, json.dumps(reply.extras()["x_qwentin"]))
    return response


async def streamed(request: web.Request, run: Run, reply: Reply, record: Record) -> web.StreamResponse:
    response, record.error = await stream(request, run, reply, request.app[SERVICE].config.keepalive_s)
    return response


async def collected(request: web.Request, run: Run, reply: Reply, record: Record) -> web.StreamResponse:
    async for number, event in run.events():
        reply.collect(number, event)
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
    routes = sorted({route.resource.canonical for route in request.app.router.routes()})
    return web.json_response({"name": "qwentin", "model": service.config.model_name, "routes": routes})


async def health(request: web.Request) -> web.Response:
    """200 when requests are served; 503 while loading, while shutting down and after the engine died."""
    service = request.app[SERVICE]
    status = service.status()
    word = "stopping" if service.stopping else "loading" if service.engine is None else status.get("status", "ok")
    return web.json_response({**status, "status": word, "model": service.config.model_name},
                             status=200 if word == "ok" else 503)


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[SERVICE].metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def stored_response(request: web.Request) -> web.Response:
    raise NotFound("Responses are not stored here; send the whole input with each request.", "response_not_found")


def model_object(service: Service) -> dict:
    """One entry that OpenAI's and Anthropic's clients both read."""
    name, made = service.config.model_name, datetime.fromtimestamp(service.started, UTC).isoformat()
    return {"id": name, "object": "model", "created": service.started, "owned_by": "qwentin",
            "max_model_len": service.ready().max_model_len,
            "type": "model", "display_name": name, "created_at": made}


async def models(request: web.Request) -> web.Response:
    entry = model_object(request.app[SERVICE])
    return web.json_response({"object": "list", "data": [entry],
                              "has_more": False, "first_id": entry["id"], "last_id": entry["id"]})


async def model(request: web.Request) -> web.Response:
    found, asked = model_object(request.app[SERVICE]), request.match_info["id"]
    if asked != found["id"]:
        raise NotFound(f"The model {asked!r} does not exist; this server serves {found['id']!r}.", "model_not_found")
    return web.json_response(found)


async def info(request: web.Request) -> web.Response:
    return web.json_response(tokenizer_info(request.app[SERVICE].ready()))
