"""From a configuration to blocks: the block source, DALI's queue or a direct one, and the stream of blocks over it."""
