// The curves: one card a metric, drawn when it comes into view, all with one step axis.

import { Problem, query, root, runPath } from "./api.js";
import { $, el, number } from "./dom.js";
import { Plot } from "./plot.js";

const FIRST = [
  "loss", "accuracy", "grad_norm", "grad_norm_local", "grad_norm_preclip", "lr", "step_seconds",
  "samples_per_second", "eval/loss", "eval/accuracy",
];
// A family such as grad_norm/<layer> with more members than this folds into one line, and so does
// what the agent measures about itself.
const MAX_FAMILY = 4;
const FOLDED = { "rankscope/": "What the agent measured about itself" };

const place = (metric) => (FIRST.includes(metric) ? FIRST.indexOf(metric) : FIRST.length);
const byPlace = (a, b) => place(a) - place(b) || a.localeCompare(b);

export class Charts {
  #cards = new Map();
  #metrics = [];
  #hovered = null;

  constructor({ run, state, onMark, onZoom, onReset, onHover }) {
    this.run = run;
    this.state = state;
    this.events = { onMark, onZoom, onReset, onHover };
    this.observer = new IntersectionObserver((entries) => entries.forEach((e) => this.#seen(e)), {
      rootMargin: "250px 0px",
    });
  }

  /** Brings the cards in line with the series that the run has by now and with the filter. */
  setMetrics(names) {
    this.#metrics = [...names].sort(byPlace);
    this.arrange();
  }

  arrange() {
    const wanted = this.state.get("q").toLowerCase();
    const shown = this.#metrics.filter((m) => m.toLowerCase().includes(wanted));
    const families = new Map();
    for (const metric of shown) {
      const family = metric.includes("/") && !metric.startsWith("eval/") ? `${metric.split("/")[0]}/` : metric;
      families.set(family, [...(families.get(family) ?? []), metric]);
    }
    const flat = [];
    const folded = [];
    for (const [family, members] of families) {
      if ((members.length > MAX_FAMILY || FOLDED[family]) && !wanted) folded.push([family, members]);
      else flat.push(...members);
    }
    this.#lay($("charts"), flat.sort(byPlace));
    this.#fold(folded);
    if (!shown.length && this.#metrics.length) {
      $("charts").replaceChildren(el("p", { class: "muted" }, "No metric fits the filter."));
    }
  }

  #lay(container, metrics) {
    const nodes = metrics.map((m) => this.#card(m).node);
    // Moving a node would lose its scroll and focus: only a different order is laid anew.
    if (nodes.length !== container.children.length || nodes.some((n, i) => n !== container.children[i])) {
      container.replaceChildren(...nodes);
    }
  }

  #fold(folded) {
    const box = $("families");
    const open = new Set([...box.querySelectorAll("details[open]")].map((d) => d.dataset.family));
    if ([...box.children].map((d) => d.dataset.key).join() === folded.map(([f, m]) => `${f}:${m.length}`).join()) return;
    box.replaceChildren(
      ...folded.map(([family, members]) => {
        const grid = el("div", { class: "charts" });
        this.#lay(grid, members);
        return el(
          "details",
          { class: "more", "data-family": family, "data-key": `${family}:${members.length}`, open: open.has(family) },
          el("summary", {}, `${FOLDED[family] ?? `${family}\u2026`} (${members.length} series)`),
          grid,
        );
      }),
    );
  }

  #card(metric) {
    const known = this.#cards.get(metric);
    if (known) return known;
    const card = { metric, visible: false, dirty: true };
    const plotNode = el("div", { class: "plot", role: "img", "aria-label": metric });
    card.plot = new Plot(plotNode, {
      hover: (step) => this.events.onHover(step, card.plot),
      leave: () => this.events.onHover(null, card.plot),
      zoom: this.events.onZoom,
      reset: this.events.onReset,
      mark: this.events.onMark,
    });
    card.log = el("button", {
      type: "button", class: "quiet", title: "Logarithmic y axis (y)", "aria-label": `Logarithmic y axis of ${metric}`,
      onclick: () => this.toggleLog(metric),
    }, "log");
    card.wide = el("button", {
      type: "button", class: "quiet", title: "Large", "aria-label": `Show ${metric} large`,
      onclick: () => this.#toggleList("wide", metric),
    }, "\u2922");
    card.numbers = el("a", { class: "button quiet", title: "The numbers as JSON", "aria-label": `Numbers of ${metric}` }, "{}");
    card.readout = el("p", { class: "readout" });
    card.node = el(
      "figure",
      { class: "panel chart", "data-metric": metric },
      el("header", {}, el("h3", { title: metric }, metric), el("span", { class: "tools" }, card.log, card.wide, card.numbers)),
      card.readout,
      plotNode,
    );
    card.node.addEventListener("pointerenter", () => (this.#hovered = metric));
    card.node.addEventListener("pointerleave", () => (this.#hovered = null));
    this.#cards.set(metric, card);
    this.observer.observe(card.node);
    this.#dress(card);
    return card;
  }

  #seen(entry) {
    const card = this.#cards.get(entry.target.dataset.metric);
    if (!card) return;
    card.visible = entry.isIntersecting;
    if (card.visible && card.dirty) this.#draw(card);
  }

  #dress(card) {
    card.log.setAttribute("aria-pressed", this.isLog(card.metric));
    const wide = this.state.get("wide").split(",").includes(card.metric);
    card.wide.setAttribute("aria-pressed", wide);
    card.node.classList.toggle("wide", wide);
    card.numbers.href = `${root}${runPath(this.run)}/series${query({
      metric: card.metric, from_step: this.state.get("from"), to_step: this.state.get("to"),
    })}`;
  }

  isLog(metric) {
    const log = this.state.get("log").split(",");
    return log.includes("all") || log.includes(metric);
  }

  /** Of the chart under the pointer, or of all. */
  toggleLogHere() {
    if (this.#hovered) this.toggleLog(this.#hovered);
    else this.state.set({ log: this.state.get("log") === "all" ? "" : "all" });
  }

  toggleLog(metric) {
    if (this.state.get("log") === "all") {
      this.state.set({ log: this.#metrics.filter((m) => m !== metric).join(",") });
    } else this.#toggleList("log", metric);
  }

  #toggleList(name, metric) {
    const list = new Set(this.state.get(name).split(",").filter(Boolean));
    if (!list.delete(metric)) list.add(metric);
    this.state.set({ [name]: [...list].join(",") });
  }

  /** New data, or another setting: what is in view is drawn now, the rest when it comes into view. */
  refresh() {
    for (const card of this.#cards.values()) {
      card.dirty = true;
      this.#dress(card);
      if (card.visible && card.node.isConnected) this.#draw(card);
    }
  }

  async #draw(card) {
    card.dirty = false;
    const s = this.state;
    try {
      await card.plot.draw(`${this.#figures()}/curves.json`, {
        metric: card.metric,
        ranks: s.get("ranks"),
        highlight: s.get("highlight"),
        from_step: s.get("from"),
        to_step: s.get("to"),
        smoothing: s.get("smoothing") === "0" ? "" : s.get("smoothing"),
        log: this.isLog(card.metric) ? "true" : "",
        theme: window.rankscopeTheme.current(),
      });
      card.node.dataset.drawn = "true";
      this.onDrawn?.(card.plot.meta);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      card.dirty = true;
      card.plot.say(error.message);
    }
  }

  #figures() {
    return `/runs/${encodeURIComponent(this.run)}/figures`;
  }

  /** All charts show the step that one of them is pointed at, and what they have there. */
  point(step, origin) {
    for (const card of this.#cards.values()) {
      if (!card.visible || !card.plot.drawn) continue;
      if (card.plot !== origin) card.plot.crosshair(step);
      card.readout.textContent = step === null ? "" : readout(card.plot.lines(), step);
    }
  }
}

/** What the lines of a chart have at the step nearest to `step`. */
function readout(lines, step) {
  const at = lines
    .map((line) => ({ ...line, i: nearest(line.steps, step) }))
    .filter((line) => line.i >= 0)
    .map((line) => ({ name: line.name, step: line.steps[line.i], value: line.values[line.i] }));
  if (!at.length) return "";
  const head = `step ${at[0].step}:`;
  if (at.length <= 4) return `${head} ${at.map((a) => `${a.name.replace("rank ", "r")} ${number(a.value)}`).join(", ")}`;
  const finite = at.map((a) => a.value).filter(Number.isFinite);
  const strange = at.length - finite.length;
  const range = finite.length ? `${number(Math.min(...finite))} to ${number(Math.max(...finite))}` : "";
  return `${head} ${range}${strange ? `, ${strange} ranks without a finite value` : ""}`;
}

function nearest(steps, step) {
  let low = 0;
  let high = steps.length - 1;
  if (high < 0) return -1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  return Math.abs(steps[high] - step) < Math.abs(steps[low] - step) ? high : low;
}
