// The tree of what is cached: drawn, read with the keyboard, and what has left it seen to go.

import { refresh } from "./cache.js";
import { $, count, format, make } from "./dom.js";
import { call, tell } from "./server.js";

let view = null; // the last answer of /v1/cache

const GONE_SECONDS = 3; // for which what has left the cache is still shown
let ghosts = []; // {namespace, anchor, node, until}: a node that was below `anchor` until just now

/** Find what left the cache between two views. What was only cut in two, or joined, is there still. */
function noteGone(before, after) {
  const flushed = before && after.stats.requests < before.stats.requests;
  if (!before || (!flushed && after.stats.evicted_tokens === before.stats.evicted_tokens)) return;
  const until = performance.now() + 1000 * GONE_SECONDS;
  let tokens = 0;
  for (const { namespace, tree } of before.namespaces) {
    const ends = new Map(); // of what is still there; all that is on the way to it is there, too
    const note = (node) => {
      ends.set(node.id, node.start + node.num_tokens);
      node.children.forEach(note);
    };
    after.namespaces.filter((other) => other.namespace === namespace).forEach(({ tree }) => note(tree));
    const compare = (node, anchor) => {
      if (ends.has(node.id)) anchor = node.id;
      const below = node.children.map((child) => compare(child, anchor));
      const kept = Math.max(ends.get(node.id) ?? 0, ...below.map((part) => part.kept));
      const children = below.flatMap((part) => part.lost);
      const start = Math.max(node.start, kept);
      const length = node.start + node.num_tokens - start;
      if (length <= 0) {
        ghosts.push(...children.map((child) => ({ namespace, anchor, node: child, until })));
        return { kept, lost: [] };
      }
      tokens += length;
      const gone = { ...node, id: `gone-${node.id}-${until}`, start, num_tokens: length, children, gone: true };
      return { kept, lost: [gone] };
    };
    compare(tree, "");
  }
  if (!tokens) return;
  $("gone").textContent = `${count(tokens, "token")} ${flushed ? "flushed" : "evicted"}`;
  setTimeout(() => {
    ghosts = ghosts.filter((ghost) => ghost.until > performance.now());
    if (!ghosts.length) $("gone").textContent = "";
    show();
  }, 1000 * GONE_SECONDS + 50);
}

const WIDTH = { least: 26, readable: 76 }; // pixels of a node
const ROW = { least: 18, most: 44 }; // pixels of a leaf
const GAP = 2;
const boxes = new Map(); // element of each node that is drawn
let drawn = []; // the nodes as they are drawn, in the order of the keys Up and Down

/** The trees as they are drawn: a row for each leaf, and children to the right of their parents. */
function layOut() {
  const trees = view.namespaces.map(({ namespace, tree }) => ({ namespace, tree }));
  for (const { namespace } of ghosts) {
    if (!trees.some((other) => other.namespace === namespace)) {
      trees.push({ namespace, tree: { id: "", start: 0, num_tokens: 0, children: [] } });
    }
  }
  const nodes = [];
  let rows = 0;
  const walk = (node, parent, namespace, level) => {
    const box = { node, parent, level, namespace, key: `${namespace ?? ""}/${node.id}`, row: rows, children: [] };
    if (level) nodes.push(box);
    const left = ghosts.filter((ghost) => ghost.namespace === namespace && ghost.anchor === node.id);
    const below = [...node.children, ...(node.gone ? [] : left.map((ghost) => ghost.node))];
    box.children = below.map((child) => walk(child, level ? box : null, namespace, level + 1));
    if (!below.length && level) rows += 1;
    box.rows = rows - box.row;
    return box;
  };
  for (const { namespace, tree } of trees) walk(tree, null, namespace, 0);
  return { nodes, rows };
}

/**
 * Place the nodes so that the longest path just fits the width. Short ones are as wide as it takes
 * to read how they begin, if that leaves half of the width to the proportions of the others.
 */
function fit(nodes, size, width) {
  const depth = Math.max(1, ...nodes.map((box) => box.level));
  const least = Math.max(WIDTH.least, Math.min(WIDTH.readable, width / 2 / depth));
  const longest = (unit) => {
    let most = 0;
    for (const box of nodes) {
      box.width = Math.max(least, unit * size(box.node.num_tokens));
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

/** Draw an answer of /v1/cache. */
export function showTree(news) {
  noteGone(view, news);
  view = news;
  showPages();
  show();
}

function show() {
  if (!view) return;
  const tree = $("tree");
  const { nodes, rows } = layOut();
  const scale = document.querySelector("[name=scale]:checked").value;
  fit(nodes, scale === "log" ? (n) => Math.log2(1 + n) : (n) => n, tree.clientWidth);
  const height = Math.min(ROW.most, Math.max(ROW.least, tree.clientHeight / rows));
  const ages = [...new Set(nodes.map((box) => box.node.age))].sort((a, b) => a - b);
  const keys = new Set(nodes.map((box) => box.key));
  for (const [key, element] of boxes) {
    if (keys.has(key)) continue;
    element.remove();
    boxes.delete(key);
  }
  drawn = nodes;
  nodes.forEach((box, index) => {
    const { node, key } = box;
    box.rank = ages.indexOf(node.age);
    let element = boxes.get(key);
    if (!element) {
      element = make("div", { role: "treeitem", tabIndex: -1 }, make("span"), make("small"));
      element.addEventListener("focus", () => focusNode(key));
      element.addEventListener("pointerenter", () => describe(key));
      boxes.set(key, element);
    }
    if (tree.children[index] !== element) tree.insertBefore(element, tree.children[index] ?? null);
    element.box = box;
    const state = node.gone ? "evicted" : node.leases ? "used" : node.pinned ? "pinned" : "idle";
    element.className = `node ${state}`;
    element.style.left = `${box.left}px`;
    element.style.top = `${box.row * height}px`;
    element.style.width = `${box.width - GAP}px`;
    element.style.height = `${box.rows * height - GAP}px`;
    element.style.setProperty("--age", ages.length > 1 ? box.rank / (ages.length - 1) : 0);
    element.firstChild.textContent = node.text;
    element.lastChild.textContent = format.format(node.num_tokens);
    element.ariaLevel = box.level;
    element.ariaLabel = `${facts(box)}: ${node.text}`;
  });
  tree.classList.toggle("empty", !nodes.length);
  if (nodes.length && !nodes.some((box) => boxes.get(box.key).tabIndex === 0)) {
    boxes.get(nodes[0].key).tabIndex = 0;
  }
  if (!described || !boxes.has(described)) describe(null);
}

const ordinals = new Intl.PluralRules("en", { type: "ordinal" });
const ordinal = (n) => n + { one: "st", two: "nd", few: "rd", other: "th" }[ordinals.select(n)];

/** What there is to know about a node, but for its text. */
function facts({ node, rank, namespace }) {
  const { page_size } = view.stats;
  const end = node.start + node.num_tokens;
  const pages = Math.ceil(end / page_size) - Math.floor(node.start / page_size);
  const parts = [`${count(node.num_tokens, "token")} from ${format.format(node.start)} on`, count(pages, "page")];
  if (namespace) parts.push(`salt ${namespace}`);
  if (node.gone) return [...parts, "no longer cached"].join(", ");
  parts.push(node.leases ? `in use by ${count(node.leases, "request")}` : `${rank ? `${ordinal(rank + 1)} ` : ""}most recently used`);
  if (node.pins.length) parts.push(`pinned as ${node.pins.join(", ")}`);
  else if (node.pinned) parts.push("pinned");
  if (node.num_hidden) parts.push(`${count(node.num_hidden, "branch")} not shown`);
  return parts.join(", ");
}

let described = null;

function describe(key) {
  described = key;
  const box = key && boxes.get(key)?.box;
  if (!box) {
    $("detail").replaceChildren("Point at a node, or go there with Tab and the arrow keys, to see its text.");
    return;
  }
  const more = box.node.num_tokens > PREVIEW ? " …" : "";
  $("detail").replaceChildren(make("p", {}, facts(box)), make("pre", {}, box.node.text + more));
}

function focusNode(key) {
  for (const [other, element] of boxes) element.tabIndex = other === key ? 0 : -1;
  describe(key);
}

const PREVIEW = 24; // tokens of a node that the server tells

$("tree").addEventListener("keydown", (event) => {
  const at = drawn.findIndex((box) => boxes.get(box.key) === document.activeElement);
  if (at < 0) return;
  const to = {
    ArrowRight: drawn[at].children[0],
    ArrowLeft: drawn[at].parent,
    ArrowDown: drawn[at + 1],
    ArrowUp: drawn[at - 1],
    Home: drawn[0],
    End: drawn.at(-1),
  }[event.key];
  if (!(event.key in { ArrowRight: 0, ArrowLeft: 0, ArrowDown: 0, ArrowUp: 0, Home: 0, End: 0 })) return;
  event.preventDefault();
  if (to) boxes.get(to.key).focus();
});

function showPages() {
  const { stats } = view;
  const nodes = view.namespaces.flatMap(({ tree }) => nodesOf(tree));
  const cached = nodes.reduce((sum, node) => sum + node.num_tokens, 0);
  const used = `${format.format(stats.pages - stats.free_pages)} of ${count(stats.pages, "page")} in use`;
  const whole = !nodes.some((node) => node.num_hidden);
  $("pages").textContent = `${whole ? "" : "more than "}${count(cached, "token")}; ${used}; ${format.format(stats.evicted_tokens)} evicted`;
}

const nodesOf = (node) => [node, ...node.children.flatMap(nodesOf)];

$("flush").addEventListener("click", async () => {
  try {
    await call("v1/cache/flush", { method: "POST" });
  } catch (error) {
    $("gone").textContent = tell(error);
  }
  refresh();
});
for (const choice of document.querySelectorAll("[name=scale]")) {
  choice.checked = choice.value === (localStorage.getItem("scale") ?? "tokens");
  choice.addEventListener("change", () => { localStorage.setItem("scale", choice.value); show(); });
}
new ResizeObserver(show).observe($("tree"));
