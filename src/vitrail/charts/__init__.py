"""Charts as static SVG: numbers in, text out."""
