// The public REST interface, asked from the browser.

export const root = document.body.dataset.root || "";

/** What the server says is wrong (problem+json), as an Error whose message a person can read. */
export class Problem extends Error {
  constructor(status, title, detail) {
    super(detail || title || `the server answered ${status}`);
    this.status = status;
  }
}

let ahead = 0; // How far the server's clock is ahead of ours, in milliseconds.

async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(root + path, { headers: { Accept: "application/json" }, ...options });
  } catch {
    throw new Problem(0, "", "no answer from the server");
  }
  const date = Date.parse(answer.headers.get("date"));
  // The header has whole seconds; a difference below two says nothing.
  if (date) ahead = Math.abs(date - Date.now()) < 2000 ? 0 : date - Date.now();
  if (answer.ok) return answer.status === 204 ? null : answer.json();
  let problem = {};
  try {
    problem = await answer.json();
  } catch {
    // Not JSON: a proxy in between has answered.
  }
  throw new Problem(answer.status, problem.title, problem.detail);
}

export function query(values) {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== undefined && value !== null && value !== "" && value !== false) parts.append(name, value);
  }
  const text = parts.toString();
  return text ? `?${text}` : "";
}

// How long an answer stands for what is now: scripts of a page that is opened in the background may
// wait for hours until they want it.
const FRESH_MS = 10_000;
const asked = new Map(); // Address -> { answer, at }: what was asked for ahead and not wanted yet.

/** Asks for what `get` is going to be called for within seconds, with the same values in this order. */
export function askAhead(path, values = {}) {
  const answer = ask(path + query(values));
  answer.catch(() => {}); // Who calls `get` hears of it.
  asked.set(path + query(values), { answer, at: performance.now() });
}

export function get(path, values = {}) {
  const address = path + query(values);
  const { answer, at } = asked.get(address) ?? {};
  asked.delete(address);
  return answer && performance.now() - at < FRESH_MS ? answer : ask(address);
}

export const post = (path, body = {}) =>
  ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "application/json" },
    body: JSON.stringify(body),
  });

export const remove = (path) => ask(path, { method: "DELETE", headers: { Accept: "application/json" } });

export const runPath = (run) => `/api/v1/runs/${encodeURIComponent(run)}`;
export const runPage = (run) => `${root}/runs/${encodeURIComponent(run)}`;

/** Milliseconds since 1970, by the server's clock. */
export const serverNow = () => Date.now() + ahead;

/** Seconds since an RFC 3339 time, by the server's clock. */
export const age = (time) => (serverNow() - Date.parse(time)) / 1000;
