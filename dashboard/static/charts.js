// The curves: one card a metric, drawn when it comes into view, all with one step axis.

import { Problem, askAhead, query, root, runPath } from "./api.js";
import { $, el, number, show } from "./dom.js";
import { exportMenu } from "./exports.js";
import { Plot } from "./plot.js";

const FIRST = [
  "loss", "accuracy", "grad_norm", "grad_norm_local", "grad_norm_preclip", "lr", "step_seconds",
  "samples_per_second", "eval/loss", "eval/accuracy", "process_resident_memory_bytes",
  "cuda_memory_allocated_bytes", "cuda_memory_reserved_bytes", "cuda_max_memory_allocated_bytes",
];
// A family such as val/<what> with more members than this folds into one line, and so do the numbers
// of single tensors and what the agent measures about itself.
const MAX_FAMILY = 4;
const FOLDED = { "rankscope/": "What the agent measured about itself" };
// A model has a thousand tensors: charts of this many are laid out at a time, and found by the filter.
const PAGE = 12;
// On a phone a chart is half a screen: these come first, and all others at one touch.
const NARROW = 640;
const FIRST_FEW = 3;
const MAX_FOUND = 24;

const place = (metric) => (FIRST.includes(metric) ? FIRST.indexOf(metric) : FIRST.length);
const byPlace = (a, b) => place(a) - place(b) || a.localeCompare(b);

// What the x axis of the charts can be, where the run has the series that it is made of.
export const AXES = { time: "step_seconds", epoch: "epoch", tokens: "tokens" };

export class Charts {
  #cards = new Map();
  #metrics = [];
  #byTensor = [];
  #unfolded = new Map(); // family -> { shown, filter }
  #hovered = null;
  #all = innerWidth >= NARROW;
  #settle;
  /** Kept once the first curve stands on the page, or it is known that none is in sight. */
  first = new Promise((settle) => (this.#settle = settle));

  constructor({ run, state, onMark, onZoom, onReset, onHover }) {
    this.run = run;
    this.state = state;
    this.events = { onMark, onZoom, onReset, onHover };
    $("charts-all").addEventListener("click", () => this.#showAll());
    this.observer = new IntersectionObserver((entries) => {
      entries.forEach((e) => this.#seen(e));
      if (![...this.#cards.values()].some((card) => card.visible)) this.#settle();
    }, { rootMargin: "250px 0px" });
  }

  /**
   * Brings the cards in line with the series that the run has by now and with the filter.
   * @param names of the series that are of no tensor
   * @param byTensor { metric, table, tensors } each: <metric>/<tensor> are series, too
   */
  setMetrics(names, byTensor) {
    this.#metrics = [...names].sort(byPlace);
    this.#byTensor = [...byTensor].sort((a, b) => byPlace(a.metric, b.metric) || a.table.localeCompare(b.table));
    this.arrange();
  }

  arrange() {
    const wanted = this.state.get("q").toLowerCase();
    const shown = this.#metrics.filter((m) => m.toLowerCase().includes(wanted));
    const groups = new Map();
    for (const metric of shown) {
      const group = metric.includes("/") && !metric.startsWith("eval/") ? `${metric.split("/")[0]}/` : metric;
      groups.set(group, [...(groups.get(group) ?? []), metric]);
    }
    const flat = [];
    const folded = [];
    for (const [group, members] of groups) {
      if ((members.length > MAX_FAMILY || FOLDED[group]) && !wanted) {
        folded.push({ key: group, title: FOLDED[group] ?? `${group}\u2026`, members });
      } else flat.push(...members);
    }
    flat.sort(byPlace);
    let hidden = 0;
    for (const { metric, table, tensors } of this.#byTensor) {
      const members = tensors.map((tensor) => `${metric}/${tensor}`);
      if (!wanted) {
        const of = table === "parameters" ? "" : ` of ${table}`;
        folded.push({ key: `${metric}/${table}`, title: `${metric} by tensor${of}`, members });
        continue;
      }
      const found = members.filter((m) => m.toLowerCase().includes(wanted) && !flat.includes(m));
      const room = Math.max(0, MAX_FOUND - flat.length);
      flat.push(...found.slice(0, room));
      hidden += Math.max(0, found.length - room);
    }
    const kept = this.#all || wanted ? flat.length : FIRST_FEW;
    const left = flat.length - kept;
    $("charts-all").hidden = left <= 0;
    $("charts-all").textContent = `Show ${left} more curve${left === 1 ? "" : "s"}`;
    show($("families"), left <= 0);
    this.#lay($("charts"), flat.slice(0, kept));
    this.#fold(folded);
    const any = this.#metrics.length || this.#byTensor.length;
    if (!this.#cards.size) this.#settle();
    if (!flat.length && wanted && any) $("charts").replaceChildren(el("p", { class: "muted" }, "No metric fits the filter."));
    $("charts-more").textContent = hidden ? `${hidden.toLocaleString("en")} more fit the filter: name a tensor to narrow it down.` : "";
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
    const key = ({ key, members }) => `${key}:${members.length}`;
    if ([...box.children].map((d) => d.dataset.key).join() === folded.map(key).join()) return;
    const open = new Set([...box.querySelectorAll("details[open]")].map((d) => d.dataset.family));
    box.replaceChildren(
      ...folded.map((family) => {
        const body = el("div", {});
        const details = el(
          "details",
          { class: "more", "data-family": family.key, "data-key": key(family), open: open.has(family.key) },
          el("summary", {}, `${family.title} (${family.members.length.toLocaleString("en")} series)`),
          body,
        );
        // Charts are made when their section is opened.
        const unfold = () => details.open && !body.children.length && this.#unfold(body, family);
        details.addEventListener("toggle", unfold);
        unfold();
        return details;
      }),
    );
  }

  #unfold(body, { key, title, members }) {
    if (!this.#unfolded.has(key)) this.#unfolded.set(key, { shown: PAGE, filter: "" });
    const chosen = this.#unfolded.get(key);
    const grid = el("div", { class: "charts" });
    const more = el("button", { type: "button" });
    const lay = () => {
      const fitting = members.filter((m) => m.toLowerCase().includes(chosen.filter.toLowerCase()));
      this.#lay(grid, fitting.slice(0, chosen.shown));
      const left = fitting.length - chosen.shown;
      more.hidden = left <= 0;
      more.textContent = `Show ${Math.min(PAGE, left)} more of ${left.toLocaleString("en")}`;
    };
    const filter = el("input", {
      type: "search", placeholder: "filter, for example conv1", autocomplete: "off", value: chosen.filter, "aria-label": `Which of ${title}`,
      oninput: () => {
        Object.assign(chosen, { filter: filter.value, shown: PAGE });
        lay();
      },
    });
    more.addEventListener("click", () => {
      chosen.shown += PAGE;
      lay();
    });
    lay();
    body.replaceChildren(...(members.length > PAGE ? [el("label", { class: "field" }, "Which ", filter)] : []), grid, el("p", {}, more));
  }

  #card(metric) {
    const known = this.#cards.get(metric);
    if (known) return known;
    const card = { metric, visible: false, dirty: true };
    const plotNode = el("div", { class: "plot", role: "img", tabindex: "0", "aria-label": metric });
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
    card.whole = el("button", {
      type: "button", class: "quiet", title: "Show all values: a few lie far beyond the others", "aria-label": `Show all values of ${metric}`, hidden: true,
      onclick: () => this.#toggleList("whole", metric),
    }, "all");
    card.wide = el("button", {
      type: "button", class: "quiet", title: "Large", "aria-label": `Show ${metric} large`,
      onclick: () => this.#toggleList("wide", metric),
    }, "\u2922");
    card.numbers = el("a", { class: "button quiet", title: "The numbers as JSON", "aria-label": `Numbers of ${metric}` }, "{}");
    card.readout = el("p", { class: "readout", "aria-live": "polite" });
    card.node = el(
      "figure",
      { class: "panel chart", "data-metric": metric },
      el("header", {}, el("h3", { title: metric }, metric), el("span", { class: "tools" }, card.whole, card.log, card.wide, card.numbers, exportMenu(card.plot, () => metric))),
      card.readout,
      plotNode,
    );
    plotNode.addEventListener("keydown", (event) => this.#key(card, event));
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
    const whole = this.#listed("whole", card.metric);
    card.whole.setAttribute("aria-pressed", String(whole));
    card.whole.hidden = !whole && !card.plot.meta?.cut;
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

  /** The card of a metric, if it is laid out. */
  #showAll() {
    this.#all = true;
    this.arrange();
  }

  node(metric) {
    if (!this.#all) this.#showAll();
    const card = this.#cards.get(metric);
    return card?.node.isConnected ? card.node : null;
  }

  toggleLog(metric) {
    if (this.state.get("log") === "all") {
      this.state.set({ log: this.#metrics.filter((m) => m !== metric).join(",") });
    } else this.#toggleList("log", metric);
  }

  #listed(name, metric) {
    return this.state.get(name).split(",").includes(metric);
  }

  /** Left and right point at a step before or after, Home and End at the ends, Escape at none. */
  #key(card, event) {
    const steps = card.plot.lines()[0]?.steps ?? [];
    const last = steps.length - 1;
    if (last < 0) return;
    const at = card.pointed ?? null;
    // A page of steps is a tenth of what is shown.
    const far = Math.max(1, Math.round(last / 10));
    const moves = {
      ArrowLeft: at === null ? last : at - 1, ArrowRight: at === null ? 0 : at + 1,
      PageUp: (at ?? 0) - far, PageDown: (at ?? last) + far, Home: 0, End: last, Escape: null,
    };
    if (!Object.hasOwn(moves, event.key)) return;
    event.preventDefault();
    card.pointed = moves[event.key] === null ? null : Math.min(last, Math.max(0, moves[event.key]));
    const step = card.pointed === null ? null : steps[card.pointed];
    this.events.onHover(step, card.plot);
    card.plot.crosshair(step);
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

  /** Asks for the figure of what most runs have and the page shows first, before it knows the series. */
  ask() {
    askAhead(...this.#figure(FIRST[0]));
  }

  /** Path and parameters of a metric's figure. */
  #figure(metric) {
    const s = this.state;
    return [`${this.#figures()}/curves.json`, {
      metric,
      ranks: s.get("ranks"),
      highlight: s.get("highlight"),
      from_step: s.get("from"),
      to_step: s.get("to"),
      smoothing: s.get("smoothing") === "0" ? "" : s.get("smoothing"),
      log: this.isLog(metric) ? "true" : "",
      axis: s.get("axis"),
      whole: this.#listed("whole", metric) ? "true" : "",
      theme: window.rankscopeTheme.current(),
    }];
  }

  async #draw(card) {
    card.dirty = false;
    try {
      await card.plot.draw(...this.#figure(card.metric));
      card.node.dataset.drawn = "true";
      this.#dress(card);
      this.onDrawn?.(card.plot.meta);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      card.dirty = true;
      card.plot.say(error.message);
    } finally {
      this.#settle();
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
