// Several replicas: whose cache is shown, and where the last request went and why.

import { lookAt } from "./cache.js";
import { $, count, format, make } from "./dom.js";
import { call } from "./server.js";

/** Show what the ingress tells of its replicas; nothing for one server alone. */
export async function showReplicas({ replica }) {
  if (!replica) return;
  const { replicas, recent } = await call("v1/replicas").then((response) => response.json(), () => ({}));
  if (!replicas) return; // the next look tells why
  const select = $("replicas").querySelector("select");
  const names = replicas.map((one) => one.replica).sort();
  if ([...select.options].map((option) => option.value).join() !== names.join()) {
    select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    select.onchange = () => lookAt({ replica: select.value, under: null, reveal: null });
  }
  select.value = replica;
  $("replicas").querySelector("span").textContent = recent.length ? why(recent[0]) : "";
  $("replicas").hidden = false;
}

/** Where a request went, and what it would have cost elsewhere. */
function why({ replica, prompt_tokens, standings }) {
  const chosen = standings.find((standing) => standing.replica === replica);
  const others = standings.filter((standing) => standing !== chosen);
  const cached = `${format.format(chosen.cached_tokens)} of ${count(prompt_tokens, "token")} cached`;
  const most = Math.max(0, ...others.map((standing) => standing.cached_tokens));
  const queued = chosen.queued_tokens ? `, ${format.format(chosen.queued_tokens)} queued` : "";
  return `The last request went to ${replica}: ${cached}${queued}; elsewhere ${format.format(most)} at most.`;
}
