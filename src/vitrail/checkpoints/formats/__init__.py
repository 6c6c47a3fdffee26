"""Foreign formats, one file a family: how to know it, and one two-way key table. No peer is imported here."""
