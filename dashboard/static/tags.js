// Tags of runs: each leads to the runs that have it.

import { query, root } from "./api.js";
import { el } from "./dom.js";

/** Links, in a line of their own where they stand alone; nothing for a run without tags. */
export const tagLinks = (tags) =>
  tags.length > 0 && el("span", { class: "tags" }, tags.map((tag, i) => [i > 0 && " ", el("a", { class: "tag", href: `${root}/${query({ tag })}`, title: `Runs with the tag ${tag}` }, tag)]));
