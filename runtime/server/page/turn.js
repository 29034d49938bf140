// One message of a conversation as it is shown: a question, which can be edited, or an answer.

import { count, format, make, percent } from "./dom.js";
import { markdown } from "./markdown.js";
import { usageOf } from "./usage.js";

const button = (className, text, onclick, more = {}) => make("button", { type: "button", className, onclick, ...more }, text);

/**
 * A message, {role, content, reasoning, calls, reply}, and its `article`. An answer can `begin` to come,
 * `draw` shows what has come of it, and `finish` what there is to say of it: its `reply`, or that it was
 * stopped. `place(1, 2)` says that it is the first of two versions, and `focus` goes where that stands.
 */
export function newTurn(given, actions) {
  const turn = { ...given };
  const [before, next] = [["‹", "Previous version", -1], ["›", "Next version", 1]].map(
    ([text, ariaLabel, by]) => button("", text, () => actions.step(by), { ariaLabel, title: ariaLabel }),
  );
  const place = make("span");
  turn.versions = make("span", { className: "versions", hidden: true }, before, place, next);
  turn.place = (at, of) => { turn.versions.hidden = of < 2; place.textContent = `${at}/${of}`; };
  turn.focus = (by) => (by < 0 ? before : next).focus();
  return (turn.role === "user" ? question : answer)(turn, actions);
}

function question(turn, { edit, again }) {
  turn.text = make("div", { className: "text" }, turn.content);
  turn.article = make(
    "article", { className: "user", ariaLabel: "You" }, turn.text, turn.versions,
    button("edit", "Edit", () => rewrite(turn, edit)), button("again", "Answer", again),
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
    const regenerate = button("again", "↻", again, { title: "Regenerate", ariaLabel: "Regenerate" });
    const said = turn.reply ? usageOf(turn.reply) : [make("p", { className: "usage" }, "stopped")];
    const foot = make("div", { className: "foot" }, said.pop(), turn.versions, regenerate);
    end.replaceChildren(...endOf(turn, goOn), ...said, foot);
  };
  return turn;
}

/** Which share of the prompt is computed or was cached, until the first token comes. */
function showPrefill(element, { prompt_tokens: prompt, computed_tokens: computed }) {
  const [bar, text] = element.children;
  Object.assign(bar, { max: prompt, value: computed });
  text.textContent = `${percent(computed / prompt)} of ${count(prompt, "prompt token")}`;
}

/** What is to be said of how an answer ended. */
function endOf({ content, calls, reply }, goOn) {
  const said = [];
  if (reply?.repeats) said.push(make("p", { className: "warning" }, `The last ${count(reply.repeats, "token")} of this repeat themselves again and again.`));
  if (reply?.finish === "length") {
    const cut = `cut at ${format.format(reply.tokens)} tokens`;
    const canGoOn = content.trim() && !calls; // else the prompt would not end with it
    said.push(canGoOn ? button("continue", `${cut}, continue`, goOn) : make("p", { className: "usage" }, cut));
  }
  return said;
}

/** Let a question be written anew; `edit` is called with what it says then. */
function rewrite(turn, edit) {
  const field = make("textarea", { value: turn.content, ariaLabel: "Message to send instead" });
  const restore = () => { form.replaceWith(turn.text); turn.article.classList.remove("edited"); };
  const resend = (event) => { event.preventDefault(); if (field.value.trim() && edit(field.value)) restore(); };
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
