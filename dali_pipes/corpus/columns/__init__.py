"""Columns of tables: token ids, and what the columns beside them say of padding, documents and masks."""
