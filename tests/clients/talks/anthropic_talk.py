"""The anthropic SDK: a tool loop, plain questions, streamed and not. `anthropic_talk.py URL`"""
import json
import sys

import anthropic

from turns import QUESTIONS, RESULT, SYSTEM, TOOL, WEATHER, turn

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="any", max_retries=0)
print(anthropic.__version__, flush=True)


def messages():
    tools = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
    # `temperature` left the SDK's signature; the server still reads it
    body = dict(model="any", max_tokens=500, system=SYSTEM, tools=tools, thinking={"type": "adaptive"},
                extra_body={"temperature": 0})
    history = [{"role": "user", "content": WEATHER}]
    first = client.messages.create(messages=history, **body)
    use = next(block for block in first.content if block.type == "tool_use")
    turn("messages: a tool is called", json.dumps(use.input), first.usage.cache_read_input_tokens, "Oslo")
    history += [{"role": "assistant", "content": first.content},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": RESULT}]}]
    second = client.messages.create(messages=history, **body)
    turn("messages: the result is told", second.content[-1].text, second.usage.cache_read_input_tokens, "3")
    history.append({"role": "assistant", "content": second.content})
    for question, answer in QUESTIONS.items():
        history.append({"role": "user", "content": question})
        with client.messages.stream(messages=history, **body) as stream:
            found = stream.get_final_message()
        history.append({"role": "assistant", "content": found.content})
        turn("messages: a question, streamed", found.content[-1].text, found.usage.cache_read_input_tokens, answer)
    history.append({"role": "user", "content": WEATHER})
    found = client.messages.create(messages=history, **body, tool_choice={"type": "any"})
    use = next(block for block in found.content if block.type == "tool_use")
    turn("messages: a call is required", json.dumps(use.input), found.usage.cache_read_input_tokens, '"city"')


if __name__ == "__main__":
    messages()
    print(json.dumps({"end": True}), flush=True)
