// The microscope: ∂L_t/∂h_{t-k}, losses × lags, with the truncation drawn where it cuts.

import { at, get, post } from "./api.js";
import { doAgain, lede } from "./again.js";
import { Chart } from "./chart.js";
import { equation, h, larger, number, percent, sharp, showTiles, style, unpacked, visible, write } from "./dom.js";
import { go, place } from "./place.js";
import { t } from "./words.js";

const RESTING = 400; // milliseconds until one asks again for what was not there
const SOON = 0.1; // seconds: pictures that come as often are asked for before the last one is drawn
const DECADES = 4; // of the colour scale
const LONGEST = 9; // letters of a token under the picture

// Dark violet to yellow, even steps of brightness; the same in both themes.
const STOPS = [[24, 12, 48], [66, 30, 110], [125, 42, 120], [190, 64, 98], [236, 112, 66], [252, 178, 72], [250, 240, 160]];
const SHADES = Array.from({ length: 256 }, (_, shade) => {
  const x = (shade / 255) * (STOPS.length - 1), i = Math.min(STOPS.length - 2, Math.floor(x)), f = x - i;
  return STOPS[i].map((c, j) => Math.round(c + f * (STOPS[i + 1][j] - c)));
});
const shade = (value) => Math.round(255 * Math.max(0, Math.min(1, value)));
export const heat = (value) => SHADES[shade(value)];
const level = (norm, most) => (norm > 0 && most > 0 ? 1 + Math.log10(norm / most) / DECADES : 0);

export function microscope(home, { id, fail, live }) {
  if (live().options?.model === "mlp") {
    home.append(h("h1", {}, t("Microscope")), h("section", { className: "card" }, h("p", {}, t("This model carries nothing through time."))));
    return () => {};
  }
  let closed = false, resting = false, coming = null, pictures = [], frame = null, window_ = Number(place().cut) || null, hovered = null, dragging = false;
  const canvas = h("canvas", { tabIndex: 0, role: "img", id: "heat", "aria-label": "∂L_t/∂h_{t−k}" });
  const picture = h("div", { className: "picture" }, canvas), small = document.createElement("canvas");
  const strip = h("div", { className: "strip", "aria-label": t("Text") });
  const tiles = h("div", { className: "tiles" }), words = h("p", {}, t("looking …")), told = h("p", { className: "soft", role: "status" });
  const slider = h("input", { type: "range", min: 1, id: "cut", "aria-label": t("Truncation window") });
  const size = h("b", {}), how = h("p", { className: "soft", hidden: true }), rate = h("span", { className: "soft", id: "rate" }), again = h("div", {});
  const use = h("button", { className: "main", disabled: true, onclick: () => change() }, t("Train on with this window"));
  const carriesHome = h("div", { className: "scroll" }), spectrumHome = h("div", {}), spectrumWords = h("p", { className: "soft" });

  const touches = matchMedia("(hover: none)").matches;
  const seen = h("div", { hidden: true }, // until there is something to see
    strip, picture,
    h("p", { className: "soft" }, t("Columns are losses, rows are lags: bright is where the gradient still arrives. Below the staircase the truncation cuts it off."), " ", t(touches ? "Tap a loss to see which characters its gradient reaches." : "Hover or focus a loss to see which characters its gradient reaches.")),
    how,
    h("div", { className: "row" }, h("label", {}, t("Truncation window"), slider, size), use, h("span", { className: "soft" }, touches ? "" : t("drag in the picture, or use the slider")), rate),
    tiles);

  home.append(
    h("h1", {}, t("Microscope")),
    h("section", { className: "card" },
      lede(t("How far each loss reaches back through the states before it."),
        equation("∂L_t/∂h_{t−k} = (∂h_t/∂h_{t−1} ⋯ ∂h_{t−k+1}/∂h_{t−k})^{⊤} ∂L_t/∂h_t")),
      seen, words, told, again),
    h("div", { className: "grid loose" },
      h("section", { className: "card" }, h("h2", {}, t("Carries side by side")),
        lede(t("The same gradient by every carry, against the full one."), equation("‖ḡ − g‖/‖g‖,  √(mean ‖g_i − ḡ‖²)/‖g‖")),
        h("button", { id: "compare", onclick: (e) => compare(e.target) }, t("Compare")), carriesHome),
      h("section", { className: "card" }, h("h2", {}, t("Spectrum of the Jacobian products")),
        lede(t("How many directions survive k steps back."), equation("σ_i(∂h_{t+k}/∂h_t)")),
        h("button", { id: "measure", onclick: (e) => measure(e.target) }, t("Measure")), spectrumWords, spectrumHome)));

  // ------------------------------------------------------------ the picture

  const steps = () => frame.tokens.length - 1;
  const losses = () => frame.norms.length;
  function edges(window) {
    if (window === frame.window && frame.truncates) return frame.edges;
    const found = [];
    for (let edge = steps() - window; edge >= 0; edge -= window) found.unshift(edge);
    return found;
  }
  // How many lags the loss at step t keeps: back to where its window began.
  function kept(t, edges) {
    const begins = edges.filter((edge) => edge <= t).at(-1);
    return begins === undefined ? t : t - begins;
  }
  const geometry = () => {
    const width = Math.max(160, picture.clientWidth), lags = frame.norms[0].length;
    const left = 34 * larger(), cell = (width - left) / losses(), row = Math.max(3, Math.min(9, 380 / lags)) * larger();
    return { width, height: row * lags + 22 * larger(), left, cell, row, lags };
  };

  function draw() {
    if (!frame) return;
    const { width, height, left, cell, row, lags } = geometry();
    const context = sharp(canvas, width, height);
    const most = frame.most;
    const cuts = edges(window_);
    const paper = style("--paper").match(/[0-9a-f]{2}/gi).map((c) => parseInt(c, 16)); // what is cut off fades into it
    context.font = `${11 * larger()}px system-ui`;
    const dots = new ImageData(losses(), lags); // one for each loss and lag, drawn larger in one go
    const faded = SHADES.map((colour) => colour.map((c, j) => 0.3 * c + 0.7 * paper[j]));
    frame.norms.forEach((norms, i) => {
      const reach = frame.truncates ? kept(frame.first + i, cuts) : lags;
      for (let k = 0; k < lags; k += 1) {
        const [r, g, b] = (k > reach ? faded : SHADES)[shade(level(norms[k], most))], dot = 4 * (k * frame.norms.length + i);
        dots.data[dot] = r;
        dots.data[dot + 1] = g;
        dots.data[dot + 2] = b;
        dots.data[dot + 3] = 255;
      }
    });
    small.width = losses();
    small.height = lags;
    small.getContext("2d").putImageData(dots, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, left, 0, losses() * cell, lags * row);
    context.strokeStyle = style("--mark");
    context.lineWidth = 2 * larger();
    context.setLineDash(frame.truncates ? [] : [5 * larger(), 5 * larger()]);
    context.beginPath();
    frame.norms.forEach((_, i) => {
      const y = Math.min(lags, kept(frame.first + i, cuts) + 1) * row;
      context.lineTo(left + i * cell, y);
      context.lineTo(left + (i + 1) * cell, y);
    });
    context.stroke();
    context.setLineDash([]);
    if (hovered !== null) {
      context.strokeStyle = style("--ink");
      context.strokeRect(left + hovered * cell, 0, cell, lags * row);
    }
    context.fillStyle = style("--soft");
    context.textAlign = "right";
    for (let k = 0; k < lags; k += lags > 40 ? 16 : 8) context.fillText(k, left - 6, k * row + 9 * larger());
    context.textAlign = "center";
    const names = frame.tokens.slice(frame.first + 1).map((token) => ([...token].length > LONGEST ? `${visible([...token].slice(0, LONGEST - 1).join(""))}…` : visible(token)));
    const every = Math.ceil(Math.max(9 * larger(), ...names.map((name) => (name.length > 1 ? context.measureText(name).width + 5 : 0))) / cell);
    for (let i = 0; i < losses(); i += every) context.fillText(names[i], left + (i + 0.5) * cell, height - 6);
    colourStrip(most);
  }

  // The text in a row of cells; those that the chosen loss reaches are as bright as its gradient there.
  function writeStrip() {
    const cuts = new Set(edges(window_));
    strip.classList.toggle("spaced", frame.tokens.some((token) => [...token].length > 1));
    if (strip.children.length !== frame.tokens.length) strip.replaceChildren(...frame.tokens.map((_, s) => h("span", { title: `${s}` })));
    frame.tokens.forEach((token, s) => {
      write(strip.children[s], visible(token));
      strip.children[s].classList.toggle("edge", cuts.has(s));
    });
  }
  function colourStrip(most) {
    const chosen = hovered === null ? null : frame.norms[hovered];
    if (!chosen && !strip.dataset.coloured) return;
    if (chosen) strip.dataset.coloured = "yes";
    else delete strip.dataset.coloured;
    [...strip.children].forEach((cell, s) => {
      cell.style.backgroundColor = cell.style.color = "";
      cell.classList.remove("loss");
      if (!chosen) return;
      const t = frame.first + hovered, k = t - s;
      if (s === t + 1) cell.classList.add("loss");
      if (k < 0 || k >= chosen.length) return;
      const value = level(chosen[k], most), [r, g, b] = heat(value);
      cell.style.backgroundColor = `rgb(${r} ${g} ${b})`;
      cell.style.color = value > 0.55 ? "#111" : "#fff";
    });
    if (chosen) told.textContent = t("loss of {0}: {1} nats", `“${visible(frame.tokens[frame.first + hovered + 1])}”`, number(frame.nats[frame.first + hovered]));
  }

  function state() {
    const keeps = frame.kept[Math.min(window_, frame.kept.length) - 1];
    const more = frame.settled ? "" : `${t("at least")} `, least = frame.settled ? "" : "≥ ";
    size.textContent = window_;
    how.textContent = [
      live().state === "elsewhere" && t("Another process trains this run: the picture is of the weights that it saved last."),
      !frame.truncates && t("Carry {0} does not cut at the edges of windows: the dashed line is where truncation would.", frame.carry),
    ].filter(Boolean).join(" ");
    how.hidden = !how.textContent;
    showTiles(tiles, [
      [t("step"), frame.step.toLocaleString("en"), "step"],
      [frame.truncates ? t("cut off") : t("would be cut off"), percent(1 - keeps), "cut"],
      [t("half lies within"), `${least}${frame.half} ${t(frame.half === 1 ? "step" : "steps")}`, "half"],
      [t("window that keeps 90 %"), least + frame.keep90, "keep90"],
      [t("window that keeps 99 %"), least + frame.keep99, "keep99"],
      [t("saturated"), percent(frame.saturation), "saturated"],
    ]);
    write(words, t("half of the gradient lies within {0}, 90 % within {1} steps; a window of {2} keeps {3}",
      more + frame.half, more + frame.ninety, window_, (frame.settled ? "" : `${t("at most")} `) + percent(keeps)));
  }

  function setWindow(value) {
    window_ = Math.max(1, Math.min(Number(slider.max), Math.round(value)));
    slider.value = window_;
    use.disabled = window_ === frame.window || !["running", "paused"].includes(live().state);
    writeStrip();
    state();
    draw();
  }
  const keep = () => frame && go({ cut: window_ === frame.window ? null : window_ }, true);
  slider.addEventListener("input", () => frame && setWindow(Number(slider.value)));
  slider.addEventListener("change", keep);

  const where = (event) => {
    const { left, cell, row } = geometry(), box = canvas.getBoundingClientRect();
    const i = Math.floor((event.clientX - box.left - left) / cell);
    return { i: i >= 0 && i < losses() ? i : null, lag: (event.clientY - box.top) / row };
  };
  canvas.addEventListener("pointerdown", (event) => { if (frame && event.pointerType !== "touch") { dragging = true; canvas.setPointerCapture(event.pointerId); setWindow(where(event).lag); } });
  canvas.addEventListener("pointermove", (event) => {
    if (!frame || event.pointerType === "touch") return;
    const { i, lag } = where(event);
    if (dragging) setWindow(lag);
    else if (i !== hovered) { hovered = i; draw(); }
  });
  canvas.addEventListener("pointerup", (event) => {
    if (dragging) keep();
    dragging = false;
    if (frame && event.pointerType === "touch") { hovered = where(event).i; draw(); } // one that moves scrolls the page, and is never up
  });
  canvas.addEventListener("pointerleave", (event) => { if (!dragging && frame && event.pointerType !== "touch") { hovered = null; draw(); } });
  canvas.addEventListener("keydown", (event) => {
    if (!frame) return;
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], turn = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (move) { hovered = Math.max(0, Math.min(losses() - 1, (hovered ?? losses()) + move)); draw(); }
    if (turn) { setWindow(window_ + turn); keep(); }
    if (move || turn) event.preventDefault();
  });

  async function change() {
    try { told.textContent = (await post(at(id, "/change"), { options: { window: window_ } })).again; } catch (problem) { fail(problem); }
  }

  const ask = (step) => get(at(id, `/frame?after=${step}`)); // the server waits for the one after that
  async function watch() {
    resting = document.hidden && frame !== null; // nobody looks: nothing is drawn
    if (closed || resting) return;
    const began = performance.now();
    let pause = 0;
    try {
      const now = await (coming ?? ask(frame?.step ?? ""));
      coming = null;
      if (closed) return;
      if (now.every < SOON) { // the next one is made while this one is drawn
        coming = ask(now.step);
        coming.catch(() => {}); // said when it is waited for
      }
      const fresh = !frame || ["step", "window", "carry"].some((name) => now[name] !== frame[name]);
      const moved = window_ !== null && window_ !== frame?.window;
      pause = 1000 * now.every;
      if (fresh) {
        if (!frame) again.replaceChildren(doAgain(now.again));
        const norms = unpacked(now.norms);
        frame = { ...now, norms, most: norms.reduce((most, row) => row.reduce((a, b) => (b > a && b < Infinity ? b : a), most), 0) };
        seen.hidden = false;
        slider.max = now.kept.length;
        setWindow(moved ? window_ : now.window);
        if (window_ === now.window && place().cut) keep(); // it is trained with by now
        pictures = [...pictures.slice(-20), performance.now()];
      }
      sayRate(now.every);
    } catch (problem) {
      coming = null;
      words.textContent = [problem.message, problem.hint].filter(Boolean).join(" · ");
      pause = frame ? 1500 : RESTING; // the first weights come a moment after one has looked
    }
    setTimeout(watch, Math.max(0, pause - (performance.now() - began)));
  }
  const looked = () => { if (!document.hidden && resting) { resting = false; watch(); } };
  document.addEventListener("visibilitychange", looked);

  // How often there is another picture, while it trains.
  function sayRate(every) {
    const recent = pictures.filter((when) => performance.now() - when < 5000);
    const seconds = (recent.at(-1) - recent[0]) / 1000;
    if (live().state !== "running" || recent.length < 3) rate.textContent = live().state === "running" && every > 0.5 ? t("one picture in {0} s: all cores are busy", number(every, 2)) : "";
    else rate.textContent = t("{0} pictures a second", ((recent.length - 1) / seconds).toFixed(1));
  }

  // ------------------------------------------------------------ the dearer looks

  async function busy(button, work) {
    button.disabled = true;
    try { await work(); } catch (problem) { fail(problem); }
    button.disabled = false;
  }

  const bar = (value, most, kind = "") => { const b = h("span", { className: `bar ${kind}` }); b.style.width = `${Math.round((90 * Math.min(value, most)) / (most || 1))}px`; return b; };

  const compare = (button) => busy(button, async () => {
    const { carries } = await get(at(id, "/look/carries"));
    const most = Math.min(2, Math.max(...carries.map((c) => Math.max(c.bias, c.deviation))));
    carriesHome.replaceChildren(h("table", { id: "carries" },
      h("thead", {}, h("tr", {}, [t("carry"), t("bias"), t("noise"), t("cosine"), t("states kept")].map((name) => h("th", {}, name)))),
      h("tbody", {}, carries.map((c) => h("tr", {}, h("td", {}, c.name), h("td", {}, bar(c.bias, most), number(c.bias)), h("td", {}, bar(c.deviation, most, "second"), number(c.deviation)), h("td", {}, number(c.cosine)), h("td", {}, c.steps_kept))))));
  });

  let chart = null;
  const measure = (button) => busy(button, async () => {
    const seen = await get(at(id, "/look/spectrum"));
    chart?.close();
    spectrumHome.replaceChildren();
    chart = new Chart(spectrumHome, { log: true, label: t("singular value"), x: t("direction"), height: 230,
      series: seen.lags.map((k, i) => ({ label: `k = ${k}`, colour: ["--train", "--held-out", "--other1", "--other2", "--other3", "--mark"][i % 6] })) });
    const least = 1e-12;
    chart.set([seen.values[0].map((_, i) => i + 1), ...seen.values.map((row) => row.map((v) => Math.max(v, least)))], [{ value: 1, label: "1" }]);
    spectrumWords.textContent = t("{0} of {1} units saturated, {2} never move; spectral radius {3}", seen.saturated, seen.units, seen.dead, seen.radius.map((r) => number(r)).join(", "));
  });

  const watcher = new ResizeObserver(() => draw());
  watcher.observe(picture);
  watch();
  return () => { closed = true; document.removeEventListener("visibilitychange", looked); watcher.disconnect(); chart?.close(); };
}
