"""litellm: a tool loop and questions, through its `openai/` and its `hosted_vllm/` provider. `litellm_talk.py URL`"""
import json
import os
import sys
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"         # else it fetches a price list when imported

import litellm      # noqa: E402

from turns import QUESTIONS, RESULT, SYSTEM, TOOL, WEATHER, turn        # noqa: E402

print(version("litellm"), flush=True)


def talk(provider):
    body = dict(model=f"{provider}/any", api_base=sys.argv[1] + "/v1", api_key="any", temperature=0,
                tools=[{"type": "function", "function": TOOL}])
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": WEATHER}]
    first = litellm.completion(messages=messages, **body)
    call = first.choices[0].message.tool_calls[0]
    turn(f"{provider}: a tool is called", call.function.arguments, first.usage.prompt_tokens_details.cached_tokens,
         "Oslo")
    messages += [first.choices[0].message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    second = litellm.completion(messages=messages, **body)
    turn(f"{provider}: the result is told", second.choices[0].message.content,
         second.usage.prompt_tokens_details.cached_tokens, "3")
    messages.append(second.choices[0].message.model_dump())
    for question, answer in QUESTIONS.items():
        messages.append({"role": "user", "content": question})
        parts = list(litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **body))
        whole = litellm.stream_chunk_builder(parts, messages=messages)
        messages.append({"role": "assistant", "content": whole.choices[0].message.content})
        turn(f"{provider}: a question, streamed", whole.choices[0].message.content,
             whole.usage.prompt_tokens_details.cached_tokens, answer)


if __name__ == "__main__":
    for name in ("openai", "hosted_vllm"):
        talk(name)
    print(json.dumps({"end": True}), flush=True)
