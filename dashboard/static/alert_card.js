// One alert as a card: what, since when, which ranks and tensors, why, what to do, the evidence.

import { context } from "./alert_context.js";
import { history } from "./alert_history.js";
import { Problem, age, get, post, remove, runPage, runPath } from "./api.js";
import { ask, saidBy } from "./ask.js";
import { badge, duration, el, number, prose, ranksText, severityBadge } from "./dom.js";

const PLAIN_CELLS = 40;
/** A frame of a stack: `forward (model.py:12)`. */
const FRAME = /^.+ \(.+:\d+\)$/;

/** "steps 137 to 300" */
export const steps = (alert) =>
  alert.last_step > alert.first_step ? `steps ${alert.first_step} to ${alert.last_step}` : `step ${alert.first_step}`;

/** "step 137", or "a step from 129 to 137" where what is between two samples is not known */
export const onset = ({ since: { after, by } }) => ((after ?? -1) + 1 < by ? `a step from ${(after ?? -1) + 1} to ${by}` : `step ${by}`);

/**
 * @param alert as the REST interface gives it
 * @param consequences alerts that follow from it
 * @param options { linkRun, brief, pointed, chart, onChanged(), onStep(alert) }; `brief` leaves out
 *   what the headline says already, `pointed` marks the card that a link or a chart leads to
 */
export function alertCard(alert, consequences = [], options = {}) {
  const open = alert.state === "open";
  return el(
    "article",
    { class: options.pointed ? "alert pointed" : "alert", id: `alert-${alert.id}`, "data-severity": alert.severity, "data-state": alert.state, tabindex: "-1" },
    el(
      "header",
      {},
      severityBadge(alert.severity),
      open ? badge("open", alert.severity, "\u25CB") : badge("resolved", "ok", "\u2713"),
      alert.acknowledged && badge("acknowledged", "muted", "\u2713"),
      alert.silenced && badge("silenced", "muted", "\u00D7"),
      el("code", { class: "muted" }, alert.kind),
      options.linkRun && el("a", { href: `${runPage(alert.run)}#alert-${alert.id}` }, alert.run),
    ),
    el("h3", {}, alert.title),
    el(
      "p",
      { class: "where" },
      el("span", {}, "since ", el("b", {}, onset(alert)), alert.last_step > alert.first_step && `, until ${alert.last_step}`),
      alert.ranks.length > 0 && el("span", {}, el("b", {}, ranksText(alert.ranks))),
      alert.stage && el("span", {}, "at ", el("b", {}, alert.stage.replaceAll("_", " "))),
      alert.tensors.length > 0 && el("span", {}, "in ", el("b", { class: "mono" }, alert.tensors[0]),
        alert.tensors.length > 1 && ` and ${alert.tensors.length - 1} more`),
      alert.start > 0 && el("span", { title: "counted from 0: the job was launched again under this run id" }, `start ${alert.start}`),
      el("span", { title: alert.opened_at }, `opened ${duration(age(alert.opened_at))} ago`),
    ),
    alert.acknowledgement && saidBy(alert.acknowledgement) && el("p", { class: "muted" }, `Acknowledged ${saidBy(alert.acknowledgement)}`),
    alert.silence && el("p", { class: "muted" }, `Silenced ${saidBy(alert.silence) || "without a reason or an end"}`),
    !options.brief && alert.cause && el("p", {}, prose(alert.cause)),
    !options.brief && alert.remedy && el("p", { class: "remedy" }, el("b", {}, "What to do: "), prose(alert.remedy)),
    consequences.length > 0 && followers(consequences),
    options.chart && el("div", { class: "alert-chart", "data-chart": alert.id }),
    details(alert),
    context(alert),
    history(alert),
    actions(alert, options),
  );
}

function followers(consequences) {
  return el(
    "details",
    {},
    el("summary", {}, `${consequences.length} consequence${consequences.length > 1 ? "s" : ""}`),
    el(
      "ul",
      { class: "consequences" },
      consequences.map((c) => el("li", {}, severityBadge(c.severity), " ", c.title, el("span", { class: "muted" }, ` (${c.kind}, ${steps(c)})`))),
    ),
  );
}

function details(alert) {
  const rows = Object.entries(alert.evidence ?? {});
  const more = alert.tensors.length > 1;
  if (!rows.length && !more) return null;
  return el(
    "details",
    { "data-part": "evidence" },
    el("summary", {}, "Evidence"),
    el(
      "div",
      { class: "evidence" },
      el(
        "table",
        {},
        el("caption", { class: "visually-hidden" }, `Evidence of ${alert.title}`),
        el(
          "tbody",
          {},
          more && row("tensors", alert.tensors.join(", ")),
          rows.map(([name, value]) => row(name.replaceAll("_", " "), value)),
        ),
      ),
    ),
  );
}

function row(name, value) {
  return el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, shown(value)));
}

/** Evidence is free-form: numbers, lists of numbers, tables (lists of objects), objects. */
function shown(value) {
  if (value === null || value === undefined) return "\u2013";
  if (typeof value === "number") return number(value);
  if (typeof value !== "object") return String(value);
  if (Array.isArray(value)) {
    if (value.length && value.every((v) => v && typeof v === "object" && !Array.isArray(v))) return grid(value);
    if (value.length && value.every((v) => FRAME.test(v))) return value.map((v) => el("div", { class: "mono" }, v));
    const cells = value.slice(0, PLAIN_CELLS).map((v) => (Array.isArray(v) ? `(${v.map(plainly).join(", ")})` : plainly(v)));
    return cells.join(", ") + (value.length > PLAIN_CELLS ? `, and ${value.length - PLAIN_CELLS} more` : "");
  }
  return el("table", {}, el("tbody", {}, Object.entries(value).map(([k, v]) => row(k, v))));
}

const plainly = (value) => (value === null || typeof value === "number" ? number(value) : typeof value === "string" ? value : JSON.stringify(value));

function grid(items) {
  const columns = [...new Set(items.flatMap((item) => Object.keys(item)))];
  return el(
    "table",
    {},
    el("thead", {}, el("tr", {}, columns.map((c) => el("th", { scope: "col" }, c.replaceAll("_", " "))))),
    el("tbody", {}, items.slice(0, PLAIN_CELLS).map((item) => el("tr", {}, columns.map((c) => el("td", {}, shown(item[c])))))),
  );
}

/** A button that changes something on the server, and says so where that fails; `change` may say false: not after all. */
function changing(text, change, onChanged) {
  const onclick = async (event) => {
    event.target.disabled = true;
    try {
      if ((await change()) === false) event.target.disabled = false;
      else onChanged?.();
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      event.target.disabled = false;
      event.target.textContent = `${text}: not done: ${error.message}`;
    }
  };
  return el("button", { type: "button", onclick }, text);
}

/** Ends all silences of the alert's kind in its run. */
async function endSilences(alert) {
  const { items } = await get(`${runPath(alert.run)}/silences`);
  for (const silence of items.filter((s) => s.kind === alert.kind)) {
    await remove(`/api/v1/silences/${encodeURIComponent(silence.id)}`);
  }
}

/** Asks who, why and until when, and posts that with `more`; false where nobody goes on. */
async function say(path, question, more = {}) {
  const said = await ask(question);
  return said !== null && post(path, { ...said, ...more });
}

const acknowledging = {
  title: "Acknowledge",
  text: "Others see that you know of this alert. It stays open, and counts for the verdict.",
  verb: "Acknowledge",
  hours: "",
};

const silencing = (kind) => ({
  title: "Silence",
  text: `Alerts of the kind ${kind} in this run stay on this page but do not count for the verdict, for the time chosen.`,
  verb: "Silence",
  hours: 24,
});

function actions(alert, { onChanged, onStep }) {
  const known = `/api/v1/alerts/${encodeURIComponent(alert.id)}/acknowledge`;
  const buttons = [
    onStep && el("button", { type: "button", onclick: () => onStep(alert) }, "Show on the charts"),
    alert.state === "open" && !alert.acknowledged && changing("Acknowledge", () => say(known, acknowledging), onChanged),
    alert.acknowledged && changing("Take acknowledgement back", () => remove(known), onChanged),
    !alert.silenced && changing("Silence this kind\u2026", () => say(`${runPath(alert.run)}/silences`, silencing(alert.kind), { kind: alert.kind }), onChanged),
    alert.silenced && changing("End the silence", () => endSilences(alert), onChanged),
  ].filter(Boolean);
  return buttons.length > 0 && el("div", { class: "actions" }, buttons);
}

/** Roots with what follows from them, the gravest open ones first. */
export function families(alerts) {
  const byId = new Map(alerts.map((a) => [a.id, a]));
  const children = new Set(alerts.flatMap((a) => a.consequences ?? []));
  const gravity = { critical: 0, warning: 1, info: 2 };
  return alerts
    .filter((a) => !children.has(a.id) && !a.parent)
    .sort(
      (a, b) =>
        (a.state === "open" ? 0 : 1) - (b.state === "open" ? 0 : 1) ||
        (gravity[a.severity] ?? 3) - (gravity[b.severity] ?? 3) ||
        a.first_step - b.first_step,
    )
    .map((a) => [a, (a.consequences ?? []).map((id) => byId.get(id)).filter(Boolean)]);
}

/** Puts cards into a node; details that the reader has opened stay open, buttons keep the focus. */
export function fillAlerts(node, cards, chartOf = null) {
  const markup = el("div", {}, cards).innerHTML;
  // Compared with what was made, not with what is there: charts are drawn into it.
  if (made.get(node) === markup) {
    // What is open is read again, all the same.
    node.querySelectorAll("details[open][data-part=history]").forEach((part) => part.dispatchEvent(new Event("toggle")));
    return;
  }
  made.set(node, markup);
  const open = new Set([...node.querySelectorAll("details[open]")].map(detailsKey));
  const focused = document.activeElement?.closest?.(".alert")?.id;
  const next = el("div", {}, cards);
  for (const place of next.querySelectorAll("[data-chart]")) place.append(chartOf(place.dataset.chart));
  next.querySelectorAll("details").forEach((d) => (d.open = open.has(detailsKey(d))));
  const label = document.activeElement?.textContent;
  node.replaceChildren(...next.childNodes);
  if (focused) {
    const card = document.getElementById(focused);
    [...(card?.querySelectorAll("button, summary") ?? [])].find((b) => b.textContent === label)?.focus();
  }
}

const made = new WeakMap(); // node -> the cards that were put into it, as text

const detailsKey = (node) => `${node.closest(".alert")?.id}:${node.querySelector("summary").textContent.replace(/\d+/, "")}`;
