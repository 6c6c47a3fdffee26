"""Files at URLs: range requests through fsspec, with retries, and a bounded cache on the local disk."""
