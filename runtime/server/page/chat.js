// The chat: conversations, of which one is shown, and answers as they come to any of them.

import { hurry, lookAt, looksAt, refresh } from "./cache.js";
import { forget, keep, kept, newId, onKept } from "./conversations.js";
import { $, make } from "./dom.js";
import { showList } from "./list.js";
import { sampling } from "./sampling.js";
import { call, events, tell } from "./server.js";
import { newTurn, sendsOnEnter } from "./turn.js";
import { showUsage } from "./usage.js";

const live = new Set(); // the conversations that were shown since the page was loaded
let current = null; // the one that is shown
let example = null; // something that the model can be asked

/** A conversation as it was kept, or a new one. */
function open({ id = newId(), title = "", system = "", changed = 0, turns = [] }) {
  // `running` is the AbortController of the answer that is coming, `draft` what was refused, and
  // `trouble` why.
  const chat = { id, title, system, changed, turns: [], log: make("div"), running: null, draft: "", trouble: "" };
  for (const turn of turns) add(chat, turn).finish?.();
  live.add(chat);
  return chat;
}

/** The conversation of that id; as it is kept, if another tab has changed it. */
function find(id) {
  const chat = [...live].find((other) => other.id === id);
  const stored = kept().find((other) => other.id === id);
  if (!stored || (chat && (chat.running || chat.changed === stored.changed))) return chat;
  live.delete(chat);
  return open(stored);
}

/** Show a conversation. An answer that is coming to another one goes on coming. */
function show(chat) {
  current = chat;
  history.replaceState(chat.id, ""); // so that a reload finds it
  $("log").replaceChildren(chat.log);
  $("system-text").value = chat.system;
  $("system").open = Boolean(chat.system) && !chat.turns.length;
  $("scroll").scrollTop = chat.turns.length && $("scroll").scrollHeight;
  update();
}

/** Show what may be done, and what has gone wrong. */
function update() {
  const running = [...live].filter((chat) => chat.running);
  const busy = Boolean(current.running);
  hurry(running.length > 0);
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("flush").disabled = running.length > 0;
  $("refused").textContent = current.trouble;
  if (!$("question").value) [$("question").value, current.draft] = [current.draft, ""];
  for (const button of current.log.querySelectorAll(".edit, .again")) button.disabled = busy;
  const asked = new Set(current.turns.map((turn) => turn.content));
  const left = (example?.questions ?? []).filter((question) => !asked.has(question));
  $("examples").replaceChildren(
    ...left.map((text) => make("button", { type: "button", disabled: busy, onclick: () => send(text) }, text)),
  );
  showList(current, running, { pick: (id) => show(find(id)), rename, remove });
}

/** Keep a conversation that has begun, unless it was deleted. */
function store(chat) {
  if (!live.has(chat)) return;
  chat.title = chat.turns.length ? chat.title || chat.turns[0].content.trim().split("\n")[0].slice(0, 80) : "";
  if (!chat.turns.length) forget(chat.id);
  else if (!keep(chat)) chat.trouble ||= "the browser has no room to keep this conversation";
  if (chat === current) history.replaceState(chat.id, "");
}

function send(text, undo = () => {}) {
  const content = text.trim();
  const chat = current;
  if (!content || chat.running) return;
  $("question").value = "";
  $("system").open = false;
  const asked = add(chat, { role: "user", content });
  ask(chat, () => { cut(chat, asked); chat.draft ||= content; undo(); });
}

/** Ask the last question again. */
function again(chat) {
  if (chat.running) return;
  const before = chat.turns.at(-1).role === "assistant" ? chat.turns.at(-1) : null;
  if (before) cut(chat, before);
  ask(chat, () => { if (before) add(chat, before).finish(); });
}

/** Ask something else in the place of that question. What came before is cached, up to the word that differs. */
function edit(chat, turn, content) {
  if (chat.running) return;
  const after = cut(chat, turn);
  send(content, () => { for (const old of after) add(chat, old).finish?.(); });
  $("question").focus();
}

/** Let the model answer a conversation; `undo` if nothing comes, as if it had not been asked. */
async function ask(chat, undo) {
  chat.trouble = "";
  const messages = chat.turns.map(({ role, content }) => ({ role, content }));
  if (chat.system.trim()) messages.unshift({ role: "system", content: chat.system });
  const answer = add(chat, { role: "assistant", content: "", reasoning: "", calls: "" });
  answer.article.setAttribute("aria-busy", "true");
  answer.article.scrollIntoView({ block: "nearest" });
  chat.running = new AbortController();
  store(chat);
  update();
  try {
    answer.reply = await receive(chat, messages, answer);
    showUsage(answer.reply);
  } catch (error) {
    if (error.name !== "AbortError") chat.trouble = tell(error);
  }
  chat.running = null;
  if (answer.reply || answer.content || answer.reasoning || answer.calls) follow(answer.finish);
  else {
    cut(chat, answer);
    undo();
  }
  store(chat);
  update();
  refresh();
}

/** Stream the answer to `messages` into a turn; what there is to say about it afterwards. */
async function receive(chat, messages, answer) {
  const reply = {};
  const start = performance.now();
  const response = await call("v1/chat/completions", {
    body: { messages, ...sampling(), stream: true, stream_options: { include_usage: true }, explain: true },
    signal: chat.running.signal,
  });
  const replica = response.headers.get("X-Radixcache-Replica"); // whose cache has the chat
  if (replica && replica !== looksAt("replica")) lookAt({ replica, under: null, reveal: null });
  refresh();
  let frame = 0;
  const draw = () => { frame = 0; if (chat.running) follow(answer.draw); };
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    const { content = "", reasoning = "", tool_calls: calls = [] } = chunk.choices?.[0]?.delta ?? {};
    if (content || reasoning || calls.length) {
      reply.ttft ??= (performance.now() - start) / 1000;
      answer.content += content ?? "";
      answer.reasoning += reasoning ?? "";
      for (const { function: part } of calls) answer.calls += `${part.name ? `\n${part.name} ` : ""}${part.arguments ?? ""}`;
      frame ||= requestAnimationFrame(draw);
    }
    reply.usage = chunk.usage ?? reply.usage;
    Object.assign(reply, chunk.radixcache); // the server's own TTFT, and the explanation
  }
  if (!reply.usage) throw new Error("the answer has broken off");
  return reply;
}

function add(chat, given) {
  const turn = newTurn(given, { again: () => again(chat), edit: (at, content) => edit(chat, at, content) });
  chat.turns.push(turn);
  chat.log.append(turn.article);
  return turn;
}

/** Take a turn and all after it away; which these are. */
function cut(chat, turn) {
  const turns = chat.turns.splice(chat.turns.indexOf(turn));
  for (const { article } of turns) article.remove();
  return turns;
}

/** Change the chat, and keep its end in sight if it is. */
function follow(change) {
  const { scrollHeight, scrollTop, clientHeight } = $("scroll");
  change();
  if (scrollHeight - scrollTop - clientHeight < 50) $("scroll").scrollTop = $("scroll").scrollHeight;
}

function rename(id, title) {
  const chat = find(id);
  if (chat) {
    chat.title = title;
    store(chat);
  }
  update();
}

function remove(id) {
  const chat = find(id);
  live.delete(chat);
  chat?.running?.abort();
  forget(id);
  if (chat === current) show(find(kept()[0]?.id) ?? open({ system: chat.system }));
  else update();
}

/** Begin with what the server says of itself: its model, and something that it can be asked. */
export function introduce(about) {
  $("model").textContent = about.model;
  example = about.example;
  if (!current.turns.length) current.system ||= example?.system ?? "";
  show(current);
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send($("question").value); });
sendsOnEnter($("question"), (event) => { event.preventDefault(); send($("question").value); });
$("stop").addEventListener("click", () => current.running?.abort());
$("system-text").addEventListener("input", () => { current.system = $("system-text").value; });
$("new").addEventListener("click", () => {
  if (current.turns.length) show(open({ system: current.system }));
  $("question").focus();
});
addEventListener("pagehide", () => [...live].filter((chat) => chat.running).forEach(store));
onKept(() => {
  const chat = find(current.id) ?? current;
  if (chat === current) update();
  else show(chat);
});
show(find(history.state) ?? open({}));
