"""Formats of other libraries, one file per family: detection and a two-way key table. No other library is imported."""
