// Who was notified of an alert, and what happened to it: asked for when that part of its card is opened.

import { latePart } from "./alert_parts.js";
import { root } from "./api.js";
import { badge, clock, el } from "./dom.js";
import { outcome } from "./notification_texts.js";

/** The part of an alert's card that has it. */
export const history = latePart("history", "Notifications and history", "", (detail) => [sent(detail), happened(detail)]);

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
