// The contents of a page: a bar of its sections that stays in view, and sections that fold.

import { $, el } from "./dom.js";

const KEY = "rankscope-folded";
// As the style sheet has it: below, a section is a screen or more.
const NARROW = 640;

function remembered() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {}; // Storage may be forbidden, or hold what is not ours: then nothing is remembered.
  }
}

/**
 * Makes every `[data-section]` (its name in the bar) of the page foldable and lists it in the bar.
 * Those with `data-folded` are folded at first; with `data-folded="narrow"` where the window is that of a phone.
 * @param onUnfold called with a section that was opened: what is in it may be drawn now
 */
export function contents(bar, onUnfold) {
  const folded = remembered();
  const sections = [...document.querySelectorAll("[data-section]")];
  const links = new Map();
  const fold = (section, closed) => {
    section.classList.toggle("folded", closed);
    section.querySelector(".fold-button").setAttribute("aria-expanded", String(!closed));
  };
  for (const section of sections) {
    const title = section.querySelector("h2");
    const button = el("button", {
      type: "button", class: "fold-button quiet", "aria-controls": section.id, "aria-label": `Fold ${section.dataset.section}`,
      onclick: () => {
        const closed = !section.classList.contains("folded");
        fold(section, closed);
        folded[section.id] = closed;
        try {
          localStorage.setItem(KEY, JSON.stringify(folded));
        } catch {
          // As above.
        }
        if (!closed) onUnfold(section);
      },
    });
    title.before(button);
    const { folded: atFirst } = section.dataset;
    fold(section, folded[section.id] ?? (atFirst === "" || (atFirst === "narrow" && innerWidth < NARROW)));
    const link = el("a", {
      href: `#${section.id}`,
      onclick: (event) => {
        event.preventDefault();
        if (section.classList.contains("folded")) button.click();
        section.scrollIntoView({ block: "start" });
        section.querySelector(".fold-button").focus({ preventScroll: true });
      },
    }, section.dataset.section);
    links.set(section, link);
  }
  bar.replaceChildren(...links.values());
  const list = () => {
    for (const [section, link] of links) link.hidden = section.hidden;
    bar.hidden = [...links.keys()].filter((section) => !section.hidden).length < 2;
  };
  const watcher = new MutationObserver(list);
  sections.forEach((section) => watcher.observe(section, { attributes: true, attributeFilter: ["hidden"] }));
  list();
  const here = () => {
    const line = bar.getBoundingClientRect().bottom + 120;
    const seen = sections.filter((section) => !section.hidden);
    const now = seen.findLast((section) => section.getBoundingClientRect().top < line) ?? seen[0];
    for (const [section, link] of links) {
      if (section === now) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  };
  addEventListener("scroll", here, { passive: true });
  here();
}
