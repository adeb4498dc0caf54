"""From a model's logits to tokens and text: samplers, the cache of keys and values, the loop."""
