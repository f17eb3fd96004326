// What the agents do and what it costs: their sampling plans, their faults, and what was left out.

import { $, badge, count, duration, el, fill, number, rankList, ranksText, severitySign, show } from "./dom.js";
import { age } from "./api.js";

// From cheap to dear, as the agent names its tiers.
const TIERS = {
  basic: "losses, times", signals: "norms", word: "model digests", full: "fingerprints by tensor",
  state: "optimizer state and buffers",
};
const ORDER = Object.keys(TIERS);
// Of few ranks each has its line at once.
const FEW = 4;

const place = (tier) => (ORDER.includes(tier) ? ORDER.indexOf(tier) : ORDER.length);
const every = (steps) => (steps === 1 ? "every step" : `every ${count(steps)} steps`);
const percent = (share) => `${number(100 * share, 2)}\u00a0%`;

/** @param about the run with its `agent`, as the REST interface gives it */
export function agentPanel(about) {
  const { agent } = about;
  // Where each rank has its line below and its plan, the lines say it.
  const plans = grouped(agent.sampling);
  const shown = plans.length > 1 && about.world_size <= FEW ? [] : plans;
  const left = leftOut(agent);
  show($("agent-panel"), agent.sampling.length > 0 || agent.faults.length > 0 || left.length > 0);
  $("agent-cost").textContent = cost(agent.sampling);
  fill(
    $("agent"),
    shown.length > 0 && el("ul", { class: "plans" }, shown.map((plan) => el(
      "li", {},
      plans.length > 1 && el("b", {}, `${sentence(ranksText(plan.ranks))}: `),
      plans.length > 1 ? plan.text : sentence(plan.text),
    ))),
    agent.dense_until !== null && agent.dense_until >= about.last_step && about.state === "running" &&
      el("p", {}, `Dense sampling was requested: every step is sampled up to step ${count(agent.dense_until)}.`),
    agent.faults.length > 0 && el("ul", { class: "faults", "aria-label": "Faults of the agents" }, agent.faults.map(fault)),
    left.length > 0
      ? el("ul", { class: "left-out" }, left.map((text) => el("li", { class: "is-warning" }, text)))
      : el("p", { class: "muted" }, "Nothing was dropped, and nothing came too late to be judged."),
  );
  each(about);
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function planText(intervals) {
  const tiers = Object.entries(intervals).sort(([a], [b]) => place(a) - place(b) || a.localeCompare(b));
  const parts = tiers.map(([tier, steps]) => [TIERS[tier] ?? tier, every(steps)]);
  // "norms and words every step, fingerprints every 32 steps"
  const byTime = new Map();
  for (const [what, when] of parts) byTime.set(when, [...(byTime.get(when) ?? []), what]);
  return [...byTime].map(([when, what]) => `${and(what)} ${when}`).join("; ");
}

const and = (items) =>
  items.length < 2 ? items.join("") : `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`;

/** Ranks with one plan share a line; the plan of most comes first. */
function grouped(sampling) {
  const plans = new Map();
  for (const { rank, intervals } of sampling) {
    const text = planText(intervals);
    if (text) plans.set(text, [...(plans.get(text) ?? []), rank]);
  }
  return [...plans]
    .map(([text, ranks]) => ({ text, ranks }))
    .sort((a, b) => b.ranks.length - a.ranks.length || a.ranks[0] - b.ranks[0]);
}

function cost(sampling) {
  const known = sampling.map((s) => s.overhead).filter((share) => Number.isFinite(share));
  if (!known.length) return "";
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const range = percent(low) === percent(high) ? percent(high) : `${percent(low)} to ${percent(high)}`;
  return `takes ${range} of the step time${sampled(sampling)}`;
}

/** Share of the steps so far that were sampled in full, on the rank where the fewest were. */
function sampled(sampling) {
  const known = sampling.map((s) => s.sampled).filter((share) => Number.isFinite(share));
  if (!known.length) return "";
  const least = Math.min(...known);
  return least >= 1 ? "; every step was sampled in full" : `; ${percent(least)} of the steps were sampled in full`;
}

function fault({ text, ranks, step, at }) {
  return el(
    "li",
    {},
    badge("fault", "warning", severitySign("warning")),
    el("span", {}, ` ${text}`),
    el("span", { class: "muted" }, ` ${ranksText(ranks)}, ${step < 0 ? "before the first step" : `step ${count(step)}`}, ${duration(age(at))} ago; reported once a rank`),
  );
}

const POINTS = (n) => `${count(n)} ${n === 1 ? "point" : "points"}`;

function leftOut({ dropped, late, given_up: givenUp }) {
  return [
    ...Object.entries(dropped).map(([why, n]) => `Dropped by the agents: ${POINTS(n)} (${why.replaceAll("_", " ")})`),
    late > 0 && `${POINTS(late)} came after their step had been judged: stored and shown, but judged by no detector`,
    givenUp > 0 && `${count(givenUp)} fingerprints were not compared: ranks were too far apart in time to keep them in memory`,
  ].filter(Boolean);
}

/** The table rank by rank: at once for a few ranks, folded for many. */
function each(about) {
  const box = $("agent-ranks");
  const { length } = about.agent.sampling;
  show(box, length > 0);
  if (!length) return;
  if (box.dataset.opened === undefined) {
    box.open = about.world_size <= FEW;
    box.addEventListener("toggle", () => box.open && table(shown));
  }
  box.dataset.opened = "true";
  $("agent-ranks-title").textContent = `Rank by rank (${about.rank_status.length})`;
  shown = about;
  // A thousand rows that nobody sees take longer than all else on the page.
  if (box.open) table(about);
}

let shown = null; // The run that the table is of, when it is opened.

function table({ agent, rank_status: ranks }) {
  const plans = new Map(agent.sampling.map((s) => [s.rank, s]));
  const tiers = [...new Set(agent.sampling.flatMap((s) => Object.keys(s.intervals)))].sort(
    (a, b) => place(a) - place(b) || a.localeCompare(b),
  );
  const rows = ranks.map((status) => ({ ...status, plan: plans.get(status.rank) }));
  fill(
    $("agent-table"),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Rank"),
      tiers.map((tier) => el("th", { scope: "col", class: "number" }, sentence(TIERS[tier] ?? tier))),
      el("th", { scope: "col", class: "number" }, "Share of step time"), el("th", { scope: "col", class: "number" }, "Dropped"))),
    el("tbody", {}, rows.map(({ rank, plan, dropped }) => el(
      "tr",
      { "data-rank": rank },
      el("th", { scope: "row" }, String(rank)),
      tiers.map((tier) => el("td", { class: "number", "data-label": sentence(TIERS[tier] ?? tier) },
        plan?.intervals[tier] ? every(plan.intervals[tier]) : "\u2013")),
      el("td", { class: "number", "data-label": "Share of step time" },
        Number.isFinite(plan?.overhead) ? percent(plan.overhead) : "\u2013"),
      el("td", { class: "number", "data-label": "Dropped" }, count(Object.values(dropped).reduce((a, b) => a + b, 0))),
    ))),
  );
}
