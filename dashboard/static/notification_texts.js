// What came of notifications, as words.

import { clock, count } from "./dom.js";

/** What came of an entry of the log: a word with the colour and the sign of its badge, and the rest of the sentence. */
export function outcome(entry) {
  const delivered = entry.told_at && `at ${clock(entry.told_at)} (${entry.told})`;
  const before = delivered ? `; delivered before ${delivered}` : "";
  if (entry.error) {
    const next = entry.next_try_at ? `, next attempt at ${clock(entry.next_try_at)}` : ", and was given up";
    const times = entry.failures === 1 ? "once" : `${count(entry.failures)} times`;
    return { badge: ["failed", "critical", "\u2715"], text: `${times}${next}: ${entry.error}${before}` };
  }
  if (entry.waits) {
    const when = entry.next_try_at ? `to be sent at ${clock(entry.next_try_at)}` : "to be sent";
    return { badge: ["waiting", "muted", "\u2026"], text: `${when}${before}` };
  }
  if (delivered) return { badge: ["delivered", "ok", "\u2713"], text: delivered };
  return { badge: ["not sent", "muted", "\u2013"], text: "it was over, or set aside, before" };
}

/** "desync.* in vision, critical": which alerts a target gets. */
export function ofWhat({ kinds, projects, severity }) {
  const least = { info: "", warning: ", warning or critical", critical: ", critical" }[severity];
  return `${kinds ? kinds.join(", ") : "all kinds"}${projects ? ` in ${projects.join(", ")}` : ""}${least}`;
}
