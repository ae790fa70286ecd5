"""Tool calls through all three dialects over a scripted engine: streams, whole answers and dialects say the same for every
way the engine cuts its text; then what each dialect owes its clients."""
import json

import anthropic
import openai
import pytest

from fake_engine import END, FakeEngine, pieces, play, ragged, serving
from http_client import fold
from qwentin.errors import RequestError
from qwentin.request import Finish
from qwentin.server.chat import ChatReply
from qwentin.server.messages import MessagesReply
from qwentin.server.responses import ResponsesReply
from replies import fold_messages, fold_responses, said_by_chat, said_by_messages, said_by_responses
from tool_texts import TOOLS, call

WEATHER, LS = call("get_weather", city="Oslo 😀", days=3), call("bash", command="pwd && ls <x> 2>&1")
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
MESSAGES = {"messages": CHAT["messages"], "thinking": {"type": "adaptive"}, "max_tokens": 2000, "tools": [
    {"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]}
RESPONSES = {"input": "Hi", "tools": [{"type": "function", **t["function"]} for t in TOOLS]}
THINK = "I need it.\n</think>\n\n"


def through_chat(script, **more):
    chunks, whole, _ = play(FakeEngine(script), ChatReply, {**CHAT, **more})
    streamed, = fold(chunks)
    said = said_by_chat(whole["choices"][0]["message"])
    assert said_by_chat(streamed["message"]) == said
    assert streamed["finish_reason"] == whole["choices"][0]["finish_reason"]
    return said, streamed["finish_reason"]


def through_messages(script, **more):
    chunks, whole, _ = play(FakeEngine(script), MessagesReply, {**MESSAGES, **more})
    streamed = fold_messages(chunks)
    assert streamed["stop_reason"] == whole["stop_reason"] and streamed["usage"] == whole["usage"]
    said = said_by_messages(streamed["content"])
    if whole["stop_reason"] in ("end_turn", "tool_use"):
        assert said_by_messages(whole["content"]) == [
            (*part[:2], json.loads(part[2])) if part[0] == "call" else part for part in said]
    return said, whole["stop_reason"]


def through_responses(script, **more):
    chunks, whole, _ = play(FakeEngine(script), ResponsesReply, {**RESPONSES, **more})
    streamed = fold_responses(chunks)
    said = said_by_responses(streamed["output"])
    assert said_by_responses(whole["output"]) == said
    assert streamed["usage"] == whole["usage"] and streamed["status"] == whole["status"]
    return said, whole["status"]


TEXTS = {
    "a call": (THINK + LS, [("thought", "I need it."), ("call", "bash")]),
    "text, then a call": (THINK + "Let me look.\n\n" + LS,
                          [("thought", "I need it."), ("text", "Let me look.\n\n"), ("call", "bash")]),
    "two calls": (THINK + WEATHER + "\n" + LS, [("thought", "I need it."), ("call", "get_weather"), ("call", "bash")]),
    "a call without arguments": (THINK + call("list_tasks"), [("thought", "I need it."), ("call", "list_tasks")]),
    "a tag in prose": (THINK + "Write `<tool_call>` first.",
                       [("thought", "I need it."), ("text", "Write `<tool_call>` first.")]),
    "no text at all": (THINK, [("thought", "I need it.")]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_streams_wholes_and_dialects_agree_however_the_text_is_cut(name):
    text, expected = TEXTS[name]
    called = any(part[0] == "call" for part in expected)
    for script in [pieces(text, 1), pieces(text, len(text.encode())), *(ragged(text, seed) for seed in range(6))]:
        chat, finish = through_chat(script)
        assert [part[:2] for part in chat] == expected and finish == ("tool_calls" if called else "stop")
        assert through_messages(script) == (chat, "tool_use" if called else "end_turn")
        assert through_responses(script) == (chat, "completed")
        for part in chat:
            if part[0] == "call":
                assert isinstance(json.loads(part[2]), dict)


def test_arguments_are_typed_and_kept_byte_for_byte():
    (_, _, weather), (_, _, ls) = through_chat(pieces(THINK + WEATHER + "\n" + LS))[0][1:]
    assert json.loads(weather) == {"city": "Oslo 😀", "days": 3}
    assert json.loads(ls) == {"command": "pwd && ls <x> 2>&1"}


def test_text_behind_a_call_keeps_its_place():
    """T-18 through the dialects: text after a call is delivered in both modes; two of the dialects keep its place."""
    script = ragged(THINK + LS + "\nDone.", 3)
    assert through_chat(script)[0][1:] == [("text", "\nDone."), ("call", "bash", '{"command": "pwd && ls <x> 2>&1"}')]
    assert [part[0] for part in through_messages(script)[0]] == ["thought", "call", "text"]
    assert [part[0] for part in through_responses(script)[0]] == ["thought", "call", "text"]


# ---- chat completions

def test_T22_one_index_a_call_and_its_name_only_once():
    chunks, whole, _ = play(FakeEngine(pieces(THINK + WEATHER + "\n" + LS)), ChatReply, CHAT)
    fragments = [f for c in chunks for f in c["choices"][0]["delta"].get("tool_calls", [])]
    assert len(fragments) > 20
    for index, name in enumerate(("get_weather", "bash")):
        first, *others = [f for f in fragments if f["index"] == index]
        assert first["function"] == {"name": name, "arguments": ""} and first["id"].startswith("call_")
        assert all(set(f) == {"index", "function"} and set(f["function"]) == {"arguments"} for f in others)
    assert [f["index"] for f in fragments] == sorted(f["index"] for f in fragments)
    assert len({c["id"] for c in whole["choices"][0]["message"]["tool_calls"]}) == 2


def test_content_is_null_when_there_are_only_calls():
    whole = play(FakeEngine(pieces(LS)), ChatReply, {**CHAT, "enable_thinking": False})[1]
    assert whole["choices"][0]["message"]["content"] is None
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    text = play(FakeEngine(pieces("Hm.\n\n" + LS)), ChatReply, {**CHAT, "enable_thinking": False})[1]
    assert text["choices"][0]["message"]["content"] == "Hm.\n\n"


@pytest.mark.parametrize("size", [1, 3, 500])
def test_tokens_are_sorted_into_thought_text_and_calls(size):
    """Log-probabilities: thought and text apart; the calls' tokens are in neither list, but among the ids."""
    text = THINK + "Hm.\n\n" + LS + "\nDone."
    body = {**CHAT, "logprobs": True, "return_token_ids": True}
    chunks, whole, _ = play(FakeEngine(pieces(text, size)), ChatReply, body)
    choice, (streamed,) = whole["choices"][0], fold(chunks)
    assert streamed["logprobs"] == choice["logprobs"] and streamed["token_ids"] == choice["token_ids"]
    assert len(choice["token_ids"]) == len(pieces(text, size)) + 1
    join = lambda key: bytes(b for e in choice["logprobs"][key] for b in e["bytes"]).decode()
    if size == 1:
        assert join("reasoning_content") == THINK and join("content") == "Hm.\n\n"
    elif size == 3:             # a token belongs where its text starts
        assert join("reasoning_content") + join("content") == THINK + "Hm.\n\n<"
    else:
        assert join("reasoning_content") == text and join("content") == ""


def test_T16_a_call_in_a_thought_that_never_closes():
    text = "I need it.\n" + LS
    for script in (pieces(text), ragged(text, 1)):
        chat, finish = through_chat(script)
        assert [part[:2] for part in chat] == [("thought", "I need it."), ("call", "bash")] and finish == "tool_calls"
        assert through_messages(script)[0] == chat == through_responses(script)[0]
    body = {**CHAT, "logprobs": True, "return_token_ids": True}
    choice = play(FakeEngine(pieces(text)), ChatReply, body)[1]["choices"][0]
    assert bytes(b for e in choice["logprobs"]["reasoning_content"] for b in e["bytes"]).decode() == "I need it.\n"
    assert choice["logprobs"]["content"] == [] and len(choice["token_ids"]) == len(text) + 1


# ---- tool_choice and parallel calls

def test_tool_choice_none_makes_everything_text_and_bans_the_tag():
    """The tools stay in the prompt: a turn without calls finds the prefix of the turns before."""
    text = "Hm.\n\n" + LS
    engine = FakeEngine(pieces(text))
    engine.tokenizer.added.add("<tool_call>")
    tag = engine.tokenizer.id(b"<tool_call>")
    body = {**CHAT, "enable_thinking": False, "logit_bias": {str(tag): 50, "65": 1}}
    _, whole, (request,) = play(engine, ChatReply, {**body, "tool_choice": "none"})
    message = whole["choices"][0]["message"]
    assert message["content"] == text and "tool_calls" not in message
    assert request.sampling.logit_bias == ((65, 1.0), (tag, -100.0))
    _, _, (auto,) = play(engine, ChatReply, body)
    assert auto.prompt.tolist() == request.prompt.tolist() and dict(auto.sampling.logit_bias)[tag] == 50
    for dialect, more in ((MessagesReply, {**MESSAGES, "thinking": {"type": "disabled"}, "tool_choice": {"type": "none"}}),
                          (ResponsesReply, {**RESPONSES, "enable_thinking": False, "tool_choice": "none"})):
        _, whole, (request,) = play(engine, dialect, more)
        assert request.sampling.logit_bias == ((tag, -100.0),)
        said = said_by_messages(whole["content"]) if "content" in whole else said_by_responses(whole["output"])
        assert said == [("text", text)]


@pytest.mark.parametrize("dialect, body", [
    (ChatReply, {**CHAT, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}),
    (MessagesReply, {**MESSAGES, "tool_choice": {"type": "tool", "name": "nobody"}}),
    (ResponsesReply, {**RESPONSES, "tool_choice": {"type": "function", "name": "nobody"}}),
    (ChatReply, {**CHAT, "tools": [], "tool_choice": "required"}),
    (MessagesReply, {**MESSAGES, "tools": [], "tool_choice": {"type": "any"}}),
    (ResponsesReply, {**RESPONSES, "tools": [], "tool_choice": "required"}),
])
def test_a_call_that_cannot_come_is_refused(dialect, body):
    with pytest.raises(RequestError, match="nobody|there are no tools") as caught:
        play(FakeEngine([]), dialect, body)
    assert caught.value.param == "tool_choice"


def test_only_the_first_of_parallel_calls_where_one_is_wanted():
    script = ragged(THINK + WEATHER + "\n" + LS, 2)
    first = [("thought", "I need it."), ("call", "get_weather", '{"city": "Oslo 😀", "days": 3}')]
    assert through_chat(script, parallel_tool_calls=False)[0] == first
    assert through_responses(script, parallel_tool_calls=False)[0] == first
    assert through_messages(script, tool_choice={"type": "auto", "disable_parallel_tool_use": True})[0] == first
    whole = play(FakeEngine(script), ChatReply, {**CHAT, "parallel_tool_calls": False})[1]
    assert whole["x_qwentin"]["dropped_calls"] == 1


# ---- calls that are cut off

def test_a_call_cut_by_the_limit_cannot_be_taken_for_a_whole_one():
    """Half a file must not be written as if it were the file: the arguments stay open, as they do at OpenAI."""
    text = THINK + call("write", file_path="a.py", content="one\ntwo\nthree")
    cut = text.index("three")
    chat, finish = through_chat(pieces(text), max_tokens=cut)
    assert finish == "length" and chat[-1] == ("call", "write", '{"file_path": "a.py", "content": "one\\ntwo"')
    assert through_responses(pieces(text), max_output_tokens=cut) == (chat, "incomplete")
    assert through_messages(pieces(text), max_tokens=cut) == (chat, "max_tokens")
    whole = play(FakeEngine(pieces(text)), MessagesReply, {**MESSAGES, "max_tokens": cut})[1]
    assert whole["content"][-1]["input"] == {"file_path": "a.py"}       # what is whole, and no more
    whole = play(FakeEngine(pieces(text)), ResponsesReply, {**RESPONSES, "max_output_tokens": cut})[1]
    assert whole["output"][-1]["status"] == "incomplete" and whole["output"][0]["status"] == "completed"


def test_a_call_that_ends_without_its_tags_is_whole():
    """T-5: the model stopped by itself."""
    text = THINK + "<tool_call>\n<function=bash>\n<parameter=command>\nls"
    assert through_chat(pieces(text)) == ([("thought", "I need it."), ("call", "bash", '{"command": "ls"}')], "tool_calls")


def test_a_stop_string_inside_a_call_ends_the_turn_not_the_call():
    script = [*pieces(THINK + call("bash", command="ls")[:-40]), Finish(0, "stop", stop="\n</")]
    chat, finish = through_chat(script)
    assert finish == "stop" and not chat[-1][2].endswith("}")
    assert through_messages(script)[1] == "stop_sequence"


# ---- through the SDKs, as clients read them

def test_the_openai_sdk_reads_calls():
    with serving(FakeEngine(ragged(THINK + "Hm.\n\n" + WEATHER + "\n" + LS, 5))) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0)
        whole = client.chat.completions.create(model="m", **CHAT).choices[0]
        with client.chat.completions.stream(model="m", **CHAT) as stream:
            streamed = stream.get_final_completion().choices[0]
    plain = lambda choice: [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
    assert plain(whole) == plain(streamed) == [("get_weather", {"city": "Oslo 😀", "days": 3}),
                                               ("bash", {"command": "pwd && ls <x> 2>&1"})]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    assert whole.message.content == streamed.message.content == "Hm.\n\n"


def test_the_anthropic_sdk_reads_calls():
    with serving(FakeEngine(ragged(THINK + "Hm.\n\n" + WEATHER + "\n" + LS, 6))) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)
        whole = client.messages.create(model="m", **MESSAGES)
        with client.messages.stream(model="m", **MESSAGES) as stream:
            streamed = stream.get_final_message()
    kinds = [[block.type for block in message.content] for message in (whole, streamed)]
    assert kinds[0] == kinds[1] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.content[2].input == streamed.content[2].input == {"city": "Oslo 😀", "days": 3}
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert whole.usage.output_tokens == streamed.usage.output_tokens and whole.usage.cache_read_input_tokens == 2


def test_the_openai_sdk_reads_calls_of_responses():
    with serving(FakeEngine(ragged(THINK + "Hm.\n\n" + WEATHER + "\n" + LS, 7))) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0)
        whole = client.responses.create(model="m", **RESPONSES)
        with client.responses.stream(model="m", **RESPONSES) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
    assert [i.type for i in whole.output] == [i.type for i in streamed.output] == [
        "reasoning", "message", "function_call", "function_call"]
    assert json.loads(streamed.output[2].arguments) == {"city": "Oslo 😀", "days": 3}
    assert whole.output_text == streamed.output_text == "Hm.\n\n"
    deltas = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta" and e.output_index == 2)
    assert deltas == streamed.output[2].arguments


def test_the_stop_id_is_in_no_list():
    whole = play(FakeEngine(pieces("Hi")), ChatReply, {**CHAT, "enable_thinking": False, "logprobs": True})[1]
    assert [e["token"] for e in whole["choices"][0]["logprobs"]["content"]] == ["H", "i"]
    assert END.decode() not in json.dumps(whole)
