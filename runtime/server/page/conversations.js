// The conversations that the browser keeps. Behind a key they are kept as long as the key is, until
// the tab is closed: whoever comes to this browser without the key shall not read them.

const NAME = "radixcache.conversations.2"; // another form of value will have another name
const FORMER = "radixcache.conversations.1"; // the same, without branches
const MOST = 50; // the latest; fewer, if the browser has no room for them

const place = () => (sessionStorage.getItem("key") ? sessionStorage : localStorage);
const areText = (...values) => values.every((value) => typeof value === "string");
const areNumbers = (...values) => values.every(Number.isFinite);
const isTime = (value) => areNumbers(value) && !Number.isNaN(new Date(value).getTime());

/**
 * All that are kept, {id, title, system, changed, turns}, the latest first. A turn is behind that of
 * the index `before`, -1 for none, and is `shown`, or one beside it is. What is no conversation,
 * whoever wrote it there, is passed over.
 */
export function kept() {
  try {
    const all = JSON.parse(place().getItem(NAME)).filter(isConversation);
    return all.map(inOrder).sort((a, b) => b.changed - a.changed);
  } catch {
    return [];
  }
}

const inOrder = (chat) => ({ ...chat, turns: chat.turns.map((turn, index) => ({ before: index - 1, ...turn })) });

/**
 * Keep a conversation, a tree as in branches.js, as it is now; whether there was room for it. If
 * another tab has changed it since, both are kept: this one gets another `id`.
 */
export function keep(conversation) {
  const others = kept();
  const there = others.find(({ id }) => id === conversation.id);
  const id = there && there.changed !== conversation.changed ? newId() : conversation.id;
  const changed = Date.now();
  const { title, system } = conversation;
  const turns = conversation.turns
    .filter((turn) => turn.content || turn.reasoning || turn.calls || turn.reply) // else it has yet to come
    .map((turn, _, all) => {
      const { role, content, reasoning, calls, reply, before } = turn;
      return { role, content, reasoning, calls, reply, before: all.indexOf(before), shown: before.next === turn };
    });
  if (!write([{ id, title, system, changed, turns }, ...others.filter((other) => other.id !== id)])) return false;
  Object.assign(conversation, { id, changed });
  return true;
}

export function forget(id) {
  write(kept().filter((other) => other.id !== id));
}

export const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;

/** Call `viewer` when another tab has changed what is kept. */
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
  return areText(value?.id, value?.title, value?.system) && isTime(value.changed)
    && Array.isArray(value.turns) && value.turns.every(isTurn);
}

function isTurn(turn, index) {
  const before = turn?.before ?? -1;
  return ["user", "assistant"].includes(turn?.role) && Number.isInteger(before) && before >= -1 && before < index
    && areText(turn.content, turn.reasoning ?? "", turn.calls ?? "")
    && (!turn.reply || isReply(turn.reply));
}

/** Whether it says what usage.js shows. */
function isReply({ usage, ttft, rate, tokens, repeats, explanation }) {
  return areNumbers(usage?.prompt_tokens, usage?.prompt_tokens_details?.cached_tokens)
    && areNumbers(ttft ?? 0, rate ?? 0, tokens ?? 0, repeats ?? 0)
    && (!explanation || (Array.isArray(explanation) && explanation.every(
      (miss) => areNumbers(miss?.start, miss?.end) && areText(miss.reason ?? "", miss.text ?? ""))));
}

for (const store of [localStorage, sessionStorage]) {
  const former = store.getItem(FORMER);
  store.removeItem(FORMER);
  if (former && !store.getItem(NAME)) store.setItem(NAME, former);
}
