// What has left the cache, which is still shown for a moment.

import { $, count } from "./dom.js";

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
  $("gone").textContent = `${count(tokens, "token")} ${flushed ? "flushed" : "evicted"}`;
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

/** The nodes below a node, drawn or not. */
const weight = (node) => node.children.reduce((sum, child) => sum + 1 + weight(child), node.more?.nodes ?? 0);
