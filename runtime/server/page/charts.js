// How recent requests did: a chart of their hit rates, and one of their times to first token.

import { $, count, make, milliseconds, percent } from "./dom.js";

const SLOTS = 24; // requests for which there is room at least
const MARK = 0.1; // of the height: a time is a mark on a logarithmic scale, which has no zero
const hits = chart("hits", "Hit rate");
const ttft = chart("ttft", "Time to first token");
let recent = [];
let chosen = null; // how many requests have come since the one that is pointed at

export function showCharts(view) {
  recent = view.recent;
  const { stats } = view;
  const rates = recent.map(hitRate);
  draw(hits, rates.map((rate) => Math.max(0.03, rate)).map((height, index) => (
    { top: 1 - height, height, loaded: recent[index].loaded_tokens / recent[index].prompt_tokens }
  )), {
    summary: (stats.requests ? `${percent(stats.hit_rate)} of all prompt tokens` : "") + (stats.loaded_tokens ? ", the brown part loaded" : ""),
    ticks: [1, 0.5, 0].map((rate) => ({ text: percent(rate).replace(".0", ""), top: 1 - rate })),
  });
  const times = recent.map((request) => Math.max(request.ttft, 1e-5));
  const [low, high] = decades(times);
  const top = (time) => (1 - (Math.log10(time) - low) / (high - low)) * (1 - MARK);
  const step = high - low > 4 ? 2 : 1;
  const ticks = [];
  for (let power = high; power >= low; power -= step) {
    ticks.push({ text: power < 0 ? `${10 ** (power + 3)} ms` : `${10 ** power} s`, top: top(10 ** power) + MARK / 2 });
  }
  const sorted = [...times].sort((a, b) => a - b);
  const half = sorted.length / 2;
  const median = (sorted[Math.ceil(half) - 1] + sorted[Math.floor(half)]) / 2;
  draw(ttft, times.map((time, index) => ({ top: top(time), height: MARK, hit: rates[index] })), {
    summary: times.length ? `median ${milliseconds(median)}, blue if cached` : "",
    ticks: times.length ? ticks : [],
  });
  choose(chosen);
}

const hitRate = ({ cached_tokens: cached, prompt_tokens: prompt }) => cached / prompt;

/** The powers of ten, at least two, that enclose all values. */
function decades(values) {
  const low = Math.floor(Math.log10(Math.min(...values)));
  return [low, Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values))))];
}

function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** The empty chart of a figure. It is pointed at with a mouse, a finger, or the arrow keys. */
function chart(id, title) {
  const parts = {
    title, caption: make("figcaption"), axis: make("div", { className: "axis" }), note: make("small"),
    plot: svg("svg", { preserveAspectRatio: "none", tabindex: 0, role: "slider", "aria-label": `${title} of recent requests` }),
  };
  $(id).replaceChildren(parts.caption, parts.axis, parts.plot, parts.note);
  const { plot } = parts;
  const point = ({ clientX }) => {
    const { left, width } = plot.getBoundingClientRect();
    choose(Math.floor((1 - (clientX - left) / width) * Math.max(SLOTS, recent.length)));
  };
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && choose(null));
  plot.addEventListener("focus", () => choose(chosen ?? 0));
  plot.addEventListener("blur", () => choose(null));
  plot.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: chosen + 1, ArrowRight: chosen - 1, Home: recent.length - 1, End: 0 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(Math.max(0, to));
  });
  return parts;
}

/** Draw marks, {top, height} of the height 1, the newest on the right; `hit` gives one its colour, and
 * `loaded` of the height at its top another shade. */
function draw({ title, caption, axis, plot }, marks, { summary, ticks }) {
  const slots = Math.max(SLOTS, marks.length);
  plot.setAttribute("viewBox", `0 0 ${slots} 1`);
  const bars = marks.flatMap(({ top, height, hit, loaded }, index) => {
    const place = { x: slots - marks.length + index + 0.1, y: top, width: 0.8 };
    const bar = svg("rect", { ...place, height });
    if (hit !== undefined) bar.style.setProperty("--hit", `${100 * hit}%`);
    return loaded ? [bar, svg("rect", { ...place, height: loaded, class: "loaded" })] : [bar];
  });
  const lines = ticks.map(({ top }) => svg("path", { d: `M0 ${top}H${slots}` }));
  plot.replaceChildren(...lines, ...bars);
  axis.replaceChildren(...ticks.map(({ text, top }) => {
    const label = make("span", {}, text);
    label.style.top = `${100 * top}%`;
    return label;
  }));
  caption.replaceChildren(make("b", {}, title), ` ${summary}`);
}

/** Say of a request what both charts show of it; of none, what they show. */
function choose(index) {
  const request = index === null ? undefined : recent.at(-1 - Math.min(index, recent.length - 1));
  chosen = request ? Math.min(index, recent.length - 1) : null;
  const all = recent.length ? `${count(recent.length, "request")}, newest on the right` : "no request yet";
  for (const { plot, note } of [hits, ttft]) {
    const bars = [...plot.querySelectorAll("rect:not(.loaded)")];
    bars.forEach((bar, at) => bar.classList.toggle("chosen", bars.length - 1 - at === chosen));
    note.textContent = request ? describe(request) : all;
    plot.ariaValueMin = 1;
    plot.ariaValueMax = recent.length;
    plot.ariaValueNow = recent.length - (chosen ?? 0);
    plot.ariaValueText = note.textContent;
  }
}

const describe = (request) => `${count(request.prompt_tokens, "token")}, ${percent(hitRate(request))} cached`
  + (request.loaded_tokens ? ` (${count(request.loaded_tokens, "token")} loaded in ${milliseconds(request.load_seconds)}), ` : ", ")
  + `TTFT ${milliseconds(request.ttft)}`;
