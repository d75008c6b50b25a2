"""Text and tokens: tokenizers, streamed detokenizing, chat templates."""
