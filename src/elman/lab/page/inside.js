// Inside the model: any text coloured by surprise or by a unit; what comes next; similar places.

import { at, get, post } from "./api.js";
import { doAgain, lede } from "./again.js";
import { equation, field, h, number, percent, visible } from "./dom.js";
import { place, go, remember } from "./place.js";
import { t } from "./words.js";

// Surprise in one colour, an activation in two: below and above zero.
function paint(cell, value, signed) {
  if (value === null) return;
  const size = Math.min(1, Math.abs(value));
  const colour = signed && value < 0 ? "59 110 168" : "214 92 36";
  cell.style.backgroundColor = `rgb(${colour} / ${(0.85 * size).toFixed(3)})`;
}

// What the colours mean.
function legend(from, to, signed, unit) {
  const bar = h("span", { className: `scale ${signed ? "signed" : ""}` });
  return h("small", { className: "soft row" }, number(from), bar, h("span", {}, `${number(to)} `, equation(unit)));
}

export function inside(home, { id, fail }) {
  let tokens = [], closed = false;
  const latest = { text: 0, place: 0 }; // of questions that show their answers in the same place only the last one counts
  const asked = (where) => { const own = (latest[where] += 1); return () => !closed && own === latest[where]; };
  const text = field({ rows: 5, "aria-label": t("Text"), value: sessionStorage.getItem(`inside-${id}`) ?? "" });
  const shown = h("div", { className: "text", id: "coloured" }), summary = h("p", { className: "soft", role: "status" }), key = h("div", {});
  const unit = h("input", { type: "number", min: 0, value: place().unit ?? 0, "aria-label": t("Unit") });
  const signals = [["quotes", "inside quotes"], ["line", "line length"], ["brackets", "bracket depth"], ["capitals", "capitals"], ["pattern", "a pattern:"]];
  const what = h("select", { "aria-label": t("Which units follow …"), onchange: () => { pattern.hidden = what.value !== "pattern"; } }, signals.map(([value, label]) => h("option", { value }, t(label))));
  const pattern = h("input", { type: "text", className: "short", value: "the", hidden: true, "aria-label": t("a pattern:") });
  const foundHome = h("div", { className: "row" }), nextHome = h("div", {}, h("p", { className: "soft" }, t("Click a token: what the model expected there, beside Kneser–Ney; and where its state was alike."))), similarHome = h("div", {}), again = h("div", {});
  const ask = async (kind, more, show) => {
    remember(`inside-${id}`, text.value);
    const counts = asked("text");
    try {
      const answer = await post(at(id, `/inside/${kind}`), { text: text.value, ...more });
      if (!counts()) return;
      show(answer);
      again.replaceChildren(doAgain(answer.again));
    } catch (problem) { if (counts()) fail(problem); }
  };

  function colour(values, scale, signed, label) {
    shown.replaceChildren(...tokens.map((token, i) => {
      const value = values[i];
      const cell = h("span", { tabIndex: 0, role: "button", title: value === null ? "" : `${label} ${number(value)}`,
        onclick: () => choose(i), onkeydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); choose(i); } } }, token);
      paint(cell, value === null ? null : value / scale, signed);
      return cell;
    }));
    key.replaceChildren(legend(signed ? -scale : 0, scale, signed, signed ? label.replace(/_(.*)/, "_{$1}") : label));
  }

  const surprise = () => ask("surprise", {}, (answer) => {
    go({ unit: null }, true);
    tokens = answer.tokens;
    unit.max = answer.units - 1;
    colour(answer.nats, answer.scale, false, t("nats"));
    summary.textContent = `${t("mean")} ${number(answer.mean, 4)} ${t("nats")}`;
  });
  const activation = (which) => ask("unit", { unit: which }, (answer) => {
    go({ unit: which }, true);
    unit.value = which;
    tokens = answer.tokens;
    colour(answer.values, Math.max(...answer.values.map(Math.abs)) || 1, true, `h_${which}`);
    summary.textContent = `${t("Unit")} ${which}`;
  });
  const search = () => ask("following", { what: what.value, pattern: pattern.value }, (answer) => {
    foundHome.replaceChildren(...answer.units.map(({ unit: which, r }) => h("button", { onclick: () => activation(which) }, `${which}: r = ${number(r)}`)));
    activation(answer.units[0].unit);
  });

  async function choose(i) {
    [...shown.children].forEach((cell, j) => cell.toggleAttribute("data-chosen", i === j));
    const before = tokens.slice(0, i + 1).join(""), whole = tokens.join(""), counts = asked("place");
    try {
      const expected = await post(at(id, "/inside/next"), { text: before });
      if (!counts()) return;
      nextHome.replaceChildren(h("h3", {}, `${t("What comes next")}: …${visible(tokens[i])}`), h("div", { className: "columns" },
        bars(t("this model"), expected.model, ""), bars("Kneser–Ney", expected.counting, "second")));
      const { positions } = await post(at(id, "/inside/similar"), { text: whole, at: i });
      if (!counts()) return;
      similarHome.replaceChildren(h("h3", {}, t("Similar places")), h("table", {}, h("tbody", {}, positions.map((p) =>
        h("tr", {}, h("td", {}, number(p.cosine)), h("td", {}, h("span", { className: "text" }, `…${p.text}`)))))));
      again.replaceChildren(doAgain(expected.again));
    } catch (problem) { if (counts()) fail(problem); }
  }

  home.append(
    h("h1", {}, t("Inside")),
    h("section", { className: "card" },
      lede(t("Any text, coloured by what the model makes of it."), equation("nats_t = −log P(x_t | x_1 … x_{t−1})")),
      text,
      h("div", { className: "row" }, h("button", { className: "main", id: "surprise", onclick: surprise }, t("Surprise")),
        h("label", {}, t("Unit"), unit), h("button", { id: "unit", onclick: () => activation(Number(unit.value)) }, t("Show"))),
      shown, key, summary),
    h("div", { className: "grid loose" },
      h("section", { className: "card" }, h("h2", {}, t("Which units follow …")),
        lede(t("Units whose activation is most correlated with something in the text."), equation("r_i = corr_t(h_{ti}, s_t)")),
        h("div", { className: "row" }, what, pattern, h("button", { id: "search", onclick: search }, t("Search"))), foundHome),
      h("section", { className: "card" }, nextHome, similarHome)),
    again);
  const first = () => (place().unit ? activation(Number(place().unit)) : surprise());
  if (text.value) first();
  else get(at(id, "/look/excerpt")).then((some) => { if (closed) return; if (document.activeElement !== text) text.put(text.value || some.text); if (text.value) first(); }).catch((problem) => { if (!closed) fail(problem); });
  return () => { closed = true; };
}

export function bars(title, list, kind) {
  const most = list[0]?.p || 1;
  return h("div", {}, h("small", { className: "soft" }, title), h("table", {}, h("tbody", {}, list.map(({ token, p }) => {
    const bar = h("span", { className: `bar ${kind}` });
    bar.style.width = `${Math.max(1, (90 * p) / most)}px`;
    return h("tr", {}, h("td", {}, h("span", { className: "text" }, visible(token))), h("td", {}, bar, percent(p)));
  }))));
}
