// Builds elements from plain values. Text is always text: nothing here parses markup.

export const $ = (id) => document.getElementById(id);

/** el("td", { class: "number", onclick: f }, "text", child, ...) */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((c) => c !== undefined && c !== null && c !== false));
  return node;
}

export function show(node, visible = true) {
  node.hidden = !visible;
}

/** Texts of the server name code between backticks: on a page the type says so. */
export const prose = (text) =>
  text.split(/(`[^`]+`)/).filter(Boolean).map((part) => (/^`.*`$/s.test(part) ? el("code", {}, part.slice(1, -1)) : part));

/** Puts children into a node only where they differ, so that focus and open details survive. */
export function fill(node, ...children) {
  const next = el("div", {}, ...children);
  if (node.innerHTML !== next.innerHTML) node.replaceChildren(...next.childNodes);
}

const SEVERITY_SIGNS = { critical: "\u25B2", warning: "\u25C6", info: "\u25CF" };
export const severitySign = (severity) => SEVERITY_SIGNS[severity] || "\u25CF";

/** A word with a sign and a colour; the sign says the same to those who see no colour. */
export function badge(text, tone, sign) {
  return el("span", { class: `badge is-${tone}`, "data-sign": sign }, text);
}

export const severityBadge = (severity) => badge(severity, severity, severitySign(severity));

const VERDICTS = {
  pass: ["pass", "ok", "\u2713"],
  fail: ["fail", "critical", "\u2715"],
  pending: ["pending", "muted", "\u2026"],
};
export const verdictBadge = (verdict) => badge(...(VERDICTS[verdict] || VERDICTS.pending));

const STATES = {
  running: ["running", "info", "\u25B6"],
  finished: ["finished", "ok", "\u25A0"],
  failed: ["failed", "critical", "\u2715"],
  lost: ["lost", "critical", "?"],
};
export const stateBadge = (state) => badge(...(STATES[state] || [state, "muted", "\u25CF"]));

/** 0.123456 -> "0.1235"; the strings NaN, Infinity, -Infinity stay as they are. */
export function number(value, digits = 4) {
  if (value === null || value === undefined) return "\u2013";
  if (typeof value === "string") return value;
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  // Steps and counts stand as they are; what is longer is read by its power of ten.
  if (Number.isInteger(value) && size < 1e9) return String(value);
  const rounded = Number(value.toPrecision(digits));
  return size < 1e6 ? rounded.toString() : rounded.toExponential();
}

/** Distances span decades: 0.0000013 -> "1.3e-6". */
export const distance = (value) => (Math.abs(value) >= 0.01 && Math.abs(value) < 100 ? number(value, 2) : value.toExponential(1));

export const count = (value) => (value ?? 0).toLocaleString("en");

/** The number of a step; -1 stands for none yet. */
export const stepText = (step) => (step < 0 ? "\u2013" : count(step));

/** 14:05 of today, or 20 Nov, 14:05: by the reader's clock. */
export function clock(time) {
  const then = new Date(time);
  const sameDay = then.toDateString() === new Date().toDateString();
  const day = sameDay ? {} : { day: "numeric", month: "short" };
  return then.toLocaleString("en-GB", { ...day, hour: "2-digit", minute: "2-digit" });
}

export function seconds(value) {
  if (value === null || value === undefined || typeof value === "string") return number(value);
  if (value < 1) return `${number(value * 1000, 3)} ms`;
  return `${number(value, 3)} s`;
}

/** 75 -> "1 min", in the largest unit that fits. */
export function duration(total) {
  if (total < 60) return `${Math.max(0, Math.round(total))} s`;
  if (total < 5400) return `${Math.round(total / 60)} min`;
  if (total < 129600) return `${Math.round(total / 3600)} h`;
  return `${Math.round(total / 86400)} days`;
}

/** [0,1,2,5] -> "0-2, 5" */
export function rankList(ranks) {
  const sorted = [...new Set(ranks)].sort((a, b) => a - b);
  const parts = [];
  for (let i = 0, start = 0; i < sorted.length; i++) {
    if (sorted[i + 1] === sorted[i] + 1) continue;
    parts.push(start === i ? `${sorted[i]}` : `${sorted[start]}-${sorted[i]}`);
    start = i + 1;
  }
  return parts.join(", ");
}

/** "0, 4-7" -> [[0, 0], [4, 7]]; null where it is no list of ranks. */
export function parseRanks(text) {
  const parts = text.split(",").map((part) => part.trim()).filter(Boolean);
  const ranges = parts.map((part) => /^(\d{1,5})(?:-(\d{1,5}))?$/.exec(part));
  if (ranges.includes(null)) return null;
  const bounds = ranges.map(([, low, high]) => [Number(low), Number(high ?? low)]);
  return bounds.every(([low, high]) => low <= high) ? bounds : null;
}

export const ranksText = (ranks) =>
  ranks.length === 0 ? "no rank" : `rank${ranks.length > 1 ? "s" : ""} ${rankList(ranks)}`;

/** Calls f at most once per `ms`, always once more after the last call. */
export function throttle(ms, f) {
  let timer = null;
  let last = 0;
  return () => {
    if (timer !== null) return;
    timer = setTimeout(() => {
      timer = null;
      last = Date.now();
      f();
    }, Math.max(0, last + ms - Date.now()));
  };
}

export function debounce(ms, f) {
  let timer = null;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => f(...args), ms);
  };
}
