// Write: text that streams while temperature, top-k and top-p move; every token has its alternatives.

import { at, get, lines, post } from "./api.js";
import { doAgain, lede } from "./again.js";
import { equation, field, h, percent, visible } from "./dom.js";
import { go, place, remember } from "./place.js";
import { t } from "./words.js";

const left = new Map(); // what was written in a run, and stays when the view is drawn anew

export function write(home, { id, fail, redrawn }) {
  let { tokens = [], branches = [], wanted = 0, begun = "", goesOn = false } = left.get(id) ?? {}; // begun: the prompt of what is written
  let stopping = null, closed = false, asked = 0;
  const prompt = field({ rows: 2, "aria-label": t("Prompt"), value: sessionStorage.getItem(`write-${id}`) ?? "", onchange: () => remember(`write-${id}`, prompt.value) });
  const shown = h("div", { className: "text", id: "written" }), choices = h("div", {}), branchHome = h("div", { className: "row" }), again = h("div", {});
  const kept = (name, usual) => ({ value: place()[name] ?? usual, onchange: (e) => go({ [name]: Number(e.target.value) === usual ? null : e.target.value }, true) });
  const slide = (name, min, max, step, usual) => {
    const input = h("input", { type: "range", min, max, step, id: name, oninput: () => { said.textContent = input.value; if (stopping) renew(); }, ...kept(name, usual) }), said = h("b", {}, input.value);
    return { input, label: h("label", {}, t(name), input, said) };
  };
  const temperature = slide("temperature", 0, 2, 0.05, 0.8), topK = slide("top-k", 0, 50, 1, 0), topP = slide("top-p", 0.05, 1, 0.05, 1);
  const length = h("input", { type: "number", min: 1, max: 5000, ...kept("length", 400) }), seed = h("input", { type: "number", min: 0, ...kept("seed", 0) });
  const button = h("button", { className: "main", id: "write", onclick: () => (stopping ? halt() : begin()) }, t("Write"));

  const halt = () => { stopping?.abort(); stopping = null; button.textContent = t("Write"); };
  function begin() {
    tokens = [];
    branches = [];
    wanted = Number(length.value);
    begun = prompt.value;
    redraw();
    showBranches();
    run();
  }
  // A choice moved: what is written stays, the rest is asked for anew.
  function renew() { halt(); run(); }

  async function run() {
    const own = (stopping = new AbortController());
    button.textContent = t("Stop");
    const question = { prompt: begun + tokens.join(""), length: Math.max(1, wanted - tokens.length), seed: Number(seed.value),
      temperature: Number(temperature.input.value), top_k: Number(topK.input.value), top_p: Number(topP.input.value) };
    try {
      for await (const line of lines(at(id, "/write"), question, own.signal)) {
        if (own.signal.aborted) return;
        if (line.again) again.replaceChildren(doAgain(line.again));
        else add(line.text);
        if (tokens.length % 8 === 0) await new Promise(requestAnimationFrame); // slow enough to read
      }
    } catch (problem) { if (problem.name !== "AbortError") fail(problem); }
    if (stopping === own) halt();
  }

  function add(text) {
    const i = tokens.push(text) - 1;
    shown.append(h("span", { tabIndex: 0, role: "button", onclick: () => choose(i), onkeydown: (e) => { if (e.key === "Enter") choose(i); } }, text));
  }

  function redraw() {
    const kept = tokens;
    tokens = [];
    asked += 1; // what is still on its way is about another text
    choices.replaceChildren();
    shown.replaceChildren(h("span", { className: "soft" }, begun));
    kept.forEach(add);
  }

  async function choose(i) {
    halt();
    [...shown.children].forEach((cell, j) => cell.toggleAttribute("data-chosen", j === i + 1));
    const own = (asked += 1);
    try {
      const { model, again: how } = await post(at(id, "/inside/next"), { text: begun + tokens.slice(0, i).join("") });
      if (closed || own !== asked) return;
      choices.replaceChildren(h("h3", {}, t("Instead of {0}", `“${visible(tokens[i].trim() || tokens[i])}”`)), ...model.map(({ token, p }) =>
        h("button", { className: "choice", onclick: () => branch(i, token) }, `${visible(token)}  ${percent(p)}`)));
      again.replaceChildren(doAgain(how));
    } catch (problem) { if (!closed) fail(problem); }
  }

  function branch(i, token) {
    branches.push([...tokens]);
    const gap = tokens[i].length > 1 && tokens[i].startsWith(" ") && !token.startsWith(" ") ? " " : "";
    tokens = [...tokens.slice(0, i), gap + token];
    redraw();
    showBranches();
    wanted = tokens.length + Number(length.value);
    run();
  }

  function showBranches() {
    branchHome.replaceChildren();
    if (branches.length) branchHome.replaceChildren(h("span", { className: "soft" }, t("Branches")), ...branches.map((kept, n) =>
      h("button", { onclick: () => { halt(); branches[n] = tokens; tokens = kept; redraw(); showBranches(); } }, `${n + 1}: …${kept.slice(-12).join("")}`)));
  }

  home.append(
    h("h1", {}, t("Write")),
    h("section", { className: "card" },
      lede(t("Text that the model writes, token by token."), equation("p ∝ exp(o_t / τ),  x_{t+1} ∼ p")),
      prompt,
      h("div", { className: "row" }, temperature.label, topK.label, topP.label, h("label", {}, t("length"), length), h("label", {}, t("seed"), seed), button),
      shown, h("p", { className: "soft" }, t("Click a token to see what else it could have been, and to branch from there.")), branchHome, choices, again));
  get(at(id, "/look/excerpt")).then((some) => { if (document.activeElement !== prompt) prompt.put(prompt.value || some.prompt); }).catch((problem) => { if (!closed) fail(problem); });
  if (tokens.length) {
    redraw();
    showBranches();
    if (goesOn && redrawn && tokens.length < wanted) run(); // in another language, in another light
  }
  return () => {
    left.set(id, { tokens, branches, wanted, begun, goesOn: stopping !== null });
    closed = true;
    halt();
  };
}
