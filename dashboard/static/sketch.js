// A figure of lines and bands as plain SVG, until the library that draws is there: the browser reads
// that for longer than all else on a page takes. What is drawn are the figure's own points and ranges;
// alerts, and what a pointer does, come with the library.

import { count, number } from "./dom.js";
import { decoded } from "./growing.js";

const SVG = "http://www.w3.org/2000/svg";
// As the library leaves free above and below what it shows.
const PADDING = 0.05;
// Pixels for a number of an axis: some five of each on a chart of the page, as the library has them.
const ROOM = { x: 80, y: 36 };
const LETTER = 6.5; // Pixels, of the numbers.

/** Puts it into a node, in which nothing is yet; figures of other kinds are left to the library. */
export function sketch(node, { data, layout }) {
  const traces = data.map((trace) => ({ ...trace, ...decoded(trace) })).filter((trace) => trace.x?.length);
  if (layout.meta?.axis || !layout.xaxis?.range || !traces.length || traces.some((t) => t.type !== "scatter")) return;
  const [width, height] = [node.clientWidth, node.clientHeight];
  const { l, r, t, b } = layout.margin;
  const area = { left: l, right: width - r, top: t, bottom: height - b };
  if (area.right <= area.left || area.bottom <= area.top) return;
  const log = layout.yaxis.type === "log";
  const shown = (y) => (log ? Math.log10(y) : y);
  const own = traces.filter((trace) => trace.yaxis !== "y2");
  const range = layout.yaxis.range ?? extent(own, shown);
  if (!range) return;
  const x = scale(layout.xaxis.range, area.left, area.right);
  const y = scale(range, area.bottom, area.top);
  const axis = layout.template.layout.xaxis;
  const ground = draw("svg", { class: "sketch", width, height, "aria-hidden": "true" });
  const name = `sketch-${++drawn}`;
  const clip = draw("clipPath", { id: name });
  clip.append(draw("rect", { x: area.left, y: area.top, width: area.right - area.left, height: area.bottom - area.top }));
  const lines = draw("g", { "clip-path": `url(#${name})` });
  const texts = draw("g", { "font-size": axis.tickfont.size, "font-family": layout.font.family, fill: axis.tickfont.color });
  for (const step of ticks(layout.xaxis.range, (area.right - area.left) / ROOM.x, 1)) {
    lines.append(draw("path", { d: `M${x(step)} ${area.top}V${area.bottom}`, stroke: axis.gridcolor }));
    texts.append(text(count(step), { x: x(step), y: area.bottom + 16, "text-anchor": "middle" }));
  }
  let widest = 0;
  for (const value of ticks(range, (area.bottom - area.top) / ROOM.y, log ? 1 : 0)) {
    lines.append(draw("path", { d: `M${area.left} ${y(value)}H${area.right}`, stroke: axis.gridcolor }));
    const said = log ? `1e${value}` : number(value);
    widest = Math.max(widest, LETTER * said.length);
    texts.append(text(said, { x: area.left - 8, y: y(value) + 4, "text-anchor": "end" }));
  }
  const { font } = axis.title;
  const titles = draw("g", { "font-size": font.size, fill: font.color, "text-anchor": "middle" });
  titles.append(text("step", { x: (area.left + area.right) / 2, y: area.bottom + 34 }));
  // The library's own markup is left to it.
  const title = layout.yaxis.title?.text ?? "";
  const place = `translate(${area.left - 20 - widest} ${(area.top + area.bottom) / 2}) rotate(-90)`;
  if (!/[<&]/.test(title)) titles.append(text(title, { transform: place }));
  texts.append(titles);
  for (const trace of own) lines.append(drawing(trace, x, (value) => y(shown(value))));
  for (const trace of traces.filter((one) => one.yaxis === "y2")) {
    // Values that are no numbers have their marks along the top.
    trace.x.forEach((step, n) => step !== null && lines.append(draw("circle", {
      cx: x(step), cy: area.bottom + trace.y[n] * (area.top - area.bottom), r: 4, fill: trace.marker.color,
    })));
  }
  ground.append(clip, lines, texts);
  node.append(ground);
}

let drawn = 0;

function draw(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(name, value);
  return node;
}

function text(said, attributes) {
  const node = draw("text", attributes);
  node.textContent = said;
  return node;
}

/** A line, or the area that an outline goes around; where there is no number there is a gap. */
function drawing({ x: xs, y: ys, fill, fillcolor, line, opacity, mode, marker }, x, y) {
  const points = [];
  let d = "";
  let move = "M";
  for (let n = 0; n < xs.length; n++) {
    const [across, up] = [x(xs[n]), ys[n] === null ? NaN : y(ys[n])];
    if (Number.isFinite(across) && Number.isFinite(up)) {
      d += `${move}${across.toFixed(1)} ${up.toFixed(1)}`;
      points.push([across, up]);
      move = "L";
    } else move = "M";
  }
  if (fill) return draw("path", { d, fill: fillcolor, opacity });
  const group = draw("g", { opacity });
  group.append(draw("path", { d, fill: "none", stroke: line?.color, "stroke-width": line?.width ?? 2 }));
  if (mode?.includes("markers") && typeof marker?.size === "number") {
    group.append(...points.map(([cx, cy]) => draw("circle", { cx, cy, r: marker.size / 2, fill: line?.color })));
  }
  return group;
}

/** From the least to the largest that is shown, and what is left free; null where nothing is. */
function extent(traces, shown) {
  let [low, high] = [Infinity, -Infinity];
  for (const { y } of traces) {
    for (const value of y) {
      const at = value === null ? NaN : shown(value);
      if (Number.isFinite(at)) [low, high] = [Math.min(low, at), Math.max(high, at)];
    }
  }
  if (low > high) return null;
  const free = low === high ? 1 : PADDING * (high - low);
  return [low - free, high + free];
}

const scale = ([low, high], from, to) => (value) => from + ((value - low) / (high - low)) * (to - from);

/** Round numbers in a range, about as many as there is room for. */
function ticks([low, high], many, least) {
  const raw = (high - low) / Math.max(1, many);
  const ten = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(least, [1, 2, 5, 10].map((n) => n * ten).find((n) => n >= raw));
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.max(0, Math.floor(high / step) - first + 1) }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}
