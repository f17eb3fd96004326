// Events of a run: server-sent events, or polling where these do not get through. Nothing is asked for
// while the page is hidden; one query is made as soon as it is visible again.

import { $, show } from "./dom.js";

const POLL_MS = 3000;
const TEXTS = {
  live: ["live", "Changes arrive as they happen"],
  poll: ["polling", "The event stream does not get through; asking every few seconds"],
  paused: ["paused", "Paused while this page is hidden"],
  lost: ["no connection", "The server does not answer; trying again"],
};

const OVER = ["connected", "The run is over; alerts and what is said of them still arrive as they happen"];

export class Live {
  #url;
  #onEvent;
  #source = null;
  #timer = null;
  #going = true;

  /** onEvent(name, data) is called for each event; with null where there may be news of any kind. */
  constructor(url, eventNames, onEvent) {
    this.#url = url;
    this.#onEvent = onEvent;
    this.eventNames = eventNames;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#pause() : this.#resume()));
    if (document.hidden) this.#say("paused");
    else this.#listen();
  }

  #say(state) {
    const label = $("live");
    label.dataset.state = state;
    [label.textContent, label.title] = state === "live" && !this.#going ? OVER : TEXTS[state];
    show(label);
  }

  /** Whether the run still goes on: of one that is over nothing is live but the connection. */
  follows(going) {
    if (this.#going === going) return;
    this.#going = going;
    if ($("live").dataset.state === "live") this.#say("live");
  }

  /** Whether the server answers at all, which is known to who asks it. */
  answers(yes) {
    if (document.hidden) return;
    if (!yes) this.#say("lost");
    else if ($("live").dataset.state === "lost") this.#say(this.#source?.readyState === EventSource.OPEN ? "live" : "poll");
  }

  #close() {
    this.#source?.close();
    this.#source = null;
    clearInterval(this.#timer);
    this.#timer = null;
  }

  #pause() {
    this.#close();
    this.#say("paused");
  }

  #resume() {
    this.#onEvent(null);
    if (!this.#source) this.#listen();
  }

  #listen() {
    this.#source = new EventSource(this.#url);
    this.#source.onopen = () => {
      clearInterval(this.#timer);
      this.#timer = null;
      this.#say("live");
    };
    for (const name of this.eventNames) this.#source.addEventListener(name, (event) => this.#onEvent(name, JSON.parse(event.data)));
    this.#source.onerror = () => {
      // The browser tries again by itself unless the answer was an error; meanwhile we poll.
      const gone = this.#source?.readyState === EventSource.CLOSED;
      if ($("live").dataset.state !== "lost") this.#say(navigator.onLine ? "poll" : "lost");
      // A stream that breaks off is mostly a server that is gone: this is known at once by asking.
      if (this.#timer === null) this.#onEvent(null);
      this.#timer ??= setInterval(() => this.#onEvent(null), POLL_MS);
      if (gone) {
        this.#source.close();
        this.#source = null;
        setTimeout(() => {
          if (!document.hidden && !this.#source) this.#listen();
        }, 10 * POLL_MS);
      }
    };
  }
}
