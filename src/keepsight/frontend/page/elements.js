// Elements of a page: made, found, and kept while what they show changes, so that neither focus nor sight is lost.

export const at = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const { role, label, ...others } = properties;
  const element = Object.assign(document.createElement(tag), others);
  if (role) element.setAttribute("role", role);
  if (label) element.setAttribute("aria-label", label);
  element.append(...children);
  return element;
}

// Of an element whose text is often the same.
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Of one whose children are often the same: what is marked in them stays marked.
export function fill(element, shown, draw) {
  const drawn = JSON.stringify(shown);
  if (element.drawn === drawn) return;
  element.drawn = drawn;
  element.replaceChildren(...draw(shown));
}

// One child for each item, by its name and in their order; only what is new is made, only what is gone is removed.
export function keep(parent, items, nameOf, create, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.name, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = nameOf(item);
    const child = known.get(name) ?? create(item);
    known.delete(name);
    child.dataset.name = name;
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
  for (const gone of known.values()) gone.remove();
}

// ---- numbers

export function bytes(count) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (count >= size) return `${round(count / size)} ${unit}`;
  return `${count} B`;
}

export function seconds(count) {
  if (count >= 7200) return `${round(count / 3600)} h`;
  if (count >= 120) return `${round(count / 60)} min`;
  if (count >= 1) return `${round(count)} s`;
  return `${round(count * 1000)} ms`;
}

export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

const round = (number) => number.toFixed(number < 10 && number % 1 >= 0.05 ? 1 : 0);
