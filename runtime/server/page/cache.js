// The cache as the server tells of it, looked at again and again while anybody sees the page.

import { $ } from "./dom.js";
import { call, tell } from "./server.js";

let etag = "";
let timer = 0;
let pause = 1000; // milliseconds between two looks
let loading = false;
let stale = false;
let closed = false; // the server shows the cache to others only, whatever key is given
const viewers = []; // called with each answer of /v1/cache that differs from the last

/** Call `viewer` with all that is known of the cache whenever that has changed. */
export const onView = (viewer) => viewers.push(viewer);

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
  try {
    while (stale) {
      stale = false;
      const response = await call("v1/cache", { headers: { "If-None-Match": etag } });
      if (response.status === 304) continue;
      etag = response.headers.get("ETag");
      const view = await response.json();
      viewers.forEach((viewer) => viewer(view));
    }
    $("trouble").textContent = "";
  } catch (error) {
    $("trouble").textContent = tell(error);
    closed = error.status === 403;
  }
  loading = false;
  if (!document.hidden && !closed && $("key").hidden) timer = setTimeout(refresh, pause);
}

document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : refresh()));
