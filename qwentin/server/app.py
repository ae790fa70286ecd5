"""The routes: one table, from which the application and /openapi.json are made. A generation passes through `answer`,
whatever its dialect:

    body -> parse_json -> fields.read -> Reply (prompt ids, rules) -> open_run -> events -> chunks of a stream, or one JSON

Rendering and tokenising run in a worker thread, so that a long prompt does not hold up other streams.
Proven by tests/test_server_openai.py, tests/test_stream.py, tests/test_load.py and, the table, tests/test_openapi.py.
"""
import asyncio
import json
import logging

from aiohttp import web

from ..errors import ContextOverflow
from . import operations, page
from .bridge import Run, open_run
from .chat import ChatReply
from .completions import CompletionReply
from .door import KEYLESS, add_headers, check_origin, limit_unread, read_body, require_key, route_of
from .fields import parse_json, read, unknown
from .messages import MessagesReply, count_tokens
from .metrics import Record
from .openapi import Route, document
from .refusals import refuse_in_json
from .reply import Reply
from .responses import ResponsesReply
from .service import SERVICE, Service
from .stream import stream, stream_failure
from .text import DetokenizeBody, TokenizeBody, detokenize, tokenize

log = logging.getLogger("qwentin.server")


def make_app(service: Service) -> web.Application:
    app = web.Application(middlewares=[refuse_in_json, check_origin, require_key],
                          client_max_size=service.config.max_body_mib * 2**20)
    app[SERVICE], app[KEYLESS] = service, {route.path for route in ROUTES if route.keyless}
    for route in ROUTES:
        if route.method == "GET":
            app.router.add_get(route.template, route.handler)       # HEAD too
        else:
            app.router.add_post(route.template, route.handler)
    app.on_response_prepare.extend([add_headers, limit_unread])
    return app


def generate(dialect: type[Reply]):
    """The handler of a generating route."""
    async def handler(request: web.Request) -> web.StreamResponse:
        with request.app[SERVICE].watch(route_of(request), request.remote) as record:
            return await answer(request, dialect, record)
    return handler


async def answer(request: web.Request, dialect: type[Reply], record: Record) -> web.StreamResponse:
    """Serve one generation; leaving early, for whatever reason, cancels it."""
    service = request.app[SERVICE]
    engine = service.ready()
    raw = await read_body(request)
    reply, unknown_names = await asyncio.to_thread(prepare, dialect, raw, engine, service.config.model_name)
    record.reply = reply
    service.note([f"ignoring the unknown field {name[:60]!r}" for name in unknown_names] + reply.notes)
    try:
        async with open_run(engine, reply.requests, service.config.request_timeout_s) as run:
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


async def openapi(request: web.Request) -> web.Response:
    return web.json_response(document(ROUTES, bool(request.app[SERVICE].config.api_key)))


def generation(path: str, dialect: type[Reply], answer: str, summary: str) -> Route:
    return Route("POST", path, generate(dialect), summary, answer, body=dialect.body_type, streams=True)


# `answer` names the schema of a 200, in openapi_answers.py
ROUTES = (
    Route("GET", "/", page.index, "The status page: figures over time, and a small chat", "html", keyless=True),
    Route("GET", "/page/{name}", page.file, "A file of the status page", "file", keyless=True, missing=True),
    Route("GET", "/health", operations.health, "Whether requests are served; with the key, the figures behind it", "Health",
          keyless=True),
    Route("GET", "/metrics", operations.metrics, "Counters, gauges and histograms for Prometheus", "text"),
    Route("GET", "/slots", operations.slots, "What runs, waits and is warm, by counts", "Slots"),
    Route("GET", "/openapi.json", openapi, "This document", "Object"),
    Route("GET", "/v1/models", operations.models, "The model served, as OpenAI and Anthropic list it", "ModelList"),
    Route("GET", "/v1/models/{id}", operations.model, "One model", "Model", missing=True, pattern=".+"),
    generation("/v1/chat/completions", ChatReply, "ChatCompletion", "OpenAI's Chat Completions"),
    generation("/v1/completions", CompletionReply, "Completion", "OpenAI's Completions"),
    generation("/v1/responses", ResponsesReply, "Response", "OpenAI's Responses"),
    Route("GET", "/v1/responses/{id}", operations.stored_response, "Always 404: responses are not stored", "Object",
          missing=True),
    generation("/v1/messages", MessagesReply, "Message", "Anthropic's Messages"),
    Route("POST", "/v1/messages/count_tokens", convert(count_tokens), "Prompt tokens of a Messages request", "TokenCount",
          body=MessagesReply.body_type),
    Route("POST", "/tokenize", convert(tokenize), "Text or messages to token ids", "Tokens", body=TokenizeBody),
    Route("POST", "/detokenize", convert(detokenize), "Token ids to text", "Text", body=DetokenizeBody),
    Route("GET", "/tokenizer_info", operations.info, "Special tokens and the chat template", "TokenizerInfo"),
    Route("POST", "/sleep", operations.sleep, "Free the model's memory until the next request", "Health", busy=True),
    Route("POST", "/wake_up", operations.wake_up, "Take the memory back now", "Health"),
)
