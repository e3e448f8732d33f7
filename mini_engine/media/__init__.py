"""Media URLs to processed tensors: `sources/` fetches bytes, `decode/` decodes them, the processor makes patches of the
frames. Knows nothing of prompts, requests or engines."""
