/* Attention over a paged cache in float32, for x86-64 with AVX2 and FMA: keys and values are read where they lie.
 *
 * A query and some of its heads go through a tile of TILE keys at a time with a running maximum and sum (Milakov and
 * Gimelshein 2018, arXiv:1805.02867), so that scores need no memory that grows with the length. All heads see four keys
 * before the next four are read, as a token's heads are adjacent in memory. Two of the heads that share keys are
 * computed at once: with four keys, or 32 dimensions of the values, they keep eight sums going, as many as hide the
 * latency of a multiply-add.
 */
#include "native.h"
#include "vectors.h"

#include <math.h>
#include <string.h>

#define TILE 128
#define MOST_HEADS 16
#define PAIR 2

/* Sums are variables of their own here, not arrays: compilers keep arrays of vectors in memory. With one head, what the
 * second one would need is left out. */

/* Scores of one or two heads with four keys, each TILE from the other head's. */
static inline __attribute__((always_inline)) void scores_of(const float *query, const int heads, long size,
                                                            const float *const *keys, long offset, float *scores) {
    const float *k0 = keys[0] + offset, *k1 = keys[1] + offset, *k2 = keys[2] + offset, *k3 = keys[3] + offset;
    const float *other = query + (heads - 1) * size;
    __m256 a0 = _mm256_setzero_ps(), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0;
    for (long d = 0; d < size; d += 8) {
        const __m256 a = _mm256_loadu_ps(query + d), b = _mm256_loadu_ps(other + d);
        __m256 key = _mm256_loadu_ps(k0 + d);
        a0 = _mm256_fmadd_ps(key, a, a0);
        if (heads > 1) b0 = _mm256_fmadd_ps(key, b, b0);
        key = _mm256_loadu_ps(k1 + d);
        a1 = _mm256_fmadd_ps(key, a, a1);
        if (heads > 1) b1 = _mm256_fmadd_ps(key, b, b1);
        key = _mm256_loadu_ps(k2 + d);
        a2 = _mm256_fmadd_ps(key, a, a2);
        if (heads > 1) b2 = _mm256_fmadd_ps(key, b, b2);
        key = _mm256_loadu_ps(k3 + d);
        a3 = _mm256_fmadd_ps(key, a, a3);
        if (heads > 1) b3 = _mm256_fmadd_ps(key, b, b3);
    }
    _mm_storeu_ps(scores, across(a0, a1, a2, a3));
    if (heads > 1) _mm_storeu_ps(scores + TILE, across(b0, b1, b2, b3));
}

/* Adds 32 dimensions of the values, weighted, to those of one or two heads in out, `size` apart. */
static inline __attribute__((always_inline)) void add_values(float *out, const int heads, long size,
                                                             const float *const *keys, long offset, long count,
                                                             const float *weights) {
    float *other = out + (heads - 1) * size;
    __m256 a0 = _mm256_loadu_ps(out), a1 = _mm256_loadu_ps(out + 8);
    __m256 a2 = _mm256_loadu_ps(out + 16), a3 = _mm256_loadu_ps(out + 24);
    __m256 b0 = _mm256_loadu_ps(other), b1 = _mm256_loadu_ps(other + 8);
    __m256 b2 = _mm256_loadu_ps(other + 16), b3 = _mm256_loadu_ps(other + 24);
    for (long i = 0; i < count; i++) {
        const float *value = keys[i] + offset;
        const __m256 a = _mm256_broadcast_ss(weights + i), b = _mm256_broadcast_ss(weights + (heads - 1) * TILE + i);
        __m256 loaded = _mm256_loadu_ps(value);
        a0 = _mm256_fmadd_ps(a, loaded, a0);
        if (heads > 1) b0 = _mm256_fmadd_ps(b, loaded, b0);
        loaded = _mm256_loadu_ps(value + 8);
        a1 = _mm256_fmadd_ps(a, loaded, a1);
        if (heads > 1) b1 = _mm256_fmadd_ps(b, loaded, b1);
        loaded = _mm256_loadu_ps(value + 16);
        a2 = _mm256_fmadd_ps(a, loaded, a2);
        if (heads > 1) b2 = _mm256_fmadd_ps(b, loaded, b2);
        loaded = _mm256_loadu_ps(value + 24);
        a3 = _mm256_fmadd_ps(a, loaded, a3);
        if (heads > 1) b3 = _mm256_fmadd_ps(b, loaded, b3);
    }
    _mm256_storeu_ps(out, a0), _mm256_storeu_ps(out + 8, a1);
    _mm256_storeu_ps(out + 16, a2), _mm256_storeu_ps(out + 24, a3);
    if (heads < 2) return;
    _mm256_storeu_ps(other, b0), _mm256_storeu_ps(other + 8, b1);
    _mm256_storeu_ps(other + 16, b2), _mm256_storeu_ps(other + 24, b3);
}

/* The same for 8 dimensions of one head. */
static void add_few_values(float *out, const float *const *keys, long offset, long count, const float *weights) {
    __m256 sum = _mm256_loadu_ps(out);
    for (long i = 0; i < count; i++)
        sum = _mm256_fmadd_ps(_mm256_broadcast_ss(weights + i), _mm256_loadu_ps(keys[i] + offset), sum);
    _mm256_storeu_ps(out, sum);
}

/* Scale and bend scores in place and return their maximum, or NaN where one is. -inf is added up to a multiple of 8. */
static float finish_scores(float *scores, long count, float scale, float soft_cap) {
    const long end = (count + 7) / 8 * 8;
    if (soft_cap > 0) {
        for (long i = 0; i < count; i++) scores[i] = soft_cap * tanhf(scores[i] * scale / soft_cap);
        scale = 1;
    }
    for (long i = count; i < end; i++) scores[i] = 0;
    __m256 most = _mm256_set1_ps(-INFINITY), unordered = _mm256_setzero_ps();
    for (long i = 0; i < end; i += 8) {
        const __m256 score = _mm256_mul_ps(_mm256_loadu_ps(scores + i), _mm256_set1_ps(scale));
        _mm256_storeu_ps(scores + i, score);
        if (i + 8 > count) break;
        most = _mm256_max_ps(most, score);
        unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(score, score, _CMP_UNORD_Q));
    }
    float parts[8], highest = -INFINITY;
    _mm256_storeu_ps(parts, most);
    for (int i = 0; i < 8; i++) highest = parts[i] > highest ? parts[i] : highest;
    for (long i = count / 8 * 8; i < count; i++)
        highest = scores[i] > highest || scores[i] != scores[i] ? scores[i] : highest;
    for (long i = count; i < end; i++) scores[i] = -INFINITY;
    return _mm256_movemask_ps(unordered) ? NAN : highest;
}

static inline __attribute__((always_inline)) void add_all_values(float *out, const int heads, long size,
                                                                 const float *const *keys, long offset, long count,
                                                                 const float *weights) {
    long from = 0;
    for (; from + 32 <= size; from += 32) add_values(out + from, heads, size, keys, offset + from, count, weights);
    for (; from < size; from += 8)
        for (int h = 0; h < heads; h++)
            add_few_values(out + h * size + from, keys, offset + from, count, weights + h * TILE);
}

/* Turn scores into weights in place and return their sum; those beyond `count` weigh 1e-38 at most. */
static float weigh(float *scores, long count, float most) {
    __m256 sum = _mm256_setzero_ps();
    for (long i = 0; i < count; i += 8) {
        const __m256 weight = exp_of_negative(_mm256_sub_ps(_mm256_loadu_ps(scores + i), _mm256_set1_ps(most)));
        _mm256_storeu_ps(scores + i, weight);
        sum = _mm256_add_ps(sum, weight);
    }
    float parts[8], total = 0;
    _mm256_storeu_ps(parts, sum);
    for (int i = 0; i < 8; i++) total += parts[i];
    return total;
}

/* The heads of one query that go with `kv_heads` heads of the cache from `first_kv_head` on, where positions `first` to
 * `last` are seen. */
typedef struct {
    const int *blocks;
    long first_kv_head, kv_heads, first, last;
} Query;

/* Where the keys of a tile lie: of the first head of the query. At least four; the last one repeated fills them up. */
static void find_keys(const Layer *layer, const Step *step, const Query *q, const float *cache, long start, long count,
                      const float **keys) {
    const long size = layer->head_size;
    const float *base = cache + q->first_kv_head * size;
    long block = start / step->block_size, offset = start % step->block_size;
    for (long i = 0; i < count; i++) {
        keys[i] = base + ((long)q->blocks[block] * step->block_size + offset) * layer->num_kv_heads * size;
        if (++offset == step->block_size) offset = 0, block++;
    }
    for (long i = count; i % 4; i++) keys[i] = keys[count - 1];
}

/* out and query begin with the first of the heads. */
static void attend_query(const Layer *layer, const Step *step, const Query *q, const float *query, const float *cache,
                         long to_values, float *out) {
    const long size = layer->head_size, group = layer->num_heads / layer->num_kv_heads;
    const long heads = q->kv_heads * group;
    const float *keys[TILE];
    float most[MOST_HEADS], sums[MOST_HEADS];
    _Alignas(32) float scores[MOST_HEADS * TILE];
    for (long h = 0; h < heads; h++) most[h] = -INFINITY, sums[h] = 0;
    memset(out, 0, heads * size * sizeof(float));
    for (long start = q->first; start <= q->last; start += TILE) {
        const long count = q->last - start + 1 < TILE ? q->last - start + 1 : TILE;
        find_keys(layer, step, q, cache, start, count, keys);
        for (long i = 0; i < count; i += 4) {
            const float *from = query;
            float *to = scores + i;
            for (long kv = 0; kv < q->kv_heads; kv++) {
                long h = 0;
                for (; h + PAIR <= group; h += PAIR, from += PAIR * size, to += PAIR * TILE)
                    scores_of(from, PAIR, size, keys + i, kv * size, to);
                for (; h < group; h++, from += size, to += TILE) scores_of(from, 1, size, keys + i, kv * size, to);
            }
        }
        for (long h = 0; h < heads; h++) {
            float *row = scores + h * TILE, highest = finish_scores(row, count, layer->scale, layer->soft_cap);
            if (most[h] > highest || most[h] != most[h]) highest = most[h];
            const float shrunk = sums[h] != 0 ? expf(most[h] - highest) : 0;
            if (sums[h] != 0)
                for (long d = 0; d < size; d++) out[h * size + d] *= shrunk;
            most[h] = highest;
            sums[h] = sums[h] * shrunk + weigh(row, count, highest);
        }
        for (long kv = 0; kv < q->kv_heads; kv++) {
            const long offset = to_values + kv * size;
            long h = kv * group;
            for (; h + PAIR <= (kv + 1) * group; h += PAIR)
                add_all_values(out + h * size, PAIR, size, keys, offset, count, scores + h * TILE);
            for (; h < (kv + 1) * group; h++)
                add_all_values(out + h * size, 1, size, keys, offset, count, scores + h * TILE);
        }
    }
    for (long h = 0; h < heads; h++)
        for (long d = 0; d < size; d++) out[h * size + d] /= sums[h];
}

static void store(const Layer *layer, const Step *step, const Tokens *tokens, float *cache, long to_values) {
    const long width = layer->num_kv_heads * layer->head_size;
    for (long token = 0; token < step->num_tokens; token++) {
        const long slot = step->slots[token];
        if (slot < 0) continue;
        memcpy(cache + slot * width, tokens->key + token * tokens->key_stride, width * sizeof(float));
        memcpy(cache + to_values + slot * width, tokens->value + token * tokens->value_stride, width * sizeof(float));
    }
}

void twostroke_attend(const Layer *layer, const Step *step, const Tokens *tokens, float *cache, long to_values,
                      float *out, int num_threads) {
    const long size = layer->head_size, group = layer->num_heads / layer->num_kv_heads;
    const long width = layer->num_heads * size;
    /* Whole groups of heads, as many as there is room for, and fewer where there would be too little to share out. */
    long groups = MOST_HEADS / group < layer->num_kv_heads ? MOST_HEADS / group : layer->num_kv_heads;
    if (step->num_reqs < 2 * num_threads && num_threads > 1) groups = 1;
    const long parts = (layer->num_kv_heads + groups - 1) / groups;
    if (tokens->key) store(layer, step, tokens, cache, to_values);
    /* Tokens of no request are those at the end, and whatever a request without a length has. */
    const long real = step->num_reqs ? step->starts[step->num_reqs] : 0;
    memset(out + real * width, 0, (step->num_tokens - real) * width * sizeof(float));
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(dynamic, 1)
    for (long unit = 0; unit < step->num_reqs * parts; unit++) {
        const long request = unit / parts, first_kv_head = unit % parts * groups;
        const long begin = step->starts[request], end = step->starts[request + 1], length = step->lengths[request];
        Query query = {step->blocks + request * step->blocks_stride, first_kv_head, groups, 0, 0};
        if (first_kv_head + groups > layer->num_kv_heads) query.kv_heads = layer->num_kv_heads - first_kv_head;
        const long first = first_kv_head * group * size;
        for (long token = begin; token < end; token++) {
            float *result = out + token * width + first;
            if (!length) {
                memset(result, 0, query.kv_heads * group * size * sizeof(float));
                continue;
            }
            query.last = length - (end - token);
            query.first = layer->window && query.last >= layer->window ? query.last - layer->window + 1 : 0;
            const float *from = tokens->query + token * tokens->query_stride + first;
            attend_query(layer, step, &query, from, cache, to_values, result);
        }
    }
}
