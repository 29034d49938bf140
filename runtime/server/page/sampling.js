// How answers are sampled: what is filled in is sent, for the server to judge, and all else is its own.

import { $ } from "./dom.js";

const fields = [...$("sampling").querySelectorAll("input")];
const given = () => fields.filter((field) => field.value.trim());

/** What a request says of it. */
export function sampling() {
  const value = (text) => (Number.isFinite(Number(text)) ? Number(text) : text);
  return Object.fromEntries(given().map((field) => [field.name, value(field.value.trim())]));
}

function summarise() {
  const said = given().map((field) => `${field.name} ${field.value.trim()}`).join(", ");
  $("sampling").querySelector("summary").textContent = said ? `Sampling: ${said}` : "Sampling";
}

$("sampling").addEventListener("input", summarise);
summarise(); // browsers fill in what was there before a reload
