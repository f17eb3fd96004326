// The chart of each alert: what it is about, at its step, beside its text.

import { Problem, get } from "./api.js";
import { el } from "./dom.js";
import { Plot } from "./plot.js";

// Share of the steps of an alert by which it has to grow: a tenth of the chart's width.
const VISIBLE = 0.1;

export class AlertCharts {
  #charts = new Map(); // id of the alert -> { node, plot, last }

  constructor({ run, onMark }) {
    this.folder = `/runs/${encodeURIComponent(run)}/figures/alerts`;
    this.onMark = onMark;
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const chart = [...this.#charts.values()].find((one) => one.node === entry.target);
        if (!chart) continue;
        chart.visible = entry.isIntersecting;
        if (chart.visible && chart.dirty) this.#draw(chart);
      }
    }, { rootMargin: "250px 0px" });
  }

  /** The element of an alert's chart: one and the same each time, however often its card is made. */
  of(alert) {
    let chart = this.#charts.get(alert.id);
    if (!chart) {
      const node = el("div", { class: "plot alert-plot", role: "img", "aria-label": `Chart of ${alert.title}` });
      chart = { id: alert.id, node, plot: new Plot(node, { mark: this.onMark }), visible: false, dirty: true, last: null, state: null };
      this.#charts.set(alert.id, chart);
      this.observer.observe(node);
    }
    // One that goes on has a chart that becomes longer: anew when that can be seen.
    const grown = chart.last === null ? Infinity : alert.last_step - chart.last;
    if (chart.state !== alert.state || grown > VISIBLE * (alert.last_step - alert.first_step)) {
      [chart.last, chart.state] = [alert.last_step, alert.state];
      chart.dirty = true;
      if (chart.visible) this.#draw(chart);
    }
    return chart.node;
  }

  #path(id) {
    return `${this.folder}/${encodeURIComponent(id)}.json`;
  }

  /** `divergence`, the series that shows what an alert is about, or null where none does. */
  async shows(alert) {
    const drawn = this.#charts.get(alert.id)?.plot.meta?.shows;
    if (drawn !== undefined) return drawn || null;
    try {
      return (await get(this.#path(alert.id))).layout.meta.shows || null;
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      return null;
    }
  }

  refresh() {
    for (const chart of this.#charts.values()) {
      chart.dirty = true;
      if (chart.visible && chart.node.isConnected) this.#draw(chart);
    }
  }

  async #draw(chart) {
    chart.dirty = false;
    try {
      await chart.plot.draw(this.#path(chart.id), { theme: window.rankscopeTheme.current() });
      // A run need not have a series that shows it: then there is no chart, and no room for one.
      chart.node.hidden = !chart.plot.meta.shows;
      chart.node.dataset.drawn = "true";
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      chart.dirty = true;
    }
  }
}
