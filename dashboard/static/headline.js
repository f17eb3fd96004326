// The answer at 3 a.m.: is it fine? If not: what, since which step, which rank, which tensor, what to do.

import { age } from "./api.js";
import { duration, el, fill, ranksText, severitySign } from "./dom.js";
import { families } from "./alert_card.js";

const SETTLE_MS = 15000;
const passed = new Map(); // run -> when it was last seen to pass

/** Between a batch and its evaluation a passing run is pending for a moment; it still reads as passing. */
export function settled(run, verdict) {
  if (verdict === "pass") passed.set(run, Date.now());
  return verdict === "pending" && Date.now() - (passed.get(run) ?? 0) < SETTLE_MS ? "pass" : verdict;
}

/**
 * @param facts { run, verdict, alerts } as the REST interface gives them
 * @returns the alert that it speaks of, if it does of one
 */
export function headline(node, { run, verdict, alerts }) {
  const roots = families(alerts).map(([root]) => root);
  const open = roots.filter((a) => a.state === "open" && a.severity !== "info");
  const word = settled(run.id, verdict.verdict);
  const told = open.length
    ? broken(open, run)
    : word === "fail"
      ? failed(roots, verdict)
      : word === "pass"
        ? fine(roots, verdict, run)
        : tooEarly(verdict, run);
  node.className = `panel headline is-${told.tone}`;
  node.removeAttribute("aria-busy");
  fill(
    node,
    el("p", { class: `state is-${told.tone}` }, el("span", { class: "sign", "aria-hidden": "true" }, told.sign), told.word),
    el("h1", {}, told.title),
    ...told.body,
  );
  return open[0] ?? null;
}

function broken(open, run) {
  const [first, ...others] = open;
  const tensors = first.tensors.length
    ? [el("span", { class: "mono" }, first.tensors[0]), first.tensors.length > 1 ? ` and ${first.tensors.length - 1} more` : ""]
    : null;
  return {
    tone: first.severity,
    sign: severitySign(first.severity),
    word: `Not fine: ${first.severity}` + (others.length ? `, and ${others.length} more open alert${others.length > 1 ? "s" : ""}` : ""),
    title: first.title,
    body: [
      el(
        "dl",
        { class: "answers" },
        answer("Since", `step ${first.first_step}`, run.last_step > first.first_step ? ` (now at ${run.last_step})` : ""),
        answer("Who", first.ranks.length ? ranksText(first.ranks) : "the whole run"),
        first.stage && answer("First broken link", first.stage.replaceAll("_", " ")),
        tensors && answer("Tensor", ...tensors),
      ),
      el(
        "div",
        { class: "told" },
        first.cause && el("p", { class: "cause" }, first.cause),
        first.remedy && el("div", { class: "todo" }, el("b", {}, "What to do"), first.remedy),
      ),
    ],
  };
}

function failed(roots, verdict) {
  return {
    tone: "warning",
    sign: "\u25C6",
    word: "Nothing open, but the run does not pass",
    title: roots.length ? roots[0].title : "The verdict is: fail",
    body: verdict.reasons.map((reason) => el("p", { class: "cause" }, reason)),
  };
}

function fine(roots, verdict, run) {
  const passed = verdict.checks.filter((c) => c.state === "passed").length;
  const left = verdict.checks.filter((c) => c.state === "not_run").length;
  const over = roots.filter((a) => a.state === "resolved" && a.severity !== "info").length;
  const notes = [];
  if (left) notes.push(`${left} check${left > 1 ? "s" : ""} could not run, see why below.`);
  if (over) notes.push(`${over} alert${over > 1 ? "s" : ""} opened and resolved.`);
  return {
    tone: "ok",
    sign: "\u2713",
    word: "Fine",
    title: `${passed} check${passed === 1 ? "" : "s"} passed on ${run.world_size} rank${run.world_size === 1 ? "" : "s"} through step ${run.evaluated_step}`,
    body: notes.length ? [el("p", { class: "muted" }, notes.join(" "))] : [],
  };
}

function tooEarly(verdict, run) {
  return {
    tone: "muted",
    sign: "\u2026",
    word: "Too early to tell",
    title: run.last_step >= 0 ? `Nothing bad so far, at step ${run.last_step}` : "No step has been reported yet",
    body: verdict.reasons.map((reason) => el("p", { class: "muted" }, reason)),
  };
}

function answer(name, ...text) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, ...text));
}

const STALE_AFTER = 5;

/** "stale 12 s" for a run that should be heard of and is not. */
export function staleness(run) {
  const old = age(run.last_seen_at);
  if (run.state !== "running" || old < STALE_AFTER) return null;
  return el("span", { class: "stale" }, `stale ${duration(old)}`);
}
