// What the server is asked. A refusal comes back as its own words.

import { t } from "./words.js";

export class Refusal extends Error {
  constructor(status, { error, hint }) {
    super(error);
    this.status = status;
    this.hint = hint;
  }
}

async function ask(address, options) {
  try {
    return await fetch(address, options);
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Refusal(0, { error: t("The page lost its server; it tries again."), hint: "" });
  }
}

async function answer(response) {
  if (response.ok) return response;
  const text = await response.text();
  let said = { error: text || response.statusText, hint: "" };
  try { said = JSON.parse(text); } catch { /* the door answers in plain words */ }
  throw new Refusal(response.status, said);
}

export async function get(address) {
  return (await answer(await ask(address))).json();
}

export async function post(address, body) {
  const raw = body instanceof Blob;
  const response = await ask(address, { method: "POST", body: raw ? body : JSON.stringify(body) });
  return (await answer(response)).json();
}

// Lines of JSON as they come.
export async function* lines(address, body, signal) {
  const response = await answer(await ask(address, { method: "POST", body: JSON.stringify(body), signal }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const pieces = (rest + value).split("\n");
    rest = pieces.pop();
    for (const piece of pieces) yield JSON.parse(piece);
  }
}

export const at = (id, rest = "") => `/api/runs/${encodeURIComponent(id)}${rest}`;
