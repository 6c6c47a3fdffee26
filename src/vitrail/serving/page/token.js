// The token dialog, shared by all requests that wait for the token.

import { byId } from "./elements.js";

let pending = null;

/** Ask for the token; `again` means the last one was rejected. Returns null if the dialog was closed. */
export function askForToken(again) {
  pending ??= new Promise((resolve) => {
    const dialog = byId("token");
    const input = byId("token-value");
    input.value = "";
    if (again) byId("token-note").textContent = "The server did not accept this token; try another.";
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
