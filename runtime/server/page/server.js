// The server: calls, the events of streams, and the texts of errors.

import { $ } from "./dom.js";

/** A successful or unchanged response; any other is thrown as the server's own sentence. */
export async function call(path, { body, method = body ? "POST" : "GET", headers = {}, signal } = {}) {
  const key = sessionStorage.getItem("key");
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method, headers, signal, cache: "no-store", body: body && JSON.stringify(body),
  });
  if (response.status === 401) $("key").hidden = false;
  if (response.ok || response.status === 304) return response;
  const error = (await response.json().catch(() => ({}))).error;
  const sentence = error?.message ?? `the server answers with status ${response.status}`;
  throw Object.assign(new Error(sentence), { status: response.status });
}

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

export const SILENT = "the server does not answer";

/** The text that shows an error; `fetch` throws a TypeError if there is no connection. */
export const errorText = (error) => (error instanceof TypeError ? SILENT : error.message);
