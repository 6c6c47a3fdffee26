"""Charts as static SVG: numbers in, SVG text out."""
