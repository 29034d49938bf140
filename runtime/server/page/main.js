// The page: a chat, the tree of what is cached, and how requests did. No library and no build step.

import { lookAgain, lookAt, onView } from "./cache.js";
import { showCharts } from "./charts.js";
import { introduce, wait } from "./chat.js";
import { $, count, format, make } from "./dom.js";
import { call, errorText } from "./server.js";
import { showTree } from "./tree.js";

$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key-text").value);
  $("key").hidden = true;
  begin();
});

async function begin() {
  await loaded(wait);
  try {
    introduce(await (await call("page.json")).json());
  } catch (error) {
    $("trouble").textContent = errorText(error);
  }
  lookAgain();
}

// How far the model is loaded, until it is.

/** Wait until the server has its model, and show how far it is; `wait` is told whether it loads. */
async function loaded(wait) {
  for (;;) {
    const response = await fetch("health", { cache: "no-store" }).catch(() => null);
    const { status, stage, share } = (await response?.json().catch(() => null)) ?? {};
    $("loading").hidden = status !== "loading";
    wait(status === "loading");
    if (status !== "loading") return; // whatever else is wrong is told to what is asked next
    const [bar, text] = $("loading").children;
    if (share === null) bar.removeAttribute("value");
    else bar.value = share;
    text.textContent = `Loading the model: ${stage}`;
    await new Promise((resolve) => setTimeout(resolve, 250));
  }
}

// Several replicas: whose cache is shown, and where the last request went and why.

/** Show what the ingress tells of its replicas; nothing for one server alone. */
async function showReplicas({ replica }) {
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

onView(showTree);
onView(showCharts);
onView(showReplicas);
begin();
