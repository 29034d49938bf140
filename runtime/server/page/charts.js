// How recent requests did: a chart of their hit rates, and one of their times to first token.

import { $, count, make, milliseconds, percent } from "./dom.js";

export function showCharts({ stats, recent }) {
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
