// Train, live: curves, controls, samples.

import { at, get, post } from "./api.js";
import { doAgain, lede } from "./again.js";
import { Chart, joined } from "./chart.js";
import { bytes, equation, h, number, percent, showTiles } from "./dom.js";
import { place, go } from "./place.js";
import { t } from "./words.js";

const COLOURS = ["--other1", "--other2", "--other3"];
const WORDS = { learning_rate: "learning rate", epochs: "passes" };

const told = (name, value) => (name === "memory" ? (value ? bytes(value) : "stored") : typeof value === "number" ? number(value) : value);

// What a run has told so far.
class Story {
  constructor() { this.forget(); }
  forget() { this.updates = []; this.validations = []; this.samples = []; this.changes = []; this.result = null; }
  hear(records) {
    for (const record of records) {
      if (record.kind === "update") this.updates.push(record);
      else if (record.kind === "validation") this.validations.push(record);
      else if (record.kind === "sample") this.samples.push(record);
      else if (record.kind === "change") this.changes.push(record);
      else if (record.kind === "result") this.result = record;
    }
  }
  curve(list, name) { return [this[list].map((r) => r.step), this[list].map((r) => r[name])]; }
}

// The stream of a run. A page that nobody sees lets go of it: a browser has six connections for all its tabs.
// It goes on after the last thing that was heard, then as after any cut.
function listen(id, hear) {
  const story = new Story();
  let source = null, place = 0, again = 0;
  function open() {
    source = new EventSource(at(id, `/stream?from=${place}`));
    const on = (name, heard) => source.addEventListener(name, (event) => { if (event.lastEventId) place = Number(event.lastEventId); heard(event); });
    on("records", (e) => { story.hear(JSON.parse(e.data)); hear(story); });
    on("again", () => { story.forget(); hear(story); });
    on("status", (e) => hear(story, JSON.parse(e.data)));
    on("gone", close);
    source.addEventListener("error", () => { if (source?.readyState === EventSource.CLOSED) { close(); again = setTimeout(open, 2000); } }); // it would not try again by itself
  }
  function close() { clearTimeout(again); source?.close(); source = null; }
  const seen = () => { if (document.hidden) close(); else if (!source) { clearTimeout(again); open(); } };
  document.addEventListener("visibilitychange", seen);
  open();
  return { story, close: () => { document.removeEventListener("visibilitychange", seen); close(); } };
}

export function train(home, { id, about, fail, others }) {
  let closed = false, waiting = false, status = { state: "" }, baselines = {}, drawn = 0, changes = 0;
  const tiles = h("div", { className: "tiles" });
  const state = h("span", {}), message = h("p", { className: "soft", role: "status" });
  const sample = h("pre", { className: "text sample" }), sampleAt = h("small", { className: "soft" });
  const tell = (what) => {
    pause.disabled = stop.disabled = true; // until the training says what it does: after the update that it computes now
    state.replaceChildren(h("span", { className: `state ${status.state}` }), ` ${t({ pause: "pausing …", stop: "stopping …", go: "going on …" }[what])}`);
    post(at(id, "/tell"), { do: what }).catch((problem) => { fail(problem); show(status); });
  };
  const pause = h("button", { id: "pause", onclick: () => tell(status.state === "running" ? "pause" : "go") }, t("Pause"));
  const stop = h("button", { id: "stop", onclick: () => tell("stop") }, t("Stop"));
  const lossHome = h("div", { id: "loss" }), normHome = h("div", { id: "norm" });
  const againHome = h("div", {});
  const controls = changer(id, about, fail, () => fill());
  const compared = (place().with ?? "").split(",").filter((other) => other && other !== id).slice(0, 3);
  const pick = h("div", { className: "row" }, h("span", { className: "soft" }, t("compare")), others().filter((o) => o !== id).slice(0, 6).map((other) =>
    h("label", {}, h("input", { type: "checkbox", checked: compared.includes(other), onchange: (e) => {
      const now = e.target.checked ? [...compared, other] : compared.filter((o) => o !== other);
      go({ with: now.join(",") });
    } }), other)));

  home.append(
    h("div", { className: "row" }, h("h1", {}, id), state, pause, stop),
    message, tiles,
    h("div", { className: "grid" },
      h("section", { className: "card" }, h("h2", {}, t("loss")),
        lede(t("How well it predicts the next token, while it learns; dashed: counting models on the same held-out text."), equation("L = −1/T Σ_t log P(x_{t+1} | x_1 … x_t)")),
        lossHome, others().length > 1 ? pick : null),
      h("section", { className: "card" }, h("h2", {}, t("gradient norm")),
        lede(t("The length of the gradient at each update, and where it is clipped."), equation("g ← min(1, θ/‖g‖) g")), normHome)),
    h("p", {}),
    h("div", { className: "grid" },
      h("section", { className: "card" }, h("h2", {}, t("Change while it runs")), controls.element),
      h("section", { className: "card" }, h("h2", {}, t("What it writes now")), sampleAt, sample)),
    againHome);

  const loss = new Chart(lossHome, { label: t("loss"), x: t("step"), series: [
    { label: t("training"), colour: "--train", width: 1 }, { label: t("held out"), colour: "--held-out", width: 2.2, points: true },
    ...compared.map((other, i) => ({ label: other, colour: COLOURS[i], points: true }))] });
  const norm = new Chart(normHome, { label: t("gradient norm"), x: t("step"), log: true, series: [{ label: "‖g‖", colour: "--train", width: 1 }] });

  function draw() {
    waiting = false;
    if (closed) return;
    drawn = performance.now();
    const story = main.story;
    lossHome.dataset.updates = story.updates.length;
    if (story.changes.length > changes) fill(); // perhaps from another tab
    changes = story.changes.length;
    const marks = story.changes.map((c) => ({ step: c.step, label: Object.entries(c.options).map(([n, v]) => `${t(WORDS[n] ?? n)} ${told(n, v)}`).join(", ") }));
    const lines = Object.entries(baselines).filter(([name]) => name !== "uniform").map(([name, b]) => ({ value: b.nats, label: `${name} ${number(b.nats)}` }));
    loss.set(joined([story.curve("updates", "nats"), story.curve("validations", "nats"), ...rest.map((r) => r.story.curve(r.story.validations.length ? "validations" : "updates", "nats"))]), lines, marks);
    const clip = controls.options.clip;
    norm.set(story.curve("updates", "gradient_norm"), clip ? [{ value: clip, label: `θ = ${clip}`, colour: "--held-out" }] : [], marks.map((m) => ({ ...m, label: "" })));
    const last = story.updates.at(-1), held = story.result ?? story.validations.at(-1);
    showTiles(tiles, [
      [t("step"), last ? last.step.toLocaleString("en") : "–", "step"],
      [t("progress"), last ? percent(last.progress) : "–", "progress"],
      [t("training perplexity"), number(last?.perplexity), "perplexity"],
      [t("held-out perplexity"), number(held?.perplexity, 5), "held-out"],
      [t("tokens per second"), last ? number(last.tokens_per_second) : "–", "speed"],
    ]);
    const written = story.samples.at(-1);
    sample.textContent = written ? written.text : "…";
    sampleAt.textContent = written ? t("after {0} updates", written.step.toLocaleString("en")) : "";
  }

  function hear(story, now) {
    if (now) show(now);
    if (!waiting && !closed) { waiting = true; setTimeout(() => requestAnimationFrame(draw), Math.max(0, 120 - (performance.now() - drawn))); }
  }

  function show(now) {
    const before = status.state;
    status = now;
    state.replaceChildren(h("span", { className: `state ${now.state}` }), " ", t(now.state));
    if (now.state === "elsewhere") message.textContent = t("Process {0} trains it, which this page did not start: it is paused, stopped and changed there. What it tells is shown here.", now.process ?? "?");
    else if (before === "elsewhere" && now.state === "stopped") message.textContent = t("The process that trained it is gone. It can go on here, from where it was last saved.");
    else message.textContent = [now.message, now.hint].filter(Boolean).join(" · ");
    const alive = ["running", "paused", "starting", "scoring", "queued"].includes(now.state);
    pause.textContent = now.state === "running" ? t("Pause") : t("Resume");
    pause.disabled = ["starting", "scoring", "queued", "elsewhere", "ended"].includes(now.state);
    stop.disabled = !alive || now.state === "scoring";
    controls.enable(["running", "paused", "stopped", "ended"].includes(now.state), !alive);
    if (before !== now.state) fill();
  }

  async function fill() {
    try {
      const run = await get(at(id));
      if (closed || !run.options) return;
      controls.show(run.options);
      const figures = h("div", { className: "row" }, h("span", { className: "soft" }, t("Figures")),
        ["perplexity", "gradient-norms", "lags", "directions"].map((name) => h("a", { href: at(id, `/pictures/${name}.svg`), download: `${id}-${name}.svg` }, `${name}.svg`)));
      againHome.replaceChildren(figures, doAgain(run.again.command, run.again.resume, run.again.python));
      if (!Object.keys(baselines).length && !asking) {
        asking = true;
        baselines = await get(at(id, "/look/baselines")).catch(() => ({}));
        asking = false;
        hear(main.story);
      }
    } catch (problem) { if (problem.status !== 404) fail(problem); }
  }
  let asking = false;

  const rest = compared.map((other) => listen(other, () => hear()));
  const main = listen(id, hear);
  fill();
  return () => { closed = true; main.close(); rest.forEach((r) => r.close()); loss.close(); norm.close(); };
}

// Learning rate, clip, window, carry, memory: changed between two updates.
function changer(id, about, fail, done) {
  const inputs = {
    learning_rate: h("input", { type: "number", step: "any", min: 0 }),
    clip: h("input", { type: "number", step: "any", min: 0 }),
    window: h("input", { type: "number", min: 1 }),
    carry: h("select", {}, about.options.carry.choices.map((c) => h("option", { value: c }, c))),
    memory: h("input", { type: "text", className: "short", placeholder: "stored, 64M" }),
    epochs: h("input", { type: "number", min: 1 }),
  };
  const said = h("p", { className: "soft", role: "status" });
  const button = h("button", { className: "main", id: "apply", type: "submit" }, t("Apply"));
  const object = { options: {} };
  const typed = new Set(); // here, and not applied yet: nothing that is heard meanwhile may write over it
  const shown = (name, value) => (name === "memory" ? told(name, value) : String(value));
  object.element = h("form", { onsubmit: async (event) => {
    event.preventDefault();
    const options = {};
    for (const [name, input] of Object.entries(inputs)) {
      if (input.value === shown(name, object.options[name]) || input.value === "") continue;
      options[name] = name === "carry" || name === "memory" ? input.value : Number(input.value);
    }
    try {
      const { changes, again } = await post(at(id, "/change"), { options });
      typed.clear();
      said.textContent = Object.keys(changes).length ? `${t("changed")}: ${again}` : t("no change");
      setTimeout(done, 700);
    } catch (problem) { fail(problem); }
  } },
  h("div", { className: "row" }, Object.entries(inputs).map(([name, input]) => { input.name = name; input.addEventListener("input", () => typed.add(name)); return h("label", {}, t(WORDS[name] ?? name), input); })),
  h("div", { className: "row" }, button, h("span", { className: "soft" }, t("each change is a marker on the curve and a line in the run's record"))), said);
  object.show = (options) => {
    object.options = options;
    for (const [name, input] of Object.entries(inputs)) if (!typed.has(name) && document.activeElement !== input) input.value = shown(name, options[name]);
  };
  object.enable = (on, rests) => { button.disabled = !on; button.textContent = t(rests ? "Apply and go on" : "Apply"); };
  return object;
}
