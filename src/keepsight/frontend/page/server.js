// Calls of the server that the page came from, with the key that a reader gave it: kept for as long as the tab is.

export class Refused extends Error {}

export async function request(path, keyName, options = {}) {
  const headers = { "Content-Type": "application/json" };
  const key = sessionStorage.getItem(keyName);
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const { status, statusText } = response;
  const body = await response.json().catch(() => null); // something in between may have answered
  const { message, param } = body?.error ?? {};
  throw Object.assign(new Refused(message ?? `The server answered ${status} ${statusText}`.trim() + "."), { status, param });
}

export function explain(failure) {
  if (failure instanceof Refused) return failure.message;
  console.warn(failure);
  return "The server cannot be reached.";
}
