// A part of the card of an alert that is asked for when it is opened, and again as the page refreshes.

import { Problem, get } from "./api.js";
import { el, fill } from "./dom.js";

const FRESH_MS = 5000;

/**
 * A function that makes such a part of an alert's card.
 *
 * @param part its name, which is also the class of what it is filled with
 * @param title what it is opened by
 * @param path of the alert to what is asked for: "", "/context"
 * @param content what is shown of the answer
 */
export function latePart(part, title, path, content) {
  const known = new Map(); // id -> { at, shown() }: cards are made anew each time, and what was read stays.

  async function load(alert) {
    const before = known.get(alert.id);
    if (before && Date.now() - before.at < FRESH_MS) return;
    let shown;
    try {
      const answer = await get(`/api/v1/alerts/${encodeURIComponent(alert.id)}${path}`);
      shown = () => content(answer);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      shown = () => el("p", { class: "stale" }, `This cannot be read: ${error.message}`);
    }
    known.set(alert.id, { at: Date.now(), shown });
    // The card may be another one by now.
    const body = document.getElementById(`alert-${alert.id}`)?.querySelector(`.${part}`);
    if (body) fill(body, shown());
  }

  return (alert) => {
    const body = el("div", { class: part });
    fill(body, known.get(alert.id)?.shown() ?? el("p", { class: "muted" }, "loading"));
    const node = el("details", { "data-part": part }, el("summary", {}, title), body);
    node.addEventListener("toggle", () => node.open && load(alert));
    return node;
  };
}
