"""/openapi.json, made from the table of routes and the dataclasses that bodies are read into: nothing is described twice.

    Route (app.py)  ->  a path's operation: body, answers, which refusals it can give
    body dataclass  ->  an object's schema: a field's annotation is its type, its check narrows that, null means "not given"
    TABLE (refusals.py), openapi_answers.py  ->  the refusals' statuses, the answers' schemas

Called by app.py for each request of the document. Proven by tests/test_openapi.py: schemathesis sends what the document
allows and what it forbids, and looks at every answer.
"""
import dataclasses
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass

from .. import __version__
from ..admission import ABOVE_LOW, RANGES
from . import fields
from .openapi_answers import ANSWERS, INSIDE, STREAMED

PLAIN = {"html": ("text/html",), "text": ("text/plain",), "file": ("text/css", "text/javascript", "image/svg+xml")}
KINDS = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object", tuple: "array"}
STOPS = {"anyOf": [{"type": "string", "minLength": 1},
                   {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": fields.MAX_STOPS}]}
# checks that say more than the annotation: their schema
NARROWED = {
    fields.stops: STOPS,
    fields.token_ids: {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
    fields.biases: {"type": "object", "additionalProperties": False,
                    "patternProperties": {"^[0-9]{1,10}$": {"type": "number", "minimum": -100, "maximum": 100}}}}


@dataclass(frozen=True)
class Route:
    """One method of one path. `answer` names the schema of a 200 in ANSWERS; `body` is what the request's JSON is read
    into; a route that `streams` answers a body with "stream": true by server-sent events."""
    method: str
    path: str
    handler: Callable
    summary: str
    answer: str
    body: type | None = None
    streams: bool = False
    keyless: bool = False
    missing: bool = False       # may be a 404
    busy: bool = False          # may be a 409
    pattern: str = ""           # of the path's variable, where it may hold a slash

    @property
    def template(self) -> str:
        """The path as aiohttp's router wants it."""
        return self.path.replace("}", f":{self.pattern}}}") if self.pattern else self.path


def document(routes: tuple[Route, ...], locked: bool) -> dict:
    """The OpenAPI 3.1 document; `locked` says that a key is set."""
    paths: dict[str, dict] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = operation(route, locked)
    bodies = {route.body.__name__: object_schema(route.body) for route in routes if route.body}
    schemes = {"bearer": {"type": "http", "scheme": "bearer"},
               "header": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
    return {"openapi": "3.1.0", "paths": paths,
            "info": {"title": "qwentin", "version": __version__,
                     "description": "One Qwen3.5/3.6/3.8 model behind OpenAI's and Anthropic's dialects."},
            "components": {"schemas": {**bodies, **ANSWERS}, **({"securitySchemes": schemes} if locked else {})}}


def operation(route: Route, locked: bool) -> dict:
    out = {"operationId": route.handler.__name__ if not route.body else route.path.strip("/").replace("/", "_"),
           "summary": route.summary, "responses": responses(route, locked)}
    if "{" in route.path:
        name = route.path[route.path.index("{") + 1:route.path.index("}")]
        out["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    if route.body:
        content = {"application/json": {"schema": reference(route.body.__name__)}}
        out["requestBody"] = {"required": True, "content": content}
    if locked and not route.keyless:
        out["security"] = [{"bearer": []}, {"header": []}]
    return out


def responses(route: Route, locked: bool) -> dict:
    """The 200 and every refusal: those of a body, those of the engine, those of the door."""
    content = {kind: {} for kind in PLAIN.get(route.answer, ())} \
        or {"application/json": {"schema": reference(route.answer)}}
    if route.streams:
        content = {**content, "text/event-stream": {"schema": STREAMED}}
    found = {200: {"description": route.summary, "content": content}}
    refusals = {401: locked and not route.keyless, 403: True, 404: route.missing, 409: route.busy,
                400: route.body, 408: route.body, 413: route.body, 500: route.body or route.method == "POST",
                503: route.answer not in ("html", "file", "text"), 504: route.streams}
    error = "AnthropicError" if route.path.startswith("/v1/messages") else "Error"
    for status in sorted(status for status, possible in refusals.items() if possible):
        found[status] = {"description": WORDS[status], "content": {"application/json": {"schema": reference(error)}}}
    if route.path == "/health":
        found[503]["content"]["application/json"]["schema"] = reference("Health")
    return {str(status): answer for status, answer in found.items()}


WORDS = {400: "The body cannot be served; the message names the field", 401: "The API key is missing or wrong",
         403: "A browser's page from an origin that --cors-origins does not list", 404: "There is no such thing",
         408: "The body did not arrive in time", 409: "Requests run or wait", 413: "The body is too large",
         500: "The generation failed", 503: "Loading, stopping or full; Retry-After says when to try again",
         504: "The generation reached --request-timeout-s"}


# ---- schemas of bodies

def object_schema(kind: type) -> dict:
    """Of a dataclass of fields.py."""
    hints, properties, needed = typing.get_type_hints(kind), {}, []
    for field in dataclasses.fields(kind):
        schema = field_schema(field, hints[field.name])
        if field.metadata["required"]:
            needed.append(field.name)
        else:
            schema = {"anyOf": [schema, {"type": "null"}]} if schema else schema
            if field.default is not None and not dataclasses.is_dataclass(field.default):
                schema["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
        properties[field.name] = schema
    return {"type": "object", "properties": properties, **({"required": needed} if needed else {})}


def field_schema(field: dataclasses.Field, hint) -> dict:
    """What a field takes apart from null: its check's own schema, else a schema of its type."""
    check = field.metadata["check"]
    if check in NARROWED:
        return NARROWED[check]
    if field.name in RANGES:
        low, high = RANGES[field.name][:2]
        return {**type_schema(hint), "exclusiveMinimum" if field.name in ABOVE_LOW else "minimum": low, "maximum": high}
    if field.name in INSIDE and hint not in (str, str | None):
        return INSIDE[field.name]
    return getattr(check, "schema", None) or type_schema(hint)


def type_schema(hint) -> dict:
    options = [option for option in (typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,))
               if option is not types.NoneType]
    found = [object_schema(option) if dataclasses.is_dataclass(option)
             else {"type": KINDS[typing.get_origin(option) or option]} for option in options]
    return found[0] if len(found) == 1 else {"anyOf": found}


def reference(name: str) -> dict:
    return {"$ref": f"#/components/schemas/{name}"}
