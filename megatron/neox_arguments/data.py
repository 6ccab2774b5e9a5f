"""Where tokens come from."""

from __future__ import annotations

from typing import Literal

from megatron.neox_arguments.section import NonNegativeInt, PositiveFloat, Section

TokenizerType = Literal[
    "GPT2BPETokenizer", "HFTokenizer", "HFGPT2Tokenizer", "SPMTokenizer", "CharLevelTokenizer", "TiktokenTokenizer"
]


class DataArgs(Section):
    """Token files and tokenizer."""

    data_path: str | None = None
    """Prefix of one pair of `.bin` and `.idx` files, divided by `split`. Not with `train_data_paths`."""
    split: str = "969, 30, 1"
    """Shares of the documents of `data_path` for training, validation and test."""
    train_data_paths: list[str] | None = None
    """Prefixes of training data, blended by `train_data_weights`."""
    valid_data_paths: list[str] | None = None
    """Prefixes of validation data."""
    test_data_paths: list[str] | None = None
    """Prefixes of test data."""
    train_data_weights: list[float] | None = None
    """Share of each training prefix, in any unit. Unset: equal."""
    valid_data_weights: list[float] | None = None
    """Share of each validation prefix."""
    test_data_weights: list[float] | None = None
    """Share of each test prefix."""
    weight_by_num_documents: bool = False
    """Take the shares from the numbers of documents, smoothed by `weighted_sampler_alpha`."""
    weighted_sampler_alpha: PositiveFloat = 1.0
    """Shares are proportional to documents to this power; below 1 small sources count for more."""
    num_workers: NonNegativeInt = 2
    """Processes that read samples ahead; 0 reads them in the training process."""
    mmap_warmup: bool = False
    """Read the token files once at start, so that the page cache has them."""
    eod_mask_loss: bool = False
    """Leave the prediction that follows an end-of-document token out of the loss."""

    tokenizer_type: TokenizerType = "GPT2BPETokenizer"
    """What `vocab_file` is."""
    vocab_file: str | None = None
    """Vocabulary, tokenizer JSON or sentencepiece model."""
    merge_file: str | None = None
    """Merges of a GPT-2 style BPE."""
