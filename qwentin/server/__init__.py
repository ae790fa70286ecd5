"""HTTP: knows JSON and text, never arrays.

    app.py          routes; every dialect passes through one `answer`
    chat.py         one dialect each: a JSON body -> GenerateRequests, events -> that dialect's JSON, whole or in chunks
    completions.py
    messages.py     (Anthropic's; messages_input.py reads its history)
    responses.py    (OpenAI's newer; responses_input.py reads its items and tools, output_items.py tells of its output)
    conversation.py a client's messages -> the chat template's
    effort.py       how much a request thinks, and who has the last word about it
    guidance.py     what steers a generation: form.py (structured output), toolchoice.py and toolgrammar.py (forced calls)
    fields.py       the tables a body is checked by
    reasoning.py    text -> thought and answer, incrementally; pure
    answer.py       text -> thought, text and tool calls: reasoning.py and toolcall.py (with all tool*.py) as one
    turn.py         engine events -> pieces of a reply, for every dialect that splits text
    reply.py        what a dialect is to the routes
    metrics.py      /metrics; requestlog.py, the opt-in log of counts
    operations.py   health, slots, sleep, models; page.py and page/, the status page
    door.py         the key, origins, how much of a body is let in
    openapi.py      /openapi.json, from the table of routes; openapi_answers.py, the answers' schemas
    service.py      what all handlers share
    bridge.py       asyncio on one side, the engine thread on the other
    stream.py       server-sent events
    refusals.py     what went wrong -> status and error JSON
    process.py      one server process: open the port, load, serve, drain
"""
