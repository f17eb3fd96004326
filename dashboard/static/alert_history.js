// Who was notified of an alert, and what happened to it: asked for when that part of its card is opened.

import { Problem, get, root } from "./api.js";
import { badge, clock, el, fill } from "./dom.js";
import { outcome } from "./notified.js";

const FRESH_MS = 5000;
const known = new Map(); // id -> { at, content() }: cards are made anew each time, and what was read stays.

/** A part of the card of an alert that is filled when it is opened, and again as the page refreshes. */
export function history(alert) {
  const body = el("div", { class: "history" });
  fill(body, known.get(alert.id)?.content() ?? el("p", { class: "muted" }, "loading"));
  const node = el("details", { "data-part": "history" }, el("summary", {}, "Notifications and history"), body);
  node.addEventListener("toggle", () => node.open && load(alert));
  return node;
}

async function load(alert) {
  const before = known.get(alert.id);
  if (before && Date.now() - before.at < FRESH_MS) return;
  let content;
  try {
    const detail = await get(`/api/v1/alerts/${encodeURIComponent(alert.id)}`);
    content = () => [sent(detail), happened(detail)];
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    content = () => el("p", { class: "stale" }, `This cannot be read: ${error.message}`);
  }
  known.set(alert.id, { at: Date.now(), content });
  // The card may be another one by now.
  const shown = document.getElementById(`alert-${alert.id}`)?.querySelector(".history");
  if (shown) fill(shown, content());
}

function sent({ notifications, parent }) {
  const list = notifications.map((entry) => {
    const came = outcome(entry);
    return el("li", { "data-target": entry.target }, el("b", {}, entry.name), " ", badge(...came.badge), ` ${came.text}`);
  });
  const nobody = parent
    ? "It follows from another alert, and notifications are sent of that one."
    : "No notification of it was sent.";
  return [
    list.length ? el("ul", {}, list) : el("p", {}, nobody),
    el("p", {}, el("a", { href: `${root}/notifications` }, "Notification targets")),
  ];
}

function happened({ history: events }) {
  if (!events.length) return null;
  return el(
    "ul",
    {},
    events.map((event) => el(
      "li",
      {},
      el("time", { datetime: event.at, class: "muted" }, clock(event.at)), " ", el("b", {}, event.what.replaceAll("_", " ")), ` at step ${event.step}`,
      event.reason && `: ${event.reason}`,
    )),
  );
}
