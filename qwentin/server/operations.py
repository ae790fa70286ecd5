"""Handlers of the routes that are not a dialect's: health, counts, models, sleep, and what the server says of itself.

    /health     open to everyone: is it served; the figures behind it only for those who have the key
    /slots      what runs, waits and is warm, by counts
    /sleep      frees the model's memory until the next request, /wake_up takes it back at once

Proven by tests/test_operations.py and tests/test_stream.py.
"""
import asyncio
from datetime import UTC, datetime

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from .door import has_key
from .refusals import NotFound
from .service import SERVICE, Service
from .text import tokenizer_info

SERVED = ("ok", "asleep")       # words of /health that come with 200: requests are served


async def health(request: web.Request) -> web.Response:
    """200 when requests are served; 503 while loading, while shutting down and after the engine died."""
    service = request.app[SERVICE]
    told = figures(service)
    known = told if has_key(request) else {name: told[name] for name in ("status", "model")}
    return web.json_response(known, status=200 if told["status"] in SERVED else 503)


def figures(service: Service) -> dict:
    return {**service.status(), "status": service.word(), "model": service.config.model_name}


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[SERVICE].metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def slots(request: web.Request) -> web.Response:
    return web.json_response(request.app[SERVICE].ready().slots())


async def sleep(request: web.Request) -> web.Response:
    await asyncio.to_thread(request.app[SERVICE].ready().sleeper.sleep)
    return web.json_response(figures(request.app[SERVICE]))


async def wake_up(request: web.Request) -> web.Response:
    await asyncio.to_thread(request.app[SERVICE].ready().sleeper.wake_up)
    return web.json_response(figures(request.app[SERVICE]))


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
