// Two runs side by side: both on one chart, what their configurations, checks and alerts distinguish.

import { get, root, runPage } from "./api.js";
import { $, badge, count, el, fill, number, ranksText, severityBadge, show, stateBadge, stepText, verdictBadge } from "./dom.js";
import { onKey, showError } from "./frame.js";
import { Plot } from "./plot.js";

const MAX_CHARTS = 24;
// What the headline names of the settings that differ, and of a value: the table has all.
const NAMED = 4;
const VALUE_LENGTH = 40;
/** `?runs=a,b` or `?runs=a&runs=b`: an id may have a comma in it. */
const given = new URLSearchParams(location.search).getAll("runs");
const runs = given.length === 1 ? given[0].split(",") : given;
let logarithmic = false;
let plots = [];

async function load() {
  const headline = $("headline");
  try {
    const found = await get(`/api/v1/compare?${runs.map((run) => `runs=${encodeURIComponent(run)}`).join("&")}`);
    showError(null);
    tell(found);
    await draw(found);
  } catch (error) {
    headline.removeAttribute("aria-busy");
    fill(headline, el("h1", {}, "These runs cannot be compared"), el("p", {}, error.message));
    if (!error.status) showError(error);
  }
}

const TONES = { equal: "ok", differ: "warning", not_compared: "muted" };
const WORDS = { equal: "The same bits", differ: "Not the same bits", not_compared: "Bits not compared" };

function tell({ runs: both, configuration, verdicts, checks, alerts, metrics, bits }) {
  const names = both.map((run) => run.id);
  document.title = `${names.join(" and ")} - Rankscope`;
  const tone = TONES[bits.state];
  $("headline").className = `panel headline is-${tone}`;
  $("headline").removeAttribute("aria-busy");
  fill(
    $("headline"),
    el("p", { class: `state is-${tone}` }, WORDS[bits.state]),
    el("h1", {}, names.flatMap((name, n) => [n ? " and " : "", el("a", { href: runPage(name) }, name)])),
    el("p", { class: "cause" }, settings(configuration)),
    el("p", { class: "cause" }, bits.summary),
  );
  for (const id of ["runs", "bits", "metrics", "configuration", "alerts"]) show($(`${id}-panel`));
  show($("toolbar"), metrics.length > 0);
  table($("runs"), ["", "Verdict", "State", "Ranks", "Last step", "Why"], both.map((run, n) => [
    el("a", { href: runPage(run.id) }, run.id), verdictBadge(run.verdict), stateBadge(run.state), `${run.ranks.length} of ${run.world_size}`,
    stepText(run.last_step), verdicts[n].reasons.map((reason) => el("div", {}, reason)),
  ]));
  tellBits(bits);
  table($("metrics"), ["", ...names.map((name) => `${name}, at its end`), "Differs from", "Largest difference"], metrics.map((m) => [
    m.metric, ...m.final.map((v) => number(v)), m.steps ? (m.first_differing === null ? "nowhere" : `step ${m.first_differing}`) : "no common step",
    m.at_largest ? `${m.at_largest.map((v) => number(v)).join(" and ")} at step ${m.largest_step}` : "\u2013",
  ]));
  $("configuration-count").textContent = `${differ(configuration)}, ${configuration.equal} ${configuration.equal === 1 ? "is" : "are"} the same`;
  table($("configuration"), ["", ...names], configuration.differing.map((d) => [el("code", {}, d.key), ...d.values.map(setting)]));
  const what = (found) => (found ? [severityBadge(found.severity), ` from step ${found.first_step}, ${found.ranks.length ? ranksText(found.ranks) : "the whole run"}`] : "\u2013");
  table($("alerts"), ["Alerts", ...names], alerts.map((a) => [el("code", {}, a.kind), ...a.runs.map(what)]), "No alert in either run.");
  table($("checks"), ["Checks", ...names], checks.map((c) => [el("code", {}, c.name), ...c.states.map((s) => s?.replace("_", " ") ?? "\u2013")]), "Each check came to the same in both runs.");
}

const differ = ({ differing: { length } }) => (length === 1 ? "1 setting differs" : `${length || "No"} settings differ`);

/** "2 settings differ: lr 0.004 \u2192 0.1, seed 1 \u2192 2", the most relevant first. */
function settings(configuration) {
  const named = configuration.differing.slice(0, NAMED);
  if (!named.length) return `${differ(configuration)}.`;
  const words = named.map(({ key, values }) => `${key} ${values.map(inWords).join(" \u2192 ")}`).join(", ");
  const left = configuration.differing.length - named.length;
  return `${differ(configuration)}: ${words}${left ? ` and ${left} more` : ""}.`;
}

const inWords = (value) => {
  const text = value === null ? "\u2013" : typeof value === "number" ? number(value) : JSON.stringify(value);
  return text.length > VALUE_LENGTH ? `${text.slice(0, VALUE_LENGTH)}\u2026` : text;
};

const setting = (value) => (value === null ? "\u2013" : el("code", {}, JSON.stringify(value)));

function tellBits(bits) {
  const seed = { true: "The configurations name the same seed.", false: "The configurations name different seeds.", null: "Neither configuration names a seed: with different ones a difference is to be expected." };
  fill(
    $("bits"),
    el("p", {}, bits.summary),
    bits.steps > 0 && el("p", { class: "muted" }, `${bits.steps === 1 ? `Step ${bits.first_step} was compared` : `${count(bits.steps)} steps were compared, from ${bits.first_step} to ${bits.last_step}`}, on ${ranksText(bits.ranks)}.`),
    bits.state !== "not_compared" && bits.not_compared.length > 0 && el("p", {}, "Not compared:"),
    bits.state !== "not_compared" && el("ul", {}, bits.not_compared.map((text) => el("li", {}, text))),
    (bits.same_seed !== null || bits.first?.after === null) && el("p", { class: "muted" }, seed[bits.same_seed]),
    bits.first?.tensors.length > 0 && el("div", { class: "scroll" }, tensors(bits.first)),
  );
}

function tensors({ tensors: differing, tensor_stage: stage, tensor_step: step }) {
  const made = el("table", { class: "fold" });
  table(made, [`Tensor, in the ${stage.replaceAll("_", " ")} of step ${step}`, "Ranks", "Distance", "Of its norm"], differing.map((t) => [
    el("code", {}, t.name), ranksText(t.ranks), number(t.distance), number(t.relative),
  ]));
  return made;
}

function table(node, head, rows, empty = "Nothing differs.") {
  if (!rows.length) return fill(node, el("caption", {}, `${head[0] ? `${head[0]}: ` : ""}${empty}`));
  return fill(
    node,
    el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, rows.map(([first, ...cells]) => el("tr", {}, el("th", { scope: "row" }, first), cells.map((cell, n) => el("td", { "data-label": head[n + 1], class: head[n + 1] === "Why" ? "whole" : null }, cell))))),
  );
}

async function draw({ metrics, bits }) {
  const cards = metrics.slice(0, MAX_CHARTS).map(({ metric }) => {
    const plot = el("div", { class: "plot", role: "img", "aria-label": metric });
    return { metric, plot: new Plot(plot), node: el("article", { class: "panel chart", "data-metric": metric }, el("h3", {}, metric), plot) };
  });
  $("charts").replaceChildren(...cards.map((card) => card.node));
  plots = cards.map(({ metric, plot, node }) => async () => {
    const marked = bits.first ? `&marked_step=${bits.first.step}` : "";
    const path = `/compare/figures/curves.json?${runs.map((run) => `runs=${encodeURIComponent(run)}`).join("&")}&metric=${encodeURIComponent(metric)}${marked}`;
    await plot.draw(`${path}&theme=${window.rankscopeTheme.current()}${logarithmic ? "&log=true" : ""}`);
    node.dataset.drawn = "true";
  });
  await redraw();
}

const redraw = () => Promise.all(plots.map((plot) => plot())).catch(showError);

function toggleLog() {
  logarithmic = !logarithmic;
  $("log").setAttribute("aria-pressed", String(logarithmic));
  redraw();
}

$("log").addEventListener("click", toggleLog);
onKey("y", toggleLog);
document.addEventListener("themechange", redraw);
load();
