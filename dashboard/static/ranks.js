// The table of ranks: who was last heard of when, and where. Suspicious ones come first.

import { age } from "./api.js";
import { $, badge, count, duration, el, fill, number, seconds, show, stateBadge, stepText } from "./dom.js";

const SHOWN = 16;
let everyone = false;

const SILENT_BEATS = 3;
const MIN_SILENCE = 15;

/** A rank that runs, for all it said, but has not been heard of for three of its promised intervals. */
const silent = (rank) =>
  rank.state === "running" && age(rank.last_seen_at) > Math.max(MIN_SILENCE, SILENT_BEATS * rank.heartbeat_seconds);

/** @param named Set of ranks that open alerts name */
export function rankTable(run, ranks, named) {
  const rows = ranks.map((rank) => {
    const quiet = silent(rank);
    return { ...rank, quiet, named: named.has(rank.rank), suspect: quiet || named.has(rank.rank) || rank.state === "failed" };
  });
  rows.sort((a, b) => b.named - a.named || b.quiet - a.quiet || b.suspect - a.suspect || a.rank - b.rank);
  const missing = run.world_size - ranks.length;
  const suspects = rows.filter((r) => r.suspect).length;
  $("ranks-summary").textContent = [
    `${ranks.length} of ${run.world_size} have reported`,
    missing > 0 && `${missing} missing`,
    suspects > 0 && `${suspects} suspicious`,
  ].filter(Boolean).join(", ");
  const limit = everyone ? rows.length : Math.max(SHOWN, Math.min(suspects, 2 * SHOWN));
  fill($("ranks-body"), rows.slice(0, limit).map((rank) => row(rank, run)));
  const more = $("ranks-more");
  show(more, rows.length > SHOWN);
  more.textContent = everyone ? "Show fewer" : `Show all ${rows.length} ranks`;
  more.onclick = () => {
    everyone = !everyone;
    rankTable(run, ranks, named);
  };
}

function row(rank, run) {
  const behind = run.last_step - rank.last_step;
  return el(
    "tr",
    { class: rank.suspect ? "suspect" : null, "data-rank": rank.rank },
    el("th", { scope: "row" }, `${rank.rank}`, rank.named && [" ", badge("named by an alert", "critical", "\u25B2")]),
    el("td", { "data-label": "State" }, rank.quiet ? badge("silent", "critical", "?") : stateBadge(rank.state),
      rank.phase && rank.state === "running" && el("span", { class: "muted" }, ` in ${rank.phase}`),
      rank.error && el("div", { class: "is-critical" }, rank.error)),
    el("td", { "data-label": "Last step", class: "number" }, stepText(rank.last_step),
      behind > 1 && el("span", { class: "muted" }, ` (${count(behind)} behind)`)),
    el("td", { "data-label": "Heard of" }, `${duration(age(rank.last_seen_at))} ago`),
    el("td", { "data-label": "Loss", class: "number" }, number(rank.loss)),
    el("td", { "data-label": "Step time", class: "number" }, seconds(rank.step_seconds)),
    el("td", { "data-label": "Host" }, rank.host || "\u2013"),
  );
}
