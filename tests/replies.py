"""What replies of the three chat dialects say, in one form, and their streams added up by the rules of each dialect.

    [("thought", text), ("text", text), ("call", name, arguments)]    arguments are text, or a mapping in whole Messages
"""


def said_by_chat(message):
    out = [("thought", message["reasoning_content"])] if message.get("reasoning_content") else []
    out += [("text", message["content"])] if message["content"] else []
    calls = [c["function"] for c in message.get("tool_calls", [])]
    return out + [("call", c["name"], c["arguments"]) for c in calls]


def said_by_messages(content):
    return [("thought", b["thinking"]) if b["type"] == "thinking" else ("text", b["text"]) if b["type"] == "text"
            else ("call", b["name"], b["input"]) for b in content]


def said_by_responses(output):
    out = []
    for item in output:
        if item["type"] in ("reasoning", "message"):
            kind = "thought" if item["type"] == "reasoning" else "text"
            out.append((kind, "".join(part["text"] for part in item["content"])))
        else:
            out.append(("call", item["name"], item.get("arguments", item.get("input"))))
    return out


def fold_messages(events):
    """A stream of /v1/messages added up by the rules of Anthropic's documentation; asserts its order."""
    assert [e["type"] for e in events[:2]] == ["message_start", "ping"]
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    message, block = {**events[0]["message"], "content": []}, None
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert block is None and event["index"] == len(message["content"])
            block = dict(event["content_block"], json="")
            message["content"].append(block)
        elif event["type"] == "content_block_stop":
            assert block is not None and event["index"] == len(message["content"]) - 1
            if block["type"] == "tool_use":
                block["input"] = block["json"]
            assert block["type"] != "thinking" or block["signature"]
            del block["json"]
            block = None
        else:
            assert event["type"] == "content_block_delta" and event["index"] == len(message["content"]) - 1
            delta = event["delta"]
            key = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json",
                   "signature_delta": "signature"}[delta["type"]]
            block[{"partial_json": "json"}.get(key, key)] += delta[key]
    assert block is None
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}


def fold_responses(events):
    """A stream of /v1/responses: the output that its deltas add up to; asserts order, numbers and what `done` repeats."""
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    output, text, parts = [], None, 0
    for event in events[2:-1]:
        kind = event["type"]
        index = event["output_index"]
        if kind == "response.output_item.added":
            assert text is None and index == len(output) and event["item"]["status"] == "in_progress"
            output.append(event["item"])
            text, parts = "", 0
            continue
        assert text is not None and index == len(output) - 1
        assert event.get("item_id", output[-1]["id"]) == output[-1]["id"]
        if kind == "response.content_part.added":
            assert parts == 0 and event["part"]["text"] == ""
            parts = 1
        elif kind.endswith(".delta"):
            assert parts or "call" in output[-1]["type"]
            text += event["delta"]
        elif kind == "response.output_item.done":
            output[-1] = event["item"]
            assert said_by_responses([event["item"]])[0][-1] == text
            text = None
        elif kind == "response.content_part.done":
            assert event["part"]["text"] == text
        else:
            assert text == event.get("text", event.get("arguments", event.get("input")))
    assert text is None and events[-1]["response"]["output"] == output
    return events[-1]["response"]
