// One answer as it comes: asked for, streamed into its turn, and what there is to say of it.

import { lookAt, looksAt, refresh } from "./cache.js";
import { sampling } from "./composer.js";
import { call, events } from "./server.js";

const OPTIONS = { stream: true, stream_options: { include_usage: true, include_progress: true }, explain: true };

export const size = ({ content, reasoning, calls }) => content.length + reasoning.length + calls.length;

/**
 * Stream the answer to `messages` into a turn, calling `draw` when there is more of it; what there is
 * to say about it afterwards. An answer that was the last of them goes on.
 */
export async function receive(messages, answer, signal, draw) {
  const reply = {};
  const goesOn = messages.at(-1)?.role === "assistant";
  const how = goesOn ? { continue_final_message: true, add_generation_prompt: false } : {};
  const start = performance.now();
  let first = 0;
  let latest = 0;
  let chunks = 0;
  const response = await call("v1/chat/completions", { body: { messages, ...sampling(), ...how, ...OPTIONS }, signal });
  const replica = response.headers.get("X-Radixcache-Replica"); // whose cache has the chat
  if (replica && replica !== looksAt("replica")) lookAt({ replica, under: null, reveal: null });
  refresh();
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    const { delta, finish_reason: finish } = chunk.choices?.[0] ?? {};
    const { content, reasoning, tool_calls: calls = [] } = delta ?? {};
    if (delta) latest = performance.now();
    if (content || reasoning || calls.length) {
      first ||= latest;
      chunks += 1;
      answer.content += content ?? "";
      answer.reasoning += reasoning ?? "";
      for (const { function: part } of calls) answer.calls += `${part.name ? `\n${part.name} ` : ""}${part.arguments ?? ""}`;
      draw();
    }
    reply.finish = finish ?? reply.finish;
    reply.usage = chunk.usage ?? reply.usage;
    if (chunk.radixcache?.computed_tokens !== undefined) {
      answer.prefill = chunk.radixcache;
      draw();
    } else if (chunk.radixcache) { // of the last chunk
      const { ttft, explanation, repetitions, accepted_tokens: accepted } = chunk.radixcache;
      Object.assign(reply, { ttft, explanation, accepted, repeats: repetitions?.[0] });
    }
  }
  if (!reply.usage) throw new Error("the answer has broken off");
  const tokens = reply.usage.completion_tokens;
  if (first) reply.ttft ??= (first - start) / 1000; // else the server's own
  if (reply.accepted) reply.perStep = tokens / (tokens - reply.accepted);
  const later = reply.accepted ? tokens * (1 - 1 / chunks) : tokens - 1; // than the first that came
  if (chunks === 1 && tokens > 1) reply.rate = (1000 * tokens) / (latest - start); // all in one step
  if (chunks > 1 && later > 0 && latest > first) reply.rate = (1000 * later) / (latest - first);
  return reply;
}
