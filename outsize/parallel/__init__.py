"""How states and computation are spread over workers: shards of chunks, cuts of weights."""
