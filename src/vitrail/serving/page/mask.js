// The mask of a segmentation model: drawn over the image that was sent, in the colours of its palette.

import { bytesOf } from "./arrays.js";

const SIDE = 720;
const PIXELATED_FROM = 4;

/** Decode a mask and the image it belongs to; `preprocessed` stands in for a file that the browser cannot show. */
export async function readMask(base64, blob, preprocessed) {
  const mask = new Image();
  mask.src = `data:image/png;base64,${base64}`;
  const [shown] = await Promise.all([createImageBitmap(blob).catch(() => preprocessed), mask.decode()]);
  return { mask, shown, colours: paletteOf(bytesOf(base64)) };
}

/** Draw the image under its mask. */
export function drawMask(canvas, { mask, shown }, opacity) {
  const zoom = SIDE / Math.max(mask.naturalWidth, mask.naturalHeight);
  canvas.width = Math.max(1, Math.round(mask.naturalWidth * zoom));
  canvas.height = Math.max(1, Math.round(mask.naturalHeight * zoom));
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = zoom < PIXELATED_FROM;
  context.drawImage(shown, 0, 0, canvas.width, canvas.height);
  context.globalAlpha = opacity;
  context.drawImage(mask, 0, 0, canvas.width, canvas.height);
}

/** Return the CSS colours of a PNG's palette, by index. */
function paletteOf(bytes) {
  const view = new DataView(bytes.buffer);
  for (let at = 8; at + 8 <= bytes.length; ) {
    const size = view.getUint32(at);
    if (String.fromCharCode(...bytes.subarray(at + 4, at + 8)) === "PLTE") {
      const entries = bytes.subarray(at + 8, at + 8 + size);
      return Array.from({ length: size / 3 }, (_, i) => `rgb(${entries.subarray(3 * i, 3 * i + 3).join(" ")})`);
    }
    at += size + 12; // length, type and checksum
  }
  return [];
}
