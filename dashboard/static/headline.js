// The answer at 3 a.m.: is it fine? If not: what, since which step, which rank, which tensor, what to do.

import { age } from "./api.js";
import { $, clock, distance, duration, el, fill, prose, ranksText, severitySign } from "./dom.js";
import { families, onset } from "./alert_card.js";
import { saidBy } from "./ask.js";

const SETTLE_MS = 15000;
const BEHIND_S = 60;
// Hosts that are named: more would take the first screen.
const HOSTS = 4;
const passed = new Map(); // run -> when it was last seen to pass

/** Between a batch and its evaluation a passing run is pending for a moment; it still reads as passing. */
export function settled(run, verdict) {
  if (verdict === "pass") passed.set(run, Date.now());
  return verdict === "pending" && Date.now() - (passed.get(run) ?? 0) < SETTLE_MS ? "pass" : verdict;
}

/**
 * @param facts { run, verdict, alerts, ranks } as the REST interface gives them
 * @returns the alert that it speaks of, if it does of one
 */
export function headline(node, { run, verdict, alerts, ranks }) {
  const roots = families(alerts).map(([root]) => root);
  const open = roots.filter((a) => a.state === "open" && a.severity !== "info" && !a.silenced);
  const word = settled(run.id, verdict.verdict);
  const shown = open.length ? broken(open, run, ranks) : whole(word, { run, verdict, roots, ranks });
  node.className = `panel headline is-${shown.tone}`;
  node.removeAttribute("aria-busy");
  fill(
    node,
    el("p", { class: `state is-${shown.tone}` }, el("span", { class: "sign", "aria-hidden": "true" }, shown.sign), shown.word),
    el("h1", {}, shown.title),
    ...shown.body,
  );
  // Separate from the rest, in which numbers change at every step: nobody wants to have these read out.
  const said = `${shown.word}. ${shown.title}`;
  if ($("said").textContent !== said) $("said").textContent = said;
  return open[0] ?? null;
}

/** What there is to say where no alert is open. */
function whole(word, { run, verdict, roots, ranks }) {
  const hushed = roots.filter((a) => a.silenced && a.severity === "critical" && counts(a, verdict));
  if (hushed.length && word !== "fail") return silenced(hushed, roots, verdict, run);
  // A run that still trains has no verdict yet, but all that it needs for one may have passed.
  if (word === "pass" || (run.state === "running" && verdict.so_far === "pass")) return fine(roots, verdict, run);
  if (word === "fail") return ENDS[run.state]?.(run, ranks) ?? failed(roots, verdict);
  return tooEarly(verdict, run, roots);
}

const PROBLEMS = { critical: "Critical problem", warning: "Warning" };
export const REPLICAS = /^desync\.(parameters|gradients|optimizer|buffers)$/;

function broken(open, run, ranks) {
  const [first, ...others] = open;
  const word = first.kind === "rank.failed" ? "The run failed" : PROBLEMS[first.severity];
  const tensors = first.tensors.length
    ? [el("span", { class: "mono" }, first.tensors[0]), first.tensors.length > 1 ? ` and ${first.tensors.length - 1} more` : ""]
    : null;
  return {
    tone: first.severity,
    sign: severitySign(first.severity),
    word: word + (first.acknowledged ? `, acknowledged ${saidBy({ ...first.acknowledgement, reason: "" })}`.trimEnd() : "") + (others.length ? `, and ${others.length} more open alert${others.length > 1 ? "s" : ""}` : ""),
    title: first.title,
    body: [
      el(
        "dl",
        { class: "answers" },
        answer("Since", onset(first), run.last_step > first.first_step ? ` (${run.state === "running" ? "now at" : "ended at"} ${run.last_step})` : "",
          `, found at ${clock(first.opened_at)}`),
        answer("Who", first.ranks.length ? ranksText(first.ranks) : "the whole run"),
        where(first, ranks),
        first.stage && answer("First broken link", first.stage.replaceAll("_", " ")),
        tensors && answer("Tensor", ...tensors),
        answer("Distance", size(first.evidence)),
        // What replicas hold was the same up to here: a checkpoint from before is sound.
        REPLICAS.test(first.kind) && first.since.after !== null && answer("Last identical",
          `step ${first.since.after}: a checkpoint saved up to then is good on all ranks`),
      ),
      el(
        "div",
        { class: "explanation" },
        first.cause && el("p", { class: "cause" }, prose(first.cause)),
        first.remedy && el("div", { class: "todo" }, el("b", {}, "What to do"), prose(first.remedy)),
      ),
    ],
  };
}

/** Host and process of the rank that an alert names; of several (of all, where it names none) their hosts. */
function where(alert, ranks) {
  const named = ranks.filter((rank) => rank.host && (!alert.ranks.length || alert.ranks.includes(rank.rank)));
  if (!named.length) return null;
  if (named.length === 1) return answer("Where", `${named[0].host}, process ${named[0].pid}`);
  const hosts = [...new Set(named.map((rank) => rank.host))];
  if (hosts.length === 1) return answer("Where", `${hosts[0]}, ${named.length} processes`);
  const on = (host) => named.filter((rank) => rank.host === host).map((rank) => rank.rank);
  const shown = hosts.slice(0, HOSTS).map((host) => `${host} (${ranksText(on(host))})`);
  return answer("Where", shown.join(", ") + (hosts.length > HOSTS ? ` and ${hosts.length - HOSTS} more` : ""));
}

/** How far replicas differ, where the finding is of such: the newest of its sizes. */
function size({ sizes, growth }) {
  const relative = sizes?.at?.(-1)?.[2];
  if (!(relative > 0)) return null;
  const going = { growing: ", growing", exponential: ", growing exponentially", shrinking: ", shrinking" };
  return `${distance(relative)} of the parameters' norm${going[growth] ?? ""}`;
}

/** An alert that is over counts where it is of the job's last launch. */
const counts = (alert, verdict) => alert.state === "open" || (alert.start >= verdict.first_start && alert.start <= verdict.start);

/** What somebody has set aside is not fine, whatever else has passed. */
function silenced(hushed, roots, verdict, run) {
  const people = [...new Set(hushed.map((a) => saidBy({ ...a.silence, reason: "" })))].filter(Boolean);
  const over = hushed.filter((a) => a.state === "resolved").length;
  const critical = `${hushed.length} critical problem${hushed.length > 1 ? "s" : ""}${over ? ` (${over} resolved)` : ""}`;
  return {
    tone: "muted",
    sign: "\u00D7",
    word: "Silenced, not solved",
    title: `${critical}, silenced ${people.join("; ")}`.trimEnd(),
    body: [
      ...hushed.map((a) => el("p", { class: "cause" }, el("b", {}, a.title), a.silence.reason && ` (${a.silence.reason})`)),
      el("p", { class: "muted" }, `Silenced alerts do not count for the verdict, which is: ${verdict.verdict}.`),
      ...fine(roots.filter((a) => !hushed.includes(a)), verdict, run).body,
    ],
  };
}

function failed(roots, verdict) {
  return {
    tone: "warning",
    sign: "\u25C6",
    word: "Nothing open, but the run does not pass",
    title: roots.length ? lasted(roots[0]) : "The verdict is: fail",
    body: verdict.reasons.map((reason) => el("p", { class: "cause" }, sentence(reason))),
  };
}

/** What an alert says, which speaks of now, and when it was over. */
const lasted = (alert) => (alert.state === "open" ? alert.title : `${alert.title} (over, last seen at step ${alert.last_step})`);

/** A reason as a sentence; one that begins with the name of a kind stays as it is. */
const sentence = (text) => (/^\w+\./.test(text) ? text : text.charAt(0).toUpperCase() + text.slice(1));

// Of an error message that is longer, the table of the ranks has the whole.
const ERROR_LENGTH = 300;

/** Ranks that ended with an error: the trainer's own fault comes before all that is said of the numbers. */
function crashed(run, ranks) {
  const dead = ranks.filter((rank) => rank.state === "failed");
  if (!dead.length) return null;
  // The first to fall takes the others along, mostly in the same step.
  const [first] = [...dead].sort((a, b) => a.last_step - b.last_step || Date.parse(a.last_seen_at) - Date.parse(b.last_seen_at));
  const who = dead.map((rank) => rank.rank);
  return {
    tone: "critical",
    sign: "\u2715",
    word: "The run failed",
    title: `${sentence(ranksText(who))} ended with an error${first.last_step < 0 ? " before the first step" : ` at step ${first.last_step}`}`,
    body: [
      el(
        "dl",
        { class: "answers" },
        answer("Who", ranksText(who)),
        answer("Last heard of", clock(first.last_seen_at)),
        first.host && answer("Where", `${first.host}, process ${first.pid}`),
      ),
      el(
        "div",
        { class: "explanation" },
        first.error && el("p", { class: "cause mono" }, short(first.error)),
        el("div", { class: "todo" }, el("b", {}, "What to do"),
          `Look at the log of rank ${first.rank}, which ended first; no detector has found a fault before.`),
      ),
    ],
  };
}

/** No rank says anything any more, and none has said goodbye. */
function lost(run, ranks) {
  const hosts = [...new Set(ranks.map((rank) => rank.host).filter(Boolean))];
  return {
    tone: "critical",
    sign: "?",
    word: "The run was lost",
    title: `No rank has been heard of since ${clock(run.last_seen_at)}`,
    body: [
      el(
        "dl",
        { class: "answers" },
        answer("Who", ranks.length === 1 ? ranksText([ranks[0].rank]) : `all ${ranks.length} ranks that had reported`),
        answer("Last step", run.last_step < 0 ? "none" : String(run.last_step)),
        hosts.length > 0 && answer("Where", hosts.slice(0, HOSTS).join(", ") + (hosts.length > HOSTS ? ` and ${hosts.length - HOSTS} more` : "")),
      ),
      el(
        "div",
        { class: "explanation" },
        el("p", { class: "cause" }, "None of them had said that it was done."),
        el("div", { class: "todo" }, el("b", {}, "What to do"),
          "See whether the job still runs. If it does, its machines do not reach this server: what they measure waits on " +
          "their disks and comes later. If it was killed (out of memory, preempted, end of its time), the scheduler's log says so."),
      ),
    ],
  };
}

const ENDS = { failed: crashed, lost };

const short = (text) => (text.length > ERROR_LENGTH ? `${text.slice(0, ERROR_LENGTH)}\u2026` : text);

function fine(roots, verdict, run) {
  const passed = verdict.checks.filter((c) => c.state === "passed").length;
  const left = verdict.checks.filter((c) => c.state === "not_run").length;
  const over = roots.filter((a) => a.state === "resolved" && a.severity !== "info").length;
  const quiet = roots.filter((a) => a.state === "open" && a.silenced).length;
  const notes = [];
  if (left) notes.push(`${left} check${left > 1 ? "s" : ""} could not run, see why below.`);
  const behind = run.last_step - run.evaluated_step;
  if (behind > 0 && age(run.last_seen_at) > BEHIND_S) {
    notes.push(`The last ${behind} steps have not been judged: the server is behind, or cannot; then its log says why.`);
  }
  if (quiet) notes.push(`${quiet} open alert${quiet > 1 ? "s are" : " is"} silenced.`);
  if (over) notes.push(`${over} alert${over > 1 ? "s" : ""} opened and resolved.`);
  return {
    tone: "ok",
    sign: "\u2713",
    word: `No problems found${run.state === "running" ? " so far" : ""} (${passed} of ${verdict.checks.length} checks)`,
    title: `${passed} check${passed === 1 ? "" : "s"} passed on ${run.world_size} rank${run.world_size === 1 ? "" : "s"} through step ${run.evaluated_step}`,
    body: notes.length ? [el("p", { class: "muted" }, notes.join(" "))] : [],
  };
}

function tooEarly(verdict, run, roots) {
  const quiet = roots.some((a) => a.state === "open" && a.silenced);
  const bad = quiet ? "Nothing bad but what is silenced" : "Nothing bad";
  return {
    tone: "muted",
    sign: "\u2026",
    word: run.state === "running" ? "Too early to tell" : "Cannot tell",
    title: run.last_step >= 0 ? `${bad} ${run.state === "running" ? "so far" : "was found"}, at step ${run.last_step}` : "No step has been reported yet",
    body: verdict.reasons.map((reason) => el("p", { class: "muted" }, sentence(reason))),
  };
}

function answer(name, ...text) {
  if (text[0] === null) return null;
  return el("div", {}, el("dt", {}, name), el("dd", {}, ...text));
}

const STALE_AFTER = 5;

/** "stale 12 s" for a run that should be heard of and is not. */
export function staleness(run) {
  const old = age(run.last_seen_at);
  if (run.state !== "running" || old < STALE_AFTER) return null;
  return el("span", { class: "stale" }, `stale ${duration(old)}`);
}
