// The chat box: one conversation with /v1/chat/completions, streamed; the thought folds away when the answer begins.

import { ask } from "./server.js";

const $ = id => document.getElementById(id);
let history = [], running = null;

function bubble(kind, text = "") {
  const node = document.createElement("div");
  node.className = `said ${kind}`;
  node.textContent = text;
  $("talk").querySelector(".hint")?.remove();
  $("talk").append(node);
  return node;
}

// the answer's bubble: { thought(text), answer(text) } add to it
function reply() {
  const node = bubble("model"), fold = document.createElement("details"), summary = document.createElement("summary");
  const thought = document.createElement("div"), answer = document.createElement("div");
  summary.textContent = "thinking …";
  thought.className = "thought";
  answer.className = "answer";
  fold.open = true;
  fold.hidden = true;
  fold.append(summary, thought);
  node.append(fold, answer);
  let due = false;                 // scrolling makes the browser lay the text out: once a frame, however fast tokens come
  const add = (part, text) => {
    part.append(text);
    if (due) return;
    due = true;
    requestAnimationFrame(() => { due = false; $("talk").scrollTop = $("talk").scrollHeight; });
  };
  return {
    thought(text) { fold.hidden = false; add(thought, text); },
    answer(text) {
      if (!answer.firstChild) { fold.open = false; summary.textContent = "thought"; }
      add(answer, text);
    },
  };
}

// JSON objects of a server-sent stream
async function* frames(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks)
      if (block.startsWith("data: ") && block !== "data: [DONE]") yield JSON.parse(block.slice(6));
  }
}

async function send(text) {
  history.push({ role: "user", content: text });
  bubble("user", text);
  running = new AbortController();
  $("send").disabled = true;
  $("stop").hidden = false;
  const box = reply(), said = { role: "assistant", content: "" }, begun = performance.now();
  try {
    const body = { messages: history, stream: true, stream_options: { include_usage: true },
                   enable_thinking: $("think").checked };
    for await (const frame of frames(await ask("/v1/chat/completions", body, running.signal))) {
      if (frame.error) throw new Error(frame.error.message);
      const delta = frame.choices[0]?.delta ?? {};
      if (delta.reasoning_content) {
        said.reasoning_content = (said.reasoning_content ?? "") + delta.reasoning_content;
        box.thought(delta.reasoning_content);
      }
      if (delta.content) {
        said.content += delta.content;
        box.answer(delta.content);
      }
      if (frame.usage) pace(frame, begun);
    }
  } catch (error) {
    if (error.name !== "AbortError") bubble("error", error.message);
  }
  history.push(said);
  running = null;
  $("send").disabled = false;
  $("stop").hidden = true;
  $("text").focus();
}

function pace(frame, begun) {
  const { completion_tokens: tokens, prompt_tokens: prompt } = frame.usage, own = frame.x_qwentin ?? {};
  const seconds = own.decode_s || (performance.now() - begun) / 1000;
  const length = own.speculation?.accept_length;
  $("pace").textContent = `${tokens} tokens at ${(tokens / seconds).toFixed(1)}/s`
    + (length ? `, accept length ${length.toFixed(2)}` : "") + `; ${own.cached_tokens ?? 0} of ${prompt} from the cache`;
}

export function startChat() {
  $("say").addEventListener("submit", event => {
    event.preventDefault();
    const text = $("text").value.trim() || $("text").placeholder;
    if (running) return;
    $("text").value = "";
    send(text);
  });
  $("text").addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("say").requestSubmit(); }
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => {
    running?.abort();
    history = [];
    $("talk").replaceChildren();
    $("pace").textContent = "";
  });
}
