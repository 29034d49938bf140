// The list of conversations: which to show, what they are called, and which to delete.

import { kept } from "./conversations.js";
import { $, button, make } from "./dom.js";

const list = $("conversations");
const dates = new Intl.DateTimeFormat("en", { dateStyle: "medium", timeStyle: "short" });

/** List what is kept. `current` is shown, and of `running` an answer is coming. */
export function showList(current, running, actions) {
  const title = current.title || "New conversation";
  list.querySelector("summary span").textContent = title;
  list.querySelector("summary").title = title;
  if (list.querySelector("input")) return; // a name is being written there
  const items = kept().map((conversation) => item(conversation, actions, {
    shown: conversation.id === current.id,
    busy: running.some(({ id }) => id === conversation.id),
  }));
  list.querySelector("ul").replaceChildren(...items);
}

function item({ id, title, changed }, { pick, rename, remove }, { shown, busy }) {
  const open = () => { list.open = false; pick(id); };
  const note = make("small", {}, busy ? "answering …" : dates.format(changed));
  const name = button(make("span", {}, title), open, { className: "pick" });
  name.append(note);
  if (shown) name.ariaCurrent = "true";
  const renaming = () => {
    const field = make("input", { value: title, ariaLabel: "Name of the conversation" });
    const end = (text) => { field.replaceWith(name); rename(id, text.trim() || title); };
    field.addEventListener("keydown", ({ key, isComposing }) => {
      if (key === "Enter" && !isComposing) field.blur();
      if (key === "Escape") field.value = title;
    });
    field.addEventListener("blur", () => end(field.value), { once: true });
    name.replaceWith(field);
    field.select();
  };
  const removing = ({ currentTarget }) => {
    if (currentTarget.textContent === "Delete?") remove(id);
    currentTarget.textContent = "Delete?"; // which takes a second click
  };
  return make(
    "li", {}, name,
    button("✎", renaming, { ariaLabel: `Rename ${title}`, title: "Rename" }),
    button("✕", removing, { ariaLabel: `Delete ${title}`, title: "Delete", onblur: ({ target }) => { target.textContent = "✕"; } }),
  );
}

document.addEventListener("pointerdown", ({ target }) => { list.open &&= list.contains(target); });
list.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.target.tagName === "INPUT") return;
  list.open = false;
  list.querySelector("summary").focus();
});
