// The conversations that the browser keeps. Behind a key they are kept as long as the key is, until
// the tab is closed: whoever comes to this browser without the key shall not read them.

const NAME = "radixcache.conversations.2"; // another form of value will have another name
const MOST = 50; // the latest; fewer, if the browser has no room for them

const place = () => (sessionStorage.getItem("key") ? sessionStorage : localStorage);
const areText = (...values) => values.every((value) => typeof value === "string");

/**
 * All that are kept, {id, title, system, changed, turns}, the latest first. A turn is behind that of
 * the index `before`, -1 for none, and is `shown`, or one beside it is. What is no conversation,
 * whoever wrote it there, is passed over.
 */
export function kept() {
  try {
    const all = JSON.parse(place().getItem(NAME)).filter(isConversation);
    return all.sort((a, b) => b.changed - a.changed);
  } catch {
    return [];
  }
}

/**
 * Keep a conversation, the root of a tree (see below), as it is now; whether there was room for it. If
 * another tab has changed it since, both are kept: this one gets another `id`.
 */
export function keep(conversation) {
  const others = kept();
  const there = others.find(({ id }) => id === conversation.id);
  const id = there && there.changed !== conversation.changed ? newId() : conversation.id;
  const changed = Date.now();
  const { title, system } = conversation;
  const turns = conversation.turns
    .filter((turn) => turn.role === "user" || turn.content || turn.reasoning || turn.calls || turn.reply) // else it has yet to come
    .map((turn, _, all) => {
      const { role, content, reasoning, calls, reply, before } = turn;
      const lost = (turn.lost ?? 0) + (turn.pictures?.length ?? 0); // pictures would take all the room
      return { role, content, reasoning, calls, reply, lost, before: all.indexOf(before), shown: before.next === turn };
    });
  if (!write([{ id, title, system, changed, turns }, ...others.filter((other) => other.id !== id)])) return false;
  Object.assign(conversation, { id, changed });
  return true;
}

export function forget(id) {
  write(kept().filter((other) => other.id !== id));
}

export const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;

export function onKept(viewer) {
  addEventListener("storage", ({ key }) => (key === NAME || key === null) && viewer());
}

/** Write as many as there is room for, the first ones first; if not even one, nothing changes. */
function write(conversations) {
  for (let list = conversations.slice(0, MOST); ; list = list.slice(0, -1)) {
    try {
      place().setItem(NAME, JSON.stringify(list));
      return true;
    } catch {
      if (list.length < 2) return false;
    }
  }
}

function isConversation(value) {
  const isTurn = (turn, index) => areText(turn?.role, turn?.content) && turn.before < index;
  return areText(value?.id, value?.title, value?.system) && Number.isFinite(value.changed)
    && Array.isArray(value.turns) && value.turns.every(isTurn);
}

// The turns of a conversation as a tree. What is edited or computed anew stands beside what was there
// before, `before` the two is the same turn, and of both one is shown, its `next`. The conversation
// itself is the root: its `next` is the first turn that is shown, its `turns` are all, as they came.

export function path(chat) {
  const turns = [];
  for (let turn = chat.next; turn; turn = turn.next) turns.push(turn);
  return turns;
}

/** The last turn that is shown, or the conversation if it has none. */
export const end = (chat) => path(chat).at(-1) ?? chat;

export const versions = (chat, turn) => chat.turns.filter(({ before }) => before === turn.before);

/** Show a new turn behind another one, in the place of what was shown there. */
export function attach(chat, turn, before) {
  Object.assign(turn, { before, instead: before.next });
  before.next = turn;
  chat.turns.push(turn);
}

/** Take a turn that nothing follows away, and show again what was shown in its place. */
export function detach(chat, turn) {
  chat.turns.splice(chat.turns.indexOf(turn), 1);
  turn.before.next = turn.instead;
}

/** Show a turn, and what leads to it. */
export function reach(turn) {
  for (; turn.before; turn = turn.before) turn.before.next = turn;
}

// Which of the conversations that this browser keeps a node of the tree is of, as far as its text tells.

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
      const letters = match(wanted, text) + shown;
      if (letters > most) [best, most] = [{ id, index }, letters];
    }
  }
  return best;
}

/** How many characters of these nodes a text has; 0 if not all of the last, whose text is its own. */
function match(way, text) {
  const has = (line) => text.includes(line);
  const { start, lines: own } = way.at(-1);
  if (!own.some(has) || (start && !own.every(has))) return 0; // the first may begin with the template's words
  return way.flatMap((node) => node.lines).filter(has).join("").length;
}
