"""What of a request steers the generation itself -> its Guide, with the grammar compiled at the door.

    tool choice             answer                                          the grammar holds
    required, or named      calls                                           from the answer's start on
    auto, and a Form        the Form, or calls if there are tools           from the answer's start on
    none, and a Form        the Form                                        from the answer's start on
    auto, strict tools      free text and calls                             behind each <tool_call>
    otherwise               free

Arguments of a call are typed by the schemas of their tools; behind a <tool_call> that the model wrote by itself only those
of strict tools are. Where such a grammar cannot be made, because the schemas hold what the library does not know, calls of
strict tools are refused and others get any text for values. A thought is limited by the request's budget or the server's,
and by --reasoning-loop. Called by turn.py; proven by tests/test_forced_calls.py and tests/test_structured_output.py.
"""
from ..constraint import Grammar
from ..errors import RequestError
from ..guide import Guide
from .form import Form
from .toolchoice import AUTO, REQUIRED, ToolChoice
from .toolgrammar import MOST_CALLS, calls_source
from .toolhead import WRAPPER
from .toolschema import Tool


def guide_of(engine, thinking: bool, tools: list[Tool], choice: ToolChoice, form: Form | None,
             budget: int | None) -> Guide | None:
    """The guide of a turn; `tools` are those that may be called. Raises RequestError for what cannot be compiled."""
    budget = budget if budget is not None else engine.config.reasoning_budget or None
    limits = dict(thinking=True, budget=budget, loop=engine.config.reasoning_loop) if thinking else {}
    most = MOST_CALLS if choice.parallel else 1
    if choice.mode == REQUIRED:
        return Guide(**limits, grammar=calls_grammar(engine, tools, most=most))
    callable_tools = tools if choice.mode == AUTO else []
    if form is not None:
        alone = engine.grammars.compile(form.source, form.field)        # first, so that its own field is named
        both = calls_grammar(engine, callable_tools, most=most, answer=form.source) if callable_tools else None
        return Guide(**limits, grammar=both or alone)
    if any(tool.strict for tool in callable_tools):
        return Guide(**limits, grammar=calls_grammar(engine, callable_tools, opened=True), opener=WRAPPER,
                     repeats=choice.parallel)
    return Guide(**limits) if limits else None


def calls_grammar(engine, tools: list[Tool], **rules) -> Grammar:
    """Calls of these tools, typed if that can be."""
    try:
        return engine.grammars.compile(calls_source(tools, **rules), "tools")
    except RequestError:
        if any(tool.strict for tool in tools):
            raise
        return engine.grammars.compile(calls_source(tools, loose=True, **rules), "tools")
