"""Images and videos to patches: loaded, sampled, decoded, processed. Knows nothing of prompts, engines or HTTP."""
