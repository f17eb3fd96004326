// Alerts of all runs.

import { get } from "./api.js";
import { alertCard, families, fillAlerts } from "./alert_card.js";
import { $, debounce, show } from "./dom.js";
import { showError } from "./frame.js";
import { QueryState } from "./query.js";

const REFRESH_MS = 5000;
const PAGE = 50;
const state = new QueryState({ q: "", state: "", severity: "", consequences: "" });
let wanted = PAGE;

async function load() {
  if (document.hidden) return;
  try {
    const items = [];
    let cursor = null;
    do {
      const page = await get("/api/v1/alerts", {
        state: state.get("state"), severity: state.get("severity"), consequences: state.get("consequences"),
        limit: Math.min(wanted, 500), cursor,
      });
      items.push(...page.items);
      cursor = page.next_cursor;
    } while (cursor && items.length < wanted);
    showError(null);
    announce(items, Boolean(cursor));
  } catch (error) {
    showError(error);
  }
}

function announce(alerts, more) {
  const words = state.get("q").toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (a) => {
    const text = [a.run, a.kind, a.title, a.cause, ...a.tensors].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  };
  const shown = alerts.filter(fits);
  const filtered = ["q", "state", "severity"].some((name) => state.get(name) !== "");
  show($("listing"), shown.length > 0);
  show($("empty"), shown.length === 0);
  if (filtered) $("empty-why").textContent = "No alert fits the filter.";
  $("count").textContent = shown.length ? `${shown.length}${more ? "+" : ""} alert${shown.length === 1 ? "" : "s"}` : "";
  fillAlerts($("alerts"), shown.map((alert) => alertCard(alert, [], { linkRun: true, onChanged: load })));
  show($("more"), more);
}

function dress() {
  $("filter").value = state.get("q");
  $("state").value = state.get("state");
  $("severity").value = state.get("severity");
  $("consequences").checked = state.get("consequences") === "true";
}

state.onChange(() => {
  dress();
  load();
});
$("filter").addEventListener("input", debounce(200, () => state.set({ q: $("filter").value })));
$("state").addEventListener("change", () => state.set({ state: $("state").value }));
$("severity").addEventListener("change", () => state.set({ severity: $("severity").value }));
$("consequences").addEventListener("change", () => state.set({ consequences: $("consequences").checked ? "true" : "" }));
$("more").addEventListener("click", () => {
  wanted += PAGE;
  load();
});
document.addEventListener("visibilitychange", () => !document.hidden && load());
setInterval(load, REFRESH_MS);
dress();
load();
