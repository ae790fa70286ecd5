"""Talk to a model in the terminal. The engine runs in this process: no server, no HTTP.

    > Please add 696 and 336.
    696 + 336: 6+6+0=12, ...                the thought, dimmed
    696 + 336 = 1032                        the answer, as it is generated
    [prefill 22 tokens, 2140 tok/s; decode 60 tokens, 171 tok/s]

Proven by tests/test_chat_command.py.
"""
import queue
import sys
import uuid
from dataclasses import replace

from tqdm import tqdm

from ..config import add_options, from_options
from ..engine import Engine
from ..errors import QwentinError, RequestError
from ..request import Delta, Done, Finish, GenerateRequest, Progress, Usage
from ..server.reasoning import ReasoningSplitter, opens_thought

HELP = "talk to the model in this terminal"
EXAMPLE = "python -m qwentin chat --system 'Be brief.'        (/new forgets, /quit or Ctrl-D ends, Ctrl-C stops a reply)"

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
# finish reason -> what is printed behind the reply
ENDINGS = {"stop": "", "length": "\n[the limit is reached]", "cancel": "\n[stopped]", "error": "\n[failed: {}]"}


def add_arguments(parser) -> None:
    add_options(parser, "model", "max_model_len", "prefill_chunk", "kv_tokens", "threads")
    parser.add_argument("message", nargs="?", help="ask this, print the reply and end")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument("--no-thinking", action="store_true", help="answer at once")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token "
                        "(default: the checkpoint's)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest reply (default: the rest of the context)")
    parser.add_argument("--seed", type=int, help="same seed, same replies")


def run(arguments) -> int:
    engine = Engine.load(from_options(arguments))
    engine.start()
    chat = Chat(engine, arguments, sys.stdout)
    try:
        if arguments.message is not None:
            return 0 if chat.turn(arguments.message) else 2
        for line in lines():
            if line == "/quit":
                break
            if line == "/new":
                chat.forget()
            elif line.strip():
                chat.turn(line)
    finally:
        engine.stop(0.0)
    return 0


def lines():
    """What the person types, or what is piped in, line by line."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline     # noqa: F401  input() then has history and editing
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


class Chat:
    """A conversation. `turn` asks and prints; history holds what the template needs to render the next turn."""

    def __init__(self, engine, arguments, out):
        self.engine, self.arguments, self.out = engine, arguments, out
        self.colour = out.isatty()
        self.variables = {"enable_thinking": False} if arguments.no_thinking else {}
        given = {"temperature": arguments.temperature, "seed": arguments.seed}
        self.sampling = replace(engine.defaults, **{k: v for k, v in given.items() if v is not None})
        self.forget()

    def forget(self) -> None:
        self.history = [{"role": "system", "content": self.arguments.system}] if self.arguments.system else []

    def turn(self, text: str) -> bool:
        """Ask, stream the reply, print the rates. False, with a sentence on stderr, if the request was refused."""
        messages = [*self.history, {"role": "user", "content": text}]
        events: queue.SimpleQueue = queue.SimpleQueue()
        try:
            prompt = self.engine.chat_template.render(messages, None, **self.variables)
            request = GenerateRequest(uuid.uuid4().hex, self.engine.tokenizer.encode(prompt), self.sampling,
                                      max_tokens=self.arguments.max_tokens)
            self.engine.submit(request, events.put)
        except QwentinError as error:
            hint = " /new forgets the conversation." if isinstance(error, RequestError) and self.history else ""
            print(f"{error}{hint}", file=sys.stderr)
            return False
        thought, answer, usage = self.read(events, request.id, opens_thought(prompt))
        self.history = [*messages, {"role": "assistant", "content": answer, "reasoning_content": thought}]
        self.say(f"\n{self.dim(rates(usage))}\n")
        return True

    def read(self, events: queue.SimpleQueue, request_id: str, thinking: bool) -> tuple[str, str, Usage]:
        """Print a reply as it comes; Ctrl-C cancels it and keeps what there is. Thought, answer, usage."""
        splitter, thought, answer = ReasoningSplitter(thinking), "", ""
        with tqdm(desc="prefill", unit=" tokens", leave=False, disable=not sys.stderr.isatty()) as bar:
            while True:
                try:
                    event = events.get()
                except KeyboardInterrupt:
                    self.engine.cancel(request_id)
                    continue
                if isinstance(event, Progress):
                    bar.total = event.total
                    bar.update(event.done - bar.n)
                    continue
                bar.close()
                if isinstance(event, Done):
                    return thought, answer, event.usage
                new_thought, new_answer = (splitter.push(event.text) if isinstance(event, Delta)
                                           else (splitter.finish(), ""))
                if new_answer and thought and not answer:
                    self.say("\n\n")
                thought, answer = thought + new_thought, answer + new_answer
                self.say(self.dim(new_thought) + new_answer)
                if isinstance(event, Finish):
                    self.say(ENDINGS[event.reason].format(event.message))

    def dim(self, text: str) -> str:
        return f"{DIM}{text}{PLAIN}" if text and self.colour else text

    def say(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


def rates(usage: Usage) -> str:
    """One line: how many tokens were read and written, and how fast. The first token comes out of the prefill."""
    fresh = usage.prompt_tokens - usage.cached_tokens
    prefill, decode = fresh / max(usage.prefill_s, 1e-9), (usage.completion_tokens - 1) / max(usage.decode_s, 1e-9)
    cached = f" ({usage.cached_tokens} more from the cache)" if usage.cached_tokens else ""
    return (f"[prefill {fresh} tokens{cached}, {prefill:.0f} tok/s; "
            f"decode {usage.completion_tokens} tokens, {max(decode, 0):.0f} tok/s]")
