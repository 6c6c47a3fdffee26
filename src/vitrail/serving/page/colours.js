// Colour map: lightness increases monotonically, so it also works in greyscale.

const HEAT = [[26, 22, 66], [82, 31, 122], [152, 42, 121], [214, 71, 92], [246, 124, 62], [252, 184, 66], [253, 244, 170]];
const STEPS = 256;

const table = new Uint8ClampedArray(STEPS * 3);
for (let step = 0; step < STEPS; step++) {
  const position = (step / (STEPS - 1)) * (HEAT.length - 1);
  const low = Math.min(Math.floor(position), HEAT.length - 2);
  for (let channel = 0; channel < 3; channel++) {
    table[step * 3 + channel] = HEAT[low][channel] + (position - low) * (HEAT[low + 1][channel] - HEAT[low][channel]);
  }
}

/** Return the minimum and maximum. */
export function range(values) {
  let [min, max] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < min) min = value;
    if (value > max) max = value;
  }
  return { min, max };
}

/** Paint values into an ImageData, from the minimum (dark) to the maximum (light). */
export function paintHeat(pixels, values, { min, max }) {
  const scale = max > min ? (STEPS - 1) / (max - min) : 0;
  for (let i = 0; i < values.length; i++) {
    const step = Math.max(0, Math.min(STEPS - 1, Math.round((values[i] - min) * scale)));
    pixels.data[i * 4] = table[step * 3];
    pixels.data[i * 4 + 1] = table[step * 3 + 1];
    pixels.data[i * 4 + 2] = table[step * 3 + 2];
    pixels.data[i * 4 + 3] = 255;
  }
}

/** Paint RGB values from 0 to 1, three per pixel. */
export function paintColours(pixels, values) {
  for (let i = 0; i * 3 < values.length; i++) {
    for (let channel = 0; channel < 3; channel++) pixels.data[i * 4 + channel] = 255 * values[i * 3 + channel];
    pixels.data[i * 4 + 3] = 255;
  }
}

/** Return the CSS colour at a position from 0 to 1. */
export function heatColour(position) {
  const step = Math.max(0, Math.min(STEPS - 1, Math.round(position * (STEPS - 1)))) * 3;
  return `rgb(${table[step]} ${table[step + 1]} ${table[step + 2]})`;
}
