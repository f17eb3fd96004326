// Asks who says something about an alert, why and until when: acknowledgements and silences have all three.

import { clock, el } from "./dom.js";

const KEY = "rankscope-name";
const ENDS = [[1, "1 hour"], [8, "8 hours"], [24, "1 day"], [168, "1 week"], ["", "good, until it is taken back"]];

function remembered() {
  try {
    return localStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // Storage may be forbidden; then the name is asked for each time.
  }
}

function remember(name) {
  try {
    localStorage.setItem(KEY, name);
  } catch {
    // As above.
  }
}

/**
 * @param what { title, text, verb, hours }: `verb` is on the button, `hours` what is chosen at first
 * @returns a promise of { name, reason, seconds }, `seconds` left out for no end; null where nobody goes on
 */
export function ask({ title, text, verb, hours }) {
  const name = el("input", { type: "text", id: "ask-name", maxlength: "200", autocomplete: "name", placeholder: "so that others can ask you", value: remembered() });
  const reason = el("input", { type: "text", id: "ask-reason", maxlength: "2000", placeholder: "so that others understand" });
  const end = el("select", { id: "ask-hours" }, ENDS.map(([value, words]) => el("option", { value, selected: value === hours }, words)));
  const cancel = el("button", { type: "button" }, "Cancel");
  const dialog = el(
    "dialog",
    { id: "ask", "aria-labelledby": "ask-title" },
    el(
      "form",
      { method: "dialog", class: "menu" },
      el("h2", { id: "ask-title" }, title),
      el("p", {}, text),
      el("label", { class: "field" }, "Your name ", name),
      el("label", { class: "field" }, "Why ", reason),
      el("label", { class: "field" }, "For ", end),
      el("div", { class: "row" }, cancel, el("button", { value: "yes" }, verb)),
    ),
  );
  cancel.addEventListener("click", () => dialog.close(""));
  document.body.append(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (dialog.returnValue !== "yes") return resolve(null);
      remember(name.value.trim());
      const said = { name: name.value.trim(), reason: reason.value.trim() };
      return resolve(end.value ? { ...said, seconds: 3600 * Number(end.value) } : said);
    });
    dialog.showModal();
    (name.value ? reason : name).focus();
  });
}

/** "by Ada until 14:05 (known)", of an acknowledgement or a silence; what nobody said is left out. */
export const saidBy = ({ name, until, reason }) =>
  [name && `by ${name}`, until && `until ${clock(until)}`, reason && `(${reason})`].filter(Boolean).join(" ");
