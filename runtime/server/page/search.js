// Finding text in the tree: which nodes it is in, and going from one to the next.

import { lookAt, looksAt } from "./cache.js";
import { $, format } from "./dom.js";
import { call, errorText } from "./server.js";

let paths = []; // of ids, from the root to each node that was found
let total = 0;
let asked = ""; // the text that `paths` is about
let at = 0;
const onWay = new Set(); // the ids in `paths`

/** Whether a node has the text that was looked for ("hit", "here"), or leads to it ("way"). */
export function found(id) {
  if (paths[at]?.at(-1) === id) return "here";
  return paths.some((path) => path.at(-1) === id) ? "hit" : onWay.has(id) ? "way" : "";
}

/** How many nodes were found below a node but not below these children of it. */
export function foundBelow(id, children) {
  const shown = new Set(children.map((child) => child.id));
  return paths.filter((path) => {
    const next = id ? path.indexOf(id) + 1 : 0;
    return (!id || next) && next < path.length && !shown.has(path[next]);
  }).length;
}

/** Call `redraw` whenever something else is found. */
export function searchWith(redraw) {
  const tellFound = () => {
    $("found").textContent = !asked ? "" : !total ? "not found" : `${at + 1} of ${format.format(total)}`;
    for (const id of ["before", "next"]) $(id).hidden = paths.length < 2;
    redraw();
  };
  const forget = () => {
    [paths, total, asked, at] = [[], 0, "", 0];
    onWay.clear();
    lookAt({ reveal: null });
    tellFound();
  };
  const go = (step) => {
    if (!paths.length) return;
    at = (at + step + paths.length) % paths.length;
    const path = paths[at];
    const levels = Number(looksAt("levels"));
    const from = path.indexOf(looksAt("under")); // -1 at the root, or where it does not lead
    const inSight = (looksAt("under") === null || from >= 0) && path.length - Math.max(0, from) <= levels;
    const under = inSight ? looksAt("under") : (path[path.length - levels] ?? null);
    lookAt({ under, reveal: path.at(-1) });
    tellFound();
  };
  const search = async (step) => {
    const text = $("find-text").value;
    if (!text) return forget();
    if (text === asked) return go(step);
    try {
      const replica = looksAt("replica");
      const query = new URLSearchParams({ text, ...(replica && { replica }) });
      const answer = await (await call(`v1/cache/search?${query}`)).json();
      forget();
      [asked, total, paths] = [text, answer.total, answer.data.map((hit) => hit.path)];
      for (const path of paths) for (const id of path) onWay.add(id);
      tellFound();
      go(0);
    } catch (error) {
      $("found").textContent = errorText(error);
    }
  };
  $("find").addEventListener("submit", (event) => { event.preventDefault(); search(1); });
  $("find-text").addEventListener("input", () => $("find-text").value || forget());
  $("find-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.shiftKey) { event.preventDefault(); search(-1); }
    if (event.key === "Escape") { $("find-text").value = ""; forget(); }
  });
  $("next").addEventListener("click", () => go(1));
  $("before").addEventListener("click", () => go(-1));
}
