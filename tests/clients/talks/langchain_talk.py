"""langchain-openai: bind_tools, a tool message, questions, streamed, with_structured_output. `langchain_talk.py URL`"""
import json
import sys
from importlib.metadata import version

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI

from turns import QUESTIONS, RESULT, SCHEMA, SYSTEM, TOOL, WEATHER, turn

model = ChatOpenAI(base_url=sys.argv[1] + "/v1", api_key="any", model="any", temperature=0, max_retries=0, stream_usage=True)
print(version("langchain-openai"), flush=True)


def cached(message) -> int | None:
    return (message.usage_metadata or {}).get("input_token_details", {}).get("cache_read")


def talk():
    bound = model.bind_tools([{"type": "function", "function": TOOL}])
    messages = [SystemMessage(SYSTEM), HumanMessage(WEATHER)]
    first = bound.invoke(messages)
    call = first.tool_calls[0]
    turn("a tool is called", json.dumps(call["args"]), cached(first), "Oslo")
    messages += [first, ToolMessage(RESULT, tool_call_id=call["id"])]
    second = bound.invoke(messages)
    turn("the result is told", second.content, cached(second), "3")
    messages.append(second)
    for question, answer in QUESTIONS.items():
        messages.append(HumanMessage(question))
        parts = list(bound.stream(messages))
        whole = parts[0]
        for part in parts[1:]:
            whole += part
        messages.append(whole)
        turn("a question, streamed", whole.content, cached(whole), answer)
    structured = model.with_structured_output(SCHEMA, method="json_schema", strict=True, include_raw=True)
    found = structured.invoke([*messages, HumanMessage(WEATHER)])
    turn("with_structured_output", json.dumps(found["parsed"]), cached(found["raw"]), '"city"')


if __name__ == "__main__":
    talk()
    print(json.dumps({"end": True}), flush=True)
