/* Matrix products on a CPU: rows of float32 by a weight of float32 or bfloat16.
 *
 * Each number of the result is summed up by itself and always in the same order, however many rows come at once, whichever
 * they are, and however many threads there are.  So a token has the same numbers to the last bit alone and in a batch,
 * computed with its prompt and after what a cache spared.
 *
 * A weight is laid out once in panels of as many outputs as two vectors have lanes; the results of some rows by one panel stay in
 * registers while the inputs pass.
 */

#include "cpu_bfloat16.h"
#include "cpu_products.h"

#if LANES == 16
#define MOST_ROWS 12 /* of a tile: all registers but those for weights and one for the input at hand */
#else
#define MOST_ROWS 6
#endif
#define VECTORS MOST_VECTORS
#define PANEL (VECTORS * LANES)

/* 4-byte words of a row that pass at once: of fewer a tile is more often begun and ended, which takes as long as twenty inputs.
 * Rows lie some words further apart, as the innermost cache has few places for what lies a power of 2 apart. */
#define WORDS_AT_ONCE 768
#define WORDS_APART (WORDS_AT_ONCE + 16)
/* Rows whose inputs, and panels whose results for them, share the next cache; a few rows leave room for all their inputs. */
#define ROWS_AT_ONCE (20 * MOST_ROWS)
#define PANELS_AT_ONCE 8
#define FEW_WORDS (128 * 1024)
/* So far ahead of its use a weight is asked of memory. */
#define STEPS_AHEAD 64
/* Fewer multiplications are done before a second thread has begun. */
#define PRODUCTS_WORTH_A_TEAM (1 << 20)

typedef enum {
    FLOAT32,          /* a step is one input */
    BFLOAT16,         /* two, of a weight that is widened: numbers of float32 by numbers of bfloat16 */
    BFLOAT16_BY_SAME, /* two, and the rows are rounded, too */
} arithmetic;

/* For the caller, who lays weights out. */
const long keepsight_panel = PANEL;

/* Whether rows may be rounded, to be multiplied twice as fast. */
long keepsight_multiplies_bfloat16;

__attribute__((constructor)) static void ask_processor(void)
{
#if defined(__AVX512BF16__)
    keepsight_multiplies_bfloat16 = __builtin_cpu_supports("avx512bf16") != 0;
#endif
}

INLINE long inputs_of_step(arithmetic kind)
{
    return kind == FLOAT32 ? 1 : 2;
}

INLINE long words_of_step(arithmetic kind)
{
    return kind == BFLOAT16 ? 2 : 1;
}

/* Blocks of inputs are all as large. */
INLINE long steps_of_block(long inputs, arithmetic kind)
{
    const long steps = parts_of(inputs, inputs_of_step(kind));
    return parts_of(steps, parts_of(steps, WORDS_AT_ONCE / words_of_step(kind)));
}

/* Panels ----------------------------------------------------------------------------------------------------------- */

/* `count` inputs of some rows, as tiles read them: [rows, WORDS_APART], of half a pair with a zero behind. */
INLINE void take_inputs(float *words, const float *hidden, long stride, long rows, long count, const arithmetic kind)
{
    for (long row = 0; row < rows; row++, hidden += stride, words += WORDS_APART) {
        uint16_t *halves = (uint16_t *)words;
        if (kind == BFLOAT16_BY_SAME)
            for (long i = 0; i < count; i++)
                halves[i] = rounded(hidden[i]);
        else
            memcpy(words, hidden, count * sizeof *words);
        if (kind == BFLOAT16_BY_SAME && count % 2)
            halves[count] = 0;
        if (kind == BFLOAT16 && count % 2)
            words[count] = 0.0f;
    }
}

/* To [rows, PANEL] of the results: what `steps` inputs add, or if they are the first, what they are. */
INLINE void multiply_tile(
    float *out, long stride, const float *words, const lanes *weight, long steps, int is_first, const int rows,
    const arithmetic kind)
{
    lanes sums[MOST_ROWS][VECTORS] = {};
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++)
            __builtin_prefetch(out + row * stride + v * LANES, 1);
    for (long step = 0; step < steps; step++, weight += VECTORS, words += words_of_step(kind)) {
        lanes first[VECTORS], second[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            __builtin_prefetch(weight + STEPS_AHEAD * VECTORS + v);
            first[v] = kind == BFLOAT16 ? first_of((whole_lanes)weight[v]) : weight[v];
            second[v] = second_of((whole_lanes)weight[v]);
        }
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                if (kind == BFLOAT16_BY_SAME) {
                    int32_t pair;
                    memcpy(&pair, words + row * WORDS_APART, sizeof pair);
                    sums[row][v] = add_pairs(sums[row][v], (whole_lanes){} + pair, (whole_lanes)first[v]);
                } else
                    sums[row][v] += words[row * WORDS_APART] * first[v];
        if (kind == BFLOAT16)
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++)
                    sums[row][v] += words[row * WORDS_APART + 1] * second[v];
    }
    if (!is_first)
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                sums[row][v] += vector_at(out + row * stride + v * LANES);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
        memcpy(out + row * stride, sums[row], sizeof sums[row]);
}

/* What is compiled for each number of rows of a tile, as those are registers. */
#if MOST_ROWS == 12
#define FOR_EACH_COUNT(OF) OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) OF(9) OF(10) OF(11) OF(12)
#else
#define FOR_EACH_COUNT(OF) OF(1) OF(2) OF(3) OF(4) OF(5) OF(6)
#endif

INLINE void multiply_rows(
    float *out, long stride, const float *words, const lanes *weight, long steps, int is_first, int rows,
    const arithmetic kind)
{
#define OF(count) \
    case count: \
        multiply_tile(out, stride, words, weight, steps, is_first, count, kind); \
        break;
    switch (rows) {
        FOR_EACH_COUNT(OF)
    }
#undef OF
}

/* x times the share of a normal distribution below it, nearly: x / (1 + exp(-2 * sqrt(2 / pi) * (x + 0.044715 * x^3))). */
INLINE lanes gelu(lanes x)
{
    const lanes power = (x + 0.044715f * x * x * x) * 2.3022082f; /* 2 * sqrt(2 / pi) / ln 2 */
    const whole_lanes is_negative = power < 0.0f;
    const lanes small = power_of_2(choose(is_negative, power, -power));
    return x * choose(is_negative, small, (lanes){} + 1.0f) / (1.0f + small);
}

/* What is done to [rows, PANEL] of the results when all inputs have passed. */
INLINE void finish_tile(const product_work *w, float *out, long stride, const float *bias, const float *times, long rows)
{
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < PANEL; i += LANES) {
            lanes number = vector_at(out + row * stride + i);
            if (bias)
                number += vector_at(bias + i);
            if (w->then_gelu)
                number = gelu(number);
            if (times)
                number *= vector_at(times + row * stride + i);
            memcpy(out + row * stride + i, &number, sizeof number);
        }
}

/* Some rows by some panels. */
typedef struct {
    long first_row, rows, first_panel, end_panel;
} patch;

/* Of a patch, whose words of one block of inputs are given, what that block adds to the results of one panel.  Of the
 * last panel, which may have more places than there are outputs, they pass through `edge`, where what is too many stays. */
INLINE void multiply_panel(const product_work *w, patch p, long panel, long block, const float *words, const arithmetic kind)
{
    const long all_steps = parts_of(w->inputs, inputs_of_step(kind)), steps_at_once = steps_of_block(w->inputs, kind);
    const long first_step = block * steps_at_once, steps = lesser(all_steps - first_step, steps_at_once);
    const lanes *weight = (const lanes *)w->weight + (panel * all_steps + first_step) * VECTORS;
    const long tiles = parts_of(p.rows, MOST_ROWS), outputs = lesser(w->outputs - panel * PANEL, PANEL);
    const int is_first = !block && !w->is_onto, is_last = first_step + steps == all_steps;
    for (long index = 0; index < tiles; index++) {
        const long row = p.rows * index / tiles, rows = p.rows * (index + 1) / tiles - row;
        float *out = w->out + (p.first_row + row) * w->outputs + panel * PANEL, edge[MOST_ROWS * PANEL];
        float *place = outputs == PANEL ? out : edge;
        const long stride = outputs == PANEL ? w->outputs : PANEL;
        const float *times = w->times ? w->times + (out - w->out) : 0;
        if (place == edge && !is_first)
            for (long i = 0; i < rows; i++)
                memcpy(edge + i * PANEL, out + i * w->outputs, outputs * sizeof *out);
        multiply_rows(place, stride, words + row * WORDS_APART, weight, steps, is_first, rows, kind);
        if (is_last && (w->bias || w->then_gelu || times))
            finish_tile(w, place, stride, w->bias ? w->bias + panel * PANEL : 0, place == out ? times : 0, rows);
        if (place == edge)
            for (long i = 0; i < rows * outputs; i++) {
                const long there = i / outputs * w->outputs + i % outputs;
                out[there] = edge[i / outputs * PANEL + i % outputs] * (is_last && times ? times[there] : 1.0f);
            }
    }
}

INLINE void multiply_patch(const product_work *w, patch p, const arithmetic kind)
{
    const long inputs_at_once = steps_of_block(w->inputs, kind) * inputs_of_step(kind);
    const long blocks = parts_of(w->inputs, inputs_at_once), words_of_block = p.rows * WORDS_APART;
    const long panels_at_once = blocks * words_of_block <= FEW_WORDS ? 1 : PANELS_AT_ONCE;
    float *words = room_for(blocks * words_of_block * sizeof *words);
    for (long block = 0; block < blocks; block++) {
        const long first = block * inputs_at_once, count = lesser(w->inputs - first, inputs_at_once);
        const float *hidden = w->hidden + p.first_row * w->inputs + first;
        take_inputs(words + block * words_of_block, hidden, w->inputs, p.rows, count, kind);
    }
    for (long first = p.first_panel; first < p.end_panel; first += panels_at_once)
        for (long block = 0; block < blocks; block++)
            for (long panel = first; panel < lesser(first + panels_at_once, p.end_panel); panel++)
                multiply_panel(w, p, panel, block, words + block * words_of_block, kind);
    free(words);
}

/* Into how many parts rows are cut, where each part has some rows of some panels: what keeps a team busy, and of as good ones the
 * most, as what a part takes of the rows it copies. */
static long parts_of_rows(long tiles, long panels, long parts)
{
    long best = 1, least = INT64_MAX;
    for (long each = 1; each <= parts; each++) {
        const long longest = parts_of(tiles, each) * parts_of(panels, parts / each);
        if (parts % each == 0 && longest <= least)
            best = each, least = longest;
    }
    return best;
}

INLINE void multiply_share(const product_work *w, long part, long parts, const arithmetic kind)
{
    const long tiles = parts_of(w->rows, MOST_ROWS), panels = parts_of(w->outputs, PANEL);
    const long of_rows = parts_of_rows(tiles, panels, parts), of_panels = parts / of_rows;
    const long end_row = lesser(tiles * (part / of_panels + 1) / of_rows * MOST_ROWS, w->rows);
    patch p = {
        .first_panel = panels * (part % of_panels) / of_panels,
        .end_panel = panels * (part % of_panels + 1) / of_panels,
    };
    for (p.first_row = tiles * (part / of_panels) / of_rows * MOST_ROWS; p.first_row < end_row; p.first_row += p.rows) {
        const long left = end_row - p.first_row;
        p.rows = parts_of(left, parts_of(left, ROWS_AT_ONCE));
        multiply_patch(w, p, kind);
    }
}

static void product_part(const void *shared, long part, long parts)
{
    const product_work *w = shared;
    if (w->kind == FLOAT32)
        multiply_share(w, part, parts, FLOAT32);
    else if (w->kind == BFLOAT16)
        multiply_share(w, part, parts, BFLOAT16);
    else
        multiply_share(w, part, parts, BFLOAT16_BY_SAME);
}

void keepsight_multiply(const product_work *w)
{
    share(product_part, w, w->rows * w->inputs * w->outputs < PRODUCTS_WORTH_A_TEAM ? 1 : INT32_MAX);
}

/* Rows ------------------------------------------------------------------------------------------------------------ */

typedef struct {
    float *out;           /* [count, inputs] */
    const void *weight;   /* as above */
    const int64_t *which; /* [count] */
    long count, inputs, kind;
} rows_work;

static void rows_part(const void *shared, long part, long parts)
{
    const rows_work *w = shared;
    const long pair = inputs_of_step(w->kind), steps = parts_of(w->inputs, pair);
    for (long index = w->count * part / parts; index < w->count * (part + 1) / parts; index++) {
        const long at = w->which[index] / PANEL * steps * PANEL + w->which[index] % PANEL;
        float *out = w->out + index * w->inputs;
        for (long i = 0; i < w->inputs; i++) {
            const long number = (at + i / pair * PANEL) * pair + i % pair;
            if (w->kind == FLOAT32)
                out[i] = ((const float *)w->weight)[number];
            else
                out[i] = widened(((const uint16_t *)w->weight)[number]);
        }
    }
}

/* What a weight in panels has for some of its outputs, as it has for a token's embedding. */
void keepsight_take_rows(const rows_work *w)
{
    share(rows_part, w, parts_for(w->count * w->inputs));
}
