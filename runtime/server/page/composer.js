// How answers are sampled: what is filled in is sent, for the server to judge, and all else is its own.

import { $ } from "./dom.js";
import { addPicture, isPicture } from "./pictures.js";

const LIMIT = 1024; // tokens of an answer, where neither the server nor whoever asks has a limit
const fields = [...$("sampling").querySelectorAll("input")];
const given = () => fields.filter((field) => field.value.trim());
let limit = {}; // what is sent of it
let own = ""; // how the server samples by itself

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
  const text = given().map((field) => `${field.name} ${field.value.trim()}`).join(", ") || own;
  $("sampling").querySelector("summary").textContent = text ? `Sampling: ${text}` : "Sampling";
}

$("sampling").addEventListener("input", summarise);
summarise(); // browsers fill in what was there before a reload

// Text files that are chosen, dropped on the chat or pasted into the question become part of it; pictures go with it.

const MOST = 1 << 20; // bytes

/** Take files that come to `place` or `field` into the field; `trouble` is told why not, or "". */
export function takeFiles(place, field, trouble) {
  const has = (data) => data?.types.includes("Files");
  const take = async (files) => {
    try {
      const texts = await Promise.all([...files].filter((file) => !isPicture(file)).map(read));
      for (const file of [...files].filter(isPicture)) await addPicture(file);
      // First, so that other questions about them find them cached.
      field.value = [...texts, field.value].join("\n\n");
      trouble("");
    } catch (error) {
      trouble(error.message);
    }
    field.focus();
  };
  $("attach").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", async () => {
    await take($("files").files);
    $("files").value = ""; // so that the same one can be chosen again
  });
  for (const type of ["dragover", "drop"]) { // elsewhere the browser would leave the page for the file
    addEventListener(type, (event) => has(event.dataTransfer) && event.preventDefault());
  }
  place.addEventListener("dragover", ({ dataTransfer }) => place.classList.toggle("over", has(dataTransfer)));
  place.addEventListener("dragleave", ({ relatedTarget }) => place.contains(relatedTarget) || place.classList.remove("over"));
  place.addEventListener("drop", ({ dataTransfer }) => {
    place.classList.remove("over");
    if (has(dataTransfer)) take(dataTransfer.files);
  });
  field.addEventListener("paste", (event) => {
    const { clipboardData: data } = event;
    if (!has(data) || data.types.includes("text/plain")) return; // what is text already is pasted as such
    event.preventDefault();
    take(data.files);
  });
}

async function read(file) {
  if (file.size > MOST) throw new Error(`${file.name} is larger than 1 MB`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return `${file.name}:\n${text.trim()}`;
  } catch { /* other bytes, or a folder */ }
  throw new Error(`${file.name} is no text file, and no PNG, JPEG, WebP or GIF`);
}
