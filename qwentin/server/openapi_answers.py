"""What /openapi.json cannot read off a dataclass: the answers' schemas, and what stands inside a body's lists.

A schema here is what clients may count on; more fields may come.
"""
STRING, INTEGER, NUMBER, BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
COUNT = {"type": "integer", "minimum": 0}
TEXT_OR_NULL = {"type": ["string", "null"]}
ANY_OBJECT = {"type": "object"}


def needs(**properties) -> dict:
    """An object with these properties, all there; others may be too."""
    return {"type": "object", "required": list(properties), "properties": properties}


def array(items: dict) -> dict:
    return {"type": "array", "items": items}


def word(*choices: str) -> dict:
    return {"type": "string", "enum": list(choices)}


STREAMED = {**needs(data=STRING), "description":
            "With \"stream\": true: server-sent events, one JSON chunk a frame. Chat Completions and Completions end with "
            "`data: [DONE]`; Responses and Messages name every frame by its type."}
USAGE = needs(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT,
              prompt_tokens_details=needs(cached_tokens=COUNT))
CALL = needs(id=STRING, type=word("function"), function=needs(name=STRING, arguments=STRING))
CHOICE = needs(index=COUNT, finish_reason=word("stop", "length", "tool_calls"),
               message={"type": "object", "required": ["role", "content"], "properties": {
                   "role": word("assistant"), "content": TEXT_OR_NULL, "reasoning_content": STRING,
                   "tool_calls": array(CALL)}})
MODEL = needs(id=STRING, object=word("model"), created=COUNT, owned_by=STRING, max_model_len=COUNT)
RUNNING = needs(id=STRING, choice=COUNT, state=word("waiting", "prefill", "decode"), prompt_tokens=COUNT,
                cached_tokens=COUNT, computed_tokens=COUNT, completion_tokens=COUNT, max_tokens=COUNT)

# what the lists and unions of bodies hold, by the field's name; more kinds of parts and items are taken than stand here
TEXT_PARTS = array({"type": "object", "required": ["type", "text"], "properties": {"type": word("text"), "text": STRING}})
MESSAGE = {"type": "object", "required": ["role"], "properties": {
    "role": word("system", "developer", "user", "assistant", "tool"),
    "content": {"anyOf": [STRING, {"type": "null"}, TEXT_PARTS, array({})]}}}
ITEM = {"anyOf": [{"type": "object", "required": ["role", "content"], "properties": {
    "role": word("system", "developer", "user", "assistant"), "content": STRING}}, ANY_OBJECT]}
INSIDE = {"messages": array(MESSAGE), "tools": array(ANY_OBJECT), "system": {"anyOf": [STRING, TEXT_PARTS]},
          "input": {"anyOf": [STRING, array(ITEM)]},
          "prompt": {"anyOf": [STRING, array(STRING), array(COUNT), array(array(COUNT))]}}

ANSWERS = {
    "Error": needs(error=needs(message=STRING, type=STRING, param=TEXT_OR_NULL, code=TEXT_OR_NULL)),
    "AnthropicError": needs(type=word("error"), error=needs(type=STRING, message=STRING)),
    "Object": ANY_OBJECT,
    "Health": needs(status=word("ok", "asleep", "loading", "stopping", "failed"), model=STRING),
    "Slots": needs(running=array(RUNNING), waiting=array(RUNNING), max_model_len=COUNT, max_seqs=COUNT, asleep=BOOLEAN,
                   warm=array(needs(tokens=COUNT, shared_tokens=COUNT, states=COUNT, used=BOOLEAN))),
    "Model": MODEL,
    "ModelList": needs(object=word("list"), data=array(MODEL), has_more=BOOLEAN),
    "ChatCompletion": needs(id=STRING, object=word("chat.completion"), created=COUNT, model=STRING, usage=USAGE,
                            choices=array(CHOICE), x_qwentin=ANY_OBJECT),
    "Completion": needs(id=STRING, object=word("text_completion"), created=COUNT, model=STRING, usage=USAGE,
                        choices=array(needs(index=COUNT, text=STRING, finish_reason=word("stop", "length"))),
                        x_qwentin=ANY_OBJECT),
    "Response": needs(id=STRING, object=word("response"), created_at=COUNT, model=STRING, output=array(needs(type=STRING)),
                      status=word("completed", "incomplete"), x_qwentin=ANY_OBJECT,
                      usage=needs(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT)),
    "Message": needs(id=STRING, type=word("message"), role=word("assistant"), model=STRING,
                     content=array(needs(type=STRING)), x_qwentin=ANY_OBJECT,
                     stop_reason=word("end_turn", "max_tokens", "stop_sequence", "tool_use",
                                      "model_context_window_exceeded"),
                     usage=needs(input_tokens=COUNT, output_tokens=COUNT, cache_read_input_tokens=COUNT)),
    "TokenCount": needs(input_tokens=COUNT),
    "Tokens": needs(tokens=array(COUNT), count=COUNT, max_model_len=COUNT),
    "Text": needs(prompt=STRING),
    "TokenizerInfo": needs(vocab_size=COUNT, model_max_length=COUNT, eos_token=TEXT_OR_NULL, chat_template=STRING),
}
