"""One server process from start to end, with an engine that loads as slowly or as badly as the test wants."""
import asyncio
import os
import signal
import ssl
import urllib.request
import socket
import threading
import time

import pytest
import trustme

from fake_engine import FakeEngine, pieces
from http_client import call
from qwentin.config import EngineConfig
from qwentin.errors import CheckpointError, ConfigError
from qwentin.server.process import placement, serve


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run(load, during, **options):
    """Serve in this thread while `during(url)` runs in another; then SIGTERM. What was announced, and what failed."""
    port, announced, failed = free_port(), [], []
    config = EngineConfig(port=port, shutdown_s=0.2, **options)

    def client():
        url = f"http://127.0.0.1:{port}"
        try:
            while True:
                try:
                    call(url, "/health")
                    break
                except OSError:
                    time.sleep(0.005)
            during(url)
        except BaseException as error:
            failed.append(error)
        os.kill(os.getpid(), signal.SIGTERM)
    thread = threading.Thread(target=client, daemon=True)
    thread.start()
    asyncio.run(serve(config, load, announced.append))
    thread.join(10)
    assert failed == []
    return announced, config


def ready(url):
    while call(url, "/health").status != 200:
        time.sleep(0.005)


def test_the_port_is_open_while_the_model_loads():
    gate, seen = threading.Event(), []

    def load(config):
        gate.wait(20)
        return FakeEngine(pieces("ok"))

    def during(url):
        seen.append(call(url, "/health"))
        seen.append(call(url, "/v1/completions", {"prompt": "a"}))
        gate.set()
        ready(url)
        seen.append(call(url, "/v1/completions", {"prompt": "a"}))
    announced, config = run(load, during)
    assert [a.status for a in seen] == [503, 503, 200]
    assert announced == [f"qwentin-nano ready: http://127.0.0.1:{config.port}/v1 (context 4000 tokens)"]


def test_a_signal_while_loading_ends_the_process_at_once():
    forever = threading.Event()
    started = time.monotonic()
    announced, _ = run(lambda config: forever.wait(60), lambda url: None)
    assert announced == [] and time.monotonic() - started < 30
    forever.set()


def test_what_loading_raises_comes_out():
    def load(config):
        raise CheckpointError("model.safetensors is cut short.")
    with pytest.raises(CheckpointError, match="cut short"):
        asyncio.run(serve(EngineConfig(port=0), load, lambda line: None))


def test_a_port_that_is_taken():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(ConfigError, match=f"port {sock.getsockname()[1]}"):
            asyncio.run(serve(EngineConfig(port=sock.getsockname()[1]), FakeEngine, lambda line: None))


def test_draining_ends_long_streams_and_refuses_new_requests():
    engine, ends = FakeEngine([[b"x"]] * 10**6, step_s=0.001), []

    def during(url):
        ready(url)
        for stream in (True, False):
            body = {"prompt": "a", "stream": stream}
            thread = threading.Thread(target=lambda: ends.append(call(url, "/v1/completions", body)))
            thread.start()
            while len(engine.jobs) < 1 + (not stream):
                time.sleep(0.002)
    run(lambda config: engine, during)
    for _ in range(1000):
        if len(ends) == 2:
            break
        time.sleep(0.005)
    whole, stream = sorted(ends, key=lambda answer: -answer.status)
    assert whole.status == 503 and whole.error["code"] == "server_stopping"
    assert stream.status == 200 and stream.raw.endswith(b"data: [DONE]\n\n") and b"server_stopping" in stream.raw


def test_https(tmp_path):
    """With a certificate the port speaks TLS alone, and a key that is not its own is refused at the start."""
    authority = trustme.CA()
    paths = [str(tmp_path / name) for name in ("cert.pem", "key.pem", "other.pem")]
    for issued, name in ((authority.issue_cert("localhost"), paths[1]), (trustme.CA().issue_cert("localhost"), paths[2])):
        issued.private_key_pem.write_to_path(name)
        if name == paths[1]:
            issued.cert_chain_pems[0].write_to_path(paths[0])
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    port, seen = free_port(), []

    def client():
        try:
            while True:
                try:
                    with urllib.request.urlopen(f"https://localhost:{port}/health", context=trust, timeout=10) as answer:
                        seen.append(answer.status)
                    break
                except OSError:
                    time.sleep(0.01)
            with pytest.raises(OSError):
                call(f"http://localhost:{port}", "/health", timeout=5)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
    thread = threading.Thread(target=client, daemon=True)
    thread.start()
    announced = []
    asyncio.run(serve(EngineConfig(host="localhost", port=port, shutdown_s=0.2, tls_cert=paths[0], tls_key=paths[1]),
                      lambda config: FakeEngine(pieces("ok")), announced.append))
    thread.join(10)
    assert seen == [200] and f"https://127.0.0.1:{port}/v1" in announced[0]
    with pytest.raises(ConfigError, match="other.pem cannot be used"):
        asyncio.run(serve(EngineConfig(port=0, tls_cert=paths[0], tls_key=paths[2]), FakeEngine, announced.append))
    with pytest.raises(ConfigError, match="go together"):
        EngineConfig(tls_cert=paths[0])


def test_where_the_model_runs_is_said_at_the_start(server):
    """N-9: a server on the CPU, or on anything else that is slow, says so in its log and in /health."""
    status = server.health()
    assert status["device"] == "cpu (numpy)" and set(status["memory"]) == {"weights", "KV", "state"}
    assert placement(status) in server.log_text() and "the model runs on cpu (numpy): weights 52.7 MiB" in placement(status)


def test_by_default_nobody_else_can_connect(server):
    """The default address is loopback: a server started without --host is not there under another one of the machine."""
    assert EngineConfig().host == "127.0.0.1" and server.url.startswith("http://127.0.0.1:")
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=5):
        pass
