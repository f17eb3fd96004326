// The page of one run.

import { agentPanel } from "./agent.js";
import { alertCard, families, fillAlerts } from "./alert_card.js";
import { AlertCharts } from "./alert_charts.js";
import { Problem, age, get, root, runPath, serverNow } from "./api.js";
import { AXES, Charts } from "./charts.js";
import { checks } from "./checks.js";
import { comparison } from "./ranks_at_step.js";
import { differing } from "./configurations.js";
import { contents } from "./contents.js";
import { $, debounce, duration, el, fill, parseRanks, rankList, severitySign, show, stateBadge, stepText, throttle, verdictBadge } from "./dom.js";
import { exportMenu } from "./exports.js";
import { onKey, showError } from "./frame.js";
import { REPLICAS, headline, settled, staleness } from "./headline.js";
import { Live } from "./live.js";
import { Overviews } from "./overviews.js";
import { Plot, fetchPlotly } from "./plot.js";
import { QueryState } from "./query.js";
import { RankTable, isOrder } from "./ranks.js";
import { plain, settings } from "./settings.js";
import { tagLinks } from "./tags.js";

const FACTS_MS = 1000;
// New points alone: what they change is drawn more seldom still.
const POINTS_MS = 5000;
const CHARTS_MS = 3000;
// A chart is drawn anew when it grows by this share of its width, some 10 pixels, or after so long.
const VISIBLE = 0.02;
const LATEST_MS = 10_000;
const MAPS_MS = 5000; // Maps of all steps, of which a column more is hardly seen.
const TICK_MS = 1000;
const MAX_CHIPS = 16;
const PATIENCE = 60;
const MAX_EVENTS = 20;
// Newest runs of a project among which a good one is looked for.
const RECENT = 50;
// More alerts than this stand between the headline and the curves: none of these is in sight then.
const ABOVE = 1;

const run = document.body.dataset.run;
const path = runPath(run);
const state = new QueryState({
  q: "", smoothing: "0", log: "", ranks: "", highlight: "", from: "", to: "", stage: "", step: "", wide: "", whole: "",
  axis: "", by: "", rel: "", layer: "", rsort: "", rq: "", rhost: "",
}, (values) => {
  const isStep = (text) => /^\d{1,15}$/.test(text);
  if (!isStep(values.from) || !isStep(values.to) || Number(values.from) > Number(values.to)) values.from = values.to = "";
  if (!isStep(values.step)) values.step = "";
  if (!Object.hasOwn(AXES, values.axis)) values.axis = "";
  if (!isOrder(values.rsort)) values.rsort = "";
  if (!(Number(values.smoothing) >= 0 && Number(values.smoothing) < 1)) values.smoothing = "0";
  for (const name of ["ranks", "highlight"]) if (parseRanks(values[name]) === null) values[name] = "";
});
let good = null; // { name, address, words }: of the runs of the project that passed before this one the most alike.
let facts = null; // { run, verdict, alerts, ranks }
let drawn = ""; // What the charts have been told of.
let charted = { step: 0, judged: 0, alerts: "", at: -Infinity }; // What they show.
let overdue = null; // Timer of what has grown too little to be seen.
let patience = PATIENCE;
let arrived = false;
let featured = null; // The alert that the headline speaks of.
let pointed = null; // The id of the alert that a link or a chart leads to.
let stages = "";
let recorded = { names: [], byTensor: [] }; // Series of the run.

// ------------------------------------------------------------------------------------------ charts

const zoom = (from, to) => state.set({ from, to }, { remember: true });
const allSteps = () => state.set({ from: "", to: "" }, { remember: true });
const pointAtAlert = (id) => {
  pointed = id;
  tellAlerts();
  const card = $(`alert-${id}`);
  card?.scrollIntoView({ block: "center" });
  card?.focus({ preventScroll: true });
};

const point = (step, origin) => {
  charts.point(step, origin);
  overviews.point(step, origin);
  if (heat !== origin && heat.drawn) heat.crosshair(step);
};
const linked = { onMark: pointAtAlert, onZoom: zoom, onReset: allSteps, onHover: point };
const charts = new Charts({ run, state, ...linked });
charts.onDrawn = chips;
const overviews = new Overviews({ run, state, linked });
const alertCharts = new AlertCharts({ run, onMark: pointAtAlert });
const rankTable = new RankTable(state);
const heat = new Plot($("heat"), {
  hover: (step) => point(Math.round(step), heat),
  leave: () => point(null, heat),
  zoom,
  reset: allSteps,
  mark: pointAtAlert,
  click: (step) => state.set({ step }),
});
const matrix = new Plot($("matrix"));
$("heat-files").replaceChildren(exportMenu(heat, () => "divergence"));

/** Link and step at which the card is shown: those that were chosen, else those of the headline's alert. */
function compared() {
  const chosen = { stage: state.get("stage"), step: state.get("step") };
  if (chosen.stage || !featured || !REPLICAS.test(featured.kind)) return chosen;
  // Before the first picture it is not known which links were compared.
  if (heat.meta && !(heat.meta.stages ?? []).includes(featured.stage)) return chosen;
  return { stage: featured.stage, step: chosen.step || String(featured.first_step) };
}

async function drawDivergence() {
  const theme = window.rankscopeTheme.current();
  const { stage, step } = compared();
  try {
    $("heat").style.setProperty("--height", `${Math.min(520, Math.max(190, 100 + 26 * (facts.ranks.length || 1)))}px`);
    await heat.draw(`/runs/${encodeURIComponent(run)}/figures/divergence.json`, {
      stage, from_step: state.get("from"), to_step: state.get("to"), selected: step, theme,
    });
    if (compared().stage !== stage) return void (await drawDivergence());
    offerStages(heat.meta);
    $("heat").dataset.drawn = "true";
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    heat.say(error.message);
  }
  try {
    await matrix.draw(`/runs/${encodeURIComponent(run)}/figures/distances.json`, {
      stage, step, theme, // the stage that the run has, by now
    });
    $("matrix-title").textContent = `Distance of every two ranks at step ${matrix.meta.step}`;
    $("matrix").dataset.drawn = "true";
    await comparison($("comparison"), path, matrix.meta.step, heat.meta?.stage ?? "");
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    matrix.say(error.message);
  }
}

function offerStages(meta) {
  const offered = [...(meta.stages ?? [])];
  if (!offered.length && meta.stage) offered.push(meta.stage);
  const select = $("stage");
  if (offered.join() !== stages) {
    stages = offered.join();
    select.replaceChildren(...offered.map((s) => el("option", { value: s }, s.replaceAll("_", " "))));
  }
  if (meta.stage) select.value = meta.stage;
  // An address may name a link that was not compared in this run.
  if (offered.length && state.get("stage") && !offered.includes(state.get("stage"))) state.set({ stage: "" });
  // Where nothing can be chosen there is no choice, and no key to colours that do not occur.
  for (const node of [select.parentElement, $("heat-key")]) show(node, (meta.stages ?? []).length > 0);
}

function offerAxes(names) {
  for (const option of $("axis").options) option.hidden = option.value !== "" && !names.includes(AXES[option.value]);
  show($("axis").parentElement, [...$("axis").options].filter((option) => !option.hidden).length > 1);
}

function chips(meta) {
  const colors = Object.entries(meta.colors ?? {});
  if (!colors.length || colors.length > MAX_CHIPS || colors.length < 2) return;
  const chosen = new Set(state.get("highlight").split(",").filter(Boolean));
  const nodes = colors.map(([rank, color]) => {
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = color;
    return el("button", { type: "button", "aria-pressed": String(chosen.has(rank)), "data-rank": rank }, swatch, `rank ${rank}`);
  });
  fill($("chips"), nodes);
}

$("chips").addEventListener("click", (event) => {
  const rank = event.target.closest("button")?.dataset.rank;
  if (rank === undefined) return;
  const chosen = new Set(state.get("highlight").split(",").filter(Boolean));
  if (!chosen.delete(rank)) chosen.add(rank);
  state.set({ highlight: [...chosen].join(",") });
});

const refreshCharts = throttle(CHARTS_MS, async () => {
  if (!facts || document.hidden) return;
  try {
    const { items, families: byTensor } = await get(`${path}/metrics`, { tensors: "false" });
    const names = items.map((metric) => metric.name);
    charts.setMetrics(names, byTensor);
    offerAxes(names);
    recorded = { names, byTensor };
  } catch (error) {
    showError(error);
  }
  charts.refresh();
  // The maps stand below: line, server and browser are for the curves at first.
  charts.first.then(refreshMaps);
});

const refreshMaps = throttle(MAPS_MS, () => {
  overviews.setMetrics(recorded.names, recorded.byTensor, facts.ranks.length);
  drawDivergence();
});

// ------------------------------------------------------------------------------------------ facts

/** All items of a list, page by page. */
async function everything(address, parameters = {}) {
  const items = [];
  let cursor = null;
  do {
    const page = await get(address, { ...parameters, limit: 500, cursor });
    items.push(...page.items);
    cursor = page.next_cursor;
  } while (cursor);
  return items;
}

async function loadFacts() {
  try {
    const [about, verdict, alerts] = await Promise.all([
      get(path), get(`${path}/verdict`), everything(`${path}/alerts`, { consequences: true }),
    ]);
    facts = { run: about, verdict, alerts, ranks: about.rank_status };
    // What is said in words is here: now the charts may take the line. The browser reads the library
    // when there is something to be drawn.
    if (!arrived && about.last_step >= 0) {
      fetchPlotly();
      if (families(alerts).length <= ABOVE) charts.ask();
    }
    showError(null);
    live.answers(true);
  } catch (error) {
    showError(error);
    live.answers(error.status !== 0);
    return;
  }
  announce();
  if (!arrived) {
    arrive();
    // Server and browser are for the curves at first.
    if (facts.verdict.verdict !== "pass") charts.first.then(() => findGood().catch(showError));
  }
  const now = [facts.run.last_step, facts.run.evaluated_step, facts.alerts.length].join();
  if (now !== drawn) {
    drawn = now;
    chartsGrew();
  }
  // The evaluation follows the data, and no event reports a verdict: ask again while it lags.
  patience = facts.verdict.verdict === "pending" ? patience - 1 : PATIENCE;
  if (facts.verdict.verdict === "pending" && patience > 0) setTimeout(refreshLater, FACTS_MS);
}

/** Draws the charts anew where it can be seen that they have grown, and else a while later. */
function chartsGrew() {
  const { last_step: step, evaluated_step: judged } = facts.run;
  const alerts = facts.alerts.map((alert) => `${alert.id}${alert.state}`).join();
  const grew = Math.max(step - charted.step, judged - charted.judged) > VISIBLE * step;
  const left = charted.at + LATEST_MS - Date.now();
  clearTimeout(overdue);
  overdue = null;
  if (grew || left <= 0 || alerts !== charted.alerts || facts.run.state !== "running") {
    charted = { step, judged, alerts, at: Date.now() };
    refreshCharts();
  } else overdue = setTimeout(chartsGrew, left);
}

/** Of a run that does not pass: what changed since one did is the first question. */
async function findGood() {
  const { project, started_at: began } = facts.run;
  const { items } = await get("/api/v1/runs", { project, order: "newest", limit: RECENT });
  const passed = items.filter((one) => one.id !== run && one.verdict === "pass" && Date.parse(one.started_at) < Date.parse(began));
  if (!passed.length) return;
  const counts = passed.map((one) => differing(one, facts.run));
  // Newest first: of those that differ in as few settings the newest one.
  const fewest = Math.min(...counts);
  const found = passed[counts.indexOf(fewest)];
  const query = [found.id, run].map((id) => `runs=${encodeURIComponent(id)}`).join("&");
  const words = fewest === 1 ? "1 setting differs" : `${fewest || "no"} settings differ`;
  good = { name: found.name || found.id, address: `${root}/compare?${query}`, words };
  tick();
}

/** The address may name an alert, whose card was not there when the browser looked for it. */
function arrive() {
  arrived = true;
  if (location.hash.startsWith("#alert-")) pointAtAlert(location.hash.slice("#alert-".length));
}
addEventListener("hashchange", arrive);

const refreshFacts = throttle(FACTS_MS, loadFacts);
// New points come all the time, and alerts do not wait for them.
const refreshLater = throttle(POINTS_MS, loadFacts);
let greeted = false; // Whether the stream has said once what the state of the run is.
const reported = new Map(); // id of an alert -> what was reported of it last

/** An event of the run: alerts and states are asked for at once, what only goes on more seldom. */
function heard(name, data) {
  if (name === "points" && facts) {
    facts.run.last_step = Math.max(facts.run.last_step, data.last_step);
    facts.run.last_seen_at = new Date(serverNow()).toISOString();
  }
  let news = name !== "points";
  if (name === "state" && !greeted) {
    // The first is no change; after a break of the stream, it says that there may have been some.
    greeted = true;
    news = facts !== null && (data.state !== facts.run.state || data.world_size !== facts.run.world_size);
    if (!news) return;
  }
  if (name === "alert") {
    // Numbers in its title change with every step.
    const state = JSON.stringify([data.severity, data.state, data.acknowledged, data.silence]);
    news = reported.get(data.id) !== state;
    reported.set(data.id, state);
  }
  (news ? refreshFacts : refreshLater)();
}

function announce() {
  const { run: about, verdict, ranks } = facts;
  const started = about.last_step >= 0;
  live.follows(about.state === "running");
  featured = headline($("headline"), facts);
  for (const id of ["checks-panel", "facts"]) show($(id));
  show($("empty"), !started);
  for (const id of ["toolbar", "curves", "divergence"]) show($(id), started);
  document.title = `${featured ? `${severitySign(featured.severity)} ` : ""}${about.name || run} - Rankscope`;
  $("verdict").replaceChildren(verdictBadge(settled(about.id, verdict.verdict)));
  checks($("checks"), verdict);
  $("checks-count").textContent = counted(verdict.checks);
  tellAlerts();
  tick();
  show($("ranks-panel"), ranks.length > 0);
  fill($("settings"), settings(plain(about.config ?? {})));
  $("config").textContent = JSON.stringify(about.config ?? {}, null, 2);
  show($("about"));
  agentPanel(about);
  notes($("notes"), about);
}

/** "43 passed, 8 not run" */
function counted(all) {
  const words = [["failed", "failed"], ["passed", "passed"], ["not_run", "not run"]];
  const of = (state) => all.filter((check) => check.state === state).length;
  return words.filter(([state]) => of(state)).map(([state, word]) => `${of(state)} ${word}`).join(", ");
}

function tellAlerts() {
  const roots = families(facts.alerts);
  const open = roots.filter(([a]) => a.state === "open").length;
  show($("alerts-panel"), roots.length > 0);
  $("alerts-count").textContent = `${open} open, ${roots.length - open} resolved`;
  const byId = new Map(roots.map(([alert]) => [alert.id, alert]));
  const cards = roots.map(([alert, consequences]) =>
    alertCard(alert, consequences, {
      brief: alert === featured, pointed: alert.id === pointed, chart: true, onChanged: loadFacts, onStep: showStep,
    }));
  fillAlerts($("alerts"), cards, (id) => alertCharts.of(byId.get(id)));
}

/** What changes without an event: ages. */
function tick() {
  if (!facts) return;
  const { run: about, ranks } = facts;
  fill(
    $("facts"),
    fact("Run", el("span", {}, about.name || about.id)),
    fact("Project", about.project),
    about.tags.length > 0 && fact("Tags", tagLinks(about.tags)),
    fact("State", stateBadge(about.state)),
    fact("Ranks", `${ranks.length} of ${about.world_size}`,
      ranks.length < about.world_size && el("span", { class: "stale" }, ` (${about.world_size - ranks.length} missing)`)),
    fact("Last step", stepText(about.last_step)),
    fact("Last heard of", staleness(about) ?? ago(about.last_seen_at)),
    about.baseline && fact("Baseline", BASELINE[about.baseline]),
    good && fact("Last passing run", el("a", { href: good.address, title: "Of those like it the newest; what differs: configuration, curves, alerts, bits" }, `compare with ${good.name}`), ` (${good.words})`),
    fact("Started", el("time", { datetime: about.started_at, title: about.started_at }, ago(about.started_at))),
  );
  // As the charts have it: what follows from an alert and mere information make nobody a suspect.
  const serious = facts.alerts.filter((a) => a.state === "open" && !a.parent && !a.silenced && a.severity !== "info");
  const suspects = new Set(serious.flatMap((a) => a.ranks));
  rankTable.set(about, ranks, suspects);
}

const BASELINE = { passed: "of its project: it passed", marked: "of its project, by hand", unmarked: "taken away by hand" };
const ago = (time) => (age(time) < 2 ? "just now" : `${duration(age(time))} ago`);
const fact = (name, ...value) => el("div", {}, el("dt", {}, name), el("dd", {}, ...value));

/** What the agents said, but for their own faults: these are in their panel. */
function notes(node, about) {
  const events = about.events.filter((event) => event.kind !== "agent.fault");
  fill(
    node,
    events.length > 0 && el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { class: "fold" },
        el("caption", {}, "What the agents said"),
        el("thead", {}, el("tr", {}, ["Kind", "Rank", "Step", "Text"].map((t) => el("th", { scope: "col" }, t)))),
        el("tbody", {}, events.slice(0, MAX_EVENTS).map((event) => el(
          "tr",
          {},
          el("th", { scope: "row" }, el("code", {}, event.kind)),
          el("td", { "data-label": "Rank" }, event.rank),
          el("td", { "data-label": "Step" }, stepText(event.step)),
          el("td", {}, event.text || JSON.stringify(event.data)),
        ))),
      ),
    ),
  );
}

/** To what the alert is about: its own metric, or where the ranks differ, around its step. */
async function showStep(alert) {
  const width = Math.max(20, alert.last_step - alert.first_step);
  state.set({
    from: Math.max(0, alert.first_step - Math.ceil(width / 2)),
    to: Math.min(facts.run.last_step, alert.last_step + Math.ceil(width / 2)),
    step: alert.first_step,
    highlight: rankList(alert.ranks).replaceAll(" ", ""),
  }, { remember: true });
  const shown = await alertCharts.shows(alert);
  if (shown && shown !== "divergence") state.set({ q: "" });
  const target = shown === "divergence" || !shown ? $("divergence") : charts.node(shown) ?? $("curves");
  for (const section of [target, target.closest("[data-section]")]) {
    if (section?.classList.contains("folded")) section.querySelector(".fold-button").click();
  }
  target.scrollIntoView({ block: "center" });
}

// ------------------------------------------------------------------------------------------ controls

function dressControls() {
  $("filter").value = state.get("q");
  $("smoothing").value = state.get("smoothing");
  $("smoothing-value").textContent = state.get("smoothing");
  $("log").setAttribute("aria-pressed", String(state.get("log") === "all"));
  $("axis").value = state.get("axis");
  $("ranks").value = state.get("ranks");
  $("highlight").value = state.get("highlight");
  const zoomed = state.get("from") !== "" || state.get("to") !== "";
  show($("range"), zoomed);
  $("range-text").textContent = `steps ${state.get("from")} to ${state.get("to")}`;
}

/** What is wrong with a list of ranks; null where it can be used. */
function wrongRanks(text) {
  const ranks = parseRanks(text);
  if (ranks === null) return `${text} is no list of ranks: write 0,4-7`;
  const there = facts?.ranks.map((rank) => rank.rank) ?? [];
  const fits = ([low, high]) => there.some((rank) => low <= rank && rank <= high);
  return ranks.length && there.length && !ranks.some(fits) ? `No rank ${text} in this run` : null;
}

function ranksField(id) {
  const change = debounce(300, () => {
    const text = $(id).value.replace(/\s/g, "");
    // Still being written.
    if (/[-,]$/.test(text)) return;
    const wrong = wrongRanks(text);
    $(id).setAttribute("aria-invalid", String(wrong !== null));
    $("ranks-hint").textContent = wrong ?? "";
    show($("ranks-hint"), wrong !== null);
    if (wrong === null) state.set({ [id]: text });
  });
  $(id).addEventListener("input", change);
}
ranksField("ranks");
ranksField("highlight");
$("filter").addEventListener("input", debounce(150, () => state.set({ q: $("filter").value })));
const smooth = debounce(120, () => state.set({ smoothing: String(Number($("smoothing").value)) }));
$("smoothing").addEventListener("input", () => {
  $("smoothing-value").textContent = $("smoothing").value;
  smooth();
});
$("log").addEventListener("click", () => state.set({ log: state.get("log") === "all" ? "" : "all" }));
$("axis").addEventListener("change", () => state.set({ axis: $("axis").value }));
$("range-reset").addEventListener("click", allSteps);
$("stage").addEventListener("change", () => state.set({ stage: $("stage").value, step: "" }));
onKey("y", () => charts.toggleLogHere());
onKey("0", allSteps);

state.onChange((changed) => {
  dressControls();
  if (!facts) return;
  const touches = (...names) => changed.some((name) => names.includes(name));
  if (touches("q")) charts.arrange();
  if (touches("smoothing", "log", "ranks", "highlight", "from", "to", "wide", "whole", "axis")) charts.refresh();
  if (touches("by", "rel", "layer", "from", "to")) overviews.refresh();
  if (touches("rsort", "rq", "rhost")) rankTable.draw();
  if (touches("stage", "step", "from", "to")) drawDivergence();
});
document.addEventListener("themechange", () => {
  charts.refresh();
  overviews.refresh();
  alertCharts.refresh();
  if (facts) drawDivergence();
});

// ------------------------------------------------------------------------------------------ life

dressControls();
contents($("contents"), () => {
  charts.refresh();
  overviews.refresh();
  if (facts) drawDivergence();
});
const live = new Live(`${root}${path}/stream`, ["points", "alert", "state"], heard);
setInterval(() => !document.hidden && tick(), TICK_MS);
loadFacts();
