// A chat, the tree of what is cached, and how requests did. No library and no build step.

const $ = (id) => document.getElementById(id);
const format = new Intl.NumberFormat("en");
const count = (n, noun) => `${format.format(n)} ${noun}${n === 1 ? "" : "s"}`;
const percent = (share) => `${(100 * share).toFixed(share === 1 ? 0 : 1)} %`;
const milliseconds = (s) => `${(1000 * s).toFixed(s < 0.0095 ? 1 : 0)} ms`;

/** An element with properties and children; a string child is text, never markup. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// The server.

/** A successful or unchanged response; any other is thrown as the server's own sentence. */
async function call(path, { body, method = body ? "POST" : "GET", headers = {}, signal } = {}) {
  const key = sessionStorage.getItem("key");
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method, headers, signal, cache: "no-store", body: body && JSON.stringify(body),
  });
  if (response.status === 401) $("key").hidden = false;
  if (response.ok || response.status === 304) return response;
  const error = (await response.json().catch(() => ({}))).error;
  const sentence = error?.message ?? `the server answers with status ${response.status}`;
  throw Object.assign(new Error(sentence), { status: response.status });
}

/** The events of a streamed completion. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

/** What to tell of an error; `fetch` throws a TypeError if there is no connection. */
const tell = (error) => (error instanceof TypeError ? "the server does not answer" : error.message);

// The chat.

let turns = []; // {role, content, article}
let running = null; // the AbortController of the answer that is coming

async function send(text) {
  const content = text.trim();
  if (!content || running) return;
  $("question").value = "";
  $("system").open = false;
  $("refused").textContent = "";
  const system = $("system-text").value;
  const asked = addTurn("user", content);
  const messages = turns.map((turn) => ({ role: turn.role, content: turn.content }));
  if (system.trim()) messages.unshift({ role: "system", content: system });
  const answer = addTurn("assistant", "");
  setRunning(new AbortController());
  let reply = null;
  try {
    reply = await receive(messages, answer);
  } catch (error) {
    if (error.name !== "AbortError") $("refused").textContent = tell(error);
  }
  setRunning(null);
  answer.article.removeAttribute("aria-busy");
  if (reply) showUsage(answer, reply);
  else if (answer.content) answer.article.append(make("p", { className: "usage" }, "stopped"));
  else { // nothing has come: as if it had not been asked
    cutTurns(turns.indexOf(asked));
    $("question").value ||= content;
  }
  showExamples();
  refresh();
}

/** Stream the answer to `messages` into a turn; what there is to say about it afterwards. */
async function receive(messages, answer) {
  const reply = {};
  const start = performance.now();
  const response = await call("v1/chat/completions", {
    body: { messages, stream: true, stream_options: { include_usage: true }, explain: true },
    signal: running.signal,
  });
  refresh();
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    const { content, reasoning } = chunk.choices?.[0]?.delta ?? {};
    if (content || reasoning) {
      reply.ttft ??= (performance.now() - start) / 1000;
      answer.content += content ?? "";
      follow(() => answer.text.append(content || reasoning));
    }
    reply.usage = chunk.usage ?? reply.usage;
    Object.assign(reply, chunk.radixcache); // the server's own TTFT, and the explanation
  }
  return reply;
}

function addTurn(role, content) {
  const text = make("p", { className: "text" }, content);
  const article = make("article", { className: role, ariaLabel: role === "user" ? "You" : "Answer" }, text);
  const turn = { role, content, article, text };
  if (role === "user") {
    article.append(make("button", { type: "button", className: "edit", onclick: () => edit(turn) }, "Edit"));
  } else {
    article.setAttribute("aria-busy", "true");
  }
  turns.push(turn);
  $("log").append(article);
  article.scrollIntoView({ block: "nearest" });
  return turn;
}

/** Change the chat, and keep its end in sight if it is. */
function follow(change) {
  const { scrollHeight, scrollTop, clientHeight } = $("scroll");
  change();
  if (scrollHeight - scrollTop - clientHeight < 50) $("scroll").scrollTop = $("scroll").scrollHeight;
}

function cutTurns(index) {
  for (const turn of turns.splice(index)) turn.article.remove();
}

/** Ask something else at this place. What came before is cached, up to the word that differs. */
function edit(turn) {
  if (running) return;
  const field = make("textarea", { value: turn.content, ariaLabel: "Message to send instead" });
  const restore = () => { form.replaceWith(turn.text); turn.article.querySelector(".edit").hidden = false; };
  const resend = (event) => {
    event?.preventDefault();
    if (!field.value.trim() || running) return;
    cutTurns(turns.indexOf(turn));
    send(field.value);
    $("question").focus();
  };
  const cancel = make("button", { type: "button", onclick: restore }, "Cancel");
  const form = make("form", { onsubmit: resend }, field, make("button", { className: "main" }, "Send"), cancel);
  sendsOnEnter(field, resend);
  field.addEventListener("keydown", (event) => event.key === "Escape" && restore());
  turn.text.replaceWith(form);
  turn.article.querySelector(".edit").hidden = true;
  field.focus();
}

function sendsOnEnter(field, submit) {
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  for (const button of document.querySelectorAll("#new, #flush, #examples button, .edit")) {
    button.disabled = Boolean(controller);
  }
}

let example = null;

function beginChat() {
  $("system").open = Boolean($("system-text").value);
  showExamples();
}

function showExamples() {
  const asked = new Set(turns.map((turn) => turn.content));
  const left = (example?.questions ?? []).filter((question) => !asked.has(question));
  $("examples").replaceChildren(
    ...left.map((text) => make("button", { type: "button", onclick: () => send(text) }, text)),
  );
}

// What a request took, and why.

function showUsage(answer, { usage, ttft, explanation }) {
  const prompt = usage.prompt_tokens;
  const cached = usage.prompt_tokens_details.cached_tokens;
  const computed = prompt - cached;
  const numbers = [count(prompt, "prompt token"), `${format.format(cached)} cached`, `${format.format(computed)} computed`].join(", ");
  const first = ttft === undefined ? "" : `, TTFT ${milliseconds(ttft)}`;
  const unexplained = { start: cached, end: prompt, text: `${count(computed, "token")} computed` };
  const misses = explanation ?? (computed ? [unexplained] : []);
  follow(() => answer.article.append(strip(misses, prompt, computed), make("p", { className: "usage" }, numbers + first)));
  $("last-usage").textContent = numbers;
  $("strip").replaceChildren(strip(misses, prompt, computed));
  $("reasons").replaceChildren(...misses.map(describeMiss));
}

/** A prompt from its first token to its last, which is computed if any is; what else is in none of
 *  `misses` was cached. */
function strip(misses, length, computed) {
  const parts = make("div", { className: "strip" });
  const add = (name, tokens) => {
    if (tokens <= 0) return;
    const part = make("i", { className: name });
    part.style.flexGrow = tokens;
    parts.append(part);
  };
  let position = 0;
  for (const { start, end } of misses) {
    add("hit", start - position);
    add("miss", end - start);
    position = end;
  }
  const last = Math.min(1, computed, length - position);
  add("hit", length - last - position);
  add("miss", last);
  return parts;
}

/** One entry of the extension field `radixcache.explanation`: {reason, start, end, text}. */
function describeMiss({ reason, start, end, text }) {
  const range = `${format.format(start)} – ${format.format(end)}`;
  const item = make("li", {}, make("span", { className: "range" }, range), text || reason.replaceAll("_", " "));
  if (reason) item.dataset.reason = reason;
  return item;
}

// The tree.

let view = null; // the last answer of /v1/cache
let etag = "";
let timer = 0;
let loading = false;
let stale = false;
let closed = false; // the server shows the cache to others only, whatever key is given

/** Look at the cache: once a second while anybody sees it, and for nothing but a 304 if it is idle. */
async function refresh() {
  stale = true;
  if (loading || closed) return;
  loading = true;
  clearTimeout(timer);
  try {
    while (stale) {
      stale = false;
      const response = await call("v1/cache", { headers: { "If-None-Match": etag } });
      if (response.status === 304) continue;
      etag = response.headers.get("ETag");
      const news = await response.json();
      noteGone(view, news);
      view = news;
      show();
    }
    $("trouble").textContent = "";
  } catch (error) {
    $("trouble").textContent = tell(error);
    closed = error.status === 403;
  }
  loading = false;
  if (!document.hidden && !closed && $("key").hidden) timer = setTimeout(refresh, running ? 200 : 1000);
}

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

function show() {
  if (!view) return;
  showStatistics();
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

// Statistics and recent requests.

function showStatistics() {
  const { stats, recent } = view;
  const nodes = view.namespaces.flatMap(({ tree }) => nodesOf(tree));
  const cached = nodes.reduce((sum, node) => sum + node.num_tokens, 0);
  const used = `${format.format(stats.pages - stats.free_pages)} of ${count(stats.pages, "page")} in use`;
  const whole = !nodes.some((node) => node.num_hidden);
  $("pages").textContent = `${whole ? "" : "more than "}${count(cached, "token")}; ${used}; ${format.format(stats.evicted_tokens)} evicted`;
  const hits = recent.map((request) => request.cached_tokens / request.prompt_tokens);
  drawChart($("hits"), hits, 1, percent, {
    title: "Hit rate",
    summary: stats.requests ? `${percent(stats.hit_rate)} of all prompt tokens` : "",
  });
  const times = recent.map((request) => request.ttft);
  const median = [...times].sort((a, b) => a - b)[Math.floor(times.length / 2)];
  drawChart($("ttft"), times, Math.max(0, ...times), milliseconds, {
    title: "Time to first token",
    summary: times.length ? `median ${milliseconds(median)}` : "",
  });
}

const nodesOf = (node) => [node, ...node.children.flatMap(nodesOf)];

/** A bar for each value, the newest on the right, from 0 to `top`; `label` gives a value its unit. */
function drawChart(figure, values, top, label, { title, summary }) {
  const SVG = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(SVG, "svg");
  const slots = Math.max(24, values.length);
  svg.setAttribute("viewBox", `0 0 ${slots} 1`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  values.forEach((value, index) => {
    const bar = document.createElementNS(SVG, "rect");
    const height = top ? Math.max(0.02, value / top) : 0;
    Object.entries({ x: slots - values.length + index + 0.1, y: 1 - height, width: 0.8, height })
      .forEach(([name, number]) => bar.setAttribute(name, number));
    const tip = document.createElementNS(SVG, "title");
    tip.textContent = label(value);
    bar.append(tip);
    svg.append(bar);
  });
  const caption = make("figcaption", {}, make("b", {}, title), ` ${summary}`);
  const axis = make("div", { className: "axis" }, make("span", {}, values.length ? label(top) : ""), make("span", {}, "0"));
  const span = values.length ? `the last ${count(values.length, "request")}, newest on the right` : "no request yet";
  figure.replaceChildren(caption, axis, svg, make("small", {}, span));
}

// Beginning.

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send($("question").value); });
sendsOnEnter($("question"), (event) => { event.preventDefault(); send($("question").value); });
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => { cutTurns(0); beginChat(); $("question").focus(); });
$("flush").addEventListener("click", async () => {
  try {
    await call("v1/cache/flush", { method: "POST" });
  } catch (error) {
    $("gone").textContent = tell(error);
  }
  refresh();
});
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key-text").value);
  $("key").hidden = true;
  closed = false;
  begin();
});
for (const choice of document.querySelectorAll("[name=scale]")) {
  choice.checked = choice.value === (localStorage.getItem("scale") ?? "tokens");
  choice.addEventListener("change", () => { localStorage.setItem("scale", choice.value); show(); });
}
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : refresh()));
new ResizeObserver(show).observe($("tree"));

async function begin() {
  try {
    const about = await (await call("page.json")).json();
    $("model").textContent = about.model;
    example = about.example;
    if (example && !$("system-text").value) $("system-text").value = example.system;
    beginChat();
  } catch (error) {
    $("trouble").textContent = tell(error);
  }
  refresh();
}

begin();
