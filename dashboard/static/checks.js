// Every check, whether it could run or not. "Not checked" never reads as "passed".

import { el } from "./dom.js";

const GROUPS = [
  { state: "failed", sign: "\u2715", tone: "critical", word: "failed" },
  { state: "not_run", sign: "\u25CB", tone: "muted", word: "not run" },
  { state: "passed", sign: "\u2713", tone: "ok", word: "passed" },
];
// A longer list of checks that did not run folds into one line, as the passed ones of a broken run.
const FEW = 4;

const chosen = {}; // state -> whether the reader has opened or closed its group
let shown = "";

/** Fills a node with the checks of a verdict, the failed ones first. */
export function checks(node, verdict) {
  const facts = JSON.stringify(verdict.checks);
  if (facts === shown) return;
  shown = facts;
  const of = (state) => verdict.checks.filter((c) => c.state === state).sort((a, b) => a.name.localeCompare(b.name));
  const broken = of("failed").length > 0;
  const open = { failed: true, not_run: of("not_run").length <= FEW, passed: !broken };
  node.replaceChildren(
    ...GROUPS.filter(({ state }) => of(state).length > 0).map((group) =>
      el(
        "details",
        {
          open: chosen[group.state] ?? open[group.state],
          "data-state": group.state,
        },
        el(
          "summary",
          // The click comes before the change. (A toggle event would also report what we open.)
          { onclick: (event) => (chosen[group.state] = !event.target.parentNode.open) },
          `${of(group.state).length} ${group.word}`,
        ),
        el("ul", {}, of(group.state).map((check) => line(check, group))),
      ),
    ),
  );
}

function line(check, { state, sign, tone, word }) {
  return el(
    "li",
    { "data-state": state, "data-name": check.name },
    el("span", { class: `sign is-${tone}`, "aria-hidden": "true" }, sign),
    el(
      "div",
      {},
      el("code", { class: "name" }, check.name),
      el("span", { class: `word is-${tone}` }, word),
      el("p", { class: "why" }, check.why),
    ),
  );
}
