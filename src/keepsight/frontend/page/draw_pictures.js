// The pictures that the processor cache holds, each with a button that pins it there.

import { at, bytes, keep, make } from "./elements.js";

const sights = new Map(); // media hash: the URL of a thumbnail that was fetched

export function drawPictures(held, { look, pin }) {
  at("held").hidden = false;
  at("none-held").hidden = held.length > 0;
  const create = (each) => createPicture(each, pin);
  const update = (item, each) => updatePicture(item, each, look);
  keep(at("pictures"), newInFront(held), (each) => each.media_hash, create, update);
  forgetOthers(new Set(held.map((each) => each.media_hash)));
}

// Using one makes it the first; here it stays where it is, under the hand that is about to press its button.
function newInFront(held) {
  const places = new Map([...at("pictures").children].map((child, place) => [child.dataset.name, place]));
  const placeOf = (each) => places.get(each.media_hash) ?? -1;
  return [...held].sort((one, other) => placeOf(one) - placeOf(other));
}

function createPicture({ media_hash: name, num_bytes: size }, pin) {
  const image = make("img", { alt: `Picture ${name.slice(0, 8)}`, title: `${name.slice(0, 16)} · ${bytes(size)}` });
  const button = make("button", { type: "button", label: `Pin picture ${name.slice(0, 8)}` });
  button.onclick = () => pin(name, button.getAttribute("aria-pressed") !== "true");
  return make("li", {}, image, button);
}

// One that is gone by now, or whose server is, is looked for again with the next list, if it stands there.
async function show(image, name, look) {
  const sight = sights.has(name) ? null : await look(name).catch(console.warn);
  if (sight && !sights.has(name)) sights.set(name, URL.createObjectURL(sight));
  if (sights.has(name)) image.src = sights.get(name);
}

function updatePicture(item, { media_hash: name, is_pinned: isPinned }, look) {
  const [image, button] = ["img", "button"].map((tag) => item.querySelector(tag));
  if (!image.src) show(image, name, look);
  button.setAttribute("aria-pressed", isPinned);
  button.textContent = isPinned ? "Pinned" : "Pin";
}

function forgetOthers(names) {
  for (const [name, url] of sights)
    if (!names.has(name)) {
      URL.revokeObjectURL(url);
      sights.delete(name);
    }
}
