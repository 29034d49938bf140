// How far the model is loaded, until it is.

import { $ } from "./dom.js";

/** Wait until the server has its model, and show how far it is; `wait` is told whether it loads. */
export async function loaded(wait) {
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
