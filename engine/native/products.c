/* Products of rows with a weight, rows @ weight.T + bias, in float32, for x86-64 with AVX2 and FMA.
 *
 * The weight stays as it is, [num_outputs, num_inputs] and row-major; nothing is kept of it between calls.
 *
 * Few rows: each output is the inner product of two streams, summed in 8 lanes, in tiles of 12 outputs, so that seven
 * loads feed twelve multiply-adds. The weight is read from memory once, in several streams far from each other: 21 GB/s
 * instead of 13 in one. Beside more than 4 rows a block of it stays in the second-level cache meanwhile.
 *
 * Many rows: a block of the weight is copied in another order, 16 outputs side by side, which pays from about
 * MANY_ROWS rows on, and tiles of 6 rows and 16 outputs are summed by adding up outer products: nothing is left to sum
 * across lanes.
 *
 * The multiplying loops are assembler, because compilers run out of the 16 registers, which they fill to the last, and
 * then keep some sums in memory: 65 instead of 90 of 100 GFLOP/s.
 */
#include "native.h"
#include "vectors.h"

#include <string.h>

#define MANY_ROWS 72
#define FEW_BLOCK_BYTES (192 * 1024)
#define FEW_TURNS 96
#define STREAMS 12
#define PANEL 16
#define PANEL_ROWS 6
#define BLOCK_INPUTS 384
#define BLOCK_OUTPUTS 192

/* Sums of products of two groups of streams, before they are summed across lanes: sums[p * Q + q] */
typedef float Lanes[12][8];

/* What the loops advance by: inputs a turn. */
#define TURN 16

#define P0(o) #o "(%[p])"
#define P1(o) #o "(%[p],%[ldp])"
#define P2(o) #o "(%[p],%[ldp],2)"
#define P3(o) #o "(%[p],%[ldp3])"
#define P4(o) #o "(%[p4])"
#define P5(o) #o "(%[p4],%[ldp])"
#define Q0(o) #o "(%[q])"
#define Q1(o) #o "(%[q],%[ldq])"
#define Q2(o) #o "(%[q],%[ldq],2)"
#define LOAD(from, to) "vmovups " from ", %%ymm" #to "\n\t"
#define FMA(a, b, sum) "vfmadd231ps %%ymm" #a ", %%ymm" #b ", %%ymm" #sum "\n\t"
#define FMA_LOADED(from, b, sum) "vfmadd231ps " from ", %%ymm" #b ", %%ymm" #sum "\n\t"
#define ZERO(n) "vxorps %%ymm" #n ", %%ymm" #n ", %%ymm" #n "\n\t"
#define STORE(n, at) "vmovaps %%ymm" #n ", " #at "(%[sums])\n\t"
#define ZERO_4 ZERO(0) ZERO(1) ZERO(2) ZERO(3)
#define ZERO_12 ZERO_4 ZERO(4) ZERO(5) ZERO(6) ZERO(7) ZERO(8) ZERO(9) ZERO(10) ZERO(11)
#define STORE_4 STORE(0, 0) STORE(1, 32) STORE(2, 64) STORE(3, 96)
#define STORE_12 \
    STORE_4 STORE(4, 128) STORE(5, 160) STORE(6, 192) STORE(7, 224) STORE(8, 256) STORE(9, 288) STORE(10, 320) \
    STORE(11, 352)

#define STEP_4X3(o) \
    LOAD(Q0(o), 12) LOAD(Q1(o), 13) LOAD(Q2(o), 14) \
    LOAD(P0(o), 15) FMA(12, 15, 0) FMA(13, 15, 1) FMA(14, 15, 2) \
    LOAD(P1(o), 15) FMA(12, 15, 3) FMA(13, 15, 4) FMA(14, 15, 5) \
    LOAD(P2(o), 15) FMA(12, 15, 6) FMA(13, 15, 7) FMA(14, 15, 8) \
    LOAD(P3(o), 15) FMA(12, 15, 9) FMA(13, 15, 10) FMA(14, 15, 11)
#define STEP_6X2(o) \
    LOAD(Q0(o), 12) LOAD(Q1(o), 13) \
    LOAD(P0(o), 14) FMA(12, 14, 0) FMA(13, 14, 1) LOAD(P1(o), 15) FMA(12, 15, 2) FMA(13, 15, 3) \
    LOAD(P2(o), 14) FMA(12, 14, 4) FMA(13, 14, 5) LOAD(P3(o), 15) FMA(12, 15, 6) FMA(13, 15, 7) \
    LOAD(P4(o), 14) FMA(12, 14, 8) FMA(13, 14, 9) LOAD(P5(o), 15) FMA(12, 15, 10) FMA(13, 15, 11)
#define STEP_4X1(o) \
    LOAD(Q0(o), 12) FMA_LOADED(P0(o), 12, 0) FMA_LOADED(P1(o), 12, 1) FMA_LOADED(P2(o), 12, 2) FMA_LOADED(P3(o), 12, 3)

/* TURN inputs of each stream a turn, and as many from `next` on fetched into the cache. */
#define DEFINE_SUMS(name, zero, fetch, step, store) \
    static inline void name(const float *p, long ldp, const float *q, long ldq, long turns, const float *next, \
                            Lanes sums) { \
        const float *p4 = p + 4 * ldp; \
        long row_bytes = 4 * ldp, row_bytes_3 = 12 * ldp, column_bytes = 4 * ldq; \
        __asm__ volatile( \
            zero "test %[turns], %[turns]\n\t jz 2f\n\t .p2align 5\n" \
            "1:\n\t" fetch step(0) step(32) \
            "add $64, %[p]\n\t add $64, %[p4]\n\t add $64, %[q]\n\t add $64, %[next]\n\t dec %[turns]\n\t jnz 1b\n" \
            "2:\n\t" store \
            : [p] "+&r"(p), [p4] "+&r"(p4), [q] "+&r"(q), [turns] "+&r"(turns), [next] "+&r"(next) \
            : [ldp] "r"(row_bytes), [ldp3] "r"(row_bytes_3), [ldq] "r"(column_bytes), [sums] "r"(sums) \
            : "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10", "ymm11", \
              "ymm12", "ymm13", "ymm14", "ymm15", "cc", "memory"); \
    }

#define FETCH "prefetcht1 (%[next])\n\t"

DEFINE_SUMS(sums_4x3, ZERO_12, , STEP_4X3, STORE_12)
DEFINE_SUMS(sums_4x3_fetching, ZERO_12, FETCH, STEP_4X3, STORE_12)
DEFINE_SUMS(sums_6x2, ZERO_12, , STEP_6X2, STORE_12)
DEFINE_SUMS(sums_6x2_fetching, ZERO_12, FETCH, STEP_6X2, STORE_12)
DEFINE_SUMS(sums_4x1, ZERO_4, , STEP_4X1, STORE_4)

/* The sums across the lanes of four vectors. */
static inline __m128 across_four(const float (*lanes)[8]) {
    const __m256 a = _mm256_load_ps(lanes[0]), b = _mm256_load_ps(lanes[1]);
    return across(a, b, _mm256_load_ps(lanes[2]), _mm256_load_ps(lanes[3]));
}

typedef struct {
    const float *rows, *weight, *bias;
    float *out;
    long num_rows, num_outputs, num_inputs;
} Product;

/* Some rows, outputs and inputs: rows from `row`, `turns` turns of inputs from `input`, and outputs `first` to `last`
 * of each of the STREAMS parts of equal size `part` from output `begin` on. Of stream `fetched` of a tile, if it has so
 * many and it is not negative, the inputs `ahead` of its own are fetched into the cache. */
typedef struct {
    long row, begin, part, first, last, input, turns, fetched, ahead;
} Range;

/* Up to 4 rows and all outputs of a range. The outputs of a tile lie in different parts: each is a stream of its own
 * through memory, which the processor finds and fetches ahead, faster than any prefetching by instructions. */
static inline __attribute__((always_inline)) void few_strip(const Product *a, const Range *r, const int rows,
                                                            const int is_first) {
    const long ld = a->num_inputs, ld_out = a->num_outputs;
    const int width = rows == 4 ? 3 : rows == 2 ? 6 : 4;
    const long apart = STREAMS / width * r->part;
    const float *x = a->rows + r->row * ld + r->input;
    for (int stream = 0; stream < STREAMS / width; stream++)
        for (long index = r->first; index < r->last; index++) {
            const long output = r->begin + stream * r->part + index;
            const float *w = a->weight + output * ld + r->input;
            _Alignas(32) Lanes lanes;
            _Alignas(16) float sums[12];
            const float *next = w + r->fetched * apart * ld + r->ahead;
            const int is_fetching = r->fetched >= 0 && r->fetched < width;
            if (rows == 4 && is_fetching) sums_4x3_fetching(x, ld, w, apart * ld, r->turns, next, lanes);
            else if (rows == 4) sums_4x3(x, ld, w, apart * ld, r->turns, NULL, lanes);
            else if (rows == 3 && is_fetching) sums_4x3_fetching(w, apart * ld, x, ld, r->turns, next, lanes);
            else if (rows == 3) sums_4x3(w, apart * ld, x, ld, r->turns, NULL, lanes);
            else if (rows == 2 && is_fetching) sums_6x2_fetching(w, apart * ld, x, ld, r->turns, next, lanes);
            else if (rows == 2) sums_6x2(w, apart * ld, x, ld, r->turns, NULL, lanes);
            else sums_4x1(w, apart * ld, x, 0, r->turns, NULL, lanes);
            for (int i = 0; i < rows * width; i += 4) _mm_store_ps(sums + i, across_four((const float(*)[8])lanes + i));
            float *out = a->out + r->row * ld_out + output;
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < width; j++) {
                    const float sum = sums[rows == 4 ? i * width + j : j * rows + i];
                    float *to = out + i * ld_out + j * apart;
                    *to = is_first ? sum : *to + sum;
                }
        }
}

static void few_rows(const Product *a, const Range *r, long rows) {
    if (rows == 4 && r->input) few_strip(a, r, 4, 0);
    else if (rows == 4) few_strip(a, r, 4, 1);
    else if (rows == 3 && r->input) few_strip(a, r, 3, 0);
    else if (rows == 3) few_strip(a, r, 3, 1);
    else if (rows == 2 && r->input) few_strip(a, r, 2, 0);
    else if (rows == 2) few_strip(a, r, 2, 1);
    else few_strip(a, r, 1, 1);
}

/* Outputs that fill no tile, one at a time: four streams that are all the same row. */
static void few_singly(const Product *a, long begin, long end) {
    const long ld = a->num_inputs;
    for (long output = begin; output < end; output++)
        for (long row = 0; row < a->num_rows; row++) {
            _Alignas(32) Lanes lanes;
            sums_4x1(a->rows + row * ld, 0, a->weight + output * ld, 0, ld / TURN, NULL, lanes);
            a->out[row * a->num_outputs + output] = _mm_cvtss_f32(across_four((const float(*)[8])lanes));
        }
}

/* Add the inputs that fill no turn, and the bias. */
static void few_finish(const Product *a, long begin, long end) {
    const long rest = a->num_inputs % TURN, whole = a->num_inputs - rest;
    for (long i = 0; i < a->num_rows; i++) {
        float *out = a->out + i * a->num_outputs;
        const float *x = a->rows + i * a->num_inputs + whole;
        for (long j = begin; rest && j < end; j++) {
            const float *w = a->weight + j * a->num_inputs + whole;
            float sum = 0;
            for (long k = 0; k < rest; k++) sum += x[k] * w[k];
            out[j] += sum;
        }
        if (a->bias)
            for (long j = begin; j < end; j++) out[j] += a->bias[j];
    }
}

/* Outputs `begin` to `end` of fewer than MANY_ROWS rows. */
static void multiply_few(const Product *a, long begin, long end) {
    const long groups = (a->num_rows + 3) / 4, all_turns = a->num_inputs / TURN, part = (end - begin) / STREAMS;
    /* Beside one group of rows the weight is read once and needs no blocks. */
    const long blocks = groups == 1 || !all_turns ? 1 : (all_turns + FEW_TURNS - 1) / FEW_TURNS;
    const long turns = (all_turns + blocks - 1) / blocks;
    const long fitting = FEW_BLOCK_BYTES / (STREAMS * TURN * sizeof(float)) / (turns ? turns : 1);
    const long size = groups == 1 ? part : fitting ? fitting : 1;
    for (long first = 0; first < part; first += size)
        for (long block = 0; block < blocks; block++) {
            const long from = all_turns * block / blocks, to = all_turns * (block + 1) / blocks;
            Range range = {0, begin, part, first, first + size < part ? first + size : part, from * TURN, to - from, -1,
                           block + 1 < blocks ? (to - from) * TURN : size * a->num_inputs - from * TURN};
            for (long group = 0; group < groups; group++) {
                const long rows = (a->num_rows - range.row + groups - group - 1) / (groups - group);
                few_rows(a, &range, rows);
                range.row += rows;
                range.fetched++;
            }
        }
    few_singly(a, begin + part * STREAMS, end);
    if (a->bias || a->num_inputs % TURN) few_finish(a, begin, end);
}

static inline void transpose_8x8(const float *from, long ld, float *to) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(from + i * ld);
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_store_ps(to + i * PANEL, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_store_ps(to + (i + 4) * PANEL, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

/* One panel, [inputs, PANEL]; outputs that are not there are zeros. */
static void pack_panel(const float *weight, long ld, long outputs, long inputs, float *panel) {
    long k = 0;
    if (outputs == PANEL)
        for (; k + 8 <= inputs; k += 8) {
            transpose_8x8(weight + k, ld, panel + k * PANEL);
            transpose_8x8(weight + 8 * ld + k, ld, panel + k * PANEL + 8);
        }
    for (; k < inputs; k++)
        for (int j = 0; j < PANEL; j++) panel[k * PANEL + j] = j < outputs ? weight[j * ld + k] : 0;
}

#define X0(o) #o "(%[x])"
#define X1(o) #o "(%[x],%[ld])"
#define X2(o) #o "(%[x],%[ld],2)"
#define X3(o) #o "(%[x3])"
#define X4(o) #o "(%[x3],%[ld])"
#define X5(o) #o "(%[x3],%[ld],2)"
#define SPREAD(from, to) "vbroadcastss " from ", %%ymm" #to "\n\t"
#define OUTER(o, w0, w1) \
    "vmovaps " #w0 "(%[w]), %%ymm12\n\t vmovaps " #w1 "(%[w]), %%ymm13\n\t" \
    SPREAD(X0(o), 14) FMA(12, 14, 0) FMA(13, 14, 1) SPREAD(X1(o), 15) FMA(12, 15, 2) FMA(13, 15, 3) \
    SPREAD(X2(o), 14) FMA(12, 14, 4) FMA(13, 14, 5) SPREAD(X3(o), 15) FMA(12, 15, 6) FMA(13, 15, 7) \
    SPREAD(X4(o), 14) FMA(12, 14, 8) FMA(13, 14, 9) SPREAD(X5(o), 15) FMA(12, 15, 10) FMA(13, 15, 11)

/* sums [PANEL_ROWS, PANEL] of PANEL_ROWS rows `ld` apart and a panel. */
static void outer_tile(const float *x, long ld, const float *w, long inputs, const char *next, float *sums) {
    const float *x3 = x + 3 * ld;
    long row_bytes = 4 * ld, turns = inputs / 4, rest = inputs % 4;
    __asm__ volatile(
        ZERO_12 "test %[turns], %[turns]\n\t jz 2f\n\t .p2align 5\n"
        "1:\n\t prefetcht1 (%[next])\n\t" OUTER(0, 0, 32) OUTER(4, 64, 96) OUTER(8, 128, 160) OUTER(12, 192, 224)
        "add $16, %[x]\n\t add $16, %[x3]\n\t add $256, %[w]\n\t add $16, %[next]\n\t dec %[turns]\n\t jnz 1b\n"
        "2:\n\t test %[rest], %[rest]\n\t jz 4f\n"
        "3:\n\t" OUTER(0, 0, 32)
        "add $4, %[x]\n\t add $4, %[x3]\n\t add $64, %[w]\n\t dec %[rest]\n\t jnz 3b\n"
        "4:\n\t" STORE_12
        : [x] "+&r"(x), [x3] "+&r"(x3), [w] "+&r"(w), [turns] "+&r"(turns), [rest] "+&r"(rest), [next] "+&r"(next)
        : [ld] "r"(row_bytes), [sums] "r"(sums)
        : "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10", "ymm11", "ymm12",
          "ymm13", "ymm14", "ymm15", "cc", "memory");
}

/* Outputs `begin` to `end` of many rows. */
static void multiply_many(const Product *a, long begin, long end) {
    static _Thread_local _Alignas(64) float packed[BLOCK_OUTPUTS * BLOCK_INPUTS];
    static _Thread_local _Alignas(64) float last_rows[PANEL_ROWS * BLOCK_INPUTS];
    _Alignas(64) float sums[PANEL_ROWS * PANEL];
    const long ld = a->num_inputs, blocks = (ld + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
    const long size = blocks ? ((ld + blocks - 1) / blocks + 15) / 16 * 16 : 0;
    for (long from = begin; from < end; from += BLOCK_OUTPUTS) {
        const long outputs = from + BLOCK_OUTPUTS < end ? BLOCK_OUTPUTS : end - from;
        for (long k = 0; k < ld; k += size) {
            const long inputs = k + size < ld ? size : ld - k;
            const float *weight = a->weight + from * ld + k;
            for (long n = 0; n < outputs; n += PANEL)
                pack_panel(weight + n * ld, ld, outputs - n < PANEL ? outputs - n : PANEL, inputs, packed + n * inputs);
            /* The next block is right of this one, or the first one of the outputs that follow: a row of it a tile. */
            const float *next = k + inputs < ld ? weight + inputs : weight + outputs * ld - k;
            for (long row = 0; row < a->num_rows; row += PANEL_ROWS) {
                const long rows = a->num_rows - row < PANEL_ROWS ? a->num_rows - row : PANEL_ROWS;
                const float *x = a->rows + row * ld + k;
                long x_ld = ld;
                if (rows < PANEL_ROWS) {
                    for (long i = 0; i < rows; i++) memcpy(last_rows + i * inputs, x + i * ld, inputs * sizeof(float));
                    memset(last_rows + rows * inputs, 0, (PANEL_ROWS - rows) * inputs * sizeof(float));
                    x = last_rows, x_ld = inputs;
                }
                for (long n = 0; n < outputs; n += PANEL) {
                    /* Of the rows that come next, as many lines with each panel. */
                    for (long line = n / PANEL; line < PANEL_ROWS * inputs / 16; line += outputs / PANEL + 1)
                        _mm_prefetch((const char *)(x + (PANEL_ROWS + line % PANEL_ROWS) * ld + line / PANEL_ROWS * 16),
                                     _MM_HINT_T1);
                    outer_tile(x, x_ld, packed + n * inputs, inputs, (const char *)next, sums);
                    next += ld;
                    const long width = outputs - n < PANEL ? outputs - n : PANEL;
                    for (long i = 0; i < rows; i++) {
                        float *to = a->out + (row + i) * a->num_outputs + from + n;
                        const float *start = k ? to : a->bias ? a->bias + from + n : NULL;
                        if (width == PANEL && start) {
                            for (int j = 0; j < PANEL; j++) to[j] = start[j] + sums[i * PANEL + j];
                        } else
                            for (long j = 0; j < width; j++) to[j] = (start ? start[j] : 0) + sums[i * PANEL + j];
                    }
                }
            }
        }
    }
}

void twostroke_linear(const float *rows, const float *weight, const float *bias, float *out, long num_rows,
                      long num_outputs, long num_inputs, int num_threads) {
    if (num_rows < 1 || num_inputs < 1) return;
    const Product a = {rows, weight, bias, out, num_rows, num_outputs, num_inputs};
    /* Whole tiles of either kind for each thread: 48 outputs are a multiple of 3, 4, 6 and 16. */
    const long units = (num_outputs + 47) / 48;
    if (num_threads > units) num_threads = (int)units;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(static, 1)
    for (int part = 0; part < num_threads; part++) {
        const long begin = units * part / num_threads * 48, stop = units * (part + 1) / num_threads * 48;
        const long end = stop < num_outputs ? stop : num_outputs;
        if (num_rows < MANY_ROWS) multiply_few(&a, begin, end);
        else multiply_many(&a, begin, end);
    }
}
