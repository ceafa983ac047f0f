// The frame around the views: runs, tabs, language, light; one view at a time.

import { get } from "./api.js";
import { h, number, percent } from "./dom.js";
import { forecast } from "./forecast.js";
import { inside } from "./inside.js";
import { microscope } from "./microscope.js";
import { go, onMove, place } from "./place.js";
import { acceptDrops, start } from "./start.js";
import { train } from "./train.js";
import { speak, spoken, t } from "./words.js";
import { write } from "./write.js";

const VIEWS = { train: ["Train", train], microscope: ["Microscope", microscope], inside: ["Inside", inside], write: ["Write", write] };
const [top, side, main, toast] = ["top", "side", "main", "toast"].map((id) => document.getElementById(id));
let about = null, runs = [], close = () => {}, open = "", hiding = 0, model, here = true;

function fail(problem) {
  toast.textContent = [problem.message, problem.hint].filter(Boolean).join(" · ");
  toast.classList.add("on");
  clearTimeout(hiding);
  hiding = setTimeout(() => toast.classList.remove("on"), 7000);
}

function theme(now) {
  document.documentElement.dataset.theme = now;
  localStorage.setItem("elman-theme", now);
}

function header() {
  const { run, view } = place();
  const found = runs.find((r) => r.id === run);
  model = found?.options?.model;
  const views = Object.entries(VIEWS).filter(([name]) => name !== "microscope" || model !== "mlp"); // nothing travels through its time
  const dark = document.documentElement.dataset.theme === "dark";
  top.replaceChildren(
    h("span", { className: "brand" }, h("b", {}, "elman"), " lab"),
    h("nav", { className: "tabs" }, run && found?.kind !== "forecast" ? views.map(([name, [label]]) =>
      h("a", { href: `#${new URLSearchParams({ ...place(), view: name })}`, "aria-current": (view ?? "train") === name ? "page" : null,
        onclick: (e) => { if (!e.ctrlKey && !e.metaKey && !e.shiftKey) { e.preventDefault(); go({ view: name }); } } }, t(label))) : null), // the address may have moved since
    h("button", { id: "theme", onclick: () => { theme(dark ? "light" : "dark"); render(); } }, t(dark ? "Light" : "Dark")),
    h("button", { id: "language", onclick: () => { speak(spoken() === "zh" ? "en" : "zh"); render(); } }, spoken() === "zh" ? "English" : "中文"));
}

// One line for each run, kept while it is listed: what is clicked or has the focus must not be replaced.
const rows = new Map(), listed = h("div", {});

function row(run) {
  if (!rows.has(run.id)) rows.set(run.id, h("div", { className: "run" }, h("span", {}), h("a", {}, run.id), h("small", {})));
  const line = rows.get(run.id), [state, link, words] = line.children;
  line.dataset.open = place().run === run.id;
  state.className = `state ${run.state}`;
  state.title = t(run.state);
  link.href = `#${new URLSearchParams({ ...place(), run: run.id, view: place().view ?? "train" })}`;
  words.textContent = describe(run);
  return line;
}

function list() {
  for (const id of rows.keys()) if (!runs.some((run) => run.id === id)) rows.delete(id);
  const lines = runs.map(row), focus = document.activeElement;
  if (lines.length === listed.children.length && lines.every((line, i) => line === listed.children[i])) return;
  listed.replaceChildren(...(lines.length ? lines : [h("p", { className: "soft" }, t("No runs yet"))]));
  if (listed.contains(focus)) focus.focus();
}

function sidebar() {
  side.replaceChildren(h("div", { className: "row" }, h("h2", {}, t("Runs")), h("a", { id: "new", href: "#" }, `+ ${t("New")}`)), listed);
  listed.replaceChildren();
  list();
}

function describe(run) {
  if (run.problem) return run.problem;
  if (run.kind === "forecast") return t("forecast");
  const score = run.perplexity ?? (run.best_validation_nats === null || run.best_validation_nats === undefined ? null : Math.exp(run.best_validation_nats));
  const far = run.progress === undefined || run.state === "ended" ? "" : ` ${percent(run.progress)}`;
  return [t(run.state) + far, score && `${t("perplexity")} ${number(score, 4)}`].filter(Boolean).join(" · ");
}

const isHere = () => !place().run || runs.some((r) => r.id === place().run);

function gone(home, run) {
  toast.classList.remove("on"); // what was asked of it just before
  home.append(h("h1", {}, run), h("section", { className: "card", id: "gone" },
    h("p", { role: "status" }, t("There is no run of this name here: it was moved, renamed or deleted. If it comes back, it is shown again."))));
  return () => {};
}

function render() {
  const { run, view } = place();
  const redrawn = open === `${run}/${view}`; // in another language, in another light
  header();
  sidebar();
  close();
  main.replaceChildren();
  open = `${run}/${view}`;
  const context = {
    id: run, about, redrawn,
    fail: (problem) => { if (!run || runs.some((r) => r.id === run)) fail(problem); },
    others: () => runs.filter((r) => r.kind === "text" && !r.problem && r.options).map((r) => r.id),
    live: () => runs.find((r) => r.id === run) ?? {},
  };
  here = isHere();
  if (!run) close = start(main, context);
  else if (!here) close = gone(main, run);
  else if (runs.find((r) => r.id === run)?.kind === "forecast") close = forecast(main, context);
  else close = (VIEWS[view] ?? VIEWS.train)[1](main, context);
}

async function refresh() {
  try {
    runs = await get("/api/runs");
    if (isHere() !== here) render();
    else {
      list();
      if (runs.find((r) => r.id === place().run)?.options?.model !== model) header(); // else a button would lose its focus
    }
    toast.classList.toggle("on", toast.classList.contains("on") && !toast.dataset.lost);
    delete toast.dataset.lost;
  } catch (problem) {
    if (!toast.dataset.lost) fail({ message: t("The page lost its server; it tries again.") });
    toast.dataset.lost = "yes";
  }
  setTimeout(refresh, 1500);
}

const moved = async () => {
  const before = open;
  if (!isHere()) runs = await get("/api/runs").catch(() => runs); // it may have been made just now
  render();
  if (open !== before) scrollTo(0, 0);
};
onMove(moved);
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); }); // the address says where one is
theme(localStorage.getItem("elman-theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
try {
  about = await get("/api/about");
  runs = await get("/api/runs");
  acceptDrops(about, fail);
  render();
  refresh();
} catch (problem) {
  main.textContent = problem.message;
}
