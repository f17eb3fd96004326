// The state of every control lives in the query string, and only where it is not the default: a link
// that is copied shows what its sender sees.

export class QueryState {
  #defaults;
  #clean;
  #values;
  #listeners = [];

  /** clean(values) takes out of an address what no control could have put there. */
  constructor(defaults, clean = () => {}) {
    this.#defaults = defaults;
    this.#clean = clean;
    this.#read();
    addEventListener("popstate", () => {
      this.#read();
      this.#listeners.forEach((f) => f(Object.keys(this.#defaults)));
    });
  }

  #read() {
    const given = new URLSearchParams(location.search);
    this.#values = { ...this.#defaults };
    for (const name of Object.keys(this.#defaults)) if (given.has(name)) this.#values[name] = given.get(name);
    this.#clean(this.#values);
  }

  get(name) {
    return this.#values[name];
  }

  /** Sets several values; a change of the view can be undone with the Back button. */
  set(changes, { remember = false } = {}) {
    const changed = Object.keys(changes).filter((name) => this.#values[name] !== String(changes[name] ?? ""));
    if (!changed.length) return;
    for (const name of changed) this.#values[name] = String(changes[name] ?? "");
    const given = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(this.#values)) {
      if (value === this.#defaults[name]) given.delete(name);
      else given.set(name, value);
    }
    const text = given.toString();
    history[remember ? "pushState" : "replaceState"](null, "", location.pathname + (text ? `?${text}` : "") + location.hash);
    this.#listeners.forEach((f) => f(changed));
  }

  /** f(names of what has changed) */
  onChange(f) {
    this.#listeners.push(f);
  }
}
