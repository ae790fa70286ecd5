"""The same question in three dialects, streamed or not, through the SDKs that users have; what came of it in one form.

    ask(server, "messages", True, "Hello", tools=[...], choice="required")  ->  Said(thought, text, calls, finish, extras)

schema, tools (name -> JSON schema), strict, choice ("auto", "none", "required" or a tool's name), thinking, budget, effort
and limit are put into each dialect's own words; `more` goes into the body as it is.
"""
import json
from dataclasses import dataclass, field

import anthropic
import openai

DIALECTS = ("chat", "responses", "messages")
FINISH = {"tool_use": "calls", "tool_calls": "calls", "stop": "stop", "end_turn": "stop", "completed": "stop",
          "length": "length", "max_tokens": "length", "incomplete": "length"}


@dataclass
class Said:
    thought: str = ""
    text: str = ""
    calls: list = field(default_factory=list)       # (name, arguments) each
    finish: str = ""
    extras: dict = field(default_factory=dict)

    def added(self):
        """calls with their arguments read."""
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def ask(server, dialect, stream, prompt, limit=400, temperature=0, **wishes) -> Said:
    asked = {"chat": ask_chat, "responses": ask_responses, "messages": ask_messages}[dialect]
    return asked(server, stream, prompt, limit, temperature, **wishes)


def ask_chat(server, stream, prompt, limit, temperature, schema=None, tools=None, strict=False, choice=None, parallel=None,
             thinking=None, budget=None, effort=None, more=None):
    body = {"model": "nano", "messages": [{"role": "user", "content": prompt}], "max_tokens": limit,
            "temperature": temperature}
    if schema:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    if tools is not None:
        body["tools"] = [{"type": "function", "function": {"name": n, "parameters": s, "strict": strict}}
                         for n, s in tools.items()]
    if choice:
        named = {"type": "function", "function": {"name": choice}}
        body["tool_choice"] = choice if choice in ("auto", "none", "required") else named
    if parallel is not None:
        body["parallel_tool_calls"] = parallel
    if effort:
        body["reasoning_effort"] = effort
    extra = {"enable_thinking": thinking, "thinking_token_budget": budget, **(more or {})}
    client = sdk(server)
    if not stream:
        whole = client.chat.completions.create(**body, extra_body=extra)
        message = whole.choices[0].message
        return Said(getattr(message, "reasoning_content", None) or "", message.content or "",
                    [(c.function.name, c.function.arguments) for c in message.tool_calls or []],
                    FINISH[whole.choices[0].finish_reason], whole.x_qwentin)
    said = Said()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(**body, extra_body=extra):
        if not chunk.choices:
            said.extras = chunk.x_qwentin
            continue
        delta = chunk.choices[0].delta
        said.thought += getattr(delta, "reasoning_content", None) or ""
        said.text += delta.content or ""
        for call in delta.tool_calls or []:
            if call.id:
                said.calls.append((call.function.name, ""))
            name, arguments = said.calls[call.index]
            said.calls[call.index] = name, arguments + call.function.arguments
        said.finish = FINISH.get(chunk.choices[0].finish_reason, said.finish)
    return said


def ask_responses(server, stream, prompt, limit, temperature, schema=None, tools=None, strict=False, choice=None,
                  parallel=None, thinking=None, budget=None, effort=None, more=None):
    body = {"model": "nano", "input": prompt, "max_output_tokens": limit, "temperature": temperature}
    if schema:
        body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    if tools is not None:
        body["tools"] = [{"type": "function", "name": n, "parameters": s, "strict": strict} for n, s in tools.items()]
    if choice:
        named = {"type": "function", "name": choice}
        body["tool_choice"] = choice if choice in ("auto", "none", "required") else named
    if parallel is not None:
        body["parallel_tool_calls"] = parallel
    if effort:
        body["reasoning"] = {"effort": effort}
    extra = {"enable_thinking": thinking, "thinking_token_budget": budget, **(more or {})}
    whole = sdk(server).responses.create(**body, extra_body=extra, stream=stream)
    if stream:
        *_, last = whole
        whole = last.response
    said = Said(finish=FINISH[whole.status], extras=whole.x_qwentin)
    for item in whole.output:
        if item.type == "reasoning":
            said.thought += "".join(part.text for part in item.content)
        elif item.type == "message":
            said.text += "".join(part.text for part in item.content)
        else:
            said.calls.append((item.name, item.arguments))
    said.finish = "calls" if said.calls and said.finish == "stop" else said.finish
    return said


def ask_messages(server, stream, prompt, limit, temperature, schema=None, tools=None, strict=False, choice=None,
                 parallel=None, thinking=None, budget=None, effort=None, more=None):
    body = {"model": "nano", "messages": [{"role": "user", "content": prompt}], "max_tokens": limit}
    extra = {"output_config": {}, "temperature": temperature, **(more or {})}
    if schema:
        extra["output_config"]["format"] = {"type": "json_schema", "schema": schema}
    if effort:
        extra["output_config"]["effort"] = effort
    if tools is not None:
        body["tools"] = [{"name": n, "input_schema": s, "strict": strict} for n, s in tools.items()]
    if choice or parallel is not None:
        kind = {"type": {"required": "any", None: "auto"}.get(choice, choice)}
        kind = kind if choice in ("auto", "none", "required", None) else {"type": "tool", "name": choice}
        body["tool_choice"] = kind if parallel is None else {**kind, "disable_parallel_tool_use": not parallel}
    if thinking or budget is not None:
        extra["thinking"] = {"type": "enabled"} if budget is None else {"type": "enabled", "budget_tokens": budget}
    client = anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=120.0)
    if stream:
        with client.messages.stream(**body, extra_body=extra) as events:
            extras = [event.x_qwentin for event in events if event.type == "message_delta"][0]
            whole = events.get_final_message()
    else:
        whole = client.messages.create(**body, extra_body=extra)
        extras = whole.x_qwentin
    said = Said(finish=FINISH[whole.stop_reason], extras=extras)
    for block in whole.content:
        if block.type == "thinking":
            said.thought += block.thinking
        elif block.type == "text":
            said.text += block.text
        else:
            said.calls.append((block.name, json.dumps(block.input)))
    return said


def sdk(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0, timeout=120.0)
