"""Flags of vLLM's `bench serve` that are not taken, each with what to use instead, or why there is nothing."""

from __future__ import annotations

SAMPLING = "give the field in --extra-body, such as '{\"min_p\": 0.1}'"
ONE_SET = "its data set is not among those of --dataset-name; write its records to a file of --dataset-name custom"
RAMP = "the rate does not change in a run; measure several by `bench.py sweep --flag request-rate`"
REFUSED: dict[str, str] = {
    "--append-result": "each run has a file of its own; name it by --result-filename",
    "--profile": "the server is not profiled; its own account of its time stands below the table",
    "--ramp-up-strategy": RAMP,
    "--ramp-up-start-rps": RAMP,
    "--ramp-up-end-rps": RAMP,
    "--lora-modules": "requests name one model; choose it by --served-model-name",
    "--use-beam-search": "answers are sampled, greedily without --temperature",
    "--min-p": SAMPLING,
    "--frequency-penalty": SAMPLING,
    "--presence-penalty": SAMPLING,
    "--repetition-penalty": SAMPLING,
    "--skip-chat-template": "the template is the server's work; --backend openai sends texts without a chat",
    "--chat-template": "the template is the server's work; --backend openai sends texts without a chat",
    "--enable-multimodal-chat": "chats with media are sent as such",
    "--tokenizer-mode": "the tokenizer is loaded as its files say; choose it by --tokenizer",
    "--trust-remote-code": "no code of a model or a data set is run; choose another one by --tokenizer",
    "--request-id-prefix": "requests have no names of their own; a header for all of them is set by --header",
    "--insecure": "certificates are checked; use http, or a certificate that this host trusts",
    "--plot-timeline": "use --plot",
    "--plot-dataset-stats": "use --plot",
    "--hf-name": "a record's form is found by its keys, whatever the data set is called",
    "--random-batch-size": "each prompt is a request; see --max-concurrency",
    "--random-mm-num-mm-items-range-ratio": "all prompts have as many media: --random-mm-base-items-per-request",
    "--random-mm-limit-mm-per-prompt": "say how many by --random-mm-base-items-per-request, and of which kind by the "
    "weights of --random-mm-bucket-config",
    "--no-stream": "a data set of the hub is read as a stream; download it, and give --dataset-path the folder",
    **dict.fromkeys(
        [
            "--sonnet-input-len", "--sonnet-output-len", "--sonnet-prefix-len",
            "--prefix-repetition-prefix-len", "--prefix-repetition-suffix-len", "--prefix-repetition-num-prefixes",
            "--prefix-repetition-output-len", "--spec-bench-output-len", "--spec-bench-category",
            "--blazedit-min-distance", "--blazedit-max-distance", "--asr-max-audio-len-sec", "--asr-min-audio-len-sec",
        ],
        ONE_SET,
    ),
}  # fmt: skip
