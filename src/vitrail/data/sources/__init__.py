"""Image sources: folders, manifests, shards, arrays."""
