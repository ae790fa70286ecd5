"""The door: the key on every route of the table, origins, and clients that send too much, too slowly, or never end, while a
good request beside them is served."""
import contextlib
import socket
import time
import zlib
from urllib.parse import urlsplit

import pytest

from fake_engine import FakeEngine, pieces, serving, until
from http_client import call, open_request, read_until
from qwentin.server import door, process, stream
from qwentin.server.app import ROUTES

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}], "enable_thinking": False}
KEY = {"Authorization": "Bearer s3cret"}
LISTED = "https://chat.example"


def connect(url) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def soon(condition):
    return until(condition, 60.0)


def closed(sock) -> bool:
    """Whether the server ends the connection, whatever it says before."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass
    return True


# ---- the key

def paths():
    """(method, a path that matches) of every route of the table."""
    return [(route, route.path.replace("{id}", "x").replace("{name}", "style.css")) for route in ROUTES]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"x-api-key": ""}, {"Authorization": "s3cret"},
                                     {"Authorization": "Basic s3cret"}, {"x-api-key": "s3cret s3cret"}])
def test_no_route_works_without_the_key(headers):
    engine = FakeEngine(pieces("ok"))
    with serving(engine, api_key="s3cret") as server:
        for route, path in paths():
            body = None if route.method == "GET" else {}
            for method in (route.method, "OPTIONS", "DELETE"):
                for spelt in (path, path + "?x=1", path.replace("/", "//", 1), path + "/", path.replace("e", "%65", 1)):
                    answer = call(server.url, spelt, body if method == route.method else None, method, headers)
                    open_here = route.keyless and method == route.method
                    assert answer.status in ((200, 404, 401) if open_here else (401,)), (method, spelt)
                    assert b"qwentin-nano" not in answer.raw or path == "/health", spelt
        assert engine.requests == []
    assert {route.path for route in ROUTES if route.keyless} == {"/", "/page/{name}", "/health"}


def test_the_key_opens_every_route_and_health_tells_more():
    with serving(FakeEngine(pieces("ok")), api_key="s3cret") as server:
        for route, path in paths():
            answer = call(server.url, path, None if route.method == "GET" else {}, headers=KEY)
            assert answer.status in (200, 400, 404), path
        assert set(call(server.url, "/health").json) == {"status", "model"}
        assert "running" in call(server.url, "/health", headers=KEY).json


# ---- origins

def allowed(answer):
    return answer.headers.get("access-control-allow-origin")


def test_cors_is_off_by_default():
    engine = FakeEngine(pieces("ok"))
    with serving(engine) as server:
        for origin in (LISTED, "null", "http://127.0.0.1:1"):
            for method, path, body in (("GET", "/v1/models", None), ("POST", CHAT, HI), ("OPTIONS", CHAT, None)):
                answer = call(server.url, path, body, method, {"Origin": origin})
                assert answer.status == 403 and answer.error["code"] == "origin_not_allowed" and allowed(answer) is None
        assert engine.requests == [], "a foreign page makes nothing run"
        own = call(server.url, CHAT, HI, headers={"Origin": server.url})
        assert own.status == 200 and allowed(own) is None, "the status page's own requests"


def test_listed_origins_are_let_in_with_the_key_alone():
    preflight = {"Origin": LISTED, "Access-Control-Request-Method": "POST"}
    with serving(FakeEngine(pieces("ok")), api_key="s3cret", cors_origins=f"https://a.example, {LISTED}/") as server:
        asked = call(server.url, CHAT, method="OPTIONS", headers=preflight)
        assert asked.status == 204 and allowed(asked) == LISTED and "POST" in asked.headers["access-control-allow-methods"]
        assert "Authorization" in asked.headers["access-control-allow-headers"]
        assert call(server.url, CHAT, HI, headers={"Origin": LISTED}).status == 401
        for body in (HI, {**HI, "stream": True}):
            answer = call(server.url, CHAT, body, headers={"Origin": LISTED, **KEY})
            assert answer.status == 200 and allowed(answer) == LISTED and answer.headers["vary"] == "Origin"
        other = call(server.url, CHAT, method="OPTIONS", headers={**preflight, "Origin": "https://evil.example"})
        assert other.status == 403 and allowed(other) is None
        assert allowed(call(server.url, "/health")) is None
    with serving(FakeEngine(pieces("ok")), cors_origins="*") as server:
        assert allowed(call(server.url, CHAT, HI, headers={"Origin": "null"})) == "null"


# ---- too much

def test_bodies_that_are_too_large():
    """By their announced length at once, chunk by chunk when none is announced, a compressed one by what it unfolds to."""
    with serving(FakeEngine(pieces("ok")), max_body_mib=1) as server:
        answer = call(server.url, CHAT, b" " * (2**20 + 1))
        assert answer.status == 413 and answer.error["code"] == "body_too_large"
        sock = connect(server.url)
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                sock.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        assert b" 413 " in read_until(sock, b"\r\n")
        sock.close()
        folded = zlib.compress(b" " * (8 * 2**20))
        assert len(folded) < 20000
        assert call(server.url, CHAT, folded, headers={"Content-Encoding": "deflate"}).status == 413
        assert call(server.url, CHAT, HI).status == 200


@pytest.mark.parametrize("head", [
    b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: a\r\n" % i for i in range(500)) + b"\r\n",
    b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"\r\n\r\n\x00\x00\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"])
def test_heads_that_are_malformed_or_too_large(head, caplog):
    with serving(FakeEngine(pieces("ok"))) as server:
        sock = connect(server.url)
        sock.sendall(head)
        assert read_until(sock, b"\r\n").split()[1] == b"400" and closed(sock)
        assert call(server.url, "/health").status == 200
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


# ---- too slow

def test_slow_and_endless_clients_are_ended_and_block_nobody(monkeypatch):
    """Forty connections that say nothing, drip a head, drip a body, never end one or never read; a good request is served
    while all of them hang, and each of them is closed."""
    monkeypatch.setattr(process, "HEAD_S", 0.6)
    monkeypatch.setattr(process, "LINGER_S", 0.1)
    monkeypatch.setattr(door, "BODY_S", 0.6)
    monkeypatch.setattr(stream, "STALL_S", 0.6)
    endless = [[b"x" * 4000]] * 10**6
    engine = FakeEngine(lambda request, i: pieces("ok") if request.max_tokens else endless, max_seqs=16, max_queue=16)
    with serving(engine) as server:
        silent = [connect(server.url) for _ in range(8)]
        heads = [connect(server.url) for _ in range(8)]
        bodies = [open_request(server.url, CHAT, HI, missing=1000) for _ in range(8)]
        chunked = [connect(server.url) for _ in range(8)]
        unread = [open_request(server.url, CHAT, {**HI, "stream": True}) for _ in range(8)]
        for sock in heads:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: ")
        for sock in chunked:
            sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        begun = time.monotonic()
        for _ in range(3):
            assert call(server.url, CHAT, {**HI, "max_tokens": 9}).status == 200
            with contextlib.suppress(ConnectionError):
                for sock in heads:
                    sock.sendall(b"x")
                for sock in chunked:
                    sock.sendall(b"1\r\n \r\n")
        assert time.monotonic() - begun < 30
        assert soon(lambda: len(engine.did("cancel")) == 8), "streams that nobody reads are cancelled"
        for sock in bodies + chunked:
            assert b" 408 " in read_until(sock, b"\r\n")
        for sock in silent + heads + bodies + chunked:
            assert closed(sock)
        for sock in unread:
            sock.close()
        assert call(server.url, CHAT, {**HI, "max_tokens": 9}).status == 200


def test_an_answer_that_nobody_takes_is_let_go(monkeypatch):
    """A whole answer of megabytes, and a client that never reads: the kernel ends the connection."""
    monkeypatch.setattr(door, "UNREAD_S", 1.0)
    with serving(FakeEngine(pieces("ok"))) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((urlsplit(server.url).hostname, urlsplit(server.url).port))
        body = b'{"prompt": "' + b"a" * 4 * 2**20 + b'"}'
        sock.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert soon(lambda: len(server.runner.server.connections) == 1)
        assert soon(lambda: not server.runner.server.connections)
        sock.close()
        assert call(server.url, "/health").status == 200


@pytest.mark.parametrize("streams", [True, False])
def test_a_request_may_not_take_longer_than_it_may(streams):
    engine = FakeEngine([[b"x"]] * 10**6, step_s=0.001)
    with serving(engine, request_timeout_s=0.3) as server:
        answer = call(server.url, CHAT, {**HI, "stream": streams})
        assert b"request_timeout" in answer.raw and b"--request-timeout-s" in answer.raw
        assert answer.status == (200 if streams else 504) and (streams or answer.headers["x-should-retry"] == "false")
        assert soon(lambda: not engine.jobs) and len(engine.did("cancel")) == 1


# ---- nothing is fetched

@pytest.mark.parametrize("path, body, named", [
    (CHAT, lambda url: {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url}}]}]}, "messages[0].content[0]"),
    (CHAT, lambda url: {"messages": [{"role": "user", "content": [
        {"type": "file", "file": {"file_data": url}}]}]}, "messages[0].content[0]"),
    ("/v1/responses", lambda url: {"input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": url}]}]}, "input[0].content[0]"),
    ("/v1/responses", lambda url: {"input": [{"role": "user", "content": [
        {"type": "input_file", "file_url": url}]}]}, "input[0].content[0]"),
    ("/v1/messages", lambda url: {"messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": url}}]}]}, "messages[0].content[0]"),
    ("/v1/messages", lambda url: {"messages": [{"role": "user", "content": [
        {"type": "document", "source": {"type": "url", "url": url}}]}]}, "messages[0].content[0]")])
def test_urls_are_refused_by_name_and_never_fetched(path, body, named):
    engine = FakeEngine(pieces("ok"))
    with socket.create_server(("127.0.0.1", 0)) as bait, serving(engine) as server:
        bait.setblocking(False)
        url = f"http://127.0.0.1:{bait.getsockname()[1]}/secret"
        answer = call(server.url, path, body(url))
        assert answer.status == 400 and named in answer.error["message"] and engine.requests == []
        with pytest.raises(BlockingIOError):
            bait.accept()


def test_a_web_search_tool_fetches_nothing():
    """Codex lists it on every turn: it is left out, and the text's URLs stay text."""
    with socket.create_server(("127.0.0.1", 0)) as bait, serving(FakeEngine(pieces("ok"))) as server:
        bait.setblocking(False)
        url = f"http://127.0.0.1:{bait.getsockname()[1]}/page"
        answer = call(server.url, "/v1/responses", {"input": f"Read {url}", "tools": [{"type": "web_search"}]})
        assert answer.status == 200
        with pytest.raises(BlockingIOError):
            bait.accept()
