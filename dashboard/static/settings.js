// The settings of a run as a table: the plain values of its configuration.

import { el } from "./dom.js";

/** Plain values by dotted name; lists of them are one. */
export function plain(value, name = "") {
  const isObject = value !== null && typeof value === "object";
  const isPlain = !isObject || (Array.isArray(value) && value.every((one) => one === null || typeof one !== "object"));
  if (isPlain) return { [name]: Array.isArray(value) ? value.join(", ") : value };
  return Object.assign({}, ...Object.entries(value).map(([key, inner]) => plain(inner, name ? `${name}.${key}` : key)));
}

/** @param values by dotted name */
export function settings(values) {
  const rows = Object.entries(values);
  return el(
    "div",
    { class: "scroll", tabindex: "0" },
    el(
      "table",
      { class: "settings" },
      el("caption", { class: "visually-hidden" }, "Settings"),
      el("tbody", {}, rows.map(([name, value]) => el(
        "tr",
        {},
        el("th", { scope: "row" }, el("code", {}, name)),
        el("td", {}, String(value ?? "\u2013")),
      ))),
    ),
  );
}
