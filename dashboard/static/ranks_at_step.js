// What was compared at one step, in words: groups of equal ranks, and the tensors that differ.

import { get } from "./api.js";
import { el, fill, number, rankList, ranksText } from "./dom.js";

const SHOWN = 12;

export async function comparison(node, runPath, step, stage) {
  const [item] = (await get(`${runPath}/divergence`, { from_step: step, to_step: step, stage })).items;
  if (!item || item.equal) return fill(node);
  const shown = item.clusters.slice(0, SHOWN).map((ranks) => ranksText(ranks));
  if (item.clusters.length > SHOWN) shown.push(`and ${item.clusters.length - SHOWN} more`);
  fill(
    node,
    el("h3", {}, `Step ${step}, ${item.stage.replaceAll("_", " ")}: ${item.clusters.length} groups of equal ranks`),
    el("p", {}, shown.join("  |  "),
      item.decided ? "" : ". No group is the largest: the bits do not show which one is wrong."),
    item.tensors.length > 0 && tensorTable(item),
  );
}

function tensorTable(item) {
  const rest = item.tensors.length - SHOWN;
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { class: "fold" },
      el("caption", {}, `${item.tensors.length} tensor${item.tensors.length > 1 ? "s differ" : " differs"}, in the order of the model` +
        (rest > 0 ? `; the first ${SHOWN} of them` : "")),
      el("thead", {}, el("tr", {}, ["Tensor", "Shape", "Ranks"].map((t) => el("th", { scope: "col" }, t)),
        ["Distance (L2)", "Relative"].map((t) => el("th", { scope: "col", class: "number" }, t)))),
      el("tbody", {}, item.tensors.slice(0, SHOWN).map((tensor) => el(
        "tr",
        {},
        el("th", { scope: "row", class: "mono" }, tensor.name),
        el("td", { "data-label": "Shape" }, tensor.shape.join(" \u00D7 ") || "scalar"),
        el("td", { "data-label": "Ranks" }, rankList(tensor.ranks)),
        el("td", { "data-label": "Distance", class: "number" }, number(tensor.distance)),
        el("td", { "data-label": "Relative", class: "number" }, number(tensor.relative)),
      ))),
    ),
  );
}
