// What the caller hands over: pointers into memory that it owns.
//
// Owns the layout of the records; native.py mirrors them field by field. Surprising rule: pointers come as they are named
// in programs/rows.py and programs/buffers.py, and only the order here and there must agree.
#pragma once
#include "gemm.hpp"

using flare::Activations, flare::Linear;

extern "C" {
struct FlareLayer {
  Linear qkv, output, gate_up, down;
  const float *input_norm, *mlp_norm, *query_norm, *key_norm;
};
struct FlareModel {
  int64_t hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, window;
  double norm_eps;
  const FlareLayer *layer;
  Linear embedding, head;
  const float *final_norm, *rotary;
  Linear fuse; // of a draft head, without data in a whole model
  const float *embedding_norm, *hidden_norm;
  const int32_t *kept; // tokens of the rows of `head`; null: all
};
struct FlareRows {
  int32_t *pending, *committed, *remaining, *ended, *page_table;
  int64_t table_pages;
  int32_t *stop_tokens, *stop_count;
  int64_t stop_tokens_max;
  float *temperature;
  int32_t *top_k;
  float *top_p, *min_p;
  int64_t *seed;
  float *presence, *frequency, *repetition;
  int32_t *bias_tokens;
  float *bias_values;
  int32_t *bias_count;
  int64_t bias_max;
  int32_t *logprobs, *prompt_logprobs;
  int32_t *drafted, *waiting, *waiting_tokens;
  float *waiting_hidden;
  int64_t waiting_max;
};
struct FlareBuffers {
  int32_t *slot, *start, *rows, *emits, *prefill_row;
  int64_t prompts_max;
  int32_t *seen, *history_tokens, *history_counts;
  int64_t history_max;
  int32_t *banned_count, *banned, *banned_rows;
  int64_t banned_max;
  int32_t *tokens, *targets, *count, *verified, *token;
  int64_t width_max;
  float *logprob;
  int32_t *top_tokens;
  float *top_logprobs, *row_logprob;
  int32_t *row_top_tokens;
  float *row_top_logprobs;
  int64_t alternatives_max;
  float *survival, *confidence, *draft_probabilities;
  int64_t slots, depth_max;
};
struct FlareSpace {
  uint16_t *keys, *values;
  int64_t pages;
  float *x, *qkv, *attended, *logits, *thread_scratch;
  int64_t rows_max, logits_rows, scratch_floats;
  Activations narrow, heads, wide, last, fused;
};
}
