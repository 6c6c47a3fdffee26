"""Where images come from: folders, manifests, shards, arrays."""
