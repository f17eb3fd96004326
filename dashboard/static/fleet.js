// All runs at once: what runs now, and the hosts and kinds of alerts that come again and again.

import { age, get, query, root, runPage } from "./api.js";
import { $, badge, count, duration, el, fill, severitySign, show, stepText, verdictBadge } from "./dom.js";
import { showError } from "./frame.js";
import { settled } from "./headline.js";
import { QueryState } from "./query.js";

const REFRESH_MS = 5000;
const MOST = 200;
const NAMED = 6;
// An alert in two runs is no accident any more.
const AGAIN = 2;
const state = new QueryState({ project: "", days: "30" }, (values) => {
  if (![...$("days").options].some((option) => option.value === values.days)) values.days = "30";
});

async function load() {
  if (document.hidden) return;
  try {
    const project = state.get("project");
    const [fleet, running, projects] = await Promise.all([
      get("/api/v1/fleet", { project, days: state.get("days") }),
      get("/api/v1/runs", { project, state: "running", limit: MOST }),
      get("/api/v1/projects", { limit: 500 }),
    ]);
    showError(null);
    announce(fleet, running, projects.items);
  } catch (error) {
    showError(error);
  }
}

function announce({ kinds, hosts }, running, projects) {
  const wanted = [...new Set([...projects.map((one) => one.name), state.get("project")])].filter(Boolean);
  fill($("project"), el("option", { value: "" }, "all"), wanted.map((name) => el("option", { value: name }, name)));
  $("project").value = state.get("project");
  const open = kinds.reduce((sum, kind) => sum + kind.open, 0);
  const many = running.next_cursor ? `${running.items.length}+` : running.items.length;
  const asked = projects.filter((one) => ["", one.name].includes(state.get("project")));
  const all = asked.reduce((sum, one) => sum + one.runs, 0);
  $("count").textContent = `${many} of ${count(all)} run${all === 1 ? "" : "s"} running, ${open} open alert${open === 1 ? "" : "s"}`;
  listed("running", running.items.map(runRow));
  listed("hosts", hosts.map((host) => row(host, ["q", null])));
  listed("kinds", kinds.map((kind) => row(kind, ["kind", kind.name])));
  for (const [id, all, word] of [["hosts", hosts, "host"], ["kinds", kinds, "kind"]]) {
    const again = all.filter((one) => one.runs >= AGAIN).length;
    $(`${id}-said`).textContent = again ? `${again} ${word}${again > 1 ? "s" : ""} in ${AGAIN} runs or more` : "";
  }
}

function listed(id, rows) {
  fill($(id), rows);
  show($(`${id}-table`), rows.length > 0);
  show($(`${id}-empty`), rows.length === 0);
}

function runRow(run) {
  const worst = run.worst_alert;
  return el(
    "tr",
    {},
    el("td", {}, el("a", { class: "run", href: runPage(run.id) }, run.name || run.id), el("div", { class: "muted" }, run.project)),
    el("td", { "data-label": "Verdict" }, verdictBadge(settled(run.id, run.verdict))),
    el("td", { "data-label": "Open alerts" }, worst
      ? [badge(`${run.open_alerts} open`, worst.severity, severitySign(worst.severity)),
        el("div", { class: "worst" }, el("a", { href: `${runPage(run.id)}#alert-${worst.id}` }, worst.title))]
      : el("span", { class: "muted" }, run.open_alerts ? `${run.open_alerts} silenced` : "none")),
    el("td", { "data-label": "Ranks", class: "number" }, count(run.world_size)),
    el("td", { "data-label": "Last step", class: "number" }, stepText(run.last_step)),
    el("td", { "data-label": "Started", class: "nowrap" }, `${duration(age(run.started_at))} ago`),
  );
}

function row(one, [name, value]) {
  const rest = one.runs - one.newest_runs.slice(0, NAMED).length;
  const others = one.others.length - NAMED;
  return el(
    "tr",
    { class: one.open > 0 ? "suspect" : null, "data-name": one.name },
    el("th", { scope: "row" }, value ? el("a", { href: `${root}/alerts${query({ [name]: value })}` }, one.name) : one.name,
      one.runs >= AGAIN && [" ", badge(`${one.runs} runs`, one.severity, severitySign(one.severity))]),
    el("td", { "data-label": "Open", class: "number" }, count(one.open)),
    el("td", { "data-label": "Alerts", class: "number" }, count(one.alerts)),
    el("td", { "data-label": "Runs" }, one.newest_runs.slice(0, NAMED).map((run, i) => [i > 0 && ", ", el("a", { href: runPage(run) }, run)]),
      rest > 0 && ` and ${count(rest)} more`),
    el("td", { "data-label": value ? "Hosts" : "Kinds" }, one.others.slice(0, NAMED).join(", ") || "\u2013", others > 0 && ` and ${others} more`),
    el("td", { "data-label": "Newest", class: "nowrap" }, `${duration(age(one.newest_at))} ago`),
  );
}

$("days").value = state.get("days");
$("days").addEventListener("change", () => state.set({ days: $("days").value }));
$("project").addEventListener("change", () => state.set({ project: $("project").value }));
state.onChange(() => {
  $("days").value = state.get("days");
  load();
});
document.addEventListener("visibilitychange", () => !document.hidden && load());
setInterval(load, REFRESH_MS);
load();
