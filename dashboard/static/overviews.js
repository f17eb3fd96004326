// Figures that show a whole run at once: ranks x steps, layers x steps, where the time goes.

import { Problem, root, runPath } from "./api.js";
import { $, el, show } from "./dom.js";
import { exportMenu } from "./exports.js";
import { Plot } from "./plot.js";

// What is worth a look rank by rank, in this order; then whatever else each rank has.
const BY_RANK = [
  "loss", "step_seconds", "data_seconds", "wait_seconds", "compute_seconds", "grad_norm_local", "samples_per_second",
  "samples", "process_resident_memory_bytes", "cuda_memory_allocated_bytes",
];
const BY_LAYER = ["grad_norm", "update_ratio", "weight_norm"];
const TIMED = ["step_seconds", "compute_seconds"];
const SIZES = "samples";
// What the gradient noise scale is made of: of each rank's own gradient, and of the reduced one.
const OWN = "grad_norm_local";
const REDUCED = ["grad_norm", "grad_norm_preclip"];
// Charts without an axis of steps.
const NOT_STEPS = ["times", "data-ranks", "overlap", "scaling"];
// Of those that are there for some runs only, the server says whether there is something to show.
const FOR_SOME = ["noise", "scaling"];
const READ = ["data-ranks", "data-steps", "overlap"];
const THROUGHPUT = "samples_per_second";
const SELDOM_MS = 60_000;
const NARROW = 640;
const TALL = { few: 150, row: 16, most: 560 };

const place = (list, name) => (list.includes(name) ? list.indexOf(name) : list.length);

export class Overviews {
  #views = [];
  #offered = {};

  /** @param linked events of a plot with a step axis: { onMark, onZoom, onReset, onHover } */
  constructor({ run, state, linked }) {
    this.folder = `/runs/${encodeURIComponent(run)}/figures`;
    this.state = state;
    const events = (view) => ({
      hover: (step) => linked.onHover(Math.round(step), view.plot),
      leave: () => linked.onHover(null, view.plot),
      zoom: linked.onZoom,
      reset: linked.onReset,
      mark: linked.onMark,
    });
    const steps = () => ({ from_step: state.get("from"), to_step: state.get("to") });
    this.#add("rank-map", "ranks.json", () => this.#offered.by && { metric: this.#metric(), relative: state.get("rel") && "true", ...steps() }, events,
      (meta) => Math.min(TALL.most, 90 + TALL.row * Math.max(4, Math.min(meta.rows ?? 0, 40))));
    this.#add("layers", "layers.json", () => this.#offered.layer && { ...this.#layer(), letters: innerWidth < NARROW ? 14 : 34, ...steps() }, events,
      (meta) => Math.min(TALL.most, Math.max(TALL.few, 90 + TALL.row * (meta.names?.length ?? 0))));
    this.#add("times", "times.json", () => this.#offered.timed && steps(), () => ({}));
    this.#add("shares", "shares.json", () => this.#offered.shared && steps(), events);
    this.#add("data-ranks", "data-ranks.json", () => this.#offered.read && steps(), () => ({}));
    this.#add("data-steps", "data-steps.json", () => this.#offered.read && steps(), events);
    this.#add("overlap", "overlap.json", () => this.#offered.read && steps(), () => ({}));
    this.#add("batch-sizes", "curves.json", () => this.#offered.read && { metric: SIZES, ...steps() }, events);
    // What the run goes on to do changes little of it.
    this.#add("scaling", "scaling.json", () => this.#offered.scaled && {}, () => ({ arrives: (meta) => show($("scaling-panel"), !meta.nothing) }), null, SELDOM_MS);
    this.#add("noise", "noise.json", () => this.#offered.noise && steps(), (view) => ({ ...events(view), arrives: (meta) => show($("noise-panel"), !meta.nothing) }));
    $("data-numbers").href = `${root}${runPath(run)}/data`;
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const view = this.#views.find((one) => one.node === entry.target);
        view.visible = entry.isIntersecting;
        if (view.visible && view.dirty) this.#draw(view);
      }
    }, { rootMargin: "250px 0px" });
    this.#views.forEach((view) => this.observer.observe(view.node));
    $("by").addEventListener("change", () => state.set({ by: $("by").value }));
    $("rel").addEventListener("click", () => state.set({ rel: state.get("rel") ? "" : "1" }));
    $("layer").addEventListener("change", () => state.set({ layer: $("layer").value }));
  }

  /** @param seldom milliseconds in which it is asked for once, whatever comes in between */
  #add(id, file, parameters, events, height = null, seldom = 0) {
    const node = $(id);
    const view = { node, file, parameters, height, seldom, asked: -Infinity, visible: false, dirty: true };
    view.plot = new Plot(node, events(view));
    this.#views.push(view);
    $(`${id}-files`)?.replaceChildren(exportMenu(view.plot, () => [id, node.dataset.shows].filter(Boolean).join("-")));
  }

  /** What can be chosen, and which of the panels have anything to show. */
  setMetrics(names, families, ranks) {
    const by = names.filter((name) => !name.startsWith("rankscope/"))
      .sort((a, b) => place(BY_RANK, a) - place(BY_RANK, b) || a.localeCompare(b));
    const layers = families
      .map((family) => ({ value: `${family.metric}:${family.table}`, metric: family.metric, table: family.table }))
      .filter((family) => !family.metric.includes("units"))
      .sort((a, b) => (a.table !== "parameters") - (b.table !== "parameters") || place(BY_LAYER, a.metric) - place(BY_LAYER, b.metric));
    this.#offered = {
      by: by.length > 0 && ranks > 1,
      layer: layers.length > 0,
      read: names.includes(SIZES),
      scaled: ranks > 1 && names.includes(THROUGHPUT),
      noise: ranks > 1 && names.includes(OWN) && REDUCED.some((name) => names.includes(name)),
      timed: TIMED.some((name) => names.includes(name)),
      shared: names.includes("step_seconds") && ["wait_seconds", "data_seconds"].some((name) => names.includes(name)),
    };
    options($("by"), by.map((name) => [name, name]), this.state.get("by") || by[0]);
    options($("layer"), layers.map((l) => [l.value, l.table === "parameters" ? l.metric : `${l.metric} of ${l.table}`]), this.state.get("layer") || layers[0]?.value);
    this.layers = layers;
    show($("rank-map-panel"), this.#offered.by);
    show($("layers-panel"), this.#offered.layer);
    show($("time-panel"), this.#offered.timed);
    show($("data-panel"), this.#offered.read);
    this.single = ranks < 2;
    show($("shares").parentElement, this.#offered.shared);
    this.refresh();
  }

  #metric() {
    return this.state.get("by") || $("by").value;
  }

  #layer() {
    const chosen = this.layers.find((l) => l.value === this.state.get("layer")) ?? this.layers[0];
    return { metric: chosen.metric, table: chosen.table };
  }

  refresh() {
    $("rel").setAttribute("aria-pressed", String(this.state.get("rel") !== ""));
    for (const [id, name] of [["by", "by"], ["layer", "layer"]]) if (this.state.get(name)) $(id).value = this.state.get(name);
    for (const view of this.#views) {
      if (view.theme === window.rankscopeTheme.current() && performance.now() - view.asked < view.seldom) continue;
      view.dirty = true;
      // What is hidden is never in view.
      const hidden = view.absent || (FOR_SOME.includes(view.node.id) && $(`${view.node.id}-panel`).hidden);
      if (view.visible || hidden) this.#draw(view);
    }
  }

  async #draw(view) {
    const parameters = view.parameters();
    if (!parameters) return;
    view.dirty = false;
    view.asked = performance.now();
    view.theme = window.rankscopeTheme.current();
    view.node.dataset.shows = parameters.metric ?? "";
    try {
      await view.plot.draw(`${this.folder}/${view.file}`, { ...parameters, theme: view.theme });
      if (view.height && view.plot.drawn) {
        const tall = `${view.height(view.plot.meta)}px`;
        if (view.node.style.height !== tall) {
          view.node.style.height = tall;
          await window.Plotly.Plots.resize(view.node);
        }
      }
      view.absent = false;
      view.node.dataset.drawn = "true";
      const said = $(`${view.node.id}-said`);
      if (said) said.textContent = view.plot.meta.summary ?? "";
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      // Of batches that were counted, and not identified, there is nothing to be shown.
      view.absent = error.status === 404 && READ.includes(view.node.id);
      if (!view.absent) view.plot.say(error.message);
    }
    if (READ.includes(view.node.id)) show(view.node.parentElement, !view.absent && !(this.single && view.node.id === "overlap"));
  }

  point(step, origin) {
    for (const view of this.#views) {
      if (view.plot !== origin && view.plot.drawn && !NOT_STEPS.includes(view.node.id)) view.plot.crosshair(step);
    }
  }
}

function options(select, entries, chosen) {
  const text = JSON.stringify(entries);
  if (select.dataset.entries !== text) {
    select.dataset.entries = text;
    select.replaceChildren(...entries.map(([value, name]) => el("option", { value }, name)));
  }
  if (entries.some(([value]) => value === chosen)) select.value = chosen;
}
