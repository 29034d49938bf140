// Where each node of the tree stands: a row for each leaf, children to the right of their parents.

import { $, count, format } from "./dom.js";

const WIDTH = { least: 56, readable: 92, letter: 7.6, rest: 24 }; // pixels of a node
const ROW = { least: 19, asked: 23, most: 44 }; // pixels of a leaf
const TOUCHED = { least: 30, asked: 34, most: 48 }; // the same for fingers
const touched = matchMedia("(max-width: 820px), (pointer: coarse)");
const row = () => (touched.matches ? TOUCHED : ROW);

export const narrow = matchMedia("(max-width: 820px)");

/** The height that a tree may have: on a phone it takes no more of it than it needs. */
export const mostHeight = (tree) => (narrow.matches ? Math.round(0.6 * innerHeight) : tree.clientHeight);

/** How many leaves one above the other, and nodes side by side, can be read in a space. */
export const room = (width, height) => ({
  rows: Math.max(5, Math.floor(height / row().asked)),
  levels: Math.min(12, Math.max(3, Math.floor(width / 88))),
});

export const rowHeight = (height, rows) => Math.min(row().most, Math.max(row().least, height / rows));

/**
 * The nodes of a view of the cache as boxes {node, parent, level, namespace, key, row, rows,
 * children}, and how many rows they take. `extra(node, namespace)` are children besides its own;
 * what a node leaves out is one, too, with `more`.
 */
export function layOut(trees, more, extra) {
  const boxes = [];
  let rows = 0;
  const walk = (node, parent, namespace, level) => {
    const box = { node, parent, level, namespace, key: `${namespace ?? ""}/${node.id}`, row: rows, children: [] };
    if (level) boxes.push(box);
    const below = [...(node.children ?? []), ...extra(node, namespace), ...(node.isFold ? [] : fold(node.more, node.id))];
    box.children = below.map((child) => walk(child, level ? box : null, namespace, level + 1));
    if (!below.length && level) rows += 1;
    box.rows = rows - box.row;
    return box;
  };
  for (const { namespace, tree } of trees) walk(tree, null, namespace, 0);
  for (const node of fold(more, "")) walk(node, null, "salts", 1);
  return { boxes, rows };
}

function fold(more, id) {
  return more ? [{ id: `${id}/more`, num_tokens: 0, more, isFold: true, text: `+${format.format(more.nodes)} more` }] : [];
}

/**
 * Place boxes so that the longest path just fits the width. Short ones are as wide as it takes to
 * read how they begin, if that leaves some of the width to the proportions of the others.
 */
export function fit(boxes, size, width) {
  const depth = Math.max(1, ...boxes.map((box) => box.level));
  const least = Math.max(WIDTH.least, Math.min(WIDTH.readable, 0.6 * width / depth));
  const longest = (unit) => {
    let most = 0;
    for (const box of boxes) {
      const { isFold, text, num_tokens } = box.node;
      box.width = isFold ? WIDTH.rest + WIDTH.letter * text.length : Math.max(least, unit * size(num_tokens));
      box.left = box.parent ? box.parent.left + box.parent.width : 0;
      most = Math.max(most, box.left + box.width);
    }
    return most;
  };
  let [low, high] = [0, width];
  for (let step = 0; step < 40; step++) {
    const middle = (low + high) / 2;
    if (longest(middle) > width) high = middle;
    else low = middle;
  }
  longest(low);
}

// What has left the cache, which is still shown for a moment.

const SECONDS = 3;
let ghosts = []; // {namespace, anchor, node, until}: a node that was below `anchor` until just now
const thinned = new Map(); // until when the fold of a node says that it has lost some
let shownUntil = 0;

/** Namespaces of which something is still shown. */
export const gonePlaces = () => ghosts.map((ghost) => ghost.namespace);

/** What was below a node until just now. */
export const goneBelow = (node, namespace) =>
  ghosts.filter((ghost) => ghost.namespace === namespace && ghost.anchor === node.id && !node.gone).map((ghost) => ghost.node);

/** Whether something has just gone from what is folded below a node. */
export const isThinned = (id) => thinned.get(id) > performance.now();

/**
 * Find what left the cache between two views, and call `redraw` when it has been shown. What was
 * only cut in two, or joined, is there still; what may have been folded is not taken for gone.
 */
export function noteGone(before, after, redraw) {
  if (!before) return;
  const flushed = after.stats.requests < before.stats.requests;
  const tokens = flushed ? before.stats.cached_tokens : after.stats.evicted_tokens - before.stats.evicted_tokens;
  if (tokens <= 0) return;
  const until = shownUntil = performance.now() + 1000 * SECONDS;
  if (before.under === after.under) {
    for (const { namespace, tree } of before.namespaces) {
      const there = after.namespaces.filter((other) => other.namespace === namespace);
      if (there.length || !after.more) note(namespace, tree, there.map((other) => other.tree), until);
    }
  }
  $("gone").textContent = `${count(tokens, "token")} ${flushed ? "gone" : "evicted"}`;
  setTimeout(() => {
    const now = performance.now();
    ghosts = ghosts.filter((ghost) => ghost.until > now);
    for (const [id, end] of thinned) if (end <= now) thinned.delete(id);
    if (shownUntil <= now) $("gone").textContent = "";
    redraw();
  }, 1000 * SECONDS + 50);
}

function note(namespace, tree, trees, until) {
  const there = new Map(); // what is still there; all that is on the way to it is there, too
  const list = (node) => {
    there.set(node.id, node);
    node.children.forEach(list);
  };
  trees.forEach(list);
  const compare = (node, anchor) => {
    const now = there.get(node.id);
    if (now) anchor = node.id;
    if (now?.more && weight(now) < weight(node)) thinned.set(node.id, until);
    const below = node.children.map((child) => compare(child, anchor));
    const kept = Math.max(now ? now.start + now.num_tokens : 0, ...below.map((part) => part.kept));
    const children = below.flatMap((part) => part.lost);
    const start = Math.max(node.start, kept);
    const length = node.start + node.num_tokens - start;
    if (length <= 0) {
      if (!there.get(anchor)?.more) ghosts.push(...children.map((child) => ({ namespace, anchor, node: child, until })));
      return { kept, lost: [] };
    }
    const gone = { ...node, id: `gone-${node.id}-${until}`, start, num_tokens: length, children, more: null, gone: true };
    return { kept, lost: [gone] };
  };
  compare(tree, "");
}

const weight = (node) => node.children.reduce((sum, child) => sum + 1 + weight(child), node.more?.nodes ?? 0);
