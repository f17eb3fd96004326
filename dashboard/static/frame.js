// What every page has: theme button, keyboard, help, the line that says what went wrong.

import { Problem } from "./api.js";
import { $, show } from "./dom.js";

const keys = new Map();

/** Binds a single key, ignored while a field has the focus. */
export const onKey = (key, action) => keys.set(key, action);

/**
 * Says that the server could not be asked, or (null) that it is over. Faults of ours are not hidden.
 * @param again whether what failed is asked for again by itself
 */
export function showError(error, { again = true } = {}) {
  if (error && !(error instanceof Problem)) throw error;
  const line = $("error-notice");
  // What is shown is of before: it dims, so that nobody takes it for what is now.
  document.body.classList.toggle("unreachable", Boolean(error) && !error.status);
  show(line, Boolean(error));
  if (!error) return;
  const who = error.status ? "The server refuses" : "The server cannot be reached";
  line.textContent = `${who}: ${error.message.replace(/\.$/, "")}. ${again ? "Trying again." : "Nothing was changed."}`;
}

$("theme").addEventListener("click", () => window.rankscopeTheme.toggle());
$("help").addEventListener("click", () => $("keys").showModal());
onKey("t", () => window.rankscopeTheme.toggle());
onKey("?", () => $("keys").showModal());
onKey("/", () => {
  $("filter")?.focus();
  $("filter")?.select();
});

document.addEventListener("keydown", (event) => {
  const field = event.target.closest("input, select, textarea");
  if (event.key === "Escape" && field) field.blur();
  // A range has no text: single keys work while it has the focus.
  if ((field && field.type !== "range" && field.type !== "checkbox") || document.querySelector("dialog[open]")) return;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const action = keys.get(event.key);
  if (action) {
    event.preventDefault();
    action();
  }
});
