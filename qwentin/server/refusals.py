"""What went wrong, as HTTP: one table from exception to status, and the dialect's error object around the sentence.

    OpenAI      {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
    Anthropic   {"type": "error", "error": {"type": ..., "message": ...}}       on every route under /v1/messages

Proven by tests/test_server_openai.py (each refusal from a real server), tests/test_stream.py and tests/test_messages.py.
"""
import logging

from aiohttp import web

from ..errors import Busy, ContextOverflow, EngineStopped, QueueFull, QwentinError, RequestError, WakeFailed

log = logging.getLogger("qwentin.server")


class Failed(QwentinError):
    """The engine ended a request with an error of its own."""


class Loading(QwentinError):
    """The weights are not in memory yet."""

    def __init__(self):
        super().__init__("The model is still loading; retry in a moment.")


class BadKey(QwentinError):
    """The request carries no API key, or the wrong one."""

    def __init__(self):
        super().__init__("A valid API key is required: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")


class ForeignOrigin(QwentinError):
    """A browser's page from elsewhere asks."""

    def __init__(self, origin: str):
        super().__init__(f"Pages of {origin[:200]!r} may not use this server; --cors-origins lists those that may.")


class TookTooLong(QwentinError):
    """A generation reached --request-timeout-s."""

    def __init__(self, seconds: float):
        super().__init__(f"The request took longer than the {seconds:g} s that this server allows (--request-timeout-s).")


class NotFound(QwentinError):
    """Something that is asked for by its name and is not here."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


# exception, status, error type, code (None: the exception's own), seconds to wait before a retry (None: do not retry)
TABLE = (
    (RequestError, 400, "invalid_request_error", None, None),
    (QueueFull, 503, "overloaded_error", "queue_full", 1),
    (EngineStopped, 503, "server_error", "server_stopping", 5),
    (Loading, 503, "server_error", "model_loading", 1),
    (BadKey, 401, "authentication_error", "invalid_api_key", None),
    (ForeignOrigin, 403, "permission_error", "origin_not_allowed", None),
    (NotFound, 404, "invalid_request_error", None, None),
    (Busy, 409, "invalid_request_error", "server_busy", 1),
    (WakeFailed, 503, "server_error", "wake_failed", 5),
    (TookTooLong, 504, "server_error", "request_timeout", None),
    (Failed, 500, "server_error", "generation_failed", None),
)
# Anthropic's error types by status; every other one is an api_error
ANTHROPIC_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                   404: "not_found_error", 405: "invalid_request_error", 408: "invalid_request_error",
                   413: "request_too_large",
                   409: "invalid_request_error", 503: "overloaded_error", 504: "timeout_error"}
# 504: the SDKs would send the whole request again, twice
EXTRA_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 504: {"x-should-retry": "false"}}


def error_object(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict, dict]:
    """Status, headers and JSON body for any exception; one that nobody foresaw is a 500, and logged."""
    if status_of(error) == 500 and not isinstance(error, Failed):
        log.error("a request failed unexpectedly", exc_info=error)
    return describe_quietly(error)


def describe_quietly(error: Exception) -> tuple[int, dict, dict]:
    if isinstance(error, RecursionError):       # only a client's JSON nests without bound
        error = RequestError("The body is nested too deeply.", code="invalid_json")
    for kind, status, type_, code, retry in TABLE:
        if isinstance(error, kind):
            headers = {} if retry is None else {"Retry-After": str(getattr(error, "retry_after", retry))}
            headers |= EXTRA_HEADERS.get(status, {})
            body = error_object(str(error), type_, getattr(error, "param", None), code or getattr(error, "code", None))
            return status, headers, body
    if isinstance(error, web.HTTPException):
        return error.status, kept_headers(error), describe_http(error)
    return 500, {}, error_object("The server failed on this request; its log says more.", "server_error",
                                 code="internal_error")


def status_of(error: Exception) -> int:
    """The status that `describe` gives."""
    if isinstance(error, RecursionError):
        return 400
    if isinstance(error, web.HTTPException):
        return error.status
    return next((status for kind, status, *_ in TABLE if isinstance(error, kind)), 500)


def describe_for_anthropic(error: Exception) -> tuple[int, dict, dict]:
    """The same in the shape of /v1/messages. An overflow is worded as agents look for it before they compact."""
    status, headers, body = describe(error)
    message = body["error"]["message"]
    if isinstance(error, ContextOverflow):
        message = overflow_for_anthropic(error)
    return status, headers, {"type": "error",
                             "error": {"type": ANTHROPIC_TYPES.get(status, "api_error"), "message": message}}


def overflow_for_anthropic(error: ContextOverflow) -> str:
    longest = error.context - 1         # of a prompt: one token at least is to be generated
    if error.prompt > longest:
        return f"prompt is too long: {error.prompt} tokens > {longest} maximum"
    return (f"input length and `max_tokens` exceed context limit: {error.prompt} + {error.limit} > {error.context}, "
            "decrease input length or `max_tokens` and try again")


def kept_headers(error: web.HTTPException) -> dict:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}


def describe_http(error: web.HTTPException) -> dict:
    """aiohttp's own refusals (no such route, wrong method, body too large), each in one sentence."""
    sentences = {
        404: "There is no such route here; /openapi.json lists those that are.",
        405: f"This route does not take that method; it takes {error.headers.get('Allow', 'another')}.",
        408: "The body did not arrive in time.",
        413: "The body is larger than this server accepts.",
    }
    codes = {404: "route_not_found", 405: "method_not_allowed", 408: "body_timeout", 413: "body_too_large"}
    return error_object(sentences.get(error.status, error.reason), "invalid_request_error",
                        code=codes.get(error.status))


@web.middleware
async def refuse_in_json(request: web.Request, handler):
    """Turn whatever a handler raises into an answer of the route's dialect."""
    try:
        return await handler(request)
    except Exception as error:      # CancelledError (the client left) is no Exception and passes through
        anthropic = request.path.startswith("/v1/messages")
        status, headers, body = describe_for_anthropic(error) if anthropic else describe(error)
        return web.json_response(body, status=status, headers=headers)
