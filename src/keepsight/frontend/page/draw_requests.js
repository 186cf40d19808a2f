// Recent requests: each a line whose strip can be compared with the others', and opened a waterfall of its stages up to
// the first token. A stage that nobody had to do is drawn as skipped.

import { count, fill, keep, make, seconds, write } from "./elements.js";

const STAGES = ["fetch", "identify", "decode", "resize", "transfer", "wait", "load", "encode", "prefill"];
// How they are coloured.
const KINDS = { wait: "wait", load: "encode", encode: "encode", prefill: "prefill" };
const kindOf = (stage) => KINDS[stage] ?? "prepare";
const FOUND_IN = { prefix: "prefix cache", encoder: "encoder cache", processor: "processor cache", nobody: "made anew" };
// What did not go as it was asked.
const ENDS = { error: "failed", abort: "its client left" };
// What each entry of a request's media is.
const ITEMS = { image: "picture", video: "film moment", audio: "sound", image_embeds: "embedding", prompt_embeds: "embedding" };
const TIERS = { host: " (host memory)", disk: " (disk)", remote: " (Redis)" };

export function drawRequests(parent, requests) {
  const longest = Math.max(1, ...requests.map(firstToken));
  const names = nameAll(requests);
  keep(parent, requests, (each) => names.get(each), createRequest, (item, each) => updateRequest(item, each, longest));
}

// A request's id is its caller's, who may use it again, or for several prompts.
function nameAll(requests) {
  const times = new Map();
  return new Map(requests.toReversed().map((each) => {
    const name = `${each.id} ${each.began_at}`;
    times.set(name, (times.get(name) ?? 0) + 1);
    return [each, `${name} ${times.get(name)}`];
  }));
}

// Milliseconds until there was a first token, or as far as it came.
function firstToken({ stages }) {
  return Math.max(0, ...stages.filter((each) => each.stage !== "generate").map((each) => each.begin_ms + each.ms));
}

function createRequest() {
  const parts = ["when", "what", "took"].map((name) => make("span", { className: name }));
  const strip = make("span", { className: "strip" });
  strip.setAttribute("aria-hidden", "true");
  return make("li", {}, make("details", {}, make("summary", {}, ...parts, strip), make("div", { className: "opened" })));
}

function updateRequest(item, request, longest) {
  write(item.querySelector(".when"), new Date(request.began_at * 1000).toLocaleTimeString("en-GB"));
  write(item.querySelector(".what"), [describeMedia(request), ENDS[request.status]].filter(Boolean).join(" · "));
  item.querySelector(".what").classList.toggle("failed", request.status === "error");
  write(item.querySelector(".took"), seconds((request.completion_tokens ? firstToken(request) : request.ms) / 1000));
  fill(item.querySelector(".strip"), [request.stages, longest], ([stages, until]) => bars(stages, until));
  fill(item.querySelector(".opened"), request, open);
}

// Of very many items the server has kept only what became of the first.
function describeMedia({ media, num_media: number }) {
  if (!number) return "Text";
  const found = new Map();
  for (const each of media) found.set(foundIn(each), (found.get(foundIn(each)) ?? 0) + 1);
  if (number > media.length) found.set("not told", number - media.length);
  const kinds = new Set(media.map(kindOfItem));
  const shown = count(number, kinds.size === 1 ? [...kinds][0] : "item");
  if (found.size === 1) return `${shown}: ${[...found.keys()][0]}`;
  return `${shown}: ${[...found].map(([where, times]) => `${times} ${where}`).join(", ")}`;
}

const kindOfItem = ({ modality }) => ITEMS[modality] ?? "item";

const capitalize = (text) => text[0].toUpperCase() + text.slice(1);

const foundIn = ({ answered_by: cache, tier }) =>
  cache ? FOUND_IN[cache] + (cache === "encoder" ? TIERS[tier] ?? "" : "") : "not answered";

// ---- opened

function open(request) {
  const { stages, media } = request;
  const until = Math.max(0.001, firstToken(request));
  const rows = STAGES.map((stage) => drawStage(stage, stages.filter((each) => each.stage === stage), media, until));
  return [make("p", { className: "faint", textContent: describeRequest(request) }), make("ul", {}, ...rows.filter(Boolean)), ...describeEach(media)];
}

function describeRequest({ id, status, ms, stages, prompt_tokens: prompt, cached_tokens: cached, completion_tokens: numTokens }) {
  const generated = stages.find((each) => each.stage === "generate");
  const facts = [`${cached} of ${prompt} prompt tokens cached`, count(numTokens, "token") + (generated ? ` in ${seconds(generated.ms / 1000)}` : "")];
  return [...facts, `${status} after ${seconds(ms / 1000)}`, id].join(" · ");
}

function drawStage(stage, done, media, until) {
  const spared = media.filter((each) => each.skipped.includes(stage));
  if (!done.length && !spared.length) return null;
  const track = make("div", { className: "track" }, ...bars(done, until));
  const name = make("span", { className: "name", textContent: stage });
  if (!done.length) {
    const sources = [...new Set(spared.map(foundIn))].join(", ");
    return make("li", { className: "skipped" }, name, track, make("span", { className: "ms", textContent: "skipped", title: sources }));
  }
  const took = seconds(done.reduce((sum, { ms, together = 1 }) => sum + ms / together, 0) / 1000) + (spared.length ? `, ${spared.length} skipped` : "");
  return make("li", {}, name, track, make("span", { className: "ms", textContent: took }));
}

function bars(spans, until) {
  // Much can be done while a request waits: that is drawn over it.
  const order = [...spans].sort((one, other) => (other.stage === "wait") - (one.stage === "wait"));
  return order.filter((each) => each.stage !== "generate").map(({ stage, begin_ms: begin, ms }) => {
    const bar = make("i", { className: kindOf(stage) });
    bar.style.left = `${(begin / until) * 100}%`;
    bar.style.width = `max(2px, ${(ms / until) * 100}%)`;
    return bar;
  });
}

function describeEach(media) {
  if (media.length < 2) return [];
  const items = media.map((each, index) => make("li", { textContent: `${capitalize(kindOfItem(each))} ${index + 1}: ${foundIn(each)}` }));
  return [make("ul", { className: "each faint" }, ...items)];
}
