// Elements, units and names. Text from the model only ever becomes a text node or an attribute value.

const SVG = "http://www.w3.org/2000/svg";

function build(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

const h = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

const ruler = document.createElement("canvas").getContext("2d");
const MONO = 'ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace';
const widths = new Map();

function textWidth(text, size = 11, bold = false) {
  const key = size + (bold ? "b" : "") + text;
  if (!widths.has(key)) {
    ruler.font = `${bold ? "700 " : ""}${size}px ${MONO}`;
    widths.set(key, ruler.measureText(text).width);
  }
  return widths.get(key);
}

function shortened(text, longest) {
  const points = [...text];
  if (points.length <= longest) return text;
  const half = (longest - 1) >> 1;
  return points.slice(0, half).join("") + "…" + points.slice(-half).join("");
}

function digits(n) {
  const a = Math.abs(n);
  return a >= 99.95 || n === Math.trunc(n) ? n.toFixed(0) : a >= 9.995 ? n.toFixed(1) : n.toFixed(2);
}

function scaled(n, units, smallest) {
  for (const [unit, scale] of units) if (Math.abs(n) >= 0.9995 * scale) return `${digits(n / scale)} ${unit}`;
  return `${digits(n)} ${smallest}`;
}

const showBytes = (n) => scaled(n, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]], "B");
const showSeconds = (x) => (Math.abs(x) < 1e-12 ? "0" : scaled(x * 1e9, [["s", 1e9], ["ms", 1e6], ["µs", 1e3]], "ns"));
const showFlops = (n) => scaled(n, [["PFLOP", 1e15], ["TFLOP", 1e12], ["GFLOP", 1e9], ["MFLOP", 1e6], ["kFLOP", 1e3]], "FLOP");
const showShape = (shape) => `[${shape.join(", ")}]`;
const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)}%` : "");
const place = (fqn) => fqn || "(root)";

// "S(1)@tp R@dp" → [{text, css}]: one coloured and labelled mark per mesh axis.
const marks = new Map();
function layoutMarks(layout) {
  if (!marks.has(layout)) {
    marks.set(layout, layout.split(" ").map((text) => {
      const cut = /^S\((\d+)\)/.exec(text);
      return { text: text.replace(/^I@/, "R@"), css: cut ? `s${cut[1] % 5}` : text.startsWith("P") ? "p" : "r" };
    }));
  }
  return marks.get(layout);
}

const chips = (layout) => layoutMarks(layout).map((m) => h("span", { class: `chip ${m.css}` }, m.text));

const plural = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
