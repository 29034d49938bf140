// Where each node of the tree stands: a row for each leaf, children to the right of their parents.

import { format } from "./dom.js";

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

/** The height of each of so many rows. */
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
