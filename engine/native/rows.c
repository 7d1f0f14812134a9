/* What is done to the rows between products, each in one pass, in float32, for x86-64 with AVX2 and FMA. */
#include "native.h"
#include "vectors.h"

#include <math.h>

/* Fewer numbers than this are not worth a second thread. */
#define SHARED_SIZE 65536

void twostroke_norm(const float *rows, const float *weight, float epsilon, float *out, long num_rows, long size,
                    int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows * size >= SHARED_SIZE)
    for (long row = 0; row < num_rows; row++) {
        const float *from = rows + row * size;
        float *to = out + row * size;
        __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
        long i = 0;
        for (; i + 32 <= size; i += 32) {
            const __m256 x = _mm256_loadu_ps(from + i), y = _mm256_loadu_ps(from + i + 8);
            const __m256 z = _mm256_loadu_ps(from + i + 16), w = _mm256_loadu_ps(from + i + 24);
            a = _mm256_fmadd_ps(x, x, a), b = _mm256_fmadd_ps(y, y, b);
            c = _mm256_fmadd_ps(z, z, c), d = _mm256_fmadd_ps(w, w, d);
        }
        const __m128 sums = across(a, b, c, d);
        float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        for (; i < size; i++) sum += from[i] * from[i];
        const float scale = 1 / sqrtf(sum / size + epsilon);
        for (i = 0; i < size; i++) to[i] = from[i] * scale * weight[i];
    }
}

/* x / (1 + exp(-x)), by the exponential of a number that is not above 0. */
static inline __m256 silu(__m256 x) {
    const __m256 one = _mm256_set1_ps(1), sign = _mm256_set1_ps(-0.0f);
    const __m256 power = exp_of_negative(_mm256_or_ps(x, sign));
    __m256 over = _mm256_blendv_ps(one, power, x); /* where x is negative */
    /* That exponential is never 0, and the most negative x would make something of it. */
    over = _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-87.3f), _CMP_LT_OQ), over);
    return _mm256_mul_ps(x, _mm256_div_ps(over, _mm256_add_ps(one, power)));
}

void twostroke_gated_silu(const float *gate_up, float *out, long num_rows, long size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows * size >= SHARED_SIZE)
    for (long row = 0; row < num_rows; row++) {
        const float *gate = gate_up + row * 2 * size, *up = gate + size;
        float *to = out + row * size;
        for (long i = 0; i < size; i += 8) {
            if (i + 8 <= size) {
                _mm256_storeu_ps(to + i, _mm256_mul_ps(silu(_mm256_loadu_ps(gate + i)), _mm256_loadu_ps(up + i)));
                continue;
            }
            float rest[8] = {0};
            for (long j = i; j < size; j++) rest[j - i] = gate[j];
            _mm256_storeu_ps(rest, silu(_mm256_loadu_ps(rest)));
            for (long j = i; j < size; j++) to[j] = rest[j - i] * up[j];
        }
    }
}

void twostroke_rotate(const float *heads, long stride, const float *cosines, const float *sines, float *out,
                      long num_tokens, long num_heads, long size, int num_threads) {
    const long half = size / 2;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_tokens * num_heads * size >= SHARED_SIZE)
    for (long token = 0; token < num_tokens; token++) {
        const float *cosine = cosines + token * size, *sine = sines + token * half;
        for (long head = 0; head < num_heads; head++) {
            const float *from = heads + token * stride + head * size;
            float *to = out + (token * num_heads + head) * size;
            for (long i = 0; i < half; i++) {
                const float first = from[i], second = from[half + i];
                to[i] = first * cosine[i] - second * sine[i];
                to[half + i] = second * cosine[half + i] + first * sine[i];
            }
        }
    }
}
