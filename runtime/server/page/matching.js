// Which of the conversations that this browser keeps a node of the tree is of, as far as its text tells.

import { kept } from "./conversations.js";

const LEAST = 8; // characters that must be the same
const ROLES = ["system", "user", "assistant", "model", "tool"];

/** The lines of a text, without the marks and names that chat templates put around messages. */
const lines = (text) => text.split(/<[^<>\n]*>|\[\/?[A-Z_]+\]|[\n\ufffd]/).map((line) => line.trim())
  .filter((line) => line && !ROLES.includes(line));

/**
 * The conversation, {id, index}, that goes through the last of these nodes, given from the root on;
 * `index` is a turn of it behind the node. Of several the best match, then the latest; null for none.
 */
export function conversationOf(way) {
  const wanted = way.map((node) => ({ start: node.start, lines: lines(node.text) }));
  let [best, most] = [null, LEAST - 1];
  for (const { id, system, turns } of kept()) {
    const inner = new Set(turns.map((turn) => turn.before));
    for (const [index] of turns.entries()) {
      if (inner.has(index)) continue;
      const branch = [];
      for (let at = index; at >= 0; at = turns[at].before) branch.unshift(turns[at]);
      const text = [system, ...branch.flatMap((turn) => [turn.reasoning ?? "", turn.content])].join("\n");
      const shown = branch.every((turn) => turn.shown) ? 0.5 : 0; // of two branches, that one
      const letters = follow(wanted, text) + shown;
      if (letters > most) [best, most] = [{ id, index }, letters];
    }
  }
  return best;
}

/** How many characters of these nodes a text has, one node after the other; 0 if not those of the last. */
function follow(way, text) {
  let [from, letters, here] = [0, 0, 0];
  for (const node of way) {
    here = 0;
    for (const line of node.lines) {
      const at = text.indexOf(line, from);
      if (at >= 0) {
        from = at + line.length;
        here += line.length;
      } else if (node === way.at(-1) && node.start) return 0; // the first may begin with the template's words
    }
    letters += here;
  }
  return here && letters;
}
