"""A few lines of http.client for tests: JSON in, JSON or server-sent events out, and sockets that can be dropped."""
import contextlib
import http.client
import json
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass
class Answer:
    status: int
    headers: dict
    raw: bytes

    @property
    def json(self):
        return json.loads(self.raw)

    @property
    def error(self):
        return self.json["error"]


def call(url, path, body=None, method=None, headers=(), timeout=60.0) -> Answer:
    """One request. A body that is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)
    raw = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    try:
        connection.request(method, path, raw, {"Content-Type": "application/json", **dict(headers)})
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


@dataclass
class Events:
    """A stream that was read to its end: the JSON frames, the comments, and whether [DONE] closed it. A frame with a name
    has its own type as that name."""
    frames: list
    comments: list
    done: bool


def parse_events(raw: bytes) -> Events:
    frames, comments, done = [], [], False
    for block in raw.decode().split("\n\n"):
        if block.startswith(":"):
            comments.append(block[1:].strip())
        elif block == "data: [DONE]":
            done = True
        elif block:
            *name, data = block.split("\n")
            assert data.startswith("data: ") and not done, block
            frames.append(json.loads(data[6:]))
            assert name in ([], [f"event: {frames[-1].get('type')}"]), block
    return Events(frames, comments, done)


def events(url, path, body, **more) -> Events:
    answer = call(url, path, {**body, "stream": True}, **more)
    assert answer.status == 200, answer.raw
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return parse_events(answer.raw)


def fold(frames) -> list[dict]:
    """The choices that a chat stream adds up to: every string summed, every list joined."""
    choices = {}
    for frame in frames:
        for part in frame["choices"]:
            whole = choices.setdefault(part["index"], {"message": {}, "logprobs": {}, "token_ids": [],
                                                       "finish_reason": None})
            for key, value in part["delta"].items():
                if key == "tool_calls":
                    fold_calls(whole["message"].setdefault(key, []), value)
                else:
                    whole["message"][key] = whole["message"].get(key, "") + value
            for key, value in (part["logprobs"] or {}).items():
                whole["logprobs"][key] = (whole["logprobs"].get(key) or []) + value if value is not None else None
            whole["token_ids"] += part.get("token_ids", [])
            assert whole["finish_reason"] is None, "something came after the finish"
            whole["finish_reason"] = part["finish_reason"]
    for choice in choices.values():
        if choice["message"].get("tool_calls") and not choice["message"]["content"]:
            choice["message"]["content"] = None
    return [choices[i] for i in sorted(choices)]


def fold_calls(calls: list[dict], fragments: list[dict]) -> None:
    """Fragments of tool calls added to what came before: the first of a call names it, the others only its index."""
    for fragment in fragments:
        function = dict(fragment["function"])
        if fragment["index"] == len(calls):
            assert fragment["id"] and fragment["type"] == "function" and function["name"]
            calls.append({"id": fragment["id"], "type": "function", "function": function})
        else:
            assert fragment["index"] == len(calls) - 1 and set(fragment) == {"index", "function"}
            assert set(function) == {"arguments"}
            calls[-1]["function"]["arguments"] += function["arguments"]


@contextlib.contextmanager
def slow_response(url, path, body):
    """The response of a POST whose headers came; its body waits until it is read."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60.0)
    connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def open_request(url, path, body, missing=0) -> socket.socket:
    """Send a POST and return its socket, nothing read: to be dropped by the test, or read slowly. `missing` bytes of the
    body are announced and never sent."""
    parts, raw = urlsplit(url), json.dumps(body).encode()
    sock = socket.create_connection((parts.hostname, parts.port), timeout=30)
    lines = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json",
             f"Content-Length: {len(raw) + missing}", "", ""]
    sock.sendall("\r\n".join(lines).encode() + raw)
    return sock


def read_until(sock, marker: bytes) -> bytes:
    """Bytes of a socket up to and including `marker`."""
    seen = bytearray()
    while marker not in seen[-4096 - len(marker):]:
        more = sock.recv(4096)
        assert more, f"the connection ended before {marker}: {bytes(seen[-200:])}"
        seen += more
    return bytes(seen)
