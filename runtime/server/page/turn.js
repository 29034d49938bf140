// One message of a conversation as it is shown: a question, which can be edited, or an answer.

import { $, button, count, format, make, milliseconds, percent } from "./dom.js";
import { markdown } from "./markdown.js";
import { preview } from "./pictures.js";

/**
 * A message, {role, content, reasoning, calls, reply}, and its `article`. An answer can `begin` to come,
 * `draw` shows what has come of it, and `finish` what there is to say of it: its `reply`, or that it was
 * stopped. `place(1, 2)` says that it is the first of two versions, and `focus` goes where that stands.
 */
export function newTurn(given, actions) {
  const turn = { ...given };
  const [before, next] = [["‹", "Previous version", -1], ["›", "Next version", 1]].map(
    ([text, ariaLabel, by]) => button(text, () => actions.step(by), { ariaLabel, title: ariaLabel }),
  );
  const place = make("span");
  turn.versions = make("span", { className: "versions", hidden: true }, before, place, next);
  turn.place = (at, of) => { turn.versions.hidden = of < 2; place.textContent = `${at}/${of}`; };
  turn.focus = (by) => (by < 0 ? before : next).focus();
  return (turn.role === "user" ? question : answer)(turn, actions);
}

function question(turn, { edit, again }) {
  const lost = turn.lost ? [make("small", {}, `${count(turn.lost, "picture")}, not kept`)] : [];
  const shown = turn.pictures?.length ? [make("div", { className: "pictures" }, ...turn.pictures.map(preview))] : [];
  turn.text = make("div", { className: "text" }, ...shown, turn.content, ...lost);
  turn.article = make(
    "article", { className: "user", ariaLabel: "You" }, turn.text, turn.versions,
    button("Edit", () => rewrite(turn, edit), { className: "edit" }), button("Answer", again, { className: "again" }),
  );
  return turn;
}

function answer(turn, { again, goOn }) {
  const text = make("div", { className: "text" });
  const thoughts = make("details", { className: "thoughts", hidden: true }, make("summary"), make("p"));
  const calls = make("pre", { className: "calls", hidden: true });
  const prefill = make("p", { className: "prefill", hidden: true, ariaLive: "off" }, make("progress", { ariaLabel: "Prompt computed" }), make("span"));
  const end = make("div");
  const show = markdown(text);
  turn.article = make("article", { className: "assistant", ariaLabel: "Answer" }, thoughts, text, calls, prefill, end);
  turn.begin = () => {
    turn.article.ariaBusy = "true";
    end.replaceChildren();
  };
  turn.draw = () => {
    thoughts.hidden = !turn.reasoning;
    thoughts.firstChild.textContent = turn.content || turn.reply ? "Thoughts" : "Thinking …";
    thoughts.lastChild.textContent = turn.reasoning;
    calls.hidden = !turn.calls;
    calls.textContent = turn.calls;
    prefill.hidden = !turn.prefill;
    if (turn.prefill) showPrefill(prefill, turn.prefill);
    show(turn.content);
  };
  turn.finish = () => {
    turn.prefill = null;
    turn.draw();
    turn.article.removeAttribute("aria-busy");
    const regenerate = button("↻", again, { className: "again", title: "Regenerate", ariaLabel: "Regenerate" });
    const notes = turn.reply ? usageOf(turn.reply) : [make("p", { className: "usage" }, "stopped")];
    const foot = make("div", { className: "foot" }, notes.pop(), turn.versions, regenerate);
    end.replaceChildren(...endOf(turn, goOn), ...notes, foot);
  };
  return turn;
}

/** Which share of the prompt is computed or was cached, until the first token comes. */
function showPrefill(element, { prompt_tokens: prompt, computed_tokens: computed }) {
  const [bar, text] = element.children;
  Object.assign(bar, { max: prompt, value: computed });
  text.textContent = `${percent(computed / prompt)} of ${count(prompt, "prompt token")}`;
}

function endOf({ content, calls, reply }, goOn) {
  const notes = [];
  if (reply?.repeats) notes.push(make("p", { className: "warning" }, `The last ${count(reply.repeats, "token")} of this repeat themselves again and again.`));
  if (reply?.finish === "length") {
    const cut = `cut at ${format.format(reply.tokens)} tokens`;
    const canGoOn = content.trim() && !calls; // else the prompt would not end with it
    notes.push(canGoOn ? button(`${cut}, continue`, goOn, { className: "continue" }) : make("p", { className: "usage" }, cut));
  }
  return notes;
}

/** Let a question be written anew; `edit` is called with what it says then. */
function rewrite(turn, edit) {
  const field = make("textarea", { value: turn.content, ariaLabel: "Message to send instead" });
  const restore = () => form.replaceWith(turn.text);
  const resend = (event) => { event.preventDefault(); if (field.value.trim() && edit(field.value)) restore(); };
  const form = make("form", { onsubmit: resend }, field, make("button", { className: "main" }, "Send"), button("Cancel", restore));
  sendsOnEnter(field, resend);
  field.addEventListener("keydown", (event) => event.key === "Escape" && restore());
  turn.text.replaceWith(form);
  field.focus();
}

export function sendsOnEnter(field, submit) {
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
}

// What a request took, and why: the strip of its prompt, and the reasons of its misses.

export function showUsage(reply) {
  const { numbers, misses, parts } = read(reply);
  $("last-usage").textContent = numbers;
  $("strip").replaceChildren(parts);
  $("reasons").replaceChildren(...misses.map(describeMiss));
}

function usageOf(reply) {
  const { numbers, parts } = read(reply);
  const { ttft, rate, perStep } = reply;
  const first = Number.isFinite(ttft) ? `, TTFT ${milliseconds(ttft)}` : "";
  const later = Number.isFinite(rate) ? `, ${format.format(rate.toPrecision(3))} tokens/s` : "";
  const drafts = perStep ? `, ${format.format(perStep.toPrecision(2))} tokens a step` : "";
  return [parts, make("p", { className: "usage" }, numbers + first + later + drafts)];
}

function read({ usage, explanation }) {
  const prompt = usage.prompt_tokens;
  const cached = usage.prompt_tokens_details.cached_tokens;
  const computed = prompt - cached;
  const numbers = [count(prompt, "prompt token"), `${format.format(cached)} cached`, `${format.format(computed)} computed`].join(", ");
  const unexplained = { start: cached, end: prompt, text: `${count(computed, "token")} computed` };
  const last = { start: prompt - 1, end: prompt, text: "the last token is computed for its logits" };
  const misses = computed ? (explanation ? [...explanation, last] : [unexplained]) : explanation ?? [];
  return { numbers, misses, parts: strip(misses, prompt) };
}

/** A prompt from its first token to its last; what is in none of `misses` was cached, as was what is loaded. */
function strip(misses, length) {
  const parts = make("div", { className: "strip" });
  const add = (name, tokens) => {
    if (tokens <= 0) return;
    const part = make("i", { className: name });
    part.style.flexGrow = tokens;
    parts.append(part);
  };
  let position = 0;
  for (const { reason, start, end } of misses) {
    add("hit", start - position);
    add(reason === "loaded" ? "hit loaded" : "miss", end - start);
    position = end;
  }
  add("hit", length - position);
  return parts;
}

/** One entry of the extension field `radixcache.explanation`: {reason, start, end, text}. */
function describeMiss({ reason, start, end, text }) {
  const range = `${format.format(start)} – ${format.format(end)}`;
  const item = make("li", {}, make("span", { className: "range" }, range), text || reason.replaceAll("_", " "));
  if (reason) item.dataset.reason = reason;
  return item;
}
