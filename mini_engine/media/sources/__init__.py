"""Where media bytes come from: `data:` URLs, local files and HTTP, all under the media policy. Decodes nothing."""
