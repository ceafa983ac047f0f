// A forecasting run: the series and what comes next, and how wrong past forecasts were, by horizon.

import { at, get } from "./api.js";
import { doAgain, lede } from "./again.js";
import { Chart } from "./chart.js";
import { equation, h } from "./dom.js";
import { t } from "./words.js";

const COLOURS = ["--held-out", "--other1", "--other2", "--other3", "--mark", "--soft"];

export function forecast(home, { id, fail }) {
  let charts = [];
  const close = () => { charts.forEach((chart) => chart.close()); charts = []; };
  const body = h("div", {});
  home.append(h("h1", {}, id), body);

  function draw(told, name, column) {
    close();
    const past = told.series[name][column], ahead = told.forecast[name][column];
    const first = h("div", { id: "ahead" }), second = h("div", { id: "errors" });
    const pick = h("select", { "aria-label": t("series"), onchange: () => draw(told, ...JSON.parse(pick.value)) },
      Object.entries(told.series).flatMap(([s, columns]) => Object.keys(columns).map((c) =>
        h("option", { value: JSON.stringify([s, c]), selected: s === name && c === column }, `${s}: ${c}`))));
    body.replaceChildren(
      h("div", { className: "row" }, pick, h("span", { className: "soft" }, told.model)),
      ...told.verdicts.map((line) => h("p", {}, line)),
      h("div", { className: "grid" },
        h("section", { className: "card" }, h("h2", {}, t("What comes next")),
          lede(t("The series, the forecast, and the interval that should hold the truth so often."), equation("P(low_k ≤ x_{T+k} ≤ high_k)")), first),
        h("section", { className: "card" }, h("h2", {}, t("Errors by horizon")),
          lede(t("Past windows, each forecast from what came before it."), equation("e_k = √(mean (x_{t+k} − x̂_{t+k})²)")), second)),
      h("p", {}), doAgain(told.again));
    const levels = Object.entries(ahead.levels);
    const n = past.values.length, k = ahead.mean.length, steps = [...Array(n + k).keys()].map((i) => i + 1 - n);
    const before = (values) => [...values, ...Array(k).fill(null)];
    const after = (values) => [...Array(n - 1).fill(null), past.values.at(-1), ...values];
    const picture = new Chart(first, { label: t("What comes next"), x: t("steps"), anywhere: true, series: [
      { label: name, colour: "--train" }, { label: t("forecast"), colour: "--held-out", width: 2.2 },
      ...levels.flatMap(([level], i) => [{ label: `${level} %`, colour: COLOURS[i + 1], width: 1 }, { label: `${level} %`, class: "quiet", colour: COLOURS[i + 1], width: 1 }])],
      bands: levels.map((_, i) => ({ series: [4 + 2 * i, 3 + 2 * i], colour: COLOURS[i + 1] })) });
    picture.set([steps, before(past.values), after(ahead.mean), ...levels.flatMap(([, e]) => [after(e.low), after(e.high)])]);
    const models = Object.entries(told.scores), measure = models[0][1].rmse ? "rmse" : models[0][1].mase ? "mase" : "smape";
    const errors = new Chart(second, { label: t("Errors by horizon"), x: t("steps"), series: models.slice(0, 6).map(([label], i) => ({ label: `${label} (${measure})`, colour: i ? COLOURS[i] : "--train", width: i ? 1 : 2.2 })) });
    errors.set([models[0][1][measure].map((_, i) => i + 1), ...models.slice(0, 6).map(([, s]) => s[measure])]);
    charts = [picture, errors];
  }

  get(at(id, "/forecast")).then((told) => {
    const name = Object.keys(told.series)[0];
    draw(told, name, Object.keys(told.series[name])[0]);
  }).catch(fail);
  return close;
}
