// Markdown as models write it, made of elements. What is not known here is text, raw HTML first of
// all; nothing is ever parsed as HTML. Any text takes time linear in its length.

import { button, make } from "./dom.js";

const DEPTH = 16; // of blocks within blocks, and of marks that wait for their counterpart
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})\s*(\S*)/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/s;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^[ \t]*([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const MARK = /\\(?=[!-/:-@[-`{-~\n])|`+|\*+|_+|~+|\[|\]|https?:\/\//g;
const TARGET = /\(([^\s<>()]+(?:\([^\s<>()]*\)[^\s<>()]*)*)(?: +"[^"]*")? *\)/y;
const BARE = /https?:\/\/[^\s<>"[\]]*[^\s<>"'.,;:!?()[\]*_~`|]/y;

/**
 * A function that shows a text in `parent`, to be called with ever more of it. Blocks that no more
 * text can change stay as they are, so that a call takes as long as the last block does.
 */
export function markdown(parent) {
  let from = 0; // where the first block that may still change begins
  let settled = 0; // how many are before that
  return (text) => {
    const lines = text.replaceAll("\r", "").slice(from).split("\n");
    while (parent.children.length > settled) parent.lastChild.remove();
    const found = blocks(lines, 0);
    for (const { node } of found) parent.append(node);
    const last = found.filter(({ line }) => line < lines.length - 1).length - 1;
    if (last < 1) return; // the line that is being written may yet belong to the block before it
    settled += last;
    for (const line of lines.slice(0, found[last].line)) from += line.length + 1;
  };
}

/** The blocks of some lines, and the line where each begins. */
function blocks(lines, depth) {
  const found = [];
  for (let line = 0; line < lines.length;) {
    if (lines[line].trim()) {
      const [node, end] = block(lines, line, depth);
      found.push({ node, line });
      line = end;
    } else line += 1;
  }
  return found;
}

function block(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return codeBlock(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [fill(`h${Math.min(6, 2 + heading[1].length)}`, inline(heading[2])), at + 1];
  if (isRule(line)) return [make("hr"), at + 1];
  if (depth < DEPTH && QUOTE.test(line)) return quotation(lines, at, depth);
  if (depth < DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  let end = at + 1;
  while (goesOn(lines, end)) end += 1;
  return [fill("p", inline(lines.slice(at, end).join("\n").trim())), end];
}

/** Whether the paragraph before this line goes on there. */
function goesOn(lines, at) {
  if (at >= lines.length || !lines[at].trim()) return false;
  const item = ITEM.exec(lines[at]);
  const lists = item && lines[at].length > item[0].length && !/[02-9]|1\d/.test(item[1]);
  const starts = FENCE.test(lines[at]) || HEADING.test(lines[at]) || QUOTE.test(lines[at]);
  return !(lists || starts || isRule(lines[at]) || isTable(lines, at));
}

const isRule = (line) => /^([-*_])\1{2,}$/.test(line.replace(/[ \t]/g, ""));

function codeBlock(lines, at, [, mark, language]) {
  const closes = (line) => line.trim().length >= mark.length && !line.trim().replaceAll(mark[0], "");
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const indent = lines[at].indexOf(mark);
  const text = lines.slice(at + 1, end).map((line) => unindent(line, indent)).join("\n");
  const code = make("code", {}, text);
  const copy = button("Copy", () => copyText(copy, code));
  return [make("div", { className: "code" }, make("small", {}, language), copy, make("pre", {}, code)), end + 1];
}

async function copyText(place, code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    place.textContent = "Copied";
  } catch { // browsers have no clipboard for pages that come neither by TLS nor from this machine
    getSelection().selectAllChildren(code);
    place.textContent = "Selected";
  }
  setTimeout(() => { place.textContent = "Copy"; }, 2000);
}

function quotation(lines, at, depth) {
  let end = at;
  while (end < lines.length && (QUOTE.test(lines[end]) || goesOn(lines, end))) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [fill("blockquote", blocks(inner, depth + 1).map(({ node }) => node)), end];
}

function list(lines, at, depth) {
  const kind = (marker) => marker.at(-1); // 1. and 2. are of one list, - and * are of two
  const [, first] = ITEM.exec(lines[at]);
  const outer = indentOf(lines[at]);
  const items = []; // the lines of each
  let inner = 0; // where the text of the last one begins
  let blank = false;
  for (; at < lines.length; at++) {
    const line = lines[at];
    const item = ITEM.exec(line);
    if (!line.trim()) items.at(-1).push("");
    else if (items.length && indentOf(line) >= Math.min(inner, outer + 2)) items.at(-1).push(unindent(line, inner));
    else if (item && kind(item[1]) === kind(first) && !isRule(line)) {
      inner = outer + item[1].length + 1;
      items.push([line.slice(item[0].length)]);
    } else if (!blank && goesOn(lines, at)) items.at(-1).push(line);
    else break;
    blank = !line.trim();
  }
  const nodes = items.map((item) => fill("li", blocks(item, depth + 1).map(({ node }) => node)));
  const element = fill(/\d/.test(first) ? "ol" : "ul", nodes);
  if (/\d/.test(first)) element.start = parseInt(first, 10);
  return [element, at];
}

const indentOf = (line) => line.match(/^[ \t]*/)[0].replaceAll("\t", "    ").length;

/** A line without its first `columns` columns, as far as they are blank. */
function unindent(line, columns) {
  let at = 0;
  for (let left = columns; left > 0 && /[ \t]/.test(line[at] ?? ""); at++) left -= line[at] === "\t" ? 4 : 1;
  return line.slice(at);
}

const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim());

function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const rule = cells(lines[at + 1]);
  return rule.every((cell) => /^:?-+:?$/.test(cell)) && rule.length === cells(lines[at]).length;
}

function table(lines, at) {
  const sides = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  const row = (line, tag) => fill("tr", cells(line).slice(0, sides.length).map((cell, column) => {
    const element = fill(tag, inline(cell));
    element.style.textAlign = sides[column];
    return element;
  }));
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end++) rows.push(row(lines[end], "td"));
  return [make("table", {}, make("thead", {}, row(lines[at], "th")), fill("tbody", rows)), end];
}

/** An element with these children, which may be too many for arguments of a call. */
function fill(tag, children) {
  const element = make(tag);
  for (const child of children) if (child !== "") element.append(child);
  return element;
}

/** The strings and elements of a text without blocks. */
function inline(text) {
  const nodes = [];
  const open = []; // marks that wait for their counterpart, and the index of each in `nodes`
  const codeEnds = new Map(); // of each run of backticks, the next run that is as long
  const later = new Map();
  for (const { 0: run, index } of [...text.matchAll(/`+/g)].reverse()) {
    codeEnds.set(index, later.get(run.length));
    later.set(run.length, index);
  }
  for (let at = 0; ;) {
    MARK.lastIndex = at;
    const match = MARK.exec(text);
    nodes.push(text.slice(at, match?.index));
    if (!match) return nodes;
    const { 0: mark, index } = match;
    at = index + mark.length;
    const last = (wanted) => open.findLastIndex((other) => other.mark === wanted);
    if (mark === "\\") {
      nodes.push(text[at]);
      at += 1;
    } else if (mark[0] === "`" && codeEnds.get(index)) {
      const code = text.slice(at, codeEnds.get(index));
      nodes.push(make("code", {}, /^ .*\S.* $/s.test(code) ? code.slice(1, -1) : code));
      at += code.length + mark.length;
    } else if (mark === "[") {
      open.push({ mark, index: nodes.push(mark) - 1 });
    } else if (mark === "]" && last("[") >= 0) {
      const [start] = open.splice(last("["), 1);
      TARGET.lastIndex = at;
      const address = webAddress(TARGET.exec(text)?.[1]);
      if (address) {
        at = TARGET.lastIndex;
        nodes[start.index] = link(address, nodes.splice(start.index + 1));
        open.splice(0, open.length, ...open.filter((other) => other.index < start.index && other.mark !== "["));
      } else nodes.push(mark);
    } else if (mark.startsWith("http")) {
      BARE.lastIndex = index;
      const [bare] = (last("[") < 0 && BARE.exec(text)) || [mark];
      const address = webAddress(bare);
      nodes.push(address ? link(address, [bare]) : bare);
      at = index + bare.length;
    } else if (/[*_~]/.test(mark) && mark.length < 4 && (mark[0] !== "~" || mark.length === 2)) {
      const [before, after] = [text[index - 1] ?? " ", text[at] ?? " "];
      const inWord = mark[0] === "_" && /[\p{L}\p{N}]/u.test(before) && /[\p{L}\p{N}]/u.test(after);
      let left = mark.length;
      while (left && last(mark[0]) >= 0 && /\S/.test(before) && !inWord) {
        const start = open[last(mark[0])];
        const used = Math.min(2, left, nodes[start.index].length);
        const tag = mark[0] === "~" ? "del" : used === 2 ? "strong" : "em";
        nodes.push(fill(tag, nodes.splice(start.index + 1)));
        nodes[start.index] = nodes[start.index].slice(used);
        open.length = last(mark[0]) + (nodes[start.index] ? 1 : 0);
        left -= used;
      }
      nodes.push(mark.slice(0, left));
      if (left && /\S/.test(after) && !inWord) open.push({ mark: mark[0], index: nodes.length - 1 });
    } else nodes.push(mark);
    if (open.length > DEPTH) open.shift();
  }
}

function webAddress(text) {
  try {
    const { protocol, href } = new URL(text);
    return ["http:", "https:", "mailto:"].includes(protocol) && href;
  } catch {
    return false;
  }
}

const link = (href, children) => Object.assign(fill("a", children), { href, title: href, target: "_blank", rel: "noopener" });
