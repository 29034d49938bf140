// What a request took, and why: the strip of its prompt, and the reasons of its misses.

import { $, count, format, make, milliseconds } from "./dom.js";

/** Show what the last request took. */
export function showUsage(reply) {
  const { numbers, misses, parts } = read(reply);
  $("last-usage").textContent = numbers;
  $("strip").replaceChildren(parts);
  $("reasons").replaceChildren(...misses.map(describeMiss));
}

/** The elements below an answer that say what it took. */
export function usageOf(reply) {
  const { numbers, parts } = read(reply);
  const { ttft, rate } = reply;
  const first = Number.isFinite(ttft) ? `, TTFT ${milliseconds(ttft)}` : "";
  const later = Number.isFinite(rate) ? `, ${format.format(rate.toPrecision(3))} tokens/s` : "";
  return [parts, make("p", { className: "usage" }, numbers + first + later)];
}

function read({ usage, explanation }) {
  const prompt = usage.prompt_tokens;
  const cached = usage.prompt_tokens_details.cached_tokens;
  const computed = prompt - cached;
  const numbers = [count(prompt, "prompt token"), `${format.format(cached)} cached`, `${format.format(computed)} computed`].join(", ");
  const unexplained = { start: cached, end: prompt, text: `${count(computed, "token")} computed` };
  const last = { start: prompt - 1, end: prompt, text: "the last token is computed for its logits" };
  const misses = computed ? (explanation ? [...explanation, last] : [unexplained]) : [];
  return { numbers, misses, parts: strip(misses, prompt) };
}

/** A prompt from its first token to its last; what is in none of `misses` was cached. */
function strip(misses, length) {
  const parts = make("div", { className: "strip" });
  const add = (name, tokens) => {
    if (tokens <= 0) return;
    const part = make("i", { className: name });
    part.style.flexGrow = tokens;
    parts.append(part);
  };
  let position = 0;
  for (const { start, end } of misses) {
    add("hit", start - position);
    add("miss", end - start);
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
