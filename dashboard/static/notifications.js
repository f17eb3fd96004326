// Who is notified of alerts, what came of it, and a test message for each.

import { Problem, get, post, runPage } from "./api.js";
import { $, badge, clock, count, el, fill, show } from "./dom.js";
import { showError } from "./frame.js";
import { ofWhat, outcome } from "./notification_texts.js";
import { QueryState } from "./query.js";

const REFRESH_MS = 5000;
const state = new QueryState({ pending: "" }, (values) => {
  if (values.pending !== "true") values.pending = "";
});
const tests = new Map(); // id of a target -> what came of the test that was sent from this page
let targets = [];

async function load() {
  if (document.hidden) return;
  try {
    const [listed, log] = await Promise.all([
      get("/api/v1/notifications/targets"), get("/api/v1/notifications", { pending: state.get("pending") }),
    ]);
    targets = listed.items;
    showError(null);
    announce(log.items);
  } catch (error) {
    showError(error);
  }
}

function announce(log) {
  const some = targets.length > 0;
  show($("listing"), some);
  show($("log-panel"), some);
  show($("how"));
  show($("how-first"), !some);
  show($("how-more"), some);
  $("count").textContent = `${targets.length} target${targets.length === 1 ? "" : "s"}`;
  showTargets();
  show($("log-table"), log.length > 0);
  show($("log-empty"), log.length === 0);
  $("log-empty").textContent = state.get("pending") ? "Nothing is waiting, and nothing failed." : "No alert for these targets has opened since they were added.";
  fill($("log"), log.map(entryRow));
}

/** The button that has the focus keeps it, although its row is made anew. */
function showTargets() {
  const focused = document.activeElement?.closest("button[data-target]")?.dataset.target;
  fill($("targets"), targets.map(targetRow));
  if (focused) [...$("targets").querySelectorAll("button")].find((b) => b.dataset.target === focused)?.focus();
}

function targetRow(target) {
  return el(
    "tr",
    { "data-target": target.id },
    el("td", {}, el("b", {}, target.name), target.url !== target.name && el("div", { class: "muted" }, target.url), el("div", { class: "muted" }, `id ${target.id}`)),
    el("td", { "data-label": "Alerts", class: "whole" }, ofWhat(target)),
    el("td", { "data-label": "Last outcome", class: "whole outcome" }, lastOutcome(target.outcome)),
    el("td", { class: "whole outcome" }, testButton(target), testOutcome(tests.get(target.id))),
  );
}

function lastOutcome({ told_at, waiting, failing, failing_since, error, next_try_at }) {
  const alerts = (n) => `${count(n)} alert${n === 1 ? "" : "s"}`;
  const worse = failing > 0 && (!told_at || !failing_since || Date.parse(failing_since) >= Date.parse(told_at));
  if (worse) {
    return [
      badge("failed", "critical", "\u2715"),
      ` ${alerts(failing)} not delivered${failing_since ? ` since ${clock(failing_since)}` : ""}: ${error}`,
      el("div", { class: "muted" }, `${next_try_at ? `Next attempt at ${clock(next_try_at)}` : "It was given up"}; ` +
        `${told_at ? `last delivery at ${clock(told_at)}` : "nothing was ever delivered"}.`),
    ];
  }
  const also = [failing > 0 && `${alerts(failing)} not delivered: ${error}`, waiting > 0 && `${alerts(waiting)} to be sent`].filter(Boolean);
  return [
    told_at ? [badge("delivered", "ok", "\u2713"), ` at ${clock(told_at)}`] : badge("nothing sent yet", "muted", "\u2013"),
    also.length > 0 && el("div", { class: "muted" }, also.join("; ")),
  ];
}

const isUnderWay = (test) => test?.tone === "waits";

function testButton(target) {
  const busy = isUnderWay(tests.get(target.id));
  return el(
    "button",
    { type: "button", "data-target": target.id, "aria-label": `Send a test to ${target.name}`, "aria-disabled": busy && "true" },
    busy ? "Sending\u2026" : "Send a test",
  );
}

function testOutcome(test) {
  if (!test || isUnderWay(test)) return null;
  const [word, color, sign] = { told: ["delivered", "ok", "\u2713"], failed: ["failed", "critical", "\u2715"], refused: ["not sent", "warning", "\u25C6"] }[test.tone];
  return el("div", { class: "tested" }, badge(word, color, sign), ` ${test.text}`);
}

async function send(target) {
  if (isUnderWay(tests.get(target.id))) return;
  tests.set(target.id, { tone: "waits" });
  showTargets();
  let test;
  try {
    const { delivered, error } = await post(`/api/v1/notifications/targets/${encodeURIComponent(target.id)}/test`);
    const at = `at ${clock(new Date())}`;
    test = delivered ? { tone: "told", text: at } : { tone: "failed", text: `${at}: ${error}` };
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    test = { tone: "refused", text: error.message };
  }
  tests.set(target.id, test);
  showTargets();
  const said = { told: "Test delivered to", failed: "Test failed for", refused: "Test not sent to" }[test.tone];
  $("said").textContent = `${said} ${target.name}, ${test.text}`;
}

$("targets").addEventListener("click", (event) => {
  const id = event.target.closest("button")?.dataset.target;
  const target = targets.find((t) => t.id === id);
  if (target) send(target);
});

function entryRow(entry) {
  const came = outcome(entry);
  return el(
    "tr",
    {},
    el("td", {}, el("a", { href: `${runPage(entry.run)}#alert-${entry.alert}` }, entry.title), el("div", { class: "muted" }, entry.run)),
    el("td", { "data-label": "Target", class: "whole" }, entry.name),
    el("td", { "data-label": "Outcome", class: "whole outcome" }, badge(...came.badge), ` ${came.text}`),
  );
}

function dress() {
  $("pending").checked = state.get("pending") === "true";
}

state.onChange(() => {
  dress();
  load();
});
$("pending").addEventListener("change", () => state.set({ pending: $("pending").checked ? "true" : "" }, { remember: true }));
document.addEventListener("visibilitychange", () => !document.hidden && load());
setInterval(load, REFRESH_MS);
dress();
load();
