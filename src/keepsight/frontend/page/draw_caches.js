// The three caches, each with its tiers: how full, how often right, and what that saved.

import { bytes, count, keep, make, seconds, write } from "./elements.js";

const CACHES = {
  processor: { title: "Processor cache", holds: "Pixels, ready for the encoder", unit: "item", reset: "reset_mm_cache" },
  encoder: { title: "Encoder cache", holds: "Embeddings, ready for the decoder", unit: "item", reset: "reset_encoder_cache" },
  prefix: { title: "Prefix cache", holds: "Keys and values of prompts", unit: "block", reset: "reset_prefix_cache" },
};
const TIERS = { device: "Device", host: "Host memory", disk: "Disk", remote: "Redis" };

export function drawCaches(parent, tiers, clear) {
  const all = Object.entries(CACHES).map(([name, fields]) => ({
    name, ...fields, tiers: tiers.filter((tier) => tier.cache === name && isThere(tier)),
  }));
  const items = all.filter((item) => item.tiers.length); // others are switched off
  keep(parent, items, (item) => item.name, (item) => createCache(item, clear), updateCache);
}

const isThere = (tier) => tier.budget_bytes || tier.bytes || tier.queries || tier.reason;

function createCache({ title, holds, reset }, clear) {
  const button = make("button", { type: "button", textContent: "Clear", label: `Clear the ${title.toLowerCase()}` });
  button.onclick = () => clear(title, reset);
  return make(
    "article", { label: title },
    make("div", { className: "top" }, make("h3", { textContent: title }), button),
    make("p", { className: "faint", textContent: holds }),
    make("dl", {}, ...figure("hits", "Hit rate"), ...figure("saved", "Saved")),
    make("ul"),
  );
}

const figure = (name, text) => [make("dt", { textContent: text }), make("dd", { className: name })];

function updateCache(card, { tiers, unit }) {
  const sum = (field) => tiers.reduce((total, tier) => total + tier[field], 0);
  // Each tier is asked for what the one before it lacks: the first one's queries are all.
  const queries = tiers[0]?.queries ?? 0;
  write(card.querySelector(".hits"), queries ? percent(sum("hits") / queries) : "–");
  write(card.querySelector(".saved"), seconds(sum("saved_seconds")));
  keep(card.querySelector("ul"), tiers, (tier) => tier.tier, createTier, (item, tier) => updateTier(item, tier, unit));
}

function createTier({ tier }) {
  const bar = make("div", { className: "bar", role: "meter", label: `${TIERS[tier]}, full` }, make("i"));
  bar.setAttribute("aria-valuemax", "100");
  return make("li", {}, make("span", { className: "name", textContent: TIERS[tier] }), make("span", { className: "size" }), bar, make("small"));
}

function updateTier(item, tier, unit) {
  const { entries, budget_bytes: budget, reason } = tier;
  const share = budget ? Math.min(1, tier.bytes / budget) : 0;
  const bar = item.querySelector(".bar");
  bar.hidden = !budget;
  bar.setAttribute("aria-valuenow", Math.round(share * 100));
  // Whatever is held can be seen.
  bar.firstElementChild.style.width = tier.bytes ? `max(2px, ${(share * 100).toFixed(2)}%)` : "0";
  write(item.querySelector(".size"), bytes(tier.bytes) + (budget ? ` of ${bytes(budget)}` : ""));
  const facts = [count(entries, unit), `${count(tier.hits, "hit")} of ${tier.queries.toLocaleString("en")}`];
  write(item.querySelector("small"), reason ? `Set aside: ${reason}` : facts.join(" · "));
  item.classList.toggle("aside", Boolean(reason));
}

const percent = (share) => `${Math.round(Math.min(1, share) * 100)} %`;
