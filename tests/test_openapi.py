"""/openapi.json against the server it describes: schemathesis sends what the document allows and what it forbids, with a
fixed seed, and looks at every answer. A longer run by hand:

    python -m qwentin.server --max-model-len 48 --api-key k &
    st run http://127.0.0.1:8000/openapi.json -H 'Authorization: Bearer k' --phases coverage,fuzzing --max-examples 300 \\
       --request-timeout 60 --exclude-checks positive_data_acceptance
"""
import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from conftest import start_server
from fake_engine import FakeEngine, serving
from http_client import call
from qwentin.server.app import ROUTES
from qwentin.server.fields import MAX_CHOICES
from qwentin.server.openapi import document

KEY = {"Authorization": "Bearer k"}
EXAMPLES, FEW = 40, 3       # of a route with a body and a kind; of one without
# All but positive_data_acceptance: a schema cannot say that top_logprobs wants logprobs, or how many tokens a text is.
CHECKS = [not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
          checks.response_schema_conformance, checks.response_headers_conformance, checks.negative_data_rejection,
          checks.ignored_auth]
SCHEMA = schemathesis.openapi.from_dict(document(ROUTES, locked=True))


@pytest.fixture(scope="module")
def locked():
    """A server with a key, and a context so small that no answer is long."""
    server = start_server("--max-model-len", "48", "--api-key", "k")
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.log_text()


@pytest.mark.parametrize("route, mode", [(route, mode) for route in ROUTES for mode in GenerationMode
                                         if route.body or mode is GenerationMode.POSITIVE],
                         ids=lambda value: value.value if isinstance(value, GenerationMode) else value.path)
def test_every_route_is_as_documented(route, mode, locked):
    @settings(max_examples=EXAMPLES if route.body else FEW, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(case=SCHEMA[route.path][route.method].as_strategy(generation_mode=mode))
    def look(case):
        body = case.body
        if isinstance(body, dict) and type(body.get("n")) is int and 4 < body["n"] <= MAX_CHOICES:
            body["n"] = 4                       # as many choices as documented take their time
        case.call_and_validate(base_url=locked.url, headers=KEY, checks=CHECKS, timeout=120)
    look()


def test_the_document_is_served_and_names_every_route():
    with serving(FakeEngine([])) as server:
        found = call(server.url, "/openapi.json").json
    assert found == json.loads(json.dumps(document(ROUTES, locked=False))) and found["openapi"] == "3.1.0"
    operations = {(method.upper(), path) for path, item in found["paths"].items() for method in item}
    assert operations == {(route.method, route.path) for route in ROUTES}
    names = [operation["operationId"] for item in found["paths"].values() for operation in item.values()]
    assert len(names) == len(set(names)), "code generators make functions of these"


def test_bodies_are_read_off_their_dataclasses():
    schemas = document(ROUTES, locked=False)["components"]["schemas"]
    chat, messages = schemas["ChatBody"]["properties"], schemas["MessagesBody"]["properties"]
    assert schemas["ChatBody"]["required"] == ["messages"]
    assert chat["temperature"]["anyOf"] == [{"type": "number", "minimum": 0.0, "maximum": 2.0}, {"type": "null"}]
    assert chat["top_p"]["anyOf"][0]["exclusiveMinimum"] == 0 and chat["n"]["anyOf"][0] == {
        "type": "integer", "minimum": 1, "maximum": 128}
    assert "minimal" in chat["reasoning_effort"]["anyOf"][0]["enum"] and chat["stream"]["default"] is False
    assert messages["stop_sequences"]["anyOf"][0]["anyOf"][0] == {"type": "string", "minLength": 1}
