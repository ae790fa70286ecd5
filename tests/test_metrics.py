"""/metrics over a scripted engine and from a real server, read with the parser of prometheus_client."""
import json

from prometheus_client.parser import text_string_to_metric_families

from fake_engine import FakeEngine, pieces, serving, until
from http_client import call, events, open_request, read_until
from qwentin.request import Finish

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}], "enable_thinking": False}


def scrape(url, **more):
    """{(sample's name, its labels as sorted pairs): value}"""
    answer = call(url, "/metrics", **more)
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    return {(s.name, tuple(sorted(s.labels.items()))): s.value
            for family in text_string_to_metric_families(answer.raw.decode()) for s in family.samples}


def requests(found, route, status):
    return found.get(("qwentin_requests_total", (("route", route), ("status", str(status)))), 0)


def test_requests_are_counted_by_route_and_how_they_ended():
    engine = FakeEngine(pieces("ok"), context=300)
    with serving(engine) as server:
        assert call(server.url, CHAT, HI).status == 200
        events(server.url, CHAT, HI)
        assert call(server.url, "/v1/messages?beta=true", {"messages": HI["messages"]}).status == 200
        assert call(server.url, "/v1/responses", {"input": "Hi"}).status == 200
        assert call(server.url, CHAT, {}).status == 400
        events(server.url, "/v1/responses", {"input": "x" * 300})           # refused inside its stream
        found = scrape(server.url)
    assert requests(found, CHAT, 200) == 2 and requests(found, CHAT, 400) == 1
    assert requests(found, "/v1/messages", 200) == requests(found, "/v1/responses", 200) == 1
    assert requests(found, "/v1/responses", 400) == 1
    for name in ("queue", "prefill", "decode", "time_to_first_token", "time_per_output_token"):
        assert found[(f"qwentin_{name}_seconds_count", ())] == 4, name
    assert found[("qwentin_request_seconds_count", (("route", CHAT),))] == 3


def test_streams_that_fail_and_clients_that_leave():
    broken, endless = [[b"a"], Finish(0, "error", "broken")], [[b"x"]] * 10**6
    engine = FakeEngine(lambda request, i: broken if request.max_tokens else endless, step_s=0.001)
    with serving(engine) as server:
        events(server.url, CHAT, {**HI, "max_tokens": 5})
        for stream in (True, False):
            sock = open_request(server.url, CHAT, {**HI, "stream": stream})
            if stream:
                read_until(sock, b'"content":"x"')
            assert until(lambda: engine.jobs and engine.jobs[0].generated > 3)
            sock.close()
            assert until(lambda: not engine.jobs)
        assert until(lambda: requests(scrape(server.url), CHAT, 499) == 2)
        assert requests(scrape(server.url), CHAT, 500) == 1


def test_the_engines_own_figures():
    engine = FakeEngine(pieces("ok"))
    engine.status = lambda: {"running": 3, "waiting": 2, "requests": 7, "prompt_tokens": 100, "cached_tokens": 60,
                             "completion_tokens": 40, "prefixes": 5, "kv_pages": 64, "status": "ok",
                             "memory": {"weights": 5, "KV": 7}}
    with serving(engine) as server:
        found = scrape(server.url)
    values = {name: value for (name, labels), value in found.items() if not labels and "seconds" not in name
              and not name.endswith("_created")}
    assert [found[("qwentin_memory_bytes", (("part", part),))] for part in ("weights", "KV")] == [5, 7]
    assert values == {"qwentin_running": 3, "qwentin_waiting": 2, "qwentin_engine_requests_total": 7, "qwentin_prefixes": 5,
                      "qwentin_prompt_tokens_total": 100, "qwentin_cached_tokens_total": 60, "qwentin_kv_pages": 64,
                      "qwentin_completion_tokens_total": 40, "qwentin_dropped_tool_calls_total": 0}


def test_before_the_engine_is_there_and_behind_the_key():
    with serving(None) as server:
        assert not any(name == "qwentin_running" for name, _ in scrape(server.url))
        assert call(server.url, "/metrics", method="HEAD").status == 200
    with serving(FakeEngine([]), api_key="k") as server:
        assert call(server.url, "/metrics").status == 401
        assert scrape(server.url, headers={"Authorization": "Bearer k"})[("qwentin_running", ())] == 0


def test_two_servers_in_one_process_count_apart():
    with serving(FakeEngine(pieces("ok"))) as one, serving(FakeEngine(pieces("ok"))) as other:
        call(one.url, CHAT, HI)
        assert requests(scrape(one.url), CHAT, 200) == 1 and requests(scrape(other.url), CHAT, 200) == 0


def test_x_qwentin_tells_where_the_time_went(server):
    """The real engine: the second, equal prompt comes from the cache, and both the answer and the counters say so."""
    before = scrape(server.url)
    ask = {"role": "user", "content": "Please add 17 and 25, and count me."}
    body = {"messages": [ask], "temperature": 0, "max_tokens": 8}
    first, second = (call(server.url, CHAT, body).json for _ in range(2))
    extras = second["x_qwentin"]
    assert extras["cached_tokens"] == second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert extras["prefill_s"] > 0 and extras["decode_s"] > 0 and extras["queue_s"] >= 0
    assert extras["thinking"] is True and extras["reasoning_effort"] is None
    last = [f for f in events(server.url, CHAT, {**body, "stream_options": {"include_usage": True}}).frames][-1]
    assert set(last["x_qwentin"]) == set(first["x_qwentin"]) and last["choices"] == []
    text = call(server.url, TEXT, {"prompt": "Hi", "max_tokens": 2}).json
    assert set(text["x_qwentin"]) == {"cached_tokens", "queue_s", "prefill_s", "decode_s", "speculation"}
    guessed = extras["speculation"]
    assert set(guessed) == {"rounds", "plain_steps", "accept_length", "depth_acceptance", "guesses", "accepted",
                            "accepted_lookup", "largest_tree", "events"}
    assert guessed["accepted"] + guessed["rounds"] + guessed["plain_steps"] == 7, "tokens after the first"
    after = scrape(server.url)
    grown = lambda name: after[(name, ())] - before[(name, ())]
    assert grown("qwentin_engine_requests_total") == 4 and grown("qwentin_completion_tokens_total") == 26
    assert grown("qwentin_cached_tokens_total") >= extras["cached_tokens"]
    assert grown("qwentin_draft_rounds_total") + grown("qwentin_draft_plain_steps_total") > 0
    assert json.dumps(extras)
