// How answers are sampled: what is filled in is sent, for the server to judge, and all else is its own.

import { $ } from "./dom.js";

const LIMIT = 1024; // tokens of an answer, where neither the server nor whoever asks has a limit
const fields = [...$("sampling").querySelectorAll("input")];
const given = () => fields.filter((field) => field.value.trim());
let limit = {}; // what is sent of it
let own = ""; // how the server samples by itself

/** What a request says of it. */
export function sampling() {
  const value = (text) => (Number.isFinite(Number(text)) ? Number(text) : text);
  return { ...limit, ...Object.fromEntries(given().map((field) => [field.name, value(field.value.trim())])) };
}

/** Show what applies where nothing is filled in. */
export function showDefaults({ temperature, top_p, max_tokens: most, description }) {
  limit = most === null ? { max_tokens: LIMIT } : {};
  const values = { temperature, top_p, max_tokens: most ?? LIMIT };
  for (const field of fields) field.placeholder = values[field.name] ?? field.placeholder;
  own = `by default ${description}, max_tokens ${values.max_tokens}`;
  summarise();
}

function summarise() {
  const said = given().map((field) => `${field.name} ${field.value.trim()}`).join(", ") || own;
  $("sampling").querySelector("summary").textContent = said ? `Sampling: ${said}` : "Sampling";
}

$("sampling").addEventListener("input", summarise);
summarise(); // browsers fill in what was there before a reload
