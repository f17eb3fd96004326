// Figures of lines that grow: points that are new are put to those that are there; see `growing.py`.

const TYPES = {
  i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array,
};
const POINTS = ["x", "y", "customdata"];
const AREAS = ["envelope", "band"];

/** The whole figure, of the one that was there and of an answer that has its new points, or all. */
export function grown(before, answer) {
  const data = answer.data.map((trace) => ({ ...trace, ...decoded(trace) }));
  const { appended } = answer.layout.meta;
  for (const place of appended?.traces ?? []) {
    const trace = data[place];
    const old = before.data.find((one) => key(one) === key(trace));
    const put = AREAS.includes(trace.meta.role) ? area : line;
    Object.assign(trace, put(old, trace, appended.from));
  }
  const log = answer.layout.yaxis?.type === "log";
  for (const trace of data) {
    if (trace.meta?.role !== "envelope" || trace.x !== undefined) continue;
    Object.assign(trace, outline(data.find((one) => one.meta?.role === "raw" && one.meta.rank === trace.meta.rank), log));
  }
  return { data, layout: answer.layout };
}

const key = (trace) => JSON.stringify([trace.name, trace.meta]);

/** The arrays of a trace that came as base64, as numbers. */
export function decoded(trace) {
  const found = {};
  for (const name of POINTS) if (trace[name]?.bdata !== undefined) found[name] = array(trace[name]);
  return found;
}

/** Numbers that come as base64 of their bytes; of two dimensions a list of rows. */
function array({ dtype, bdata, shape }) {
  const bytes = Uint8Array.from(atob(bdata), (letter) => letter.charCodeAt(0));
  const flat = new TYPES[dtype](bytes.buffer);
  if (!shape) return flat;
  const width = Number(shape.split(",")[1]);
  // Plain lists: a view takes four times the memory of two numbers, and holds on to the whole answer.
  return Array.from({ length: flat.length / width }, (_, row) => Array.from(flat.subarray(row * width, (row + 1) * width)));
}

function line(old, tail, from) {
  const kept = Array.prototype.findIndex.call(old.x, (x) => x >= from);
  const found = {};
  for (const name of POINTS) {
    if (tail[name] === undefined) continue;
    const head = old[name].slice(0, kept < 0 ? undefined : kept);
    found[name] = ArrayBuffer.isView(tail[name]) ? Float64Array.of(...head, ...tail[name]) : [...head, ...tail[name]];
  }
  return found;
}

/** Areas are outlines of stretches: there along the top, back along the bottom, a gap between two. */
function area(old, tail, from) {
  const stretches = [];
  let open = null; // The stretch that goes on at `from`.
  for (const one of stretchesOf(old)) {
    const kept = one.filter(([x]) => x < from);
    if (!kept.length) break;
    stretches.push(kept);
    open = kept.length < one.length ? kept : null;
  }
  for (const one of stretchesOf(tail)) {
    if (open && one[0][0] === from) open.push(...one);
    else stretches.push(one);
    open = null;
  }
  return around(stretches);
}

/** The outline of the area between the extremes of a line's buckets; what cannot be drawn is a gap. */
function outline({ x, customdata }, log) {
  const shown = (value) => Number.isFinite(value) && (!log || value > 0);
  const stretches = [];
  let open = null;
  for (let i = 0; i < x.length; i++) {
    const [low, high] = customdata[i];
    if (!shown(low) || !shown(high)) {
      open = null;
      continue;
    }
    if (!open) stretches.push((open = []));
    open.push([x[i], high, low]);
  }
  return around(stretches);
}

/** Outlines of stretches of [x, top, bottom], NaN between two. */
function around(stretches) {
  const [x, y] = [[], []];
  for (const one of stretches) {
    if (x.length) [x, y].forEach((values) => values.push(NaN));
    for (const [step, top] of one) x.push(step), y.push(top);
    for (const [step, , bottom] of one.toReversed()) x.push(step), y.push(bottom);
  }
  return { x: Float64Array.from(x), y: Float64Array.from(y) };
}

/** [[x, top, bottom], ...] of each stretch. */
function stretchesOf({ x, y }) {
  const found = [];
  for (let begin = 0; begin < x.length;) {
    let end = begin;
    while (end < x.length && !Number.isNaN(x[end])) end++;
    const half = (end - begin) / 2;
    found.push(Array.from({ length: half }, (_, i) => [x[begin + i], y[begin + i], y[end - 1 - i]]));
    begin = end + 1;
  }
  return found;
}
