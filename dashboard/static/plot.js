// One plotly figure in one element: fetched as JSON, drawn again when it has changed.

import { Problem, get, root } from "./api.js";
import { grown } from "./growing.js";
import { sketch } from "./sketch.js";

const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false, showTips: false };

let library = null;
const address = () => `${root}/static/${document.body.dataset.plotly}`;

/** Has the library fetched, and not read yet: that takes the browser's time. */
export function fetchPlotly() {
  const link = document.createElement("link");
  Object.assign(link, { rel: "preload", as: "script", href: address() });
  document.head.append(link);
}

/** The library that draws, which is large: what a page says in words does not wait for it. */
export function plotly() {
  library ??= new Promise((loaded, failed) => {
    const script = document.createElement("script");
    script.src = address();
    script.onload = () => loaded(window.Plotly);
    script.onerror = () => {
      script.remove();
      library = null;
      failed(new Problem(0, "", "the charts' library could not be loaded"));
    };
    document.head.append(script);
  });
  return library;
}

/** Kept when what was put on the page stands there; at once where nobody sees it. */
const painted = () =>
  document.hidden || new Promise((seen) => requestAnimationFrame(() => setTimeout(seen)));

/** Arrays come as base64 of their bytes; plotly keeps what it decoded beside it. */
export const values = (array) => array?._inputArray ?? array ?? [];

/** Of ascending `from` to `to` [K] each, straight between them and beyond. */
function between(value, from, to) {
  let high = 1;
  while (high < from.length - 1 && from[high] < value) high++;
  return to[high - 1] + ((value - from[high - 1]) / (from[high] - from[high - 1])) * (to[high] - to[high - 1]);
}

export class Plot {
  #next = null; // What is wanted by now: [path, parameters].
  #drawing = null;
  #text = "";
  #asked = ""; // What was drawn last, but for what was known then.
  #figure = null; // The whole of it.

  /**
   * events: { hover(step), leave(), zoom(from, to), reset(), click(step, point), mark(alert id) }, and
   * arrives(meta) before a figure is drawn, which makes room for it
   */
  constructor(node, events = {}) {
    this.node = node;
    this.events = events;
    this.drawn = false;
  }

  /**
   * Draws the figure at a path; of one that is there already, the server is asked for what is new. Calls
   * that come while one is under way become one more at its end, and all of them wait for that: what
   * became of the earlier ones, nobody wants to know any more.
   */
  draw(path, parameters) {
    this.#next = [path, parameters];
    this.#drawing ??= this.#drawAll().finally(() => (this.#drawing = null));
    return this.#drawing;
  }

  async #drawAll() {
    while (this.#next) {
      const wanted = this.#next;
      this.#next = null;
      const asked = JSON.stringify(wanted);
      const { tail } = (asked === this.#asked && this.#figure?.layout.meta) || {};
      try {
        const [path, parameters] = wanted;
        const figure = await get(path, tail ? { ...parameters, known: `${tail.from}:${tail.digest}` } : parameters);
        await this.#put(figure, asked);
      } catch (error) {
        if (!this.#next) throw error;
      }
    }
  }

  async #put(answer, asked) {
    const text = JSON.stringify(answer);
    if (text === this.#text && asked === this.#asked) return;
    this.meta = answer.layout.meta ?? {};
    const figure = this.meta.tail || this.meta.outlined ? grown(this.#figure, answer) : answer;
    this.events.arrives?.(this.meta);
    if (this.meta.nothing) return;
    // What was wrong before this one.
    this.node.querySelector(":scope > .broken")?.remove();
    if (!this.drawn && !window.Plotly) {
      this.node.querySelector(":scope > .sketch")?.remove();
      sketch(this.node, figure);
      await painted();
    }
    await (await plotly()).react(this.node, figure.data, figure.layout, CONFIG);
    this.node.querySelector(":scope > .sketch")?.remove();
    // Only now: one that could not be drawn has to be tried again.
    [this.#text, this.#asked, this.#figure] = [text, asked, figure];
    if (this.meta.summary) this.node.setAttribute("aria-label", this.meta.summary);
    if (!this.drawn) this.#listen();
    this.drawn = true;
  }

  #listen() {
    const { hover, leave, zoom, reset, click, mark } = this.events;
    if (hover) this.node.on("plotly_hover", (event) => hover(this.#step(event.points[0].x)));
    if (leave) this.node.on("plotly_unhover", () => leave());
    if (reset) this.node.on("plotly_doubleclick", () => reset());
    if (click) this.node.on("plotly_click", (event) => click(Math.round(this.#step(event.points[0].x)), event.points[0]));
    if (mark) this.node.on("plotly_clickannotation", (event) => event.annotation.name && mark(event.annotation.name));
    if (zoom) {
      this.node.on("plotly_relayout", (change) => {
        const low = change["xaxis.range[0]"];
        const high = change["xaxis.range[1]"];
        if (low === undefined || high === undefined) return;
        const from = Math.max(0, Math.ceil(this.#step(low)));
        zoom(from, Math.max(from + 1, Math.floor(this.#step(high))));
      });
    }
  }

  /** The step at a place of the x axis, which may be one of time. */
  #step(x) {
    const { steps, at } = this.meta.axis ?? {};
    return steps ? between(x, at, steps) : x;
  }

  /** The lines of the figure: [{ name, rank, steps, values }], smoothed ones left out. */
  lines() {
    return (this.node.data ?? [])
      .filter((trace) => ["raw", "median"].includes(trace.meta?.role))
      .map((trace) => ({ name: trace.name, rank: trace.meta.rank, steps: this.stepsOf(values(trace.x)), values: values(trace.y) }));
  }

  /** Steps of places on the x axis. */
  stepsOf(xs) {
    return this.meta.axis ? Array.from(xs, (x) => Math.round(this.#step(x))) : xs;
  }

  /** A thin line at a step that is pointed at in another chart; null takes it away. */
  crosshair(step) {
    const axis = this.node._fullLayout?.xaxis;
    const { steps, at } = this.meta?.axis ?? {};
    const x = steps && step !== null ? between(step, steps, at) : step;
    const outside = step === null || !axis || x < axis.range[0] || x > axis.range[1];
    this.line?.remove();
    this.line = null;
    if (outside) return;
    this.line = document.createElement("div");
    this.line.className = "crosshair";
    this.line.style.left = `${axis._offset + axis.d2p(x)}px`;
    this.node.append(this.line);
  }

  say(text) {
    if (this.drawn) return;
    const note = document.createElement("p");
    note.className = "broken";
    note.textContent = text;
    this.node.replaceChildren(note);
  }
}
