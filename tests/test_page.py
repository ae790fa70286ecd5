"""The status page in headless Chromium, against scripted engines and a real server; what needs no browser is looked at
without one."""
import contextlib
import re
import shutil
import socket
import threading
from importlib.resources import files

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from conftest import start_server
from fake_engine import FakeEngine, pieces, serving, until
from http_client import call

PAGE = {entry.name: entry.read_text("utf-8") for entry in (files("qwentin.server") / "page").iterdir()}
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,1000",
         "--disable-background-networking", "--no-first-run")
needs_browser = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="no Chromium here: apt-get install chromium chromium-driver (Debian), then the status page is tested too")


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield found
    found.quit()


def soon(condition):
    """until(), with the patience that a browser on a busy machine needs."""
    return until(condition, 60.0)


class Tab:
    """A freshly loaded page, and what one may see and do on it."""

    def __init__(self, browser, url):
        self.browser = browser
        browser.get(url)
        browser.execute_script("sessionStorage.clear()")
        browser.get(url)

    def find(self, name):
        return self.browser.find_element(By.ID, name)

    def text(self, name):
        return self.find(name).text

    def type(self, name, text):
        self.find(name).send_keys(text + "\n")

    def talk(self):
        return [node.get_attribute("textContent") for node in self.browser.find_elements(By.CSS_SELECTOR, "#talk .said")]

    def drawn(self, plot):
        """The line of a plot, as SVG draws it."""
        return self.browser.execute_script("""return [...document.querySelectorAll(arguments[0])]
                                                     .map(line => line.getAttribute("d"))""", f"#{plot} .data")

    def complaints(self):
        return [line for line in self.browser.get_log("browser") if line["level"] == "SEVERE"]


# ---- in a browser

@needs_browser
def test_a_chat_streams_in(browser):
    """The first half of the answer stands there while the engine holds the second back; the thought has folded away."""
    go = threading.Event()

    def script(request, index):
        yield from pieces("Let me see.\n</think>\n\nThe first half", 3)
        go.wait(60)
        yield from pieces(" and the second.", 3)
    with serving(FakeEngine(script)) as server:
        tab = Tab(browser, server.url)
        assert soon(lambda: tab.text("word") == "ok")
        tab.type("text", "Hello <b>there</b>")
        assert soon(lambda: len(tab.talk()) == 2 and tab.talk()[1].endswith("The first half"))
        assert tab.talk()[0] == "Hello <b>there</b>", "text is text"
        assert "Let me see." in tab.talk()[1] and not tab.find("send").is_enabled() and tab.find("stop").is_displayed()
        go.set()
        assert soon(lambda: tab.find("send").is_enabled())
        assert tab.talk()[1].endswith("The first half and the second.")
        fold = browser.find_element(By.CSS_SELECTOR, "#talk details")
        assert fold.get_attribute("open") is None and tab.complaints() == []


@needs_browser
def test_stopping_a_chat_cancels_it(browser):
    engine = FakeEngine([[b"x"]] * 10**6, step_s=0.002)
    with serving(engine) as server:
        tab = Tab(browser, server.url)
        tab.type("text", "Go on")
        assert soon(lambda: len(tab.talk()) == 2 and len(tab.talk()[1]) > 20)
        tab.find("stop").click()
        assert soon(lambda: not engine.jobs) and len(engine.did("cancel")) == 1
        assert soon(lambda: tab.find("send").is_enabled()) and tab.find("stop").is_displayed() is False


@needs_browser
def test_a_refusal_is_told(browser):
    with serving(FakeEngine([], context=20)) as server:
        tab = Tab(browser, server.url)
        tab.type("text", "far too long for this")
        assert soon(lambda: browser.find_elements(By.CSS_SELECTOR, "#talk .error"))
        assert "maximum context length" in tab.talk()[-1]


@needs_browser
def test_with_a_key_plots_move_and_figures_show(browser, tmp_path):
    """A real server with a key: nothing shows without it; with it a chat is answered, the plots move, and the key stays in
    the tab's sessionStorage."""
    server = start_server("--api-key", "s3cret", "--max-model-len", "1024")
    try:
        tab = Tab(browser, server.url)
        assert soon(lambda: tab.find("ask").is_displayed()) and not tab.find("all").is_displayed()
        tab.type("key", "wrong")
        assert soon(lambda: tab.find("wrong").is_displayed()) and not tab.find("all").is_displayed()
        tab.type("key", "s3cret")
        assert soon(lambda: tab.find("all").is_displayed() and tab.text("running") == "0")
        assert soon(lambda: tab.drawn("speed")), "no rate without two looks"
        before = {plot: tab.drawn(plot) for plot in ("speed", "accept", "reuse")}
        for question in ("Please add 696 and 336.", "Please add 12 and 30."):
            answers = len(tab.talk()) + 2
            tab.type("text", question)
            assert soon(lambda: len(tab.talk()) == answers and tab.find("send").is_enabled())
        assert tab.talk()[1].endswith("696 + 336 = 1032") and "accept length" in tab.text("pace")
        assert soon(lambda: all(tab.drawn(plot) not in ([], before[plot]) for plot in before)), "the plots moved"
        assert soon(lambda: tab.text("requests") == "2") and int(tab.text("generated")) > 20
        assert [item.split("\n")[0] for item in tab.text("parts").split("\n")[::2]] == ["weights", "KV", "state"]
        assert soon(lambda: tab.text("warmth") != "")
        browser.save_screenshot(str(tmp_path / "page.png"))
        stored = browser.execute_script("return [sessionStorage, localStorage].map(store => JSON.stringify(store))")
        assert stored == ['{"api-key":"s3cret"}', "{}"] and browser.get_cookies() == []
        tab.find("sleep").click()
        assert soon(lambda: tab.text("word") == "asleep" and "freed" in tab.text("total"))
        tab.find("forget").click()
        assert soon(lambda: tab.find("ask").is_displayed()) and not tab.find("all").is_displayed()
    finally:
        assert server.stop() == 0


@needs_browser
def test_the_page_can_reach_this_server_alone(browser):
    """A script, a picture and a request of elsewhere are stopped by the browser before they connect."""
    with serving(FakeEngine(pieces("ok"))) as server, socket.create_server(("127.0.0.1", 0)) as bait:
        bait.setblocking(False)
        tab = Tab(browser, server.url)
        assert soon(lambda: tab.text("running") == "0")
        loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
        assert {"page.js", "plot.js", "chat.js", "server.js", "style.css"} <= {name.rsplit("/", 1)[1] for name in loaded}
        assert all(name.startswith(server.url) for name in loaded)
        stopped = browser.execute_async_script("""
            const [url, done] = arguments, stopped = [];
            document.addEventListener("securitypolicyviolation", event => {
                stopped.push(event.effectiveDirective);
                if (stopped.length === 3) done(stopped.sort());
            });
            new Image().src = url;
            fetch(url).catch(() => {});
            document.head.append(Object.assign(document.createElement("script"), { src: url }));
        """, f"http://127.0.0.1:{bait.getsockname()[1]}/x")
        assert stopped == ["connect-src", "img-src", "script-src-elem"]
        with pytest.raises(BlockingIOError):
            bait.accept()


# ---- without one

def test_the_files_are_served_with_their_types_and_nothing_else_is():
    with serving(FakeEngine([]), api_key="k") as server:
        index = call(server.url, "/")
        assert index.status == 200 and index.headers["content-type"] == "text/html; charset=utf-8"
        policy = index.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'") and "unsafe" not in policy and "*" not in policy
        for name, text in PAGE.items():
            answer = call(server.url, f"/page/{name}")
            assert answer.status == 200 and answer.raw.decode() == text
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "s3cret" not in text and "qwentin-nano" not in text
        for name in ("../config.py", "..%2f..%2fconfig.py", "%2e%2e/app.py", "page.js%00", ".", "style.css/x"):
            with contextlib.suppress(ValueError):
                assert call(server.url, f"/page/{name}").status in (401, 404)


def test_nothing_in_the_files_points_elsewhere():
    for name, text in PAGE.items():
        assert set(re.findall(r"https?://[^\"'\s]+", text)) <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"\son\w+=|style=|innerHTML|eval\(|document\.write", text), f"{name}: the policy forbids it"


def test_scripts_and_page_name_the_same_elements():
    names = set(re.findall(r'id="(\w[\w-]*)"', PAGE["index.html"]))
    used = set(re.findall(r'(?:\$|put|fill)\("([\w-]+)"', PAGE["page.js"] + PAGE["chat.js"]))
    assert used <= names and {f"{plot}-now" for plot in ("speed", "accept", "reuse")} <= names
    classes = set(re.findall(r"\.([a-z]\w*)", re.sub(r"\{[^}]*\}", "", PAGE["style.css"])))
    written = " ".join(PAGE[name] for name in ("index.html", "page.js", "chat.js", "plot.js"))
    assert [name for name in sorted(classes) if not re.search(rf"\b{name}\b", written) and name not in
            {"c0", "c1", "c2", "c3", "c4"}] == []
