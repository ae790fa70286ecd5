"""ChatTemplate: the checkpoint's own template renders, the sandbox holds, refusals are sentences."""
import json
from pathlib import Path

import pytest

from qwentin import nano
from qwentin.chat_template import ChatTemplate
from qwentin.errors import ConfigError, RequestError
from qwentin.tokenizer import Tokenizer

EVAL = [json.loads(line) for line in (Path(__file__).parent / "data" / "eval.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def template():
    return ChatTemplate(nano.DIRECTORY, {"eos_token": "<|im_end|>", "bos_token": None})


def write(tmp_path, source):
    (tmp_path / "chat_template.jinja").write_text(source)
    return ChatTemplate(tmp_path, {"bos_token": None, "eos_token": "E"})


def test_eval_prompts_have_the_recorded_length(template):
    tokenizer = Tokenizer(nano.DIRECTORY)
    for case in EVAL:
        text = template.render(case["messages"], case["tools"], enable_thinking=case["enable_thinking"])
        assert len(tokenizer.encode(text)) == case["prompt_tokens"]


def test_generation_prompt(template):
    hi = [{"role": "user", "content": "Hi"}]
    assert template.render(hi) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert template.render(hi, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert template.render(hi, add_generation_prompt=False).endswith("Hi<|im_end|>\n")


def test_tool_json_is_not_escaped(template):
    tools = [{"type": "function", "function": {"name": "f", "description": "a < b & 'c' é"}}]
    assert '"a < b & \'c\' é"' in template.render([{"role": "user", "content": "x"}], tools)


def test_helpers_of_the_official_templates(tmp_path):
    source = ("{%- for m in messages %}{%- if loop.index0 > 1 %}{% break %}{%- endif %}{{ m.content | tojson }};"
              "{%- endfor %}{{ eos_token }}{{ bos_token }}{{ strftime_now('%Y')|length }}")
    assert write(tmp_path, source).render([{"content": c} for c in "abc"]) == '"a";"b";E4'


def test_refusals(tmp_path):
    with pytest.raises(RequestError, match="System message must be first") as caught:
        write(tmp_path, "{{ raise_exception('System message must be first') }}").render([])
    assert caught.value.param == "messages"
    with pytest.raises(RequestError):
        write(tmp_path, "{{ messages.append(1) }}").render([])                # the sandbox forbids changing its inputs
    with pytest.raises(RequestError):
        write(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}").render([])
    with pytest.raises(ConfigError, match="does not parse"):
        write(tmp_path, "{% if %}")
    with pytest.raises(RequestError, match="no chat template"):
        (tmp_path / "chat_template.jinja").unlink()
        ChatTemplate(tmp_path, {}).render([])


def test_template_inside_tokenizer_config(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert ChatTemplate(tmp_path, {}).render([]) == "one"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate(tmp_path, {}).render([]) == "yes"
