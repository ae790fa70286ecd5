"""Every client there is a script for, by name."""
from . import aider, claude_code, codex, guidellm, llm_cli, lm_eval, opencode, qwen_code, sdks

CLIENTS = {client.name: client for client in (
    sdks.OPENAI, sdks.ANTHROPIC, sdks.LANGCHAIN, sdks.LITELLM, llm_cli.LLM,
    aider.AIDER, opencode.OPENCODE, codex.CODEX, claude_code.CLAUDE, qwen_code.QWEN,
    lm_eval.LM_EVAL, guidellm.GUIDELLM)}
