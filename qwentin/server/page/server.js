// Requests to this server. The API key lives in this tab's sessionStorage and goes into one header.

export class WrongKey extends Error {}

export const key = { get: () => sessionStorage.getItem("api-key") ?? "", set: value => sessionStorage.setItem("api-key", value),
                     forget: () => sessionStorage.removeItem("api-key") };

// GET, or POST of a JSON body; throws WrongKey, or an Error with the server's sentence
export async function ask(path, body, signal) {
  const headers = { ...(key.get() && { Authorization: `Bearer ${key.get()}` }),
                    ...(body && { "Content-Type": "application/json" }) };
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, signal, cache: "no-store",
                                       ...(body && { body: JSON.stringify(body) }) });
  if (response.status === 401) throw new WrongKey();
  if (!response.ok && path !== "/health") {
    const told = await response.json().catch(() => ({}));
    throw new Error(told.error?.message ?? `The server answered ${response.status}.`);
  }
  return response;
}
