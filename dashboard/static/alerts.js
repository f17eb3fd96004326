// Alerts of all runs, filtered by the server; the filter is in the address.

import { Problem, get } from "./api.js";
import { alertCard, fillAlerts } from "./alert_card.js";
import { $, debounce, el, fill, show } from "./dom.js";
import { onKey, showError } from "./frame.js";
import { QueryState } from "./query.js";

const REFRESH_MS = 5000;
const PAGE = 50;
const MOST = 1000;
const CHOICES = { severity: ["critical", "warning", "info"], state: ["open", "resolved"] };
const NOTHING = { q: "", severity: "", state: "", kind: "", rank: "", project: "" };
const NAMES = Object.keys(NOTHING);
const isRank = (text) => /^\d{1,9}$/.test(text);

const state = new QueryState({ ...NOTHING, consequences: "", shown: String(PAGE) }, (values) => {
  for (const [name, choices] of Object.entries(CHOICES)) if (!choices.includes(values[name])) values[name] = "";
  if (!isRank(values.rank)) values.rank = "";
  if (!/^[a-z0-9_.*?]{1,64}$/.test(values.kind)) values.kind = "";
  values.q = values.q.slice(0, $("filter").maxLength);
  values.consequences = values.consequences === "true" ? "true" : "";
  const shown = Number(values.shown);
  if (!(Number.isInteger(shown) && shown > 0 && shown <= MOST)) values.shown = String(PAGE);
});

// ------------------------------------------------------------------------------------------ list

let asked = 0; // Number of the newest question: an answer to an older one comes too late.
let refused = false; // The filter as it is: asked again, it would be refused again.

/** The list, in its order: what is open, the gravest first, then what is over; each newest first. */
function parts() {
  const severities = state.get("severity") ? [state.get("severity")] : CHOICES.severity;
  const open = severities.map((severity) => ({ state: "open", severity }));
  return [...(state.get("state") === "resolved" ? [] : open), ...(state.get("state") === "open" ? [] : [{ state: "resolved" }])];
}

async function load() {
  if (document.hidden || refused) return;
  const mine = ++asked;
  try {
    const items = [];
    const wanted = Number(state.get("shown"));
    for (const part of parts()) {
      let cursor = null;
      do {
        const page = await get("/api/v1/alerts", {
          ...Object.fromEntries(NAMES.map((name) => [name, state.get(name)])), ...part,
          // One more than is shown says whether there are more.
          consequences: state.get("consequences"), limit: Math.min(wanted + 1 - items.length, 500), cursor,
        });
        items.push(...page.items);
        cursor = page.next_cursor;
      } while (cursor && items.length <= wanted && mine === asked);
      if (mine !== asked) return;
      if (items.length > wanted) break;
    }
    showError(null);
    announce(items.slice(0, wanted), items.length > wanted);
  } catch (error) {
    if (mine !== asked) return;
    if (error instanceof Problem && error.status === 422) refuse(error);
    else showError(error);
  }
}

function announce(alerts, more) {
  const filtered = NAMES.some((name) => state.get(name) !== "");
  show($("listing"), alerts.length > 0);
  show($("empty"), alerts.length === 0 && !filtered);
  show($("nothing"), alerts.length === 0 && filtered);
  show($("clear"), filtered);
  if (alerts.length === 0 && filtered) {
    $("nothing-title").textContent = "No alert fits the filter";
    $("nothing-why").replaceChildren("Asked for: ", ...filters(), ".");
    show($("nothing-hidden"), state.get("consequences") === "");
  }
  if (alerts.length) $("count").textContent = `${alerts.length}${more ? "+" : ""} alert${alerts.length === 1 ? "" : "s"}`;
  else $("count").textContent = filtered ? "no alert fits" : "";
  fillAlerts($("alerts"), alerts.map((alert) => alertCard(alert, [], { linkRun: true, onChanged: load })));
  show($("more"), more && alerts.length < MOST);
}

/** What the server takes for no filter is said where the list would be. */
function refuse(problem) {
  refused = true;
  showError(null);
  for (const id of ["listing", "empty", "nothing-hidden"]) show($(id), false);
  $("nothing-title").textContent = "This filter cannot be used";
  $("nothing-why").textContent = problem.message;
  $("count").textContent = "";
  show($("nothing"));
  show($("clear"));
}

/** "severity critical, rank 3", in bold what was chosen. */
function filters() {
  const words = { q: "words" };
  return NAMES.filter((name) => state.get(name) !== "")
    .flatMap((name, n) => [n > 0 && ", ", `${words[name] ?? name} `, el("b", {}, state.get(name))])
    .filter(Boolean);
}

// ------------------------------------------------------------------------------------------ controls

let kinds = [];
let projects = [];

/** Kinds by their group, each group with one choice for all of it. */
function offerKinds() {
  const chosen = state.get("kind");
  const groups = new Map();
  for (const kind of kinds) {
    const name = kind.split(".")[0];
    if (!groups.has(name)) groups.set(name, [`${name}.*`]);
    groups.get(name).push(kind);
  }
  const offered = [...groups.values()].flat();
  const option = (value) => el("option", { value }, value);
  fill(
    $("kind"),
    el("option", { value: "" }, "all"),
    chosen && !offered.includes(chosen) && option(chosen),
    [...groups].map(([label, members]) => el("optgroup", { label }, members.map(option))),
  );
  $("kind").value = chosen;
}

function offerProjects() {
  const chosen = state.get("project");
  const names = projects.includes(chosen) || !chosen ? projects : [...projects, chosen];
  fill($("project"), el("option", { value: "" }, "all"), names.map((value) => el("option", { value }, value)));
  $("project").value = chosen;
}

/** What can be chosen; without it the list is there all the same. */
async function loadChoices() {
  try {
    const [ofDetectors, ofRuns] = await Promise.all([get("/api/v1/detectors"), get("/api/v1/projects", { limit: 1000 })]);
    kinds = [...new Set(ofDetectors.items.flatMap((detector) => detector.kinds))].sort();
    projects = ofRuns.items.map((project) => project.name);
    offerKinds();
    offerProjects();
  } catch (error) {
    showError(error);
  }
}

function dress() {
  for (const [id, name] of [["filter", "q"], ["rank", "rank"]]) if ($(id).value.trim() !== state.get(name)) $(id).value = state.get(name);
  for (const name of Object.keys(CHOICES)) $(name).value = state.get(name);
  $("consequences").checked = state.get("consequences") === "true";
  hint(false);
  offerKinds();
  offerProjects();
}

function hint(wrong) {
  $("rank").setAttribute("aria-invalid", String(wrong));
  show($("rank-hint"), wrong);
}

/** Another filter begins with the first page; the Back button leads to the one before. */
const filter = (changes, remember = true) => state.set({ ...changes, shown: PAGE }, { remember });

function clear() {
  filter(NOTHING);
  // The button that was pressed may be gone.
  $("filter").focus();
}

/** Of a text that is typed the Back button undoes the whole, and not each letter. */
function typed(id, name, read) {
  let began = false;
  const take = () => {
    const value = read($(id).value.trim());
    if (value === null || value === state.get(name)) return;
    filter({ [name]: value }, !began);
    began = true;
  };
  const later = debounce(200, take);
  $(id).addEventListener("input", later);
  $(id).addEventListener("change", () => {
    take();
    began = false;
  });
}

typed("filter", "q", (text) => text);
typed("rank", "rank", (text) => {
  const wrong = text !== "" && !isRank(text);
  hint(wrong);
  return wrong ? null : text;
});
for (const name of ["severity", "state", "kind", "project"]) $(name).addEventListener("change", () => filter({ [name]: $(name).value }));
$("consequences").addEventListener("change", () => filter({ consequences: $("consequences").checked ? "true" : "" }));
$("include").addEventListener("click", () => {
  filter({ consequences: "true" });
  $("consequences").focus();
});
for (const id of ["clear", "reset"]) $(id).addEventListener("click", clear);
onKey("c", clear);
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("more").addEventListener("click", () => state.set({ shown: Math.min(Number(state.get("shown")) + PAGE, MOST) }));

state.onChange(() => {
  refused = false;
  dress();
  load();
});
document.addEventListener("visibilitychange", () => !document.hidden && load());
setInterval(load, REFRESH_MS);
dress();
load();
loadChoices();
