// The table of ranks: who was last heard of when, and where. Suspicious ones come first, unless the
// reader sorts; filtered by words, grouped by host.

import { age } from "./api.js";
import { $, badge, count, debounce, duration, el, fill, number, parseRanks, seconds, show, stateBadge, stepText } from "./dom.js";

const SHOWN = 16;
// The least of what `rank.silent` asks for: a rank that is silent here has its alert by and by.
const SILENT_BEATS = 3;
const MIN_SILENCE = 30; // seconds

// What each column is sorted by; the first click has the end of interest on top.
const COLUMNS = {
  rank: { title: "Rank", of: (r) => r.rank },
  state: { title: "State", of: (r) => (r.quiet ? "silent" : r.state) },
  step: { title: "Last step", number: true, of: (r) => r.last_step },
  heard: { title: "Last heard of", of: (r) => -Date.parse(r.last_seen_at), falls: true },
  loss: { title: "Loss", number: true, of: (r) => numeric(r.loss), falls: true },
  time: { title: "Step time", number: true, of: (r) => numeric(r.step_seconds), falls: true },
  host: { title: "Host", of: (r) => r.host },
};

/** What is no number is the most interesting one of all. */
const numeric = (value) => (typeof value === "number" ? value : value === null ? -Infinity : Infinity);

/** A rank that runs, for all it said, but has not been heard of for three of its promised intervals. */
const silent = (rank) =>
  rank.state === "running" && age(rank.last_seen_at) > Math.max(MIN_SILENCE, SILENT_BEATS * rank.heartbeat_seconds);

/** `-time` sorts by step time, the longest first; `time` the shortest first; empty: suspects first. */
export const isOrder = (text) => text === "" || text.replace(/^-/, "") in COLUMNS;

export class RankTable {
  #everyone = false;
  #facts = null;

  /** @param state the page's address: `rsort`, `rq`, `rhost` */
  constructor(state) {
    this.state = state;
    $("ranks-filter").addEventListener("input", debounce(150, () => state.set({ rq: $("ranks-filter").value.trim() })));
    $("ranks-hosts").addEventListener("click", () => state.set({ rhost: state.get("rhost") ? "" : "1" }));
    $("ranks-more").addEventListener("click", () => {
      this.#everyone = !this.#everyone;
      this.draw();
    });
    $("ranks-head").addEventListener("click", (event) => {
      const name = event.target.closest("button")?.dataset.column;
      if (name) state.set({ rsort: next(state.get("rsort"), name) });
    });
    if (state.get("rq")) $("ranks-filter").value = state.get("rq");
  }

  /** @param named Set of ranks that open alerts name */
  set(run, ranks, named) {
    this.#facts = { run, ranks, named };
    this.draw();
  }

  draw() {
    if (!this.#facts) return;
    const { run, ranks, named } = this.#facts;
    const rows = ranks.map((rank) => {
      const quiet = silent(rank);
      return { ...rank, quiet, named: named.has(rank.rank), suspect: quiet || named.has(rank.rank) || rank.state === "failed" };
    });
    const order = this.state.get("rsort");
    rows.sort((a, b) => b.named - a.named || b.quiet - a.quiet || b.suspect - a.suspect || a.rank - b.rank);
    if (order) rows.sort(compared(order));
    const missing = run.world_size - ranks.length;
    const suspects = rows.filter((r) => r.suspect).length;
    const fitting = rows.filter(fits(this.state.get("rq")));
    $("ranks-summary").textContent = [
      `${ranks.length} of ${run.world_size} have reported`,
      missing > 0 && `${missing} missing`,
      suspects > 0 && `${suspects} suspicious`,
      fitting.length < rows.length && `${fitting.length} fit the filter`,
    ].filter(Boolean).join(", ");
    head(order);
    $("ranks-hosts").setAttribute("aria-pressed", String(this.state.get("rhost") !== ""));
    const limit = this.#everyone ? fitting.length : Math.max(SHOWN, order ? 0 : Math.min(suspects, 2 * SHOWN));
    const shown = fitting.slice(0, limit);
    fill($("ranks-body"), this.state.get("rhost") ? grouped(shown, fitting, run) : shown.map((rank) => row(rank, run)),
      fitting.length === 0 && el("tr", {}, el("td", { colspan: Object.keys(COLUMNS).length, class: "muted whole" }, "No rank fits the filter.")));
    show($("ranks-more"), fitting.length > SHOWN);
    $("ranks-more").textContent = this.#everyone ? "Show fewer" : `Show all ${fitting.length} ranks`;
  }
}

/** First click, second click, third click: sorted, the other way round, as it was. */
function next(order, name) {
  const first = COLUMNS[name].falls ? `-${name}` : name;
  const second = COLUMNS[name].falls ? name : `-${name}`;
  return { [first]: second, [second]: "" }[order] ?? first;
}

function compared(order) {
  const { of } = COLUMNS[order.replace(/^-/, "")];
  const sign = order.startsWith("-") ? -1 : 1;
  return (a, b) => {
    const [x, y] = [of(a), of(b)];
    if (typeof x === "string") return sign * x.localeCompare(y, "en", { numeric: true });
    return x === y ? 0 : sign * (x < y ? -1 : 1);
  };
}

/** A list of ranks (0,4-7), or words each of which is in the rank's host, state or error. */
function fits(text) {
  const ranges = parseRanks(text);
  if (!text) return () => true;
  if (ranges) return ({ rank }) => ranges.some(([low, high]) => low <= rank && rank <= high);
  const words = text.toLowerCase().split(/\s+/);
  return (rank) => {
    const said = `rank ${rank.rank} ${rank.host} ${rank.quiet ? "silent" : rank.state} ${rank.error ?? ""} ${rank.named ? "named" : ""}`.toLowerCase();
    return words.every((word) => said.includes(word));
  };
}

function head(order) {
  const [name, way] = [order.replace(/^-/, ""), order.startsWith("-") ? "descending" : "ascending"];
  fill($("ranks-head"), Object.entries(COLUMNS).map(([key, column]) => el(
    "th",
    { scope: "col", class: column.number ? "number" : null, "aria-sort": key === name ? way : null },
    el("button", { type: "button", class: "sort", "data-column": key }, column.title),
  )));
}

/** Rows under a line for each host, in the order in which the hosts come. */
function grouped(shown, all, run) {
  const hosts = new Map();
  for (const rank of shown) hosts.set(rank.host, [...(hosts.get(rank.host) ?? []), rank]);
  return [...hosts].map(([host, ranks]) => {
    const there = all.filter((rank) => rank.host === host);
    const suspects = there.filter((rank) => rank.suspect).length;
    const times = there.map((rank) => rank.step_seconds).filter((t) => typeof t === "number").sort((a, b) => a - b);
    return [
      el("tr", { class: "host", "data-host": host }, el(
        "th", { scope: "rowgroup", colspan: Object.keys(COLUMNS).length, class: "whole" }, host || "no host reported",
        el("span", { class: "muted" }, ` ${there.length} rank${there.length > 1 ? "s" : ""}`,
          times.length > 0 && `, median step ${seconds(times[times.length >> 1])}`),
        suspects > 0 && [" ", badge(`${suspects} suspicious`, "critical", "\u25B2")],
      )),
      ...ranks.map((rank) => row(rank, run)),
    ];
  });
}

function row(rank, run) {
  const behind = run.last_step - rank.last_step;
  return el(
    "tr",
    { class: rank.suspect ? "suspect" : null, "data-rank": rank.rank },
    el("th", { scope: "row" }, `${rank.rank}`, rank.named && [" ", badge("named by an alert", "critical", "\u25B2")]),
    el("td", { "data-label": "State" }, rank.quiet ? badge("silent", "critical", "?") : stateBadge(rank.state),
      rank.phase && rank.state === "running" && el("span", { class: "muted" }, ` in ${rank.phase}`),
      rank.error && el("div", { class: "is-critical" }, rank.error)),
    el("td", { "data-label": "Last step", class: "number" }, stepText(rank.last_step),
      behind > 1 && el("span", { class: "muted" }, ` (${count(behind)} behind)`)),
    el("td", { "data-label": "Heard of" }, `${duration(age(rank.last_seen_at))} ago`),
    el("td", { "data-label": "Loss", class: "number" }, number(rank.loss)),
    el("td", { "data-label": "Step time", class: "number" }, seconds(rank.step_seconds)),
    el("td", { "data-label": "Host" }, rank.host || "\u2013"),
  );
}
