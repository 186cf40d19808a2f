// A chat with the server that this page came from, over the same API as everybody else's.
// The whole conversation goes with every question, files as data URLs of their bytes, unchanged: so the server knows
// them again. What came of an answer stays, even if it was stopped or broke off; a question of which nothing
// came goes back into the form and leaves no trace in the conversation.

import { at, make } from "./elements.js";
import { explain, Refused, request } from "./server.js";

const [talk, form, text, send, error, keyForm] = ["talk", "ask-form", "text", "send", "error", "key-form"].map(at);

let model = null; // as the server calls it
let messages = []; // in OpenAI's form
let attached = []; // to the next message: {name, kind, url}, and the item that shows it
let unread = new Set(); // files that are being read, of which none is forgotten
let isAwaited = false; // whether the question goes once they are read
let running = null; // the AbortController of the answer under way

// ---- the server

function call(path, options) {
  return request(`v1/${path}`, "key", options);
}

async function findModel(signal) {
  model ??= (await (await call("models", { signal })).json()).data[0].id;
  at("model").textContent = model;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new Refused("The connection ended before the answer did.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      if (line.slice(5).trim() === "[DONE]") return;
      const event = JSON.parse(line.slice(5));
      if (event.error) throw new Refused(event.error.message);
      yield event;
    }
  }
}

// ---- one question, one answer

async function ask(question, shown) {
  const answer = add("assistant");
  const timing = { started: performance.now() };
  const chat = messages;
  running = new AbortController();
  labelButton();
  answer.item.setAttribute("aria-busy", "true");
  try {
    await listen(question, answer.text, timing);
  } catch (failure) {
    if (!running.signal.aborted) {
      showFailure(failure, findCulprit(failure, shown.attached));
      model = null; // the server may be another by now
    }
    timing.isBroken = true;
  }
  running = null;
  labelButton();
  answer.item.setAttribute("aria-busy", "false");
  if (chat !== messages) return; // a new chat has begun
  const said = answer.text.textContent;
  if (!said && timing.isBroken) return takeBack(shown, answer);
  messages.push(question, { role: "assistant", content: said });
  answer.note.textContent = describe(timing);
}

async function listen(question, place, timing) {
  const { signal } = running;
  await findModel(signal);
  const body = { model, messages: [...messages, question], stream: true, stream_options: { include_usage: true } };
  const response = await call("chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  let thought = null;
  for await (const event of events(response)) {
    timing.usage = event.usage ?? timing.usage;
    timing.isCut ||= event.choices[0]?.finish_reason === "length";
    const { content, reasoning_content: thinks } = event.choices[0]?.delta ?? {};
    if (!content && !thinks) continue;
    timing.first ??= performance.now();
    timing.last = performance.now();
    if (thinks) (thought ??= addThought(place)).lastElementChild.append(thinks);
    if (!content) continue;
    if (thought && !place.textContent) thought.open = false;
    place.append(content);
  }
}

function describe({ started, first, last, usage, isCut, isBroken }) {
  const facts = first ? [`first token ${Math.round(first - started)} ms`] : [];
  if (usage?.completion_tokens > 1 && last > first)
    facts.push(`${Math.round((usage.completion_tokens - 1) / ((last - first) / 1000))} tokens/s`);
  if (usage)
    facts.push(`${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens} prompt tokens cached`);
  if (isCut) facts.push("cut at the token limit");
  if (isBroken) facts.push("not finished");
  return facts.join(" · ");
}

function takeBack({ item, typed, attached: sent }, answer) {
  item.remove();
  answer.item.remove();
  at("hint").hidden = messages.length > 0;
  text.value = [typed, text.value].filter(Boolean).join("\n"); // another may have been begun meanwhile
  fit();
  attached = [...sent, ...attached];
  showAttached();
}

// ---- what is shown

function add(role) {
  const [said, note] = ["p", "small"].map((tag) => make(tag));
  const speaker = make("span", { className: "unseen", textContent: `${role}: ` });
  const item = make("li", { className: role }, speaker, said, note);
  talk.firstElementChild.append(item);
  at("hint").hidden = true;
  talk.scrollTop = 0; // its end: the style sheet reverses it
  return { item, text: said, note };
}

// Above the answer, in sight until that begins; then it is for those who open it, and not read aloud with the answer.
function addThought(place) {
  const thought = make("details", { open: true }, make("summary", { textContent: "Thought" }), make("p"));
  place.before(thought);
  return thought;
}

// The API names a file by its place in the conversation.
function findCulprit({ param }, sent) {
  const [, turn, part] = /^messages\[(\d+)\]\.content\[(\d+)\]/.exec(param) ?? [];
  return Number(turn) === messages.length ? sent[part] : undefined;
}

function showFailure(failure, file) {
  const reason = explain(failure);
  error.textContent = file ? `${file.name}: ${reason}` : reason;
  error.hidden = false;
  if (failure.status === 401) askForKey();
}

function show({ name, kind, url }) {
  if (kind === "image") return make("img", { src: url, alt: name });
  if (kind === "file") return make("span", { className: "file", textContent: name });
  return make(kind, { src: url, controls: true, preload: "metadata", label: name });
}

function showAttached() {
  const wanted = attached.map((each) => (each.item ??= makeRemovable(show(each), each.name, () => drop(each))));
  unreadItem.firstChild.textContent = `${unread.size} being read`;
  if (unread.size) wanted.push(unreadItem);
  const list = at("attached");
  for (const item of [...list.children]) if (!wanted.includes(item)) item.remove();
  // One that is moved, even to where it is, loses the focus.
  wanted.forEach((item, i) => item === list.children[i] || list.insertBefore(item, list.children[i]));
}

function makeRemovable(shown, name, forget) {
  const remove = make("button", { type: "button", textContent: "×", label: `Remove ${name}` });
  remove.onclick = () => {
    forget();
    showAttached();
    text.focus();
  };
  return make("li", {}, shown, remove);
}

const unreadItem = makeRemovable(show({ kind: "file" }), "files being read", forgetUnread);

function labelButton() {
  send.textContent = running ? "Stop" : isAwaited ? "Cancel" : "Send";
}

function askForKey() {
  keyForm.hidden = false;
  at("key").focus();
}

// ---- what is done

async function attach(files) {
  const reading = unread;
  error.hidden = true;
  for (const file of files) reading.add(file);
  showAttached();
  for (const file of files) {
    try {
      const kind = kindOf(file);
      const url = await readAsDataUrl(file); // meanwhile others may be removed, or these forgotten
      if (reading !== unread) return;
      attached.push({ name: file.name, kind, url });
    } catch (failure) {
      if (reading !== unread) return;
      showFailure(failure);
      waitForFiles(false); // the question was about this file, too
    }
    unread.delete(file);
    showAttached();
  }
  text.focus();
  if (isAwaited && !unread.size) form.requestSubmit();
}

function drop(file) {
  attached = attached.filter((each) => each !== file);
}

function forgetUnread() {
  unread = new Set();
  at("files").value = ""; // so that the same can be chosen again
  waitForFiles(false);
}

function waitForFiles(isAsked) {
  isAwaited = isAsked && unread.size > 0;
  labelButton();
}

function kindOf(file) {
  const kind = file.type.split("/")[0];
  if (["image", "video", "audio"].includes(kind)) return kind;
  if (file.type === "application/pdf") return "file";
  throw new Refused(`${file.name} is not a picture, film, recording or PDF.`);
}

function write({ name, kind, url }) {
  if (kind === "file") return { type: kind, file: { file_data: url, filename: name } };
  return { type: `${kind}_url`, [`${kind}_url`]: { url } };
}

async function readAsDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Refused(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

form.onsubmit = (event) => {
  event.preventDefault();
  if (running) return running.abort();
  waitForFiles(true);
  if (isAwaited) return;
  const typed = text.value.trim();
  if (!typed && !attached.length) return;
  const parts = attached.map(write);
  if (typed) parts.push({ type: "text", text: typed });
  const { item, text: said } = add("user");
  said.before(...attached.map(show));
  said.textContent = typed;
  const shown = { item, typed, attached };
  attached = [];
  text.value = "";
  error.hidden = true;
  showAttached();
  fit();
  ask({ role: "user", content: parts }, shown);
};

// The second click of a double one would stop the answer, or send once more what the first one stopped.
send.onclick = (event) => {
  if (isAwaited || event.detail > 1) event.preventDefault();
  if (event.detail < 2) waitForFiles(false);
};

keyForm.onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", at("key").value);
  keyForm.hidden = true;
  error.hidden = true;
  findModel().catch(showFailure);
  text.focus();
};

at("anew").onclick = () => {
  running?.abort();
  [messages, attached] = [[], []];
  forgetUnread();
  talk.firstElementChild.replaceChildren();
  at("hint").hidden = false;
  error.hidden = true;
  text.value = "";
  fit();
  showAttached();
  text.focus();
};
at("files").onchange = ({ target }) => attach([...target.files]).then(() => (target.value = ""));

const fit = () => {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight}px`;
};
text.oninput = () => {
  fit();
  waitForFiles(false); // it is not yet what is to be asked
};
text.onkeydown = (event) => {
  // Safari reports the Enter that ends a composition after its end, with this code.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  if (!running && !event.repeat) form.requestSubmit();
};
document.onkeydown = ({ key }) => {
  if (key !== "Escape") return;
  waitForFiles(false);
  running?.abort();
};

document.onpaste = (event) => {
  const { files, types } = event.clipboardData;
  // With both kinds of text, as of a spreadsheet's cells, a file is only a picture of them.
  if (!files.length || (event.clipboardData.getData("text/plain").trim() && types.includes("text/html"))) return;
  event.preventDefault();
  attach([...files]);
};
const drag = (isOver) => (event) => {
  if (!event.dataTransfer.types.includes("Files")) return; // text is the browser's own matter
  event.preventDefault();
  document.body.classList.toggle("dropping", isOver);
};
document.ondragover = drag(true);
document.ondragleave = drag(false);
document.ondrop = (event) => {
  drag(false)(event);
  attach([...event.dataTransfer.files]);
};

findModel().catch(showFailure);
