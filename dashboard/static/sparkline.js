// The loss of a run in a line as high as its text: fetched when it comes into view, rank 0 alone.

import { get, runPath } from "./api.js";

const POINTS = 60;
const [WIDE, HIGH] = [120, 28];
// Of a run that goes on, how often it is asked for again.
const AGAIN_MS = 30_000;
const SVG = "http://www.w3.org/2000/svg";

const svg = (tag, attributes) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};

export class Sparklines {
  #lines = new Map(); // run -> { node, run, step, asked, seen }
  #queue = Promise.resolve();

  constructor() {
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const line = this.#lines.get(entry.target.dataset.run);
        line.seen = entry.isIntersecting;
        this.#ask(line);
      }
    });
  }

  /** The element of a run's line: one and the same each time. */
  of(run) {
    let line = this.#lines.get(run.id);
    if (!line) {
      const node = document.createElement("div");
      node.dataset.run = run.id;
      line = { node, run: run.id, step: run.last_step, drawn: null, asked: 0, seen: false };
      this.#lines.set(run.id, line);
      this.observer.observe(node);
    }
    line.step = run.last_step;
    this.#ask(line);
    return line.node;
  }

  /** One after the other: a page of runs is no burst of requests. */
  #ask(line) {
    if (!line.seen || line.drawn === line.step || Date.now() - line.asked < AGAIN_MS) return;
    line.asked = Date.now();
    this.#queue = this.#queue.then(async () => {
      try {
        const step = line.step;
        const { series } = await get(`${runPath(line.run)}/series`, { metric: "loss", rank: 0, max_points: POINTS });
        line.node.replaceChildren(...draw(series[0]));
        line.drawn = step;
      } catch {
        // The list itself says what is wrong with the server, and asks again.
      }
    });
  }
}

/** Finite values as a line on a scale of their own; points where one is not finite. */
function draw(series) {
  const finite = series ? series.values.filter(Number.isFinite) : [];
  if (finite.length < 2) return [];
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  const [first, last] = [series.steps[0], series.steps.at(-1)];
  const x = (step) => ((step - first) / (last - first || 1)) * WIDE;
  const y = (value) => HIGH - 2 - ((value - low) / (high - low || 1)) * (HIGH - 4);
  let pen = "M";
  const path = series.values.map((value, i) => {
    if (!Number.isFinite(value)) {
      pen = "M";
      return "";
    }
    const part = `${pen}${x(series.steps[i]).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
    return part;
  });
  const picture = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": `loss, last ${finite.at(-1).toPrecision(3)}` });
  picture.append(svg("path", { d: path.join("") }));
  series.values.forEach((value, i) => {
    if (!Number.isFinite(value)) picture.append(svg("circle", { cx: x(series.steps[i]).toFixed(1), cy: 3, r: 2.5 }));
  });
  return [picture];
}
