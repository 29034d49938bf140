// One message of a conversation as it is shown: a question, which can be edited, or an answer.

import { make } from "./dom.js";
import { markdown } from "./markdown.js";
import { usageOf } from "./usage.js";

const button = (className, text, onclick) => make("button", { type: "button", className, onclick }, text);

/**
 * A message, {role, content, reasoning, calls, reply}, and its `article`. `draw` shows what has come of
 * an answer, and `finish` what there is to say of it: its `reply`, or that it was stopped.
 */
export const newTurn = (given, actions) => (given.role === "user" ? question : answer)({ ...given }, actions);

function question(turn, { edit, again }) {
  turn.text = make("div", { className: "text" }, turn.content);
  turn.article = make(
    "article", { className: "user", ariaLabel: "You" }, turn.text,
    button("edit", "Edit", () => rewrite(turn, edit)), button("again", "Answer", again),
  );
  return turn;
}

function answer(turn, { again }) {
  const text = make("div", { className: "text" });
  const thoughts = make("details", { className: "thoughts", hidden: true }, make("summary"), make("p"));
  const calls = make("pre", { className: "calls", hidden: true });
  const show = markdown(text);
  turn.article = make("article", { className: "assistant", ariaLabel: "Answer" }, thoughts, text, calls);
  turn.draw = () => {
    thoughts.hidden = !turn.reasoning;
    thoughts.firstChild.textContent = turn.content || turn.reply ? "Thoughts" : "Thinking …";
    thoughts.lastChild.textContent = turn.reasoning;
    calls.hidden = !turn.calls;
    calls.textContent = turn.calls;
    show(turn.content);
  };
  turn.finish = () => {
    turn.draw();
    turn.article.removeAttribute("aria-busy");
    const said = turn.reply ? usageOf(turn.reply) : [make("p", { className: "usage" }, "stopped")];
    turn.article.append(...said.slice(0, -1), make("div", { className: "foot" }, said.at(-1), Object.assign(button("again", "↻", again), { title: "Regenerate", ariaLabel: "Regenerate" })));
  };
  return turn;
}

/** Let a question be written anew; `edit` is called with what it says then. */
function rewrite(turn, edit) {
  const field = make("textarea", { value: turn.content, ariaLabel: "Message to send instead" });
  const restore = () => { form.replaceWith(turn.text); turn.article.classList.remove("edited"); };
  const resend = (event) => { event.preventDefault(); if (field.value.trim()) edit(turn, field.value); };
  const form = make("form", { onsubmit: resend }, field, make("button", { className: "main" }, "Send"), button("", "Cancel", restore));
  sendsOnEnter(field, resend);
  field.addEventListener("keydown", (event) => event.key === "Escape" && restore());
  turn.text.replaceWith(form);
  turn.article.classList.add("edited");
  field.focus();
}

export function sendsOnEnter(field, submit) {
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
}
