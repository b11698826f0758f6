"""Bytes of files: `ByteFile` and exact positioned reads, retries, fingerprints, checksums and the decoded cache."""
