"""Bytes of files: exact positioned reads that can fail, retries, fingerprints, checksums and the decoded cache."""
