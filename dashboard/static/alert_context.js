// What is around an alert: what each rank had printed, what was not committed, the run's settings.

import { latePart } from "./alert_parts.js";
import { el } from "./dom.js";
import { settings } from "./settings.js";

/** The part of an alert's card that has it. */
export const context = latePart("context", "Around it: console, changes, settings", "/context", (around) => [
  consoles(around.console),
  changes(around.git_diff),
  Object.keys(around.settings).length > 0 && el("details", {}, el("summary", {}, "Settings"), settings(around.settings)),
]);

function consoles(reports) {
  if (!reports.length) {
    return el("p", { class: "muted" }, "No console lines: ", el("code", {}, "attach(..., console=50)"), " keeps the last ones of each rank for this place.");
  }
  return reports.map((one) => el(
    "details",
    { open: reports.length === 1 || null },
    el("summary", {}, `Rank ${one.rank} had printed, at step ${one.step}`),
    el("pre", { tabindex: "0" }, one.lines.join("\n")),
  ));
}

function changes(diff) {
  if (!diff) return null;
  const words = [diff.commit && ` since ${diff.commit.slice(0, 10)}`, diff.truncated && " (the beginning)"];
  return el(
    "details",
    {},
    el("summary", {}, "Changes that were not committed", words),
    el("pre", { tabindex: "0" }, diff.diff),
  );
}
