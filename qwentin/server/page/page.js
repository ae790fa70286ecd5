// The status page: asks /health and /slots every second, keeps five minutes of rates, draws them.

import { Plot } from "./plot.js";
import { startChat } from "./chat.js";
import { ask, key, WrongKey } from "./server.js";

const EVERY = 1000, HIDDEN = 5000, WINDOW = 20;         // milliseconds between looks; seconds that a rate is taken over
const $ = id => document.getElementById(id);
const percent = value => `${Math.round(value * 100)} %`;
const plots = {
  speed: new Plot($("speed"), { least: 10, tell: value => `${value.toFixed(1)}/s` }),
  accept: new Plot($("accept"), { least: 3, from: 1, tell: value => value.toFixed(2) }),
  reuse: new Plot($("reuse"), { least: 100, most: 100, tell: value => `${Math.round(value)} %` }),
};
let seen = [], asleep = false;      // seen: { time, figures } of the last WINDOW seconds

function put(id, value) { $(id).textContent = value ?? "–"; }

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB"], unit = Math.min(3, Math.floor(Math.log2(Math.max(1, count)) / 10));
  return `${(count / 1024 ** unit).toFixed(unit > 2 ? 2 : unit && 1)} ${units[unit]}`;
}

function cell(row, text, kind) {
  const node = row.insertCell();
  if (text instanceof Node) node.append(text); else node.textContent = text;
  if (kind) node.className = kind;
}

// rows of a table's body, or one that says there are none
function fill(table, items, columns, none) {
  const body = $(table).tBodies[0];
  body.replaceChildren();
  for (const item of items) columns(body.insertRow(), item);
  if (!items.length) { cell(body.insertRow(), none, "none"); body.rows[0].cells[0].colSpan = 9; }
}

// by how much a counter grew between two looks; null where it is missing, or the server began anew
function grown(now, then, name) {
  const change = now[name] - then[name];
  return Number.isFinite(change) && change >= 0 ? change : null;
}

function rates(now) {
  const last = seen.at(-1), first = seen[0] ?? now, f = now.figures;
  const tokens = last && grown(f, last.figures, "completion_tokens");
  const [rounds, accepted, prompt, cached] = ["draft_rounds", "draft_accepted", "prompt_tokens", "cached_tokens"].map(
    name => last && grown(f, first.figures, name));
  return { speed: tokens === null || !last ? null : tokens / (now.time - last.time),
           accept: rounds ? 1 + accepted / rounds : null, reuse: prompt ? 100 * cached / prompt : null };
}

function plot(figures) {
  const now = { time: performance.now() / 1000, figures }, found = rates(now);
  for (const [name, value] of Object.entries(found)) {
    plots[name].add(now.time, value);
    put(`${name}-now`, value === null ? "–" : plots[name].tell(value));
  }
  seen.push(now);
  while (seen[0].time < now.time - WINDOW) seen.shift();
}

function showMemory(figures) {
  const parts = Object.entries(figures.memory ?? {}), total = parts.reduce((sum, [, size]) => sum + size, 0);
  const freed = Object.values(figures.freed ?? {}).reduce((sum, size) => sum + size, 0);
  put("total", freed ? `${bytes(freed)} freed, ${bytes(figures.parked_bytes ?? 0)} parked` : bytes(total));
  $("memory").replaceChildren(...parts.filter(([, size]) => size).map(([, size], i) => {
    const piece = document.createElement("i");
    piece.className = `c${i % 5}`;
    piece.style.flexGrow = size / total;
    return piece;
  }));
  $("parts").replaceChildren(...parts.map(([name, size], i) => {
    const item = document.createElement("li"), value = document.createElement("span");
    item.className = `c${i % 5}`;
    value.textContent = bytes(size);
    item.append(name, value);
    return item;
  }));
}

function showFigures(figures) {
  put("running", figures.running);
  put("waiting", figures.waiting);
  put("requests", figures.requests?.toLocaleString("en"));
  put("generated", figures.completion_tokens?.toLocaleString("en"));
  put("pages", "kv_pages" in figures ? percent(1 - figures.kv_pages_free / figures.kv_pages) : "–");
  put("prefixes", figures.prefixes);
  put("counts", `Evictions ${figures.evictions ?? "–"}, not finite ${figures.nonfinite ?? "–"}, sleeps ${figures.sleeps ?? "–"}.`);
  showMemory(figures);
}

function showSlots(slots) {
  const jobs = [...slots.running, ...slots.waiting], longest = Math.max(1, ...slots.warm.map(c => c.tokens));
  put("busy", `at most ${slots.max_seqs} at once`);
  fill("jobs", jobs, (row, job) => {
    for (const text of [job.state, job.prompt_tokens, job.cached_tokens, job.completion_tokens,
                        job.age_s === null ? "–" : `${job.age_s.toFixed(1)} s`]) cell(row, text);
  }, "Nothing runs.");
  put("warmth", slots.warm.length ? `${slots.warm.length}` : "");
  fill("warm", slots.warm.slice(0, 8), (row, conversation) => {
    const bar = document.createElement("div"), shared = document.createElement("i"), own = document.createElement("i");
    bar.className = "length";
    shared.className = "shared";
    shared.style.width = `${100 * conversation.shared_tokens / longest}%`;
    own.style.width = `${100 * (conversation.tokens - conversation.shared_tokens) / longest}%`;
    bar.append(shared, own);
    cell(row, conversation.tokens.toLocaleString("en"));
    cell(row, bar, "wide");
    cell(row, conversation.shared_tokens.toLocaleString("en"));
    cell(row, conversation.states);
  }, "None yet.");
}

function showWord(word, figures = {}) {
  asleep = word === "asleep";
  put("word", word);
  $("word").dataset.word = word;
  put("model", figures.model ?? "");
  put("device", figures.device ?? "");
  $("sleep").textContent = asleep ? "Wake up" : "Sleep";
  $("sleep").hidden = !["ok", "asleep"].includes(word) || !("memory" in figures);
  document.title = figures.model ? `${figures.model}: ${word}` : "qwentin";
}

function showLock(locked) {
  $("ask").hidden = !locked;
  $("all").hidden = locked;
  $("forget").hidden = locked || !key.get();
}

async function look() {
  try {
    const figures = await (await ask("/health")).json();
    showWord(figures.status, figures);
    if (["loading", "stopping"].includes(figures.status)) return;
    if (!("running" in figures)) throw new WrongKey();      // without the key /health tells one word
    const slots = await (await ask("/slots")).json();
    showLock(false);
    showFigures(figures);
    showSlots(slots);
    plot(figures);
  } catch (error) {
    if (error instanceof WrongKey) { if (key.get()) $("wrong").hidden = false; key.forget(); showLock(true); }
    else if (error instanceof TypeError) showWord("unreachable");      // fetch could not connect
  }
}

async function keepLooking() {
  await look();
  setTimeout(keepLooking, document.hidden ? HIDDEN : EVERY);
}

$("ask").addEventListener("submit", event => {
  event.preventDefault();
  $("wrong").hidden = true;
  key.set($("key").value);
  $("key").value = "";
  look();
});
$("forget").addEventListener("click", () => { key.forget(); $("wrong").hidden = true; look(); });
$("sleep").addEventListener("click", () =>
  ask(asleep ? "/wake_up" : "/sleep", {}).then(look, error => alert(error.message)));
startChat();
keepLooking();
