// The cache as the server tells of it, looked at again and again while anybody sees the page.

import { $ } from "./dom.js";
import { call, errorText } from "./server.js";

const look = new URLSearchParams(); // what of it is looked at: rows, levels, under, reveal
let above = []; // ids of the nodes above `under`
let etag = "";
let timer = 0;
let pause = 1000; // milliseconds between two looks
let loading = false;
let stale = false;
let closed = false; // the server shows the cache to others only, whatever key is given
const viewers = []; // called with each answer of /v1/cache that differs from the last

/** Call `viewer` with all that is known of the cache whenever that has changed. */
export const onView = (viewer) => viewers.push(viewer);

/** Look at another part of the cache: parameters of /v1/cache, null for none. */
export function lookAt(changes) {
  const before = String(look);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null) look.delete(name);
    else look.set(name, value);
  }
  if (String(look) !== before && etag) refresh();
}

export const looksAt = (name) => look.get(name);

/** Look five times a second instead of once, while an answer is coming. */
export function hurry(on) {
  pause = on ? 200 : 1000;
}

/** Look at the cache, although it may have been closed: there may be another key. */
export function lookAgain() {
  closed = false;
  refresh();
}

/** Look at the cache: once a second while anybody sees it, and for nothing but a 304 if it is idle. */
export async function refresh() {
  stale = true;
  if (loading || closed) return;
  loading = true;
  clearTimeout(timer);
  let trouble;
  while (stale) { // also after an error: there may be another key meanwhile
    stale = closed = false;
    trouble = await load().then(() => "", (error) => { closed = error.status === 403; return errorText(error); });
  }
  $("trouble").textContent = closed ? "" : trouble;
  $("closed").textContent = closed ? trouble : "";
  document.querySelector("main").classList.toggle("closed", closed);
  loading = false;
  if (!document.hidden && !closed && $("key").hidden) timer = setTimeout(refresh, pause);
}

async function load() {
  const under = look.get("under");
  const asked = String(look);
  try {
    const response = await call(`v1/cache?${asked}`, { headers: { "If-None-Match": etag } });
    if (response.status === 304) return;
    etag = response.headers.get("ETag");
    const replica = response.headers.get("X-Radixcache-Replica"); // null for one server alone
    const view = { ...(await response.json()), under, replica };
    if (String(look) !== asked) return; // something else is wanted meanwhile
    above = view.above.map((node) => node.id);
    viewers.forEach((viewer) => viewer(view));
  } catch (error) {
    if (error.status !== 404 || !(under || look.get("replica"))) throw error;
    if (!under) lookAt({ replica: null }); // it has died
    if (look.get("under") === under) lookAt({ under: above.pop() ?? null }); // it has gone
    stale = true;
  }
}

document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : refresh()));
