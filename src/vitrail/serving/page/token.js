// A server may want a token. All requests that wait for it wait for one dialog.

import { byId } from "./elements.js";

let pending = null;

/** Ask the reader for the token; `again` says that the last one was refused. Null: the dialog was closed. */
export function askForToken(again) {
  pending ??= new Promise((resolve) => {
    const dialog = byId("token");
    const input = byId("token-value");
    input.value = "";
    if (again) byId("token-says").textContent = "The server did not accept this token; try another.";
    dialog.addEventListener(
      "close",
      () => {
        pending = null;
        resolve(input.value.trim() || null);
      },
      { once: true },
    );
    dialog.addEventListener("cancel", () => (input.value = ""), { once: true });
    dialog.showModal();
  });
  return pending;
}
