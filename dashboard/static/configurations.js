// In how many settings two runs differ, counted as the page that compares them does.

/** Every leaf with its path, `a.b.0.c`; lists of plain values and empty ones are leaves. */
function* flattened(config, prefix = "") {
  for (const [name, value] of Object.entries(config)) {
    const key = `${prefix}${name}`;
    if (holds(value)) yield* flattened(value, `${key}.`);
    else yield [key, JSON.stringify(value)];
  }
}

const isHolder = (value) => value !== null && typeof value === "object";

const holds = (value) =>
  Array.isArray(value) ? value.some(isHolder) : isHolder(value) && Object.keys(value).length > 0;

/** What a run was set to: the number of its ranks, too, and not what it is filed under. */
const settings = ({ config, world_size: ranks }) => ({ world_size: ranks, ...config, tags: undefined });

/** The number of keys whose values are not the same in both runs. */
export function differing(one, other) {
  const [a, b] = [one, other].map((run) => new Map(flattened(settings(run))));
  // A key that a run has not reads as null.
  const of = (settings, key) => settings.get(key) ?? "null";
  return [...new Set([...a.keys(), ...b.keys()])].filter((key) => of(a, key) !== of(b, key)).length;
}
