// The turns of a conversation as a tree. What is edited or computed anew stands beside what was there
// before, `before` the two is the same turn, and of both one is shown, its `next`. The conversation
// itself is the root: its `next` is the first turn that is shown, its `turns` are all, as they came.

/** The turns that are shown, from the first to the last. */
export function path(chat) {
  const turns = [];
  for (let turn = chat.next; turn; turn = turn.next) turns.push(turn);
  return turns;
}

/** The last turn that is shown, or the conversation if it has none. */
export const end = (chat) => path(chat).at(-1) ?? chat;

/** A turn and those beside it, as they came. */
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
