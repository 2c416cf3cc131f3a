// Shows pairs one at a time, blind and in an order of each person's own, takes verdicts by keyboard
// and keeps them in this browser. Nothing is sent. Texts of others are only ever set as text.
"use strict";

const page = JSON.parse(document.getElementById("pairs").textContent);
const byId = (id) => document.getElementById(id);
let worker = "";
let order = []; // [number of the pair, whether its summaries are exchanged]
let verdicts = {}; // number of the pair -> verdict
let at = 0;
let shownAt = 0;

// A generator in [0, 1) that depends on a text alone: FNV-1a into xorshift.
function randomOf(text) {
  let state = 2166136261;
  for (const character of text) {
    state = Math.imul(state ^ character.codePointAt(0), 16777619) >>> 0;
  }
  state = state || 1;
  return () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    state >>>= 0;
    return state / 4294967296;
  };
}

function orderFor(name) {
  const random = randomOf(`${page.key} ${name}`);
  for (let k = 0; k < 20; k++) random();
  const drawn = page.pairs.map((_, number) => [number, random() < 0.5]);
  for (let last = drawn.length - 1; last > 0; last--) {
    const other = Math.floor(random() * (last + 1));
    [drawn[last], drawn[other]] = [drawn[other], drawn[last]];
  }
  return drawn;
}

const storageKey = () => `annotate ${page.key} ${worker}`;

function keep() {
  try {
    localStorage.setItem(storageKey(), JSON.stringify(verdicts));
    localStorage.setItem(`annotate ${page.key}`, worker);
    byId("kept").textContent = "";
  } catch {
    byId("kept").textContent = "This browser keeps nothing: save before you close the page.";
  }
}

function begin(name) {
  worker = name.replace(/[^\p{L}\p{N}._-]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 40);
  if (!worker) return;
  order = orderFor(worker);
  verdicts = {};
  try {
    verdicts = JSON.parse(localStorage.getItem(storageKey())) || {};
  } catch {
    keep();
  }
  const next = order.findIndex(([number]) => !(number in verdicts));
  at = next < 0 ? order.length : next;
  byId("start").hidden = true;
  byId("work").hidden = false;
  show();
}

function shownSummaries() {
  const [number, exchanged] = order[at];
  const both = page.pairs[number].summaries;
  return exchanged ? [both[1], both[0]] : both;
}

function show() {
  const given = Object.values(verdicts).filter((one) => one.choice !== null).length;
  const skipped = Object.keys(verdicts).length - given;
  byId("progress").textContent =
    `${worker}: ${given} of ${order.length} judged, ${skipped} skipped`;
  const done = at >= order.length;
  byId("pair").hidden = done;
  byId("done").hidden = !done;
  if (done) return;
  const { info } = page.pairs[order[at][0]];
  byId("title").textContent = info.title;
  byId("subreddit").textContent = info.subreddit ? `r/${info.subreddit}` : "";
  byId("post").textContent = info.post;
  byId("post").scrollTop = 0;
  const [first, second] = shownSummaries();
  byId("first").textContent = first.text.trim() || "(empty)";
  byId("second").textContent = second.text.trim() || "(empty)";
  shownAt = Date.now();
  window.scrollTo(0, 0);
}

function judge(choice, confidence) {
  if (at >= order.length) return;
  const seconds = Math.round((Date.now() - shownAt) / 100) / 10;
  const time = new Date().toISOString();
  verdicts[order[at][0]] = { choice, confidence, seconds, time };
  keep();
  at += 1;
  show();
}

function back() {
  if (at === 0) return;
  at -= 1;
  delete verdicts[order[at][0]];
  keep();
  show();
}

// One line a verdict, in the schema of the published comparisons; the first summary is A.
function lines() {
  return order
    .filter(([number]) => verdicts[number] && verdicts[number].choice !== null)
    .map(([number, exchanged]) => {
      const { info, summaries } = page.pairs[number];
      const { choice, confidence, seconds, time } = verdicts[number];
      return JSON.stringify({
        info,
        summaries: exchanged ? [summaries[1], summaries[0]] : summaries,
        choice,
        worker,
        batch: `annotate ${page.key}`,
        split: page.split,
        extra: { confidence, seconds, time },
      });
    });
}

function save() {
  const text = lines().map((line) => `${line}\n`).join("");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/jsonl" }));
  link.download = `annotations_${worker}.jsonl`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const KEYS = {
  a: () => judge(0, null),
  b: () => judge(1, null),
  s: () => judge(null, null),
  u: back,
  d: save,
};
for (const point of [1, 2, 3, 4]) KEYS[point] = () => judge(0, point);
for (const point of [6, 7, 8, 9]) KEYS[point] = () => judge(1, point);

document.addEventListener("keydown", (event) => {
  if (byId("work").hidden || event.ctrlKey || event.altKey || event.metaKey || event.repeat) return;
  const act = KEYS[event.key.toLowerCase()];
  if (act) {
    event.preventDefault();
    act();
  }
});
byId("start").addEventListener("submit", (event) => {
  event.preventDefault();
  begin(byId("name").value);
});
for (const button of document.querySelectorAll("button[data-key]")) {
  button.addEventListener("click", () => KEYS[button.dataset.key]());
}
byId("count").textContent = page.pairs.length;
try {
  byId("name").value = localStorage.getItem(`annotate ${page.key}`) || "";
} catch {
  byId("name").value = "";
}
byId("name").focus();
