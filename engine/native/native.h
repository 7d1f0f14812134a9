/* What the library gives to Python; engine/native/library.py describes the same to ctypes. */
#ifndef TWOSTROKE_NATIVE_H
#define TWOSTROKE_NATIVE_H

/* rows [num_rows, num_inputs] times weight [num_outputs, num_inputs], transposed, plus bias [num_outputs] or NULL. */
void twostroke_linear(const float *rows, const float *weight, const float *bias, float *out, long num_rows,
                      long num_outputs, long num_inputs, int num_threads);

/* out = rows / sqrt(mean of squares + epsilon) * weight, for rows [num_rows, size] and weight [size]. */
void twostroke_norm(const float *rows, const float *weight, float epsilon, float *out, long num_rows, long size,
                    int num_threads);

/* out [num_rows, size] = silu(gate) * up, for gate_up [num_rows, 2 * size]. */
void twostroke_gated_silu(const float *gate_up, float *out, long num_rows, long size, int num_threads);

/* out [num_tokens, num_heads, size]: each pair (i, i + size / 2) of heads turned by its angle; tokens of `heads` lie
 * `stride` floats apart, cosines are [num_tokens, size], sines [num_tokens, size / 2]. */
void twostroke_rotate(const float *heads, long stride, const float *cosines, const float *sines, float *out,
                      long num_tokens, long num_heads, long size, int num_threads);

/* An attention layer: `window` and `soft_cap` are 0 for none. */
typedef struct {
    long num_heads, num_kv_heads, head_size, window;
    float scale, soft_cap;
} Layer;

/* A step: queries of request r are tokens starts[r] to starts[r + 1], the last of its lengths[r] tokens (0: padding),
 * its keys lie in blocks[r * blocks_stride ...]; new keys are stored at slots[token], unless that is negative. */
typedef struct {
    long num_tokens, num_reqs, block_size, blocks_stride;
    const int *starts, *lengths, *blocks;
    const long *slots;
} Step;

/* New tokens, each [heads, head_size], and floats from one to the next; key and value are NULL if they are stored. */
typedef struct {
    const float *query, *key, *value;
    long query_stride, key_stride, value_stride;
} Tokens;

/* cache [num_slots, num_kv_heads, head_size], with the values `to_values` floats after the keys; out is dense. */
void twostroke_attend(const Layer *layer, const Step *step, const Tokens *tokens, float *cache, long to_values,
                      float *out, int num_threads);

#endif
