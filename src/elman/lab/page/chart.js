// Curves: uPlot with the page's colours, horizontal lines (baselines, clip) and vertical marks (changes).

import uPlot from "./vendor/uPlot.esm.js";
import { larger, number, style } from "./dom.js";

const HEIGHT = 280;

export class Chart {
  constructor(home, { series, bands = [], log = false, label, x = "step", height = HEIGHT, anywhere = false }) {
    this.home = home;
    this.height = height * larger();
    this.lines = [];
    this.marks = [];
    this.least = anywhere ? -Infinity : 0; // of most curves nothing lies below zero
    const grid = () => ({ stroke: style("--rule"), width: 1, ...(log ? { filter: decades } : {}) });
    const said = (u, value) => (value === null || value === undefined ? "–" : number(value, 4));
    const lonely = (u, i) => u.data[i].filter((value) => value !== null && value !== undefined).length === 1;
    const axis = { stroke: () => style("--soft"), grid: { stroke: style("--rule"), width: 1 }, ticks: { stroke: style("--rule"), width: 1 }, font: `${12 * larger()}px system-ui`, size: 50 * larger(), space: 50 * larger() };
    this.plot = new uPlot({
      width: this.width(),
      height: this.height,
      scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: log ? undefined : (u, low, high) => this.range(low, high) } },
      axes: [axis, { ...axis, grid: grid(), ticks: grid(), size: 56 * larger(), space: 30 * larger(), values: (u, values) => values.map((v) => (v === null ? "" : v && Math.abs(v) < 1e-3 ? v.toExponential(0) : Number(v.toPrecision(3)))), ...(log ? { filter: decades } : {}) }],
      series: [{ label: x, value: said }, ...series.map((s) => ({ ...s, value: said, stroke: () => style(s.colour), width: (s.width ?? 1.5) * larger(), points: { show: s.points ?? lonely, size: 5 } }))],
      bands: bands.map(({ series: pair, colour }) => ({ series: pair, fill: () => `color-mix(in srgb, ${style(colour)} 16%, transparent)` })),
      legend: { live: true },
      cursor: { drag: { x: true, y: false } },
      hooks: { draw: [() => this.overlay()] },
    }, [[], ...series.map(() => [])], home);
    home.setAttribute("role", "img");
    home.setAttribute("aria-label", label);
    this.watcher = new ResizeObserver(() => this.plot.setSize({ width: this.width(), height: this.height }));
    this.watcher.observe(home);
  }

  width() { return Math.max(160, this.home.clientWidth); }

  range(low, high) {
    if (low === null) return [0, 1];
    const ends = [low, high, ...this.lines.filter((l) => l.value < 2 * high).map((l) => l.value)];
    const least = Math.min(...ends), most = Math.max(...ends), room = 0.06 * (most - least || 1);
    const under = this.lines.some((l) => l.value === least) ? 2 * room : room; // for its name
    return [Math.max(this.least, least - under), most + room];
  }

  set(columns, lines = [], marks = []) {
    this.lines = lines;
    this.marks = marks;
    this.plot.setData(columns);
  }

  overlay() {
    const { ctx, bbox } = this.plot;
    const dots = (window.devicePixelRatio || 1) * larger();
    ctx.save();
    ctx.font = `${11 * dots}px system-ui`;
    ctx.lineWidth = dots;
    ctx.lineJoin = "round";
    const paper = style("--raised");
    const write = (text, x, y) => { // on whatever is drawn there already
      ctx.save();
      ctx.strokeStyle = paper;
      ctx.lineWidth = 4 * dots;
      ctx.strokeText(text, x, y);
      ctx.restore();
      ctx.fillText(text, x, y);
    };
    let above = -Infinity, beside = 0, named = ""; // where the last line that was named lies, and how its name stands
    for (const { value, label, colour } of [...this.lines].sort((a, b) => b.value - a.value)) {
      const y = this.plot.valToPos(value, "y", true);
      if (!(y >= bbox.top && y <= bbox.top + bbox.height)) continue;
      ctx.strokeStyle = ctx.fillStyle = style(colour ?? "--soft");
      ctx.setLineDash([5 * dots, 4 * dots]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      // Curves fall: the names of low lines stand under them, where no curve is; beside one another where lines are close.
      const low = y > bbox.top + bbox.height / 2, crowded = y - above < 14 * dots;
      beside = crowded ? beside + ctx.measureText(named).width + 14 * dots : 0;
      ctx.textAlign = "right";
      write(label, bbox.left + bbox.width - 4 * dots - beside, y + (low && y + 14 * dots < bbox.top + bbox.height ? 12 : -4) * dots);
      above = y;
      named = label;
    }
    ctx.setLineDash([]);
    const taken = []; // where names of marks stand, row by row
    this.marks.forEach(({ step, label }) => {
      const x = this.plot.valToPos(step, "x", true);
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) return;
      ctx.strokeStyle = ctx.fillStyle = style("--mark");
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const right = x > bbox.left + 0.6 * bbox.width, width = ctx.measureText(label).width + 8 * dots;
      const [from, to] = right ? [x - width, x] : [x, x + width];
      let row = 0;
      while (taken.some((other) => other.row === row && other.from < to && from < other.to)) row += 1;
      if (!label || row > 9) return;
      taken.push({ row, from, to });
      ctx.textAlign = right ? "right" : "left";
      write(label, x + (right ? -4 : 4) * dots, bbox.top + (12 + 13 * row) * dots);
    });
    ctx.restore();
  }

  close() {
    this.watcher.disconnect();
    this.plot.destroy();
  }
}

// Over many powers of ten, only those are named; over few, 1, 2 and 5 of each.
function decades(plot, splits) {
  const seen = splits.filter((v) => v > 0);
  const far = Math.log10(seen.at(-1) / seen[0]) > 2.5, every = Math.ceil(Math.log10(seen.at(-1) / seen[0]) / 6);
  return splits.map((v) => {
    const power = Math.floor(Math.log10(v) + 1e-9), leading = Math.round(v / 10 ** power);
    return (far ? leading === 1 && power % every === 0 : [1, 2, 5].includes(leading)) ? v : null;
  });
}

// Tables of [x, y] on one x axis.
export function joined(curves) {
  return uPlot.join(curves.map(([x, y]) => [x, y]));
}
