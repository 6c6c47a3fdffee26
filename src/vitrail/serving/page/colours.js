// Numbers as colours: each step of the ramp is lighter than the one before, so that it also reads in grey.

const HEAT = [[26, 22, 66], [82, 31, 122], [152, 42, 121], [214, 71, 92], [246, 124, 62], [252, 184, 66], [253, 244, 170]];
const STEPS = 256;

const table = new Uint8ClampedArray(STEPS * 3);
for (let step = 0; step < STEPS; step++) {
  const place = (step / (STEPS - 1)) * (HEAT.length - 1);
  const low = Math.min(Math.floor(place), HEAT.length - 2);
  for (let part = 0; part < 3; part++) {
    table[step * 3 + part] = HEAT[low][part] + (place - low) * (HEAT[low + 1][part] - HEAT[low][part]);
  }
}

/** Return the least and the most of some numbers. */
export function range(values) {
  let [least, most] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return { least, most };
}

/** Paint numbers into the pixels of an ImageData, from the least (dark) to the most (light). */
export function paintHeat(pixels, values, { least, most }) {
  const scale = most > least ? (STEPS - 1) / (most - least) : 0;
  for (let i = 0; i < values.length; i++) {
    const step = Math.max(0, Math.min(STEPS - 1, Math.round((values[i] - least) * scale)));
    pixels.data[i * 4] = table[step * 3];
    pixels.data[i * 4 + 1] = table[step * 3 + 1];
    pixels.data[i * 4 + 2] = table[step * 3 + 2];
    pixels.data[i * 4 + 3] = 255;
  }
}

/** Paint colours from 0 to 1, three for each pixel. */
export function paintColours(pixels, values) {
  for (let i = 0; i * 3 < values.length; i++) {
    for (let part = 0; part < 3; part++) pixels.data[i * 4 + part] = 255 * values[i * 3 + part];
    pixels.data[i * 4 + 3] = 255;
  }
}

/** Return the colour at a place from 0 to 1 as CSS says it. */
export function heatColour(place) {
  const step = Math.max(0, Math.min(STEPS - 1, Math.round(place * (STEPS - 1)))) * 3;
  return `rgb(${table[step]} ${table[step + 1]} ${table[step + 2]})`;
}
