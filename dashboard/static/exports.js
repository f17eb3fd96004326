// What a chart shows, as a file: its numbers (CSV), a picture (PNG), a drawing (SVG).

import { el } from "./dom.js";
import { values } from "./plot.js";

const PIXELS = { width: 1200, height: 600, scale: 2 };

/**
 * A menu of the files of a chart.
 * @param plot the `Plot`
 * @param name of the files, without their ending
 */
export function exportMenu(plot, name) {
  const save = (kind, make) => el("button", {
    type: "button", class: "quiet", "data-export": kind, disabled: false,
    onclick: async (event) => {
      event.target.closest("details").open = false;
      if (plot.drawn) download(await make(), `${fileName(name())}.${kind}`);
    },
  }, kind.toUpperCase());
  const picture = (format) => async () => window.Plotly.toImage(plot.node, { format, ...PIXELS });
  return el(
    "details",
    {
      class: "files",
      // A menu, not a section: it closes when the reader goes elsewhere.
      onfocusout: (event) => {
        if (!event.currentTarget.contains(event.relatedTarget)) event.currentTarget.open = false;
      },
    },
    el("summary", { class: "button quiet", title: "Save as CSV, PNG or SVG", "aria-label": `Save ${name()}` }, "\u2193"),
    el("div", { class: "panel" },
      save("csv", async () => `data:text/csv;charset=utf-8,${encodeURIComponent(csv(plot))}`),
      save("png", picture("png")),
      save("svg", picture("svg"))),
  );
}

const fileName = (text) => text.replace(/[^\w.-]+/g, "-");

function download(href, name) {
  const link = el("a", { href, download: name });
  document.body.append(link);
  link.click();
  link.remove();
}

const quoted = (value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
const line = (cells) => cells.map((cell) => quoted(cell ?? "")).join(",");

/** Lines and bars: a column each, by step or rank. Cells: what names them, and their value. */
export function csv(plot) {
  const traces = plot.node.data ?? [];
  const cells = traces.filter((t) => t.type === "heatmap");
  // Names of the rows are for cells whose texts do not have them.
  if (cells.length) return table(cells, plot.node.layout?.meta?.names);
  const lines = traces.filter((t) => ["raw", "median", "part"].includes(t.meta?.role));
  const bars = lines.some((t) => t.type === "bar");
  const names = bars ? lines[0].customdata : null;
  const rows = new Map();
  lines.forEach((trace, column) => {
    const ys = values(trace.y);
    plot.stepsOf(values(trace.x)).forEach((x, i) => {
      if (!rows.has(x)) rows.set(x, []);
      rows.get(x)[column] = ys[i];
    });
  });
  const ordered = [...rows.keys()].sort((a, b) => a - b);
  const head = [bars ? "rank" : "step", ...lines.map((t) => t.name)];
  return [line(head), ...ordered.map((x) => line([names ? names[x] : x, ...head.slice(1).map((_, i) => rows.get(x)[i])]))].join("\n") + "\n";
}

function table(traces, labels) {
  const out = ["row,step,what,value"];
  for (const trace of traces) {
    const [xs, z] = [values(trace.x), grid(trace.z)];
    const numbers = trace.customdata ? grid(trace.customdata) : null;
    z.forEach((row, y) => row.forEach((cell, x) => {
      if (cell === null || Number.isNaN(cell)) return;
      out.push(line([trace.text ? String(trace.text[y][x]).split(/,? ?(?:<br>)?step/)[0] : labels?.[y] ?? y, xs[x], trace.meta.role, numbers ? numbers[y][x] : ""]));
    }));
  }
  return `${out.join("\n")}\n`;
}

/** Rows of a matrix, which plotly keeps as it came or as one array with a shape. */
const grid = (z) => {
  const inner = z?._inputArray ?? z;
  return Array.isArray(inner) || Array.isArray(inner?.[0]) || inner?.[0]?.length !== undefined ? [...inner] : [];
};
