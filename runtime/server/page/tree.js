// The tree of what is cached: drawn, gone into, and read with a pointer, a finger or the keyboard.

import { lookAt, looksAt, refresh } from "./cache.js";
import { openAt } from "./chat.js";
import { conversationOf } from "./conversations.js";
import { $, button, count, format, make } from "./dom.js";
import { fit, goneBelow, gonePlaces, isThinned, layOut, mostHeight, narrow, noteGone, room, rowHeight } from "./layout.js";
import { found, foundBelow, searchWith } from "./search.js";
import { call, errorText } from "./server.js";

const GAP = 2; // pixels between nodes
const [FIRST_PREVIEW, PREVIEW] = [96, 24]; // tokens that the server tells of a first node, and of others
const boxes = new Map(); // element of each node that is drawn
let view = null; // the last answer of /v1/cache
let drawn = []; // the nodes as they are drawn, in the order of the keys Up and Down
let unfolded = 1; // times the rows that have room: what is folded at the top has been opened

export function showTree(news) {
  noteGone(view, news, show);
  view = news;
  const { stats } = view;
  const pool = { medium: "pool", pages: stats.pages, used_pages: stats.pages - stats.free_pages };
  const used = `${format.format(pool.used_pages)} of ${count(pool.pages, "page")} in use`;
  const nodes = stats.cached_nodes > 1 ? ` in ${count(stats.cached_nodes, "node")}` : "";
  $("pages").textContent = `${count(stats.cached_tokens, "token")}${nodes}; ${used}; ${format.format(stats.evicted_tokens)} evicted`
    + (stats.window_pages ? `; windows: ${byUse(stats.window_pages, "page")}` : "")
    + (stats.recurrent_states ? `; states: ${byUse(stats.recurrent_states, "slot")}` : "")
    + stats.tiers.map((tier) => `; ${inTier(tier)}`).join("");
  $("tiers").replaceChildren(...(stats.tiers.length ? [pool, ...stats.tiers] : []).map(meter));
  show();
}

/** Pages or slots beside the KV pages; those that were left behind are found until they are used anew. */
function byUse({ running, kept, left, free }, what) {
  const again = left === undefined ? "" : `, ${format.format(left)} left behind`;
  return `${count(running, what)} of running requests, ${format.format(kept)} kept${again}, ${format.format(free)} free`;
}

const WHERE = { pool: "in the pool", host: "in host memory", disk: "on disk" };

function inTier({ medium, pages, used_pages: used, loaded_pages: read, stored_pages: written }) {
  const moved = medium === "pool" ? "" : ` (${format.format(read)} read, ${format.format(written)} written)`;
  return `${format.format(used)} of ${count(pages, "page")} ${WHERE[medium]}${moved}`;
}

/** A tier as a bar that is as long as it has pages, and filled as far as they are used. */
function meter(tier) {
  const bar = make("div", { className: tier.medium, title: inTier(tier) }, make("i"));
  bar.style.flexGrow = tier.pages;
  bar.firstChild.style.width = `${(100 * tier.used_pages) / tier.pages}%`;
  return bar;
}

function show() {
  if (!view) return;
  const tree = $("tree");
  const focused = drawn.find((box) => boxes.get(box.key) === document.activeElement);
  const trees = [...view.namespaces];
  for (const namespace of gonePlaces()) {
    if (!trees.some((other) => other.namespace === namespace)) {
      trees.push({ namespace, tree: { id: "", start: 0, num_tokens: 0, children: [] } });
    }
  }
  const { boxes: placed, rows } = layOut(trees, view.more, goneBelow);
  const scale = document.querySelector("[name=scale]:checked").value;
  fit(placed, scale === "log" ? (n) => Math.log2(1 + n) : (n) => n, tree.clientWidth);
  const most = mostHeight(tree);
  const height = rowHeight(most, rows);
  tree.style.height = narrow.matches ? `${Math.min(most, Math.max(rows, 1) * height)}px` : "";
  const ages = [...new Set(placed.map(age))].sort((a, b) => a - b);
  const keys = new Set(placed.map((box) => box.key));
  for (const [key, element] of boxes) {
    if (keys.has(key)) continue;
    element.remove();
    boxes.delete(key);
  }
  drawn = placed;
  placed.forEach((box, index) => {
    const { node, key } = box;
    box.rank = ages.indexOf(age(box));
    let element = boxes.get(key);
    if (!element) {
      element = make("div", { role: "treeitem", tabIndex: -1 }, make("span"), make("small"));
      element.addEventListener("focus", () => focusNode(key));
      element.addEventListener("pointerenter", () => describe(key));
      element.addEventListener("click", () => enter(boxes.get(key).box));
      boxes.set(key, element);
    }
    if (tree.children[index] !== element) tree.insertBefore(element, tree.children[index] ?? null);
    element.box = box;
    element.className = `node ${state(box)} ${mark(box)}`;
    const place = { left: box.left, top: box.row * height, width: box.width - GAP, height: box.rows * height - GAP };
    for (const [side, pixels] of Object.entries(place)) element.style[side] = `${pixels}px`;
    element.style.setProperty("--age", ages.length > 1 ? box.rank / (ages.length - 1) : 0);
    element.style.setProperty("--hit", hitShare(node));
    element.firstChild.textContent = label(node);
    const isLeaf = !box.children.length && !node.isFold; // nothing stands to its right
    element.classList.toggle("leaf", isLeaf);
    element.firstChild.style.maxWidth = isLeaf ? `${tree.clientWidth - box.left - 16}px` : "";
    element.lastChild.textContent = node.isFold ? "" : format.format(node.num_tokens);
    element.ariaLevel = box.level;
    element.ariaLabel = node.isFold ? facts(box) : `${facts(box)}: ${node.text}`;
  });
  if (focused && document.activeElement === document.body) {
    boxes.get(boxes.has(focused.key) ? focused.key : focused.parent?.key)?.focus();
  }
  if (placed.length && !placed.some((box) => boxes.get(box.key).tabIndex === 0)) {
    boxes.get(placed[0].key).tabIndex = 0;
  }
  if (!described || !boxes.has(described)) describe(null);
  showCrumbs();
}

const age = ({ node }) => (node.more && node.isFold ? node.more.age : node.age);

function state({ node }) {
  if (node.isFold) return `fold ${node.more.leases ? "used" : "idle"}${isThinned(node.id.slice(0, -5)) ? " thinned" : ""}`;
  return node.gone ? "evicted" : node.leases ? "used" : node.pinned ? "pinned" : "idle";
}

/** What the search has to say of a node. */
function mark({ node, parent }) {
  if (!node.isFold) return found(node.id);
  return foundBelow(...siblings(node, parent)) ? "way" : "";
}

const siblings = (node, parent) => [parent?.node.id ?? "", parent?.node.children ?? view.namespaces.flatMap(({ tree }) => tree.children)];

/** Which part of a node was there when the requests at work in it came. */
function hitShare({ computed_from: from, start, num_tokens: size }) {
  return from == null ? 1 : Math.min(1, Math.max(0, (from - start) / size));
}

/** What stands in a node: how its text begins, but for the marks of who speaks. */
function label(node) {
  return node.text.replace(/<\|[^|>]*\|>/g, " ").trim() || node.text.trim() || count(node.num_tokens, "token");
}

const ordinals = new Intl.PluralRules("en", { type: "ordinal" });
const ordinal = (n) => n + { one: "st", two: "nd", few: "rd", other: "th" }[ordinals.select(n)];
const inUse = (leases) => `in use by ${count(leases, "request")}`;

function facts({ node, rank, namespace, parent }) {
  if (node.isFold) return foldFacts(node, parent, namespace);
  const { page_size } = view.stats;
  const end = node.start + node.num_tokens;
  const pages = Math.ceil(end / page_size) - Math.floor(node.start / page_size);
  const parts = [`${count(node.num_tokens, "token")} from ${format.format(node.start)} on`, count(pages, "page")];
  if (namespace) parts.push(`salt ${namespace}`);
  if (node.gone) return [...parts, "no longer in the pool"].join(", ");
  parts.push(node.leases ? inUse(node.leases) : `${rank ? `${ordinal(rank + 1)} ` : ""}most recently used`);
  if (node.computed_from !== null) parts.push(`${count(end - Math.max(node.start, node.computed_from), "token")} computed by them`);
  if (node.pins.length) parts.push(`pinned as ${node.pins.join(", ")}`);
  else if (node.pinned) parts.push("pinned");
  return parts.join(", ");
}

function foldFacts(node, parent, namespace) {
  const { branches, nodes, tokens, leases } = node.more;
  const what = namespace === "salts" ? count(branches, "salt") : `${format.format(branches)} ${branches === 1 ? "branch" : "branches"}`;
  const parts = [`${what} folded`, `${count(nodes, "node")}, ${count(tokens, "token")}`];
  if (leases) parts.push(inUse(leases));
  const hits = foundBelow(...siblings(node, parent));
  if (hits) parts.push(`${format.format(hits)} found in there`);
  return parts.join(", ");
}

// Going in and out.

/** Let a node with branches fill the tree, or show what is folded. */
function enter({ node, parent }) {
  if (node.gone) return;
  const id = node.isFold ? (parent?.node.id ?? null) : node.id;
  if (node.isFold && id === looksAt("under")) {
    unfolded *= 4;
    measure();
  } else if (node.isFold || node.children.length || node.more) go(id);
}

function go(under) {
  unfolded = 1;
  measure();
  lookAt({ under });
}

/** The way from the whole cache to the node that fills the tree. */
function showCrumbs() {
  const top = view.under ? [...view.above, ...view.namespaces.flatMap(({ tree }) => tree.children)] : [];
  const parts = [{ id: null, name: "Everything" }, ...top.map((node) => ({ id: node.id, name: label(node) }))];
  const key = JSON.stringify(parts);
  if ($("crumbs").dataset.key === key) return; // whoever has the focus keeps it
  $("crumbs").dataset.key = key;
  const buttons = parts.map(({ id, name }, index) => {
    const disabled = index === parts.length - 1;
    return make("li", {}, button(name, () => go(id), { disabled }));
  });
  $("crumbs").firstElementChild.replaceChildren(...buttons);
}

function measure() {
  const { rows, levels } = room($("tree").clientWidth, mostHeight($("tree")));
  lookAt({ rows: Math.min(10000, rows * unfolded), levels });
}

// Reading it.

let described = null;
let focused = null; // the key of the node that was gone to last

/** Say what a node is. Where it was gone to, its conversation can be opened. */
function describe(key) {
  described = key;
  const box = key && boxes.get(key)?.box;
  if (!box) {
    $("detail").replaceChildren("Point at a node, touch it, or go there with Tab and the arrow keys, to see its text. A click, or Enter, goes into it.");
    return;
  }
  if (box.node.isFold) {
    $("detail").replaceChildren(make("p", {}, facts(box)));
    return;
  }
  const more = box.node.num_tokens > (box.node.start ? PREVIEW : FIRST_PREVIEW) ? " …" : "";
  $("detail").replaceChildren(make("p", {}, facts(box), ...opening(key, box)), make("pre", {}, box.node.text + more));
}

/** The button that opens a node's conversation, if this browser keeps one. */
function opening(key, box) {
  const way = [];
  for (let at = key === focused && box; at; at = at.parent) way.unshift(at.node);
  const found = way.length && conversationOf([...view.above, ...way]);
  return found ? [" ", button("Open its conversation", () => openAt(found))] : [];
}

function focusNode(key) {
  for (const [other, element] of boxes) element.tabIndex = other === key ? 0 : -1;
  focused = key;
  describe(key);
}

// What was pointed at on the way from a node to its description is over.
$("tree").addEventListener("pointerleave", () => boxes.has(focused) && describe(focused));

$("tree").addEventListener("keydown", (event) => {
  const at = drawn.findIndex((box) => boxes.get(box.key) === document.activeElement);
  if (at < 0) return;
  const moves = {
    ArrowRight: drawn[at].children[0],
    ArrowLeft: drawn[at].parent,
    ArrowDown: drawn[at + 1],
    ArrowUp: drawn[at - 1],
    Home: drawn[0],
    End: drawn.at(-1),
  };
  if (event.key in moves) boxes.get(moves[event.key]?.key)?.focus();
  else if (event.key === "Enter" || event.key === " ") enter(drawn[at]);
  else if (event.key === "Escape" && view.under) go(view.above.at(-1)?.id ?? null);
  else return;
  event.preventDefault();
});

// Beginning.

$("flush").addEventListener("click", async () => {
  try {
    await call("v1/cache/flush", { method: "POST" });
  } catch (error) {
    $("gone").textContent = errorText(error);
  }
  refresh();
});
for (const choice of document.querySelectorAll("[name=scale]")) {
  choice.checked = choice.value === (localStorage.getItem("scale") ?? "tokens");
  choice.addEventListener("change", () => { localStorage.setItem("scale", choice.value); show(); });
}
searchWith(show);
new ResizeObserver(() => { measure(); show(); }).observe($("tree"));
measure();
