// What the server holds and did, asked for once a second while somebody can see it.
// Whoever asks needs the administrator's key where the server has one.

import { drawCaches } from "./draw_caches.js";
import { drawPictures } from "./draw_pictures.js";
import { drawRequests } from "./draw_requests.js";
import { at, count, write } from "./elements.js";
import { explain, request } from "./server.js";

const PERIOD_MS = 1000;
// Whoever says nothing for so long is as good as gone: what is shown would be taken for what is.
const PATIENCE_MS = 10_000;
const NUM_REQUESTS = 20;
// Pins come and go while no number changes.
const LISTED_MS = 10_000;
let timer = null;
let seenPictures = null; // how the processor cache was when its pictures were listed, and when; false: they are not shown

// ---- the server

function call(path, method = "GET") {
  const signal = method === "GET" ? AbortSignal.timeout(PATIENCE_MS) : null;
  return request(path, "admin-key", { method, signal });
}

// ---- what is shown

async function refresh() {
  const state = await (await call(`debug/state?limit=${NUM_REQUESTS}`)).json();
  at("shown").hidden = false;
  write(at("now"), `Now: ${count(state.running, "answer")} under way, ${state.waiting.toLocaleString("en")} waiting.`);
  drawCaches(at("caches"), state.caches, clear);
  write(at("work"), describeWork(state.media));
  at("no-requests").hidden = state.requests.length > 0;
  at("legend").hidden = !state.requests.length;
  drawRequests(at("requests"), state.requests);
  const processor = state.caches.filter((each) => each.cache === "processor");
  await refreshPictures(JSON.stringify([processor, Math.floor(Date.now() / LISTED_MS)]));
}

function describeWork({ fetched, decoded, preprocessed, encoded }) {
  return `Work done on media so far: ${fetched} fetched, ${decoded} decoded, ${preprocessed} resized, ${encoded} encoded.`;
}

// Not each time: the server reads a folder for it.
async function refreshPictures(seen) {
  if (seenPictures === false || seenPictures === seen) return;
  try {
    const { data } = await (await call("debug/pictures")).json();
    drawPictures(data, { look, pin });
    seenPictures = seen;
  } catch (failure) {
    if (failure.status !== 404) throw failure;
    seenPictures = false; // without --dashboard-thumbnails there is no such thing
  }
}

const look = async (name) => (await call(`debug/pictures/${name}`)).blob();

// ---- what is done

// Whether to go on asking. What was refused stays in sight until the same `kind` of work is done.
async function run(kind, work) {
  try {
    await work();
    if (at("error").dataset.kind === kind) at("error").hidden = true;
    return true;
  } catch (failure) {
    at("error").dataset.kind = kind;
    at("error").textContent = explain(failure);
    at("error").hidden = false;
    if (failure.status === 401) askForKey();
    return failure.status !== 401 && failure.status !== 403;
  }
}

function askForKey() {
  at("shown").hidden = true;
  at("key-form").hidden = false;
  at("key").focus();
}

async function act(work, said) {
  write(at("said"), "");
  const mayGoOn = await run("act", async () => {
    await work();
    write(at("said"), said);
    seenPictures &&= null;
  });
  if (mayGoOn) await poll();
}

const clear = (title, path) => act(() => call(path, "POST"), `The ${title.toLowerCase()} was cleared.`);
const pin = (name, isWanted) =>
  act(() => call(`debug/pictures/${name}/pin`, isWanted ? "POST" : "DELETE"), isWanted ? "Pinned for an hour." : "Not pinned any more.");

async function poll() {
  clearTimeout(timer);
  timer = null;
  if (document.hidden) return;
  const mayGoOn = await run("poll", refresh);
  clearTimeout(timer); // another may have begun meanwhile
  if (mayGoOn) timer = setTimeout(poll, PERIOD_MS);
}

at("key-form").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem("admin-key", at("key").value);
  at("key-form").hidden = true;
  poll();
};
document.onvisibilitychange = poll;
poll();
