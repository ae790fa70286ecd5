"""One server process: the port opens first, the model loads behind it, SIGTERM drains.

    open the port, http or https (/health says 503) -> load on a thread -> serve -> SIGTERM or SIGINT
      -> stop listening, refuse new requests -> running ones finish, up to shutdown_s -> the rest end with an error frame

A second signal ends the process at once. Proven by tests/test_process.py and tests/test_stream.py.
"""
import asyncio
import contextlib
import logging
import signal
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ..config import EngineConfig
from ..errors import ConfigError
from .app import make_app
from .service import Service

log = logging.getLogger("qwentin.server")

WORKERS = 4                 # threads that render and tokenise prompts: few, because each keeps memory of its own
HEAD_S = 75.0               # longer than proxies keep a connection that they may use again
LINGER_S = 2.0              # after a refusal: time to read on, so that the client gets to see it
HEAD_LINE, HEADERS = 8190, 128      # bytes of the request line and of a header; headers
LAST_WRITES_S = 2.0         # after the engine stopped: time for handlers to write what they hold
SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve(config: EngineConfig, load: Callable, announce: Callable[[str], None]) -> None:
    """Serve until a signal comes. `load(config)` makes the engine; `announce` gets one line when it serves.

    Raises ConfigError if the port cannot be opened, and whatever `load` raises.
    """
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(WORKERS, "prepare"))
    service, stop = Service(config), asyncio.Event()
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, loop, stop)
    runner = make_runner(service)
    await runner.setup()
    try:
        url = await listen(runner, config)
        log.info("listening on %s, loading %s", url, config.model)
        waiting = [asyncio.ensure_future(stop.wait()), in_daemon_thread(loop, load, config)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if waiting[1].done():
            service.engine = waiting[1].result()
            service.engine.start()
            log.info("%s", placement(service.status()))
            announce(f"{config.model_name} ready: {url}/v1 (context {service.engine.max_model_len} tokens)")
            await stop.wait()
            await drain(service, runner)
    finally:
        await runner.cleanup()


def placement(status: dict) -> str:
    """Where the model runs and what it takes from now on: all of it is allocated."""
    parts = ", ".join(f"{part} {size / 2**20:.1f} MiB" for part, size in status.get("memory", {}).items())
    return f"the model runs on {status.get('device', 'something unknown')}: {parts or 'nothing is counted'}"


def on_signal(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    for number in SIGNALS:
        loop.remove_signal_handler(number)
    stop.set()


def make_runner(service: Service) -> web.AppRunner:
    """The application behind aiohttp's server. A connection that stands for HEAD_S without a whole head of a request on it,
    be it silent or dripping, is closed; a head that is too large is a 400."""
    http = logging.getLogger("qwentin.http")
    http.addFilter(one_line)
    return web.AppRunner(make_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=LAST_WRITES_S,
                         logger=http, keepalive_timeout=HEAD_S, lingering_time=LINGER_S, max_line_size=HEAD_LINE,
                         max_field_size=HEAD_LINE, max_headers=HEADERS)


def one_line(record: logging.LogRecord) -> bool:
    """A filter: aiohttp's traceback about bytes that are no HTTP becomes a line, or a port scan would fill the log."""
    error = record.exc_info and record.exc_info[1]
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args, record.exc_info = "not HTTP: %s", (" ".join(error.message.split())[:200],), None
    return True


def tls(config: EngineConfig) -> ssl.SSLContext | None:
    """Of --tls-cert and --tls-key. Raises ConfigError."""
    if not config.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-cert {config.tls_cert} and --tls-key {config.tls_key} cannot be used: "
                          f"{error.strerror or error}.") from None
    return context


async def listen(runner: web.AppRunner, config: EngineConfig) -> str:
    """Open the port; the URL that it can be reached at."""
    try:
        await web.TCPSite(runner, config.host, config.port, ssl_context=tls(config)).start()
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {error.strerror or error}.") from None
    host, port = runner.addresses[0][:2]
    scheme = "https" if config.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def in_daemon_thread(loop: asyncio.AbstractEventLoop, function: Callable, *arguments) -> asyncio.Future:
    """A future of function(*arguments). The thread is a daemon: a signal while it works does not wait for it."""
    future = loop.create_future()

    def settle(error, result):
        if future.cancelled():
            return
        future.set_exception(error) if error else future.set_result(result)

    def work():
        try:
            result, error = function(*arguments), None
        except Exception as raised:
            result, error = None, raised
        with contextlib.suppress(RuntimeError):     # the loop is closed: the process is on its way out
            loop.call_soon_threadsafe(settle, error, result)
    threading.Thread(target=work, name="load", daemon=True).start()
    return future


async def drain(service: Service, runner: web.AppRunner) -> None:
    """Refuse new requests, let running ones finish for shutdown_s, cancel the rest."""
    log.info("shutting down: running requests get %.0f s", service.config.shutdown_s)
    service.stopping = True
    for site in list(runner.sites):
        await site.stop()
    await asyncio.to_thread(service.engine.stop, service.config.shutdown_s)
