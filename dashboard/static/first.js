// What the page of a run asks for first: as soon as this file is there, while the other scripts, of
// which there are many, still come. `run.js` asks for the same, and gets these answers.

import { askAhead, runPath } from "./api.js";

const path = runPath(document.body.dataset.run);

// What is said in words comes before the curves, and a server answers few at a time.
askAhead(`${path}/verdict`);
askAhead(path);
askAhead(`${path}/alerts`, { consequences: true, limit: 500 });
askAhead(`${path}/metrics`, { tensors: "false" });
