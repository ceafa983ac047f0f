// Start in five seconds: a text, a corpus, or a file, and a small model trains at once.

import { post } from "./api.js";
import { field, h } from "./dom.js";
import { go } from "./place.js";
import { t } from "./words.js";

const NAMED = 100; // characters of a text in which its first words are looked for
let chosen = null; // what the form says, while it is open
let draft = {}; // what was typed into it: another language must not cost one one's text

async function send(about, text, name) {
  let blob = new Blob([text]);
  if (blob.size > about.largest_text) throw new Error(t("“{0}” is too large for the page: at most {1} MiB. `elman train FILE` takes texts of any size; its run opens here, too.", name, about.largest_text >> 20));
  try {
    blob = new Blob([await blob.arrayBuffer()]); // a file that cannot be read is found out before anything is sent
  } catch (problem) {
    throw new Error(t("“{0}” cannot be read: {1}", name, problem.message), { cause: problem });
  }
  return post(`/api/texts?name=${encodeURIComponent(name)}`, blob);
}

export async function begin(about, text, name, corpus, options) {
  const kept = corpus ? { corpus } : await send(about, text, name);
  const { id } = await post("/api/runs", { ...kept, name: corpus ? corpus : name, options });
  return id;
}

export function start(home, { about, fail }) {
  const text = field({ rows: 9, placeholder: t("Paste some text here…"), "aria-label": t("Text") });
  const corpus = h("select", { "aria-label": t("or a corpus") },
    h("option", { value: "" }, t("my own text")), about.corpora.map((name) => h("option", { value: name }, name)));
  const model = h("select", {}, about.options.model.choices.filter((m) => m !== "mlp").map((m) => h("option", { value: m, selected: m === about.small.model }, m)));
  const number = (value, min) => h("input", { type: "number", min, value, placeholder: t("auto") });
  const hidden = number(about.small.hidden_size, 1), window_ = number("", 1), epochs = number("", 1);
  const level = h("select", {}, about.options.level.choices.filter((l) => l !== "spaced").map((l) => h("option", { value: l, selected: l === "char" }, t(l))));
  const carry = h("select", {}, about.options.carry.choices.map((c) => h("option", { value: c }, c)));
  const file = h("input", { type: "file", multiple: true, accept: "text/*,.txt,.md,.tex,.csv,.json,.xml,.html,.log", onchange: () => trainOn([...file.files].map((f) => [f, false]), own(), about, fail).then(() => { file.value = ""; }) });
  const button = h("button", { className: "main", id: "start", onclick: () => launch() }, t("Start training"));

  const own = (chosen = () => {
    const options = { model: model.value, carry: carry.value };
    if (hidden.value) options.hidden_size = Number(hidden.value);
    if (level.value !== "char") options.level = level.value;
    if (window_.value) options.window = Number(window_.value);
    if (epochs.value) options.epochs = Number(epochs.value);
    return options;
  });

  async function launch() {
    button.disabled = true;
    const name = text.value.slice(0, 10 * NAMED).trim().slice(0, NAMED).split(/[\s\p{P}]+/u).filter(Boolean).slice(0, 3).join(" ");
    try {
      const run = await begin(about, text.value, name, corpus.value, own());
      draft = {};
      text.value = "";
      go({ run, view: "train" });
    } catch (problem) {
      fail(problem);
    }
    button.disabled = false;
  }

  home.append(h("div", { className: "card" },
    h("h1", {}, t("Train a small network on your own text, now.")),
    h("p", { className: "soft" }, t("Paste a text, drop a file anywhere on this page, or pick a corpus.")),
    text,
    h("div", { className: "row" }, h("label", {}, t("or a corpus"), corpus), h("label", {}, t("or a file"), file), button),
    h("div", { className: "row" },
      h("label", {}, t("tokens"), level), h("label", {}, t("model"), model), h("label", {}, t("hidden units"), hidden), h("label", {}, t("window"), window_),
      h("label", {}, t("passes"), epochs), h("label", {}, t("carry"), carry))));
  const fields = { text, corpus, level, model, hidden, window_, epochs, carry };
  for (const [name, value] of Object.entries(draft)) fields[name].value = value;
  text.put(text.value);
  text.addEventListener("input", () => { if (text.value) corpus.value = ""; }); // what was typed last is what is meant
  text.focus();
  return () => {
    draft = Object.fromEntries(Object.entries(fields).map(([name, { value }]) => [name, value]));
    if (chosen === own) chosen = null;
  };
}

// Each file that is dropped anywhere starts a training on it, as the form says where it is open.
export function acceptDrops(about, fail) {
  const body = document.body;
  const files = (event) => event.dataTransfer?.types.includes("Files"); // a text that is dragged goes where it is dropped
  const show = (on) => { body.dataset.drop = t("drop the file"); body.classList.toggle("dropping", on); };
  body.addEventListener("dragover", (event) => { if (files(event)) { event.preventDefault(); show(true); } });
  body.addEventListener("dragleave", (event) => { if (event.relatedTarget === null) show(false); });
  body.addEventListener("drop", async (event) => {
    show(false);
    if (!files(event)) return;
    event.preventDefault();
    const dropped = [...event.dataTransfer.items].filter((item) => item.kind === "file");
    await trainOn(dropped.map((item) => [item.getAsFile(), item.webkitGetAsEntry?.()?.isDirectory]), chosen?.() ?? about.small, about, fail);
  });
}

// A training for each file, each with whether it is a folder; the first of them is shown.
async function trainOn(files, options, about, fail) {
  const problems = [];
  let first = null;
  for (const [file, folder] of files) {
    try {
      if (folder) throw new Error(t("“{0}” is a folder: drop the text files in it.", file.name));
      const id = await begin(about, file, file.name, "", options);
      first ??= id;
    } catch (problem) {
      problems.push(`${files.length > 1 && !folder ? `${file.name}: ` : ""}${[problem.message, problem.hint].filter(Boolean).join(" · ")}`);
    }
  }
  if (problems.length) fail({ message: problems.join("\n") });
  if (first) go({ run: first, view: "train" });
}
