/* Multiplies some rows by a panel of a weight with vectors: sums stay in registers for all inputs of a block.
 *
 * Rows are laid out in words of 4 bytes: float32 numbers, or pairs of bfloat16.
 */

#ifndef KEEPSIGHT_CPU_PRODUCT_VECTORS_H
#define KEEPSIGHT_CPU_PRODUCT_VECTORS_H

#include "cpu_products.h"

/* Rows of a tile: their sums and the weights of a step take nearly all registers. With 6 rows on 16 registers, compilers move
 * sums to memory as soon as weights are widened, which takes 1.4 times as long. */
#if LANES == 16
#define MOST_ROWS 12
#else
#define MOST_ROWS 5
#endif

/* Words of a row per block. With fewer, tiles are begun and ended more often, which takes as long as twenty inputs each.
 * Rows lie some words further apart, as the innermost cache has few places for addresses a power of 2 apart. */
#define WORDS_AT_ONCE 768
#define WORDS_APART (WORDS_AT_ONCE + 16)
/* Rows whose inputs, and panels whose results for them, fit the next cache together. */
#define ROWS_AT_ONCE (20 * MOST_ROWS)
#define PANELS_AT_ONCE 8
/* How far ahead of its use a single strip prefetches the weight. */
#define STEPS_AHEAD 64
/* The fewest strips for which a stretch of int8 is widened once; fewer widen it in registers, as all do with bfloat16. */
#define STRIPS_WORTH_WIDENING 3

typedef struct {
    float sums[ROWS_AT_ONCE * PANEL] __attribute__((aligned(64)));
    float widened[WORDS_AT_ONCE * PANEL] __attribute__((aligned(64)));
    long strips;
    /* The next address to prefetch, and how many bytes with each step. */
    const char *ahead;
    long ahead_by_step;
} product_room;

INLINE void enter(product_room *room, long rows)
{
    room->strips = parts_of(rows, MOST_ROWS);
}

INLINE void leave(product_room *room)
{
    (void)room;
}

/* All strips have about the same number of rows. */
INLINE strip strip_of(long rows, long index)
{
    const long strips = parts_of(rows, MOST_ROWS), first = rows * index / strips, end = rows * (index + 1) / strips;
    return (strip){first, end - first, end - first};
}

INLINE long inputs_at_once(arithmetic kind)
{
    return inputs_of_step(kind);
}

/* Words of a row per step. */
INLINE long words_of_step(arithmetic kind)
{
    return rounds_rows(kind) ? inputs_of_step(kind) / 2 : inputs_of_step(kind);
}

INLINE long most_inputs_of_block(arithmetic kind)
{
    return WORDS_AT_ONCE / words_of_step(kind) * inputs_of_step(kind);
}

INLINE long inputs_at_hand(long strips, arithmetic kind)
{
    (void)strips;
    return most_inputs_of_block(kind);
}

INLINE long bytes_of_rows(long rows, long inputs, arithmetic kind)
{
    (void)kind;
    return inputs ? rows * WORDS_APART * sizeof(float) : 0;
}

/* Lay out `count` inputs of some rows as [rows, WORDS_APART]; an incomplete last step is padded with zeros. */
INLINE void take_inputs(
    void *prepared, long places, const float *hidden, long stride, long rows, long count, const arithmetic kind)
{
    (void)places;
    float *words = prepared;
    for (long row = 0; row < rows; row++, hidden += stride, words += WORDS_APART) {
        uint16_t *halves = (uint16_t *)words;
        if (rounds_rows(kind))
            for (long i = 0; i < count; i++)
                halves[i] = rounded(hidden[i]);
        else
            memcpy(words, hidden, count * sizeof *words);
        for (long i = count; i % inputs_of_step(kind); i++)
            if (rounds_rows(kind))
                halves[i] = 0;
            else
                words[i] = 0.0f;
    }
}

/* Prefetch two cache lines, in one asm: if compilers put loads in between, few rows take 1.1 times as long. */
INLINE void ask_memory(const char *lines)
{
#if defined(__x86_64__)
    __asm__ volatile("prefetcht0 (%0)\n\tprefetcht0 64(%0)" : : "r"(lines));
#else
    __builtin_prefetch(lines);
    __builtin_prefetch(lines + 64);
#endif
}

/* Return the weights by which a row's word of a step is multiplied. */
INLINE lanes others_of(lanes weight, const int word, const arithmetic kind)
{
    if (kind == INT8)
        return one_of_four((whole_lanes)weight, word);
    if (kind == INT8_BY_BFLOAT16)
        return (lanes)two_of_four((whole_lanes)weight, 2 * word);
    if (kind == BFLOAT16)
        return word ? second_of((whole_lanes)weight) : first_of((whole_lanes)weight);
    return weight;
}

/* Add the products of `steps` of inputs to the sums `before` [rows, PANEL], unless they are the first; store to `to`. */
INLINE void multiply_tile(
    places_of_sums to, const float *before, const float *words, const lanes *weight, long steps, int is_first,
    const char *ahead, long ahead_by_step, const int rows, const arithmetic kind)
{
    lanes sums[MOST_ROWS][VECTORS] = {};
    for (long step = 0; step < steps; step++, weight += VECTORS, words += words_of_step(kind), ahead += ahead_by_step) {
        ask_memory(ahead);
#pragma GCC unroll 4
        for (int word = 0; word < words_of_step(kind); word++) {
            lanes others[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                others[v] = others_of(weight[v], word, kind);
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++)
                    sums[row][v] =
                        multiply_add(sums[row][v], words + row * WORDS_APART + word, others[v], rounds_rows(kind));
        }
    }
    if (!is_first)
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                sums[row][v] += vector_at(before + row * PANEL + v * LANES);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
        memcpy(to.first + row * to.stride, sums[row], sizeof sums[row]);
}

/* Expanded for each number of rows of a tile, as the rows' sums are registers. */
#if MOST_ROWS == 12
#define FOR_EACH_COUNT(OF) OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) OF(9) OF(10) OF(11) OF(12)
#else
#define FOR_EACH_COUNT(OF) OF(1) OF(2) OF(3) OF(4) OF(5)
#endif

INLINE int is_worth_widening(const product_room *room, arithmetic kind)
{
    return is_of_int8(kind) && room->strips >= STRIPS_WORTH_WIDENING;
}

/* The arithmetic by which rows are multiplied by a widened stretch; the sums are the same. */
INLINE arithmetic once_widened(arithmetic kind)
{
    return rounds_rows(kind) ? BFLOAT16_BY_SAME : FLOAT32;
}

INLINE void widen_stretch(float *to, stretch its, const arithmetic kind)
{
    const lanes *weight = its.first;
    for (long step = parts_of(its.inputs, inputs_of_step(kind)); step; step--, weight += VECTORS)
#pragma GCC unroll 4
        for (int word = 0; word < words_of_step(kind); word++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++, to += LANES) {
                const lanes others = others_of(weight[v], word, kind);
                memcpy(to, &others, sizeof others);
            }
}

/* A single strip prefetches the weights that it is about to use; several strips prefetch, in equal shares, the stretch that
 * comes next. */
INLINE void take_stretch(product_room *room, stretch its, stretch next, const arithmetic kind)
{
    const int is_widened = is_worth_widening(room, kind);
    if (is_widened)
        widen_stretch(room->widened, its, kind);
    room->ahead = room->strips > 1 && next.first ? next.first : its.first;
    if (room->strips == 1)
        room->ahead += STEPS_AHEAD * BYTES_OF_STEP;
    room->ahead_by_step = parts_of(BYTES_OF_STEP, room->strips * (is_widened ? words_of_step(kind) : 1));
}

INLINE void multiply_strip(
    places_of_sums to, const float *sums, const void *prepared, long rows, const void *weight, long steps, int is_first,
    product_room *room, const arithmetic kind)
{
#define OF(count) \
    case count: \
        multiply_tile(to, sums, prepared, weight, steps, is_first, room->ahead, room->ahead_by_step, count, kind); \
        break;
    switch (rows) {
        FOR_EACH_COUNT(OF)
    }
    room->ahead += steps * room->ahead_by_step;
#undef OF
}

INLINE void multiply_rows(
    places_of_sums to, const float *sums, const void *prepared, long rows, stretch weight, int is_first, int is_new,
    product_room *room, const arithmetic kind)
{
    (void)is_new;
    const long steps = parts_of(weight.inputs, inputs_of_step(kind));
    if (is_worth_widening(room, kind))
        multiply_strip(
            to, sums, prepared, rows, room->widened, steps * words_of_step(kind), is_first, room, once_widened(kind));
    else
        multiply_strip(to, sums, prepared, rows, weight.first, steps, is_first, room, kind);
}

#endif
