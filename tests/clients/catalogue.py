"""Every client there is a script for, by name."""
from . import claude_code, codex, llm_cli, opencode, qwen_code, sdks

CLIENTS = {client.name: client for client in (
    sdks.OPENAI, sdks.ANTHROPIC, sdks.LANGCHAIN, sdks.LITELLM, llm_cli.LLM,
    opencode.OPENCODE, codex.CODEX, claude_code.CLAUDE, qwen_code.QWEN)}
