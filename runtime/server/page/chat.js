// The chat: conversations, of which one is shown, and answers as they come to any of them.

import { receive, size } from "./answering.js";
import { hurry, onView, refresh } from "./cache.js";
import { showDefaults, takeFiles } from "./composer.js";
import { attach, detach, end, forget, keep, kept, newId, onKept, path, reach, versions } from "./conversations.js";
import { $, button, make } from "./dom.js";
import { showList } from "./list.js";
import { contentOf, setWaiting, waiting } from "./pictures.js";
import { SILENT, errorText } from "./server.js";
import { newTurn, sendsOnEnter, showUsage } from "./turn.js";

const live = new Set(); // the conversations that were shown since the page was loaded
let current = null; // the one that is shown
let example = null; // something that the model can be asked
let loading = false; // nobody answers yet

function open({ id = newId(), title = "", system = "", changed = 0, turns = [] }) {
  // `running` is the AbortController of the answer that is coming, `draft` what was refused, and
  // `trouble` why.
  const chat = { id, title, system, changed, turns: [], next: null, log: make("div"), running: null, draft: "", trouble: "" };
  for (const turn of turns) add(chat, turn, chat.turns[turn.before] ?? chat).finish?.();
  turns.forEach(({ shown }, index) => { if (shown) chat.turns[index].before.next = chat.turns[index]; });
  lay(chat);
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

function update() {
  const running = [...live].filter((chat) => chat.running);
  const busy = Boolean(current.running) || loading;
  hurry(running.length > 0);
  $("send").hidden = Boolean(current.running);
  $("send").disabled = loading;
  $("stop").hidden = !current.running;
  $("flush").disabled = running.length > 0;
  $("refused").textContent = current.trouble;
  if (!$("question").value) [$("question").value, current.draft] = [current.draft, ""];
  for (const button of current.log.querySelectorAll(".edit, .again, .versions button, .continue")) button.disabled = busy;
  const asked = new Set(path(current).map((turn) => turn.content));
  const left = (example?.questions ?? []).filter((question) => !asked.has(question));
  $("examples").replaceChildren(
    ...left.map((text) => button(text, () => send(text), { disabled: busy })),
  );
  showList(current, running, { pick: (id) => show(find(id)), rename, remove });
}

/** Keep a conversation that has begun, unless it was deleted. */
function store(chat) {
  if (!live.has(chat)) return;
  const first = chat.turns[0]?.content.trim().split("\n")[0].slice(0, 80);
  chat.title = chat.turns.length ? chat.title || first || "A picture" : "";
  if (!chat.turns.length) forget(chat.id);
  else if (!keep(chat)) chat.trouble ||= "the browser has no room to keep this conversation";
  if (chat === current) history.replaceState(chat.id, "");
}

function send(text, before = end(current), pictures = waiting()) {
  const content = text.trim();
  const chat = current;
  if (!(content || pictures.length) || chat.running || loading) return;
  $("question").value = "";
  setWaiting([]);
  $("system").open = false;
  const asked = add(chat, { role: "user", content, pictures }, before);
  ask(chat, () => {
    detach(chat, asked);
    chat.draft ||= content;
    if (chat === current) setWaiting(pictures);
  });
}

/** Ask something else in the place of a question, if nothing is being answered; whether it is asked. */
function edit(chat, turn, content) {
  if (chat.running || loading) return false;
  send(content, turn.before, turn.pictures ?? []); // what came before is cached, up to the word that differs
  $("question").focus();
  return true;
}

function again(chat) {
  const last = end(chat);
  if (!chat.running) ask(chat, () => {}, last.role === "assistant" ? last.before : last);
}

/** Let the model answer what leads to a question; `undo` if nothing comes, as if it had not been asked. */
function ask(chat, undo, question = end(chat)) {
  const before = path(chat);
  const messages = before.slice(0, before.indexOf(question) + 1);
  const answer = add(chat, { role: "assistant", content: "", reasoning: "", calls: "" }, question);
  run(chat, messages, answer, () => { detach(chat, answer); undo(); });
}

/** Let an answer go on that has come to its limit. */
function goOn(chat, answer) {
  const { reply } = answer;
  if (chat.running || loading) return;
  answer.reply = null;
  run(chat, path(chat), answer, () => { answer.reply = reply; answer.finish(); }, reply.tokens);
}

/** Let an answer come, which has `tokens` already; `undo` if nothing does. */
async function run(chat, turns, answer, undo, tokens = 0) {
  const had = size(answer);
  const messages = turns.map((turn) => ({ role: turn.role, content: contentOf(turn) }));
  if (chat.system.trim()) messages.unshift({ role: "system", content: chat.system });
  let frame = 0;
  const draw = () => { frame = 0; if (chat.running) follow(answer.draw); };
  chat.trouble = "";
  chat.running = new AbortController();
  answer.begin();
  lay(chat);
  answer.article.scrollIntoView({ block: "nearest" });
  store(chat);
  update();
  try {
    const reply = await receive(messages, answer, chat.running.signal, () => { frame ||= requestAnimationFrame(draw); });
    answer.reply = { ...reply, tokens: tokens + reply.usage.completion_tokens };
    showUsage(answer.reply);
  } catch (error) {
    if (error.name !== "AbortError") chat.trouble = errorText(error);
  }
  chat.running = null;
  if (answer.reply || size(answer) > had) follow(answer.finish);
  else undo();
  lay(chat);
  store(chat);
  update();
  refresh();
}

function add(chat, given, before) {
  const turn = newTurn(given, {
    again: () => again(chat),
    goOn: () => goOn(chat, turn),
    edit: (content) => edit(chat, turn, content),
    step: (by) => step(chat, turn, by),
  });
  attach(chat, turn, before);
  return turn;
}

/** Show the turn that stands so many places beside this one. */
function step(chat, turn, by) {
  const all = versions(chat, turn);
  const other = all.at((all.indexOf(turn) + by) % all.length);
  reach(other);
  lay(chat);
  store(chat);
  update();
  other.focus(by);
}

/** Lay out the turns that are shown; those that were there before stay as they are. */
function lay(chat) {
  const turns = path(chat);
  const { children } = chat.log;
  let same = 0;
  while (same < children.length && children[same] === turns[same]?.article) same += 1;
  while (children.length > same) children[same].remove();
  chat.log.append(...turns.slice(same).map((turn) => turn.article));
  for (const turn of turns) {
    const all = versions(chat, turn);
    turn.place(all.indexOf(turn) + 1, all.length);
  }
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

/** Show a conversation with the turn of that index, as they are kept. */
export function openAt({ id, index }) {
  const chat = find(id);
  if (!chat?.turns[index]) return;
  if (end(chat) !== chat.turns[index]) {
    reach(chat.turns[index]);
    lay(chat);
    store(chat);
  }
  show(chat);
  $("question").focus();
}

/** Whether the model loads, so that nothing can be asked. */
export function wait(on) {
  loading = on;
  update();
}

/** Begin with what the server says of itself: its model, and something that it can be asked. */
export function introduce(about) {
  $("model").textContent = about.model;
  $("about").textContent = about.note ? `${about.model} ${about.note}` : "";
  showDefaults(about.sampling);
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
onView(() => { // it answers again
  if (current.trouble !== SILENT) return;
  current.trouble = "";
  update();
});
takeFiles($("chat"), $("question"), (sentence) => { current.trouble = sentence; update(); });
show(find(history.state) ?? open({}));
