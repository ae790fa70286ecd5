"""The status page's files (page/*): open to everyone, because they hold nothing but the page; every figure on it comes from
routes that want the key, which the page asks for and keeps for the tab's life.

The files are read once. The Content-Security-Policy lets the page load and reach this server alone. Proven by
tests/test_page.py, in a browser.
"""
from functools import cache
from importlib.resources import files

from aiohttp import web

from .refusals import NotFound

TYPES = {"css": "text/css", "js": "text/javascript", "html": "text/html", "svg": "image/svg+xml"}
HEADERS = {"Cache-Control": "no-cache", "Referrer-Policy": "no-referrer", "Content-Security-Policy":
           "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
           "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"}


@cache
def contents() -> dict[str, str]:
    """Name of a file -> its text."""
    return {entry.name: entry.read_text("utf-8") for entry in (files(__package__) / "page").iterdir()
            if entry.name.rpartition(".")[2] in TYPES}


def served(name: str) -> web.Response:
    return web.Response(text=contents()[name], content_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)


async def index(request: web.Request) -> web.Response:
    return served("index.html")


async def file(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name not in contents():
        raise NotFound(f"The status page has no file {name[:60]!r}.", "file_not_found")
    return served(name)
