"""What went wrong, as HTTP: one table from exception to status, and OpenAI's error object around the sentence.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Proven by tests/test_server_openai.py (each refusal from a real server) and tests/test_stream.py.
"""
import logging

from aiohttp import web

from ..errors import EngineStopped, QueueFull, QwentinError, RequestError
from .reply import Failed

log = logging.getLogger("qwentin.server")


class Loading(QwentinError):
    """The weights are not in memory yet."""

    def __init__(self):
        super().__init__("The model is still loading; retry in a moment.")


class BadKey(QwentinError):
    """The request carries no API key, or the wrong one."""

    def __init__(self):
        super().__init__("A valid API key is required: send the header 'Authorization: Bearer KEY'.")


class UnknownModel(QwentinError):
    """GET /v1/models/{id} of a model that is not served."""

    def __init__(self, asked: str, served: str):
        super().__init__(f"The model {asked!r} does not exist; this server serves {served!r}.")


# exception, status, error type, code (None: the exception's own), seconds to wait before a retry (None: do not retry)
TABLE = (
    (RequestError, 400, "invalid_request_error", None, None),
    (QueueFull, 503, "overloaded_error", "queue_full", 1),
    (EngineStopped, 503, "server_error", "server_stopping", 5),
    (Loading, 503, "server_error", "model_loading", 1),
    (BadKey, 401, "authentication_error", "invalid_api_key", None),
    (UnknownModel, 404, "invalid_request_error", "model_not_found", None),
    (Failed, 500, "server_error", "generation_failed", None),
)


def error_object(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict, dict]:
    """Status, headers and JSON body for any exception; one that is not in the table is a 500, and logged."""
    if isinstance(error, RecursionError):       # only a client's JSON nests without bound
        error = RequestError("The body is nested too deeply.", code="invalid_json")
    for kind, status, type_, code, retry in TABLE:
        if isinstance(error, kind):
            headers = {} if retry is None else {"Retry-After": str(getattr(error, "retry_after", retry))}
            if status == 401:
                headers["WWW-Authenticate"] = "Bearer"
            body = error_object(str(error), type_, getattr(error, "param", None), code or getattr(error, "code", None))
            return status, headers, body
    if isinstance(error, web.HTTPException):
        return error.status, kept_headers(error), describe_http(error)
    log.error("a request failed unexpectedly", exc_info=error)
    return 500, {}, error_object("The server failed on this request; its log says more.", "server_error",
                                 code="internal_error")


def kept_headers(error: web.HTTPException) -> dict:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}


def describe_http(error: web.HTTPException) -> dict:
    """aiohttp's own refusals (no such route, wrong method, body too large), each in one sentence."""
    sentences = {
        404: "There is no such route here; the API lives under /v1.",
        405: f"This route does not take that method; it takes {error.headers.get('Allow', 'another')}.",
        408: "The body did not arrive in time.",
        413: "The body is larger than this server accepts.",
    }
    codes = {404: "route_not_found", 405: "method_not_allowed", 408: "body_timeout", 413: "body_too_large"}
    return error_object(sentences.get(error.status, error.reason), "invalid_request_error",
                        code=codes.get(error.status))


@web.middleware
async def refuse_in_json(request: web.Request, handler):
    """Turn whatever a handler raises into an answer of OpenAI's shape."""
    try:
        return await handler(request)
    except Exception as error:      # CancelledError (the client left) is no Exception and passes through
        status, headers, body = describe(error)
        return web.json_response(body, status=status, headers=headers)
