"""The openai SDK: Chat Completions and Responses, a tool loop, questions, streamed and not, a schema, a forced call.
`openai_talk.py URL`"""
import json
import sys

import openai

from turns import QUESTIONS, RESULT, SCHEMA, SYSTEM, TOOL, WEATHER, turn

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="any", max_retries=0)
print(openai.__version__, flush=True)


def chat():
    tools = [{"type": "function", "function": TOOL}]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": WEATHER}]
    first = client.chat.completions.create(model="any", messages=messages, tools=tools, temperature=0)
    call = first.choices[0].message.tool_calls[0]
    turn("chat: a tool is called", call.function.arguments, first.usage.prompt_tokens_details.cached_tokens, "Oslo")
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    second = client.chat.completions.create(model="any", messages=messages, tools=tools, temperature=0)
    turn("chat: the result is told", second.choices[0].message.content,
         second.usage.prompt_tokens_details.cached_tokens, "3")
    messages.append(second.choices[0].message)
    for question, answer in QUESTIONS.items():
        messages.append({"role": "user", "content": question})
        with client.chat.completions.stream(model="any", messages=messages, tools=tools, temperature=0,
                                            stream_options={"include_usage": True}) as stream:
            found = stream.get_final_completion()
        messages.append(found.choices[0].message.to_dict(exclude_none=True))
        turn("chat: a question, streamed", found.choices[0].message.content,
             found.usage.prompt_tokens_details.cached_tokens, answer)
    form = {"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA, "strict": True}}
    messages.append({"role": "user", "content": WEATHER})
    found = client.chat.completions.create(model="any", messages=messages, tools=tools, temperature=0, response_format=form,
                                           tool_choice="none")
    json.loads(found.choices[0].message.content)
    turn("chat: a JSON schema", found.choices[0].message.content, found.usage.prompt_tokens_details.cached_tokens, '"city"')
    found = client.chat.completions.create(model="any", messages=messages, tools=tools, temperature=0,
                                           tool_choice="required")
    call = found.choices[0].message.tool_calls[0]
    turn("chat: a call is required", call.function.arguments, found.usage.prompt_tokens_details.cached_tokens, '"city"')


def responses():
    body = dict(model="any", instructions=SYSTEM, tools=[{"type": "function", **TOOL}], temperature=0)
    items = [{"role": "user", "content": WEATHER}]
    first = client.responses.create(input=items, **body)
    call = next(item for item in first.output if item.type == "function_call")
    turn("responses: a tool is called", call.arguments, first.usage.input_tokens_details.cached_tokens, "Oslo")
    items += [item.to_dict() for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
    second = client.responses.create(input=items, **body)
    turn("responses: the result is told", second.output_text, second.usage.input_tokens_details.cached_tokens, "3")
    items += [item.to_dict() for item in second.output]
    for question, answer in QUESTIONS.items():
        items.append({"role": "user", "content": question})
        with client.responses.stream(input=items, **body) as stream:
            found = stream.get_final_response()
        items += [item.to_dict(exclude_none=True) for item in found.output]
        turn("responses: a question, streamed", found.output_text, found.usage.input_tokens_details.cached_tokens,
             answer)


if __name__ == "__main__":
    chat()
    responses()
    print(json.dumps({"end": True}), flush=True)
