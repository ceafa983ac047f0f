// Start in five seconds: a text, a corpus, or a file, and a small model trains at once.

import { post } from "./api.js";
import { h } from "./dom.js";
import { go } from "./place.js";
import { t } from "./words.js";

export async function begin(about, text, name, corpus, options) {
  const kept = corpus ? { corpus } : await post(`/api/texts?name=${encodeURIComponent(name)}`, new Blob([text]));
  const { id } = await post("/api/runs", { ...kept, name: corpus ? corpus : name, options });
  go({ run: id, view: "train" });
}

export function start(home, { about, fail }) {
  const text = h("textarea", { rows: 9, placeholder: t("Paste some text here…"), "aria-label": t("Text"), spellcheck: false });
  const corpus = h("select", { "aria-label": t("or a corpus") },
    h("option", { value: "" }, t("my own text")), about.corpora.map((name) => h("option", { value: name }, name)));
  const model = h("select", {}, about.options.model.choices.filter((m) => m !== "mlp").map((m) => h("option", { value: m, selected: m === about.small.model }, m)));
  const field = (value, min) => h("input", { type: "number", min, value, placeholder: t("auto") });
  const hidden = field(about.small.hidden_size, 1), window_ = field("", 1), epochs = field("", 1);
  const level = h("select", {}, about.options.level.choices.filter((l) => l !== "spaced").map((l) => h("option", { value: l, selected: l === "char" }, t(l))));
  const carry = h("select", {}, about.options.carry.choices.map((c) => h("option", { value: c }, c)));
  const button = h("button", { className: "main", id: "start", onclick: () => launch() }, t("Start training"));

  async function launch() {
    const options = { model: model.value, hidden_size: Number(hidden.value), carry: carry.value };
    if (level.value !== "char") options.level = level.value;
    if (window_.value) options.window = Number(window_.value);
    if (epochs.value) options.epochs = Number(epochs.value);
    button.disabled = true;
    try {
      await begin(about, text.value, text.value.trim().split(/\s+/).slice(0, 3).join(" "), corpus.value, options);
    } catch (problem) {
      fail(problem);
    }
    button.disabled = false;
  }

  home.append(h("div", { className: "card" },
    h("h1", {}, t("Train a small network on your own text, now.")),
    h("p", { className: "soft" }, t("Paste a text, drop a file anywhere on this page, or pick a corpus.")),
    text,
    h("div", { className: "row" }, h("label", {}, t("or a corpus"), corpus), button),
    h("div", { className: "row" },
      h("label", {}, t("tokens"), level), h("label", {}, t("model"), model), h("label", {}, t("hidden units"), hidden), h("label", {}, t("window"), window_),
      h("label", {}, t("passes"), epochs), h("label", {}, t("carry"), carry))));
  text.focus();
  return () => {};
}

// A file dropped anywhere starts a training on it.
export function acceptDrops(about, fail) {
  const body = document.body;
  const over = (on) => (event) => { event.preventDefault(); body.dataset.drop = t("drop the file"); body.classList.toggle("dropping", on); };
  body.addEventListener("dragover", over(true));
  body.addEventListener("dragleave", over(false));
  body.addEventListener("drop", async (event) => {
    over(false)(event);
    const file = event.dataTransfer.files[0];
    if (!file) return;
    try { await begin(about, file, file.name, "", about.small); } catch (problem) { fail(problem); }
  });
}

