// The chat: messages, answers as they come, and earlier messages asked anew.

import { hurry, refresh } from "./cache.js";
import { $, make } from "./dom.js";
import { call, events, tell } from "./server.js";
import { showUsage } from "./usage.js";

let turns = []; // {role, content, article}
let running = null; // the AbortController of the answer that is coming

async function send(text) {
  const content = text.trim();
  if (!content || running) return;
  $("question").value = "";
  $("system").open = false;
  $("refused").textContent = "";
  const system = $("system-text").value;
  const asked = addTurn("user", content);
  const messages = turns.map((turn) => ({ role: turn.role, content: turn.content }));
  if (system.trim()) messages.unshift({ role: "system", content: system });
  const answer = addTurn("assistant", "");
  setRunning(new AbortController());
  let reply = null;
  try {
    reply = await receive(messages, answer);
  } catch (error) {
    if (error.name !== "AbortError") $("refused").textContent = tell(error);
  }
  setRunning(null);
  answer.article.removeAttribute("aria-busy");
  if (reply) follow(() => answer.article.append(...showUsage(reply)));
  else if (answer.content) answer.article.append(make("p", { className: "usage" }, "stopped"));
  else { // nothing has come: as if it had not been asked
    cutTurns(turns.indexOf(asked));
    $("question").value ||= content;
  }
  showExamples();
  refresh();
}

/** Stream the answer to `messages` into a turn; what there is to say about it afterwards. */
async function receive(messages, answer) {
  const reply = {};
  const start = performance.now();
  const response = await call("v1/chat/completions", {
    body: { messages, stream: true, stream_options: { include_usage: true }, explain: true },
    signal: running.signal,
  });
  refresh();
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    const { content, reasoning } = chunk.choices?.[0]?.delta ?? {};
    if (content || reasoning) {
      reply.ttft ??= (performance.now() - start) / 1000;
      answer.content += content ?? "";
      follow(() => answer.text.append(content || reasoning));
    }
    reply.usage = chunk.usage ?? reply.usage;
    Object.assign(reply, chunk.radixcache); // the server's own TTFT, and the explanation
  }
  return reply;
}

function addTurn(role, content) {
  const text = make("p", { className: "text" }, content);
  const article = make("article", { className: role, ariaLabel: role === "user" ? "You" : "Answer" }, text);
  const turn = { role, content, article, text };
  if (role === "user") {
    article.append(make("button", { type: "button", className: "edit", onclick: () => edit(turn) }, "Edit"));
  } else {
    article.setAttribute("aria-busy", "true");
  }
  turns.push(turn);
  $("log").append(article);
  article.scrollIntoView({ block: "nearest" });
  return turn;
}

/** Change the chat, and keep its end in sight if it is. */
function follow(change) {
  const { scrollHeight, scrollTop, clientHeight } = $("scroll");
  change();
  if (scrollHeight - scrollTop - clientHeight < 50) $("scroll").scrollTop = $("scroll").scrollHeight;
}

function cutTurns(index) {
  for (const turn of turns.splice(index)) turn.article.remove();
}

/** Ask something else at this place. What came before is cached, up to the word that differs. */
function edit(turn) {
  if (running) return;
  const field = make("textarea", { value: turn.content, ariaLabel: "Message to send instead" });
  const restore = () => { form.replaceWith(turn.text); turn.article.querySelector(".edit").hidden = false; };
  const resend = (event) => {
    event?.preventDefault();
    if (!field.value.trim() || running) return;
    cutTurns(turns.indexOf(turn));
    send(field.value);
    $("question").focus();
  };
  const cancel = make("button", { type: "button", onclick: restore }, "Cancel");
  const form = make("form", { onsubmit: resend }, field, make("button", { className: "main" }, "Send"), cancel);
  sendsOnEnter(field, resend);
  field.addEventListener("keydown", (event) => event.key === "Escape" && restore());
  turn.text.replaceWith(form);
  turn.article.querySelector(".edit").hidden = true;
  field.focus();
}

function sendsOnEnter(field, submit) {
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
}

function setRunning(controller) {
  running = controller;
  hurry(Boolean(controller));
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  for (const button of document.querySelectorAll("#new, #flush, #examples button, .edit")) {
    button.disabled = Boolean(controller);
  }
}

let example = null;

/** Begin with what the server says of itself: its model, and something that it can be asked. */
export function introduce(about) {
  $("model").textContent = about.model;
  example = about.example;
  if (example && !$("system-text").value) $("system-text").value = example.system;
  beginChat();
}

/** Show where a conversation begins. */
function beginChat() {
  $("system").open = Boolean($("system-text").value);
  showExamples();
}

function showExamples() {
  const asked = new Set(turns.map((turn) => turn.content));
  const left = (example?.questions ?? []).filter((question) => !asked.has(question));
  $("examples").replaceChildren(
    ...left.map((text) => make("button", { type: "button", onclick: () => send(text) }, text)),
  );
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send($("question").value); });
sendsOnEnter($("question"), (event) => { event.preventDefault(); send($("question").value); });
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => { cutTurns(0); beginChat(); $("question").focus(); });
