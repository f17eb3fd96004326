// The list of all runs.

import { age, get, root, runPage } from "./api.js";
import { $, badge, count, debounce, duration, el, fill, severitySign, show, stateBadge, stepText, throttle, verdictBadge } from "./dom.js";
import { showError } from "./frame.js";
import { settled, staleness } from "./headline.js";
import { QueryState } from "./query.js";
import { Sparklines } from "./sparkline.js";
import { tagLinks } from "./tags.js";

const REFRESH_MS = 3000;
const PAGE = 50;
// How many runs there are in all is asked for more seldom.
const TOTALS_MS = 30_000;
// What the heading of a column sorts by first: the largest, or, of these, the first of the alphabet.
const TEXTS = ["run", "project", "state"];
const COLUMNS = [...TEXTS, "verdict", "alerts", "ranks", "last_step", "heard", "started", "duration", "loss"];
const state = new QueryState({ q: "", project: "", state: "", tag: "", order: "", sort: "" }, (values) => {
  if (values.order !== "newest") values.order = "";
  if (!COLUMNS.includes(values.sort.replace(/^-/, ""))) values.sort = "";
});
const sparklines = new Sparklines();
let wanted = PAGE;
let totalsAt = 0;
let projects = "";

async function load() {
  if (document.hidden) return;
  try {
    // Beside the first page: the rows wait for nothing that is not in them.
    const counting = Date.now() - totalsAt > TOTALS_MS ? loadTotals() : null;
    if (counting) totalsAt = Date.now();
    const items = [];
    let cursor = null;
    do {
      const page = await get("/api/v1/runs", {
        q: state.get("q"), project: state.get("project"), state: state.get("state"), tag: state.get("tag"),
        order: state.get("order") || "attention", sort: state.get("sort"), limit: Math.min(wanted, 500), cursor,
      });
      items.push(...page.items);
      cursor = page.next_cursor;
    } while (cursor && items.length < wanted);
    showError(null);
    announce(items, Boolean(cursor));
    if (counting) {
      await counting;
      announce(items, Boolean(cursor));
    }
  } catch (error) {
    showError(error);
  }
}

function announce(runs, more) {
  const filtered = ["q", "project", "state", "tag"].some((name) => state.get(name) !== "");
  show($("listing"), runs.length > 0);
  show($("empty"), runs.length === 0 && !filtered);
  show($("nothing"), runs.length === 0 && filtered);
  $("count").textContent = runs.length ? counted(runs.length, more) : "";
  fillRows(runs);
  show($("more"), more);
  offerProjects(runs);
  offerTags(runs);
}

let totals = new Map(); // project -> number of its runs

/** How many there are, where that is known: of all, and of a project. */
function counted(shown, more) {
  const total = state.get("project") ? totals.get(state.get("project")) : [...totals.values()].reduce((a, b) => a + b, 0);
  const known = total && !["q", "state", "tag"].some((name) => state.get(name));
  if (more && known) return `${count(shown)} of ${count(Math.max(total, shown))} runs`;
  return `${count(shown)}${more ? "+" : ""} run${shown === 1 ? "" : "s"}`;
}

async function loadTotals() {
  const found = new Map();
  let cursor = null;
  do {
    const page = await get("/api/v1/projects", { limit: 500, cursor });
    for (const project of page.items) found.set(project.name, project.runs);
    cursor = page.next_cursor;
  } while (cursor);
  totals = found;
}

function openAlerts(run) {
  if (!run.open_alerts) return el("span", { class: "muted" }, "none");
  const worst = run.worst_alert;
  if (!worst) return badge(`${run.open_alerts} silenced`, "muted", "\u00D7");
  return [
    badge(`${run.open_alerts} open`, worst.severity, severitySign(worst.severity)),
    el("a", { class: "worst", href: `${runPage(run.id)}#alert-${worst.id}`, title: worst.title }, worst.title),
  ];
}

/** What a run passes because somebody set it aside is not shown in green. */
function verdict(run) {
  const word = settled(run.id, run.verdict);
  const hushed = word === "pass" && run.silenced_alert?.severity === "critical";
  return hushed ? badge("pass, critical silenced", "muted", "\u00D7") : verdictBadge(word);
}

const picked = []; // Ids of the runs to compare, the oldest choice first.

/** Two at most: a third takes the place of the first. */
function pick(id) {
  if (picked.includes(id)) picked.splice(picked.indexOf(id), 1);
  else picked.push(id);
  while (picked.length > 2) picked.shift();
  for (const box of document.querySelectorAll(".pick input")) box.checked = picked.includes(box.getAttribute("aria-label").slice("Compare ".length));
  show($("compare"), picked.length === 2);
  const simple = picked.every((run) => !run.includes(","));
  const named = simple ? `runs=${picked.map(encodeURIComponent).join(",")}` : picked.map((run) => `runs=${encodeURIComponent(run)}`).join("&");
  $("compare").href = `${root}/compare?${named}`;
}

function row(run) {
  return el(
    "tr",
    {},
    el("td", { class: "pick" }, el("input", { type: "checkbox", "aria-label": `Compare ${run.id}`, checked: picked.includes(run.id), onchange: () => pick(run.id) }), " ", el("a", { class: "run", href: runPage(run.id), title: run.name || run.id }, run.name || run.id), " ", el("span", { class: "muted" }, run.project), " ", tagLinks(run.tags)),
    el("td", { "data-label": "Verdict", class: "stands" }, verdict(run)),
    el("td", { "data-label": "State", class: "stands" }, stateBadge(run.state)),
    el("td", { "data-label": "Open alerts", class: "alerts" }, openAlerts(run)),
    el("td", { "data-label": "Ranks", class: "number" }, count(run.world_size)),
    el("td", { "data-label": "Last step", class: "number" }, stepText(run.last_step)),
    el("td", { "data-label": "Heard of", class: "nowrap" }, staleness(run) ?? `${duration(age(run.last_seen_at))} ago`),
    el("td", { "data-label": "Duration", class: "nowrap" }, el("time", { datetime: run.started_at, title: `Started ${run.started_at}` }, duration(lasted(run)))),
    el("td", { "data-label": "Loss", class: "spark", "data-run": run.id }),
  );
}

/** Seconds that a run has lasted so far, or did. */
const lasted = (run) => Math.max(0, (run.state === "running" ? age(run.started_at) : age(run.started_at) - age(run.last_seen_at)));

let made = "";

/** Compared with what was made, not with what is there: lines are drawn into it. */
function fillRows(runs) {
  const rows = el("tbody", {}, runs.map(row));
  if (rows.innerHTML !== made) {
    made = rows.innerHTML;
    for (const run of runs) rows.querySelector(`.spark[data-run="${CSS.escape(run.id)}"]`).append(sparklines.of(run));
    $("runs").replaceChildren(...rows.children);
  } else runs.forEach((run) => sparklines.of(run));
}

function offerProjects(runs) {
  const names = [...new Set([...(projects ? projects.split("\n") : []), ...totals.keys(), ...runs.map((r) => r.project), state.get("project")])]
    .filter(Boolean).sort();
  if (names.join("\n") !== projects) {
    projects = names.join("\n");
    $("project").replaceChildren(el("option", { value: "" }, "all"), ...names.map((n) => el("option", { value: n }, n)));
  }
  $("project").value = state.get("project");
}

/** Those of the runs on the page: what is chosen is found among all runs. */
function offerTags(runs) {
  fill($("tags"), [...new Set(runs.flatMap((run) => run.tags))].sort().map((tag) => el("option", { value: tag })));
}

function dress() {
  $("tag").value = state.get("tag");
  $("filter").value = state.get("q");
  $("state").value = state.get("state");
  const sort = state.get("sort");
  const offered = [...$("order").options].some((option) => option.value === sort);
  $("order").value = sort ? (offered ? sort : "other") : state.get("order");
  for (const button of document.querySelectorAll(".sort")) {
    const head = button.closest("th");
    if (button.dataset.column !== sort.replace(/^-/, "")) head.removeAttribute("aria-sort");
    else head.setAttribute("aria-sort", sort.startsWith("-") ? "descending" : "ascending");
  }
}

/** First click, second click, third click: sorted, the other way round, as it was. */
function sortedBy(column) {
  const first = TEXTS.includes(column) ? column : `-${column}`;
  if (state.get("sort") === first) return first.startsWith("-") ? column : `-${column}`;
  return state.get("sort").replace(/^-/, "") === column ? "" : first;
}

state.onChange(() => {
  dress();
  load();
});
$("filter").addEventListener("input", debounce(200, () => state.set({ q: $("filter").value })));
$("state").addEventListener("change", () => state.set({ state: $("state").value }));
$("order").addEventListener("change", () => {
  const chosen = $("order").value;
  const order = ["", "newest"].includes(chosen);
  state.set(order ? { order: chosen, sort: "" } : { sort: chosen });
});
$("tag").addEventListener("input", debounce(200, () => state.set({ tag: $("tag").value.trim() })));
$("listing").addEventListener("click", (event) => {
  const tag = event.target.closest(".tag");
  if (tag && !event.ctrlKey && !event.metaKey) {
    event.preventDefault(); // Here the other filters stay.
    state.set({ tag: tag.textContent }, { remember: true });
  }
  const column = event.target.closest(".sort")?.dataset.column;
  if (column) state.set({ sort: sortedBy(column) }, { remember: true });
});
$("project").addEventListener("change", () => state.set({ project: $("project").value }));
$("reset").addEventListener("click", () => state.set({ q: "", project: "", state: "", tag: "" }));
$("more").addEventListener("click", () => {
  wanted += PAGE;
  load();
});
const soon = throttle(500, load);
document.addEventListener("visibilitychange", () => !document.hidden && soon());
setInterval(load, REFRESH_MS);
dress();
load();
