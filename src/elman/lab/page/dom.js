// Elements from data. Text only ever becomes text nodes: nothing here reads markup.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list" && name !== "form") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

// An equation: _x and _{…} are set below the line, ^{…} above it.
export function equation(text) {
  const parts = text.split(/([_^](?:\{[^}]*\}|.))/u);
  return h("span", { className: "equation", lang: "en" }, parts.map((part) => {
    if (!/^[_^]./u.test(part)) return part;
    return h(part[0] === "_" ? "sub" : "sup", {}, part.slice(1).replace(/^\{|\}$/g, ""));
  }));
}

// A field that runs as the first letters in it do. (dir="auto" takes a minute for a line of 5 MB.)
const FROM_THE_RIGHT = /^[^\p{L}]*[\u0590-\u08FF\uFB1D-\uFDFF\uFE70-\uFEFF]/u;

export function field(props) {
  const made = h("textarea", { spellcheck: false, ...props });
  const turn = () => { made.dir = FROM_THE_RIGHT.test(made.value.slice(0, 200)) ? "rtl" : "ltr"; };
  made.addEventListener("input", turn);
  made.put = (text) => { made.value = text; turn(); };
  turn();
  return made;
}

export function visible(token) {
  const named = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };
  return token.replace(/[\s\p{Cc}\p{Cf}\u{FE00}-\u{FE0F}]/gu, (c) => named[c] ?? "◌"); // joiners, marks of direction: something, too
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e9)) return value.toExponential(1);
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(digits)).toString();
}

// Numbers with their names: [name, value, key]; written anew only where they have changed.
export function showTiles(home, list) {
  const same = list.length === home.children.length && list.every(([, , key], i) => home.children[i].dataset.key === key);
  if (!same) home.replaceChildren(...list.map(([, , key]) => h("div", { className: "tile", "data-key": key }, h("b", {}, ""), h("span", {}, ""))));
  list.forEach(([name, value], i) => [value, name].forEach((text, j) => write(home.children[i].children[j], text)));
}

// Text is laid out anew whenever it is set, even to what it was.
export function write(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

export function percent(value) {
  if (value > 0 && value < 0.0005) return "< 0.1 %";
  const small = (value > 0 && value < 0.1) || (value > 0.999 && value < 1);
  return `${(100 * value).toFixed(small ? 1 : 0)} %`;
}

// A number of bytes as one types it: 64M.
export function bytes(value) {
  const power = value ? Math.min(3, Math.floor(Math.log2(value) / 10)) : 0;
  return Number.isInteger(value / 1024 ** power) ? `${value / 1024 ** power}${["", "K", "M", "G"][power]}` : String(value);
}

// A table of numbers as the server packs it, one list for each row.
export function unpacked({ shape: [rows, columns], float32 }) {
  const data = Uint8Array.from(atob(float32), (c) => c.charCodeAt(0));
  const view = new DataView(data.buffer), numbers = Float32Array.from({ length: rows * columns }, (_, i) => view.getFloat32(4 * i, true));
  return Array.from({ length: rows }, (_, i) => numbers.subarray(i * columns, (i + 1) * columns));
}

export function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// How much larger things are drawn on a screen that is larger than a desk's.
export function larger() {
  return Math.max(1, parseFloat(getComputedStyle(document.documentElement).fontSize) / 15);
}

// A canvas with as many dots as the screen has, however large it is drawn.
export function sharp(canvas, width, height) {
  const dots = window.devicePixelRatio || 1;
  const size = [Math.round(width * dots), Math.round(height * dots)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) { // else its memory would be made anew
    [canvas.width, canvas.height] = size;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(dots, 0, 0, dots, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
