// The page: a chat, the tree of what is cached, and how requests did. No library and no build step.

import { lookAgain, onView } from "./cache.js";
import { showCharts } from "./charts.js";
import { introduce, wait } from "./chat.js";
import { $ } from "./dom.js";
import { loaded } from "./loading.js";
import { showReplicas } from "./replicas.js";
import { call, tell } from "./server.js";
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
    $("trouble").textContent = tell(error);
  }
  lookAgain();
}

onView(showTree);
onView(showCharts);
onView(showReplicas);
begin();
