/* Vectors of the processor's native width: for other widths compilers generate code of a tenth of the speed. */

#ifndef KEEPSIGHT_CPU_VECTORS_H
#define KEEPSIGHT_CPU_VECTORS_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#include "cpu_team.h"

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

/* The most vectors of a tile. */
#define MOST_VECTORS 2

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t whole_lanes __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t unsigned_lanes __attribute__((vector_size(4 * LANES)));

INLINE lanes vector_at(const float *numbers)
{
    lanes vector;
    memcpy(&vector, numbers, sizeof vector);
    return vector;
}

INLINE lanes choose(whole_lanes which, lanes yes, lanes no)
{
    return (lanes)(((whole_lanes)yes & which) | ((whole_lanes)no & ~which));
}

/* A loop, because compilers turn it into one instruction. */
INLINE lanes larger(lanes a, lanes b)
{
    lanes out;
    for (int lane = 0; lane < LANES; lane++)
        out[lane] = a[lane] > b[lane] ? a[lane] : b[lane];
    return out;
}

/* Interleave two vectors; the first or the second half of the result. */
#if LANES == 16
#define FIRST_HALF 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND_HALF 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define FIRST_HALF 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND_HALF 4, 12, 5, 13, 6, 14, 7, 15
#else
#define FIRST_HALF 0, 4, 1, 5
#define SECOND_HALF 2, 6, 3, 7
#endif
#if defined(__clang__)
#define CHOSEN_FROM(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CHOSEN_FROM(a, b, ...) __builtin_shuffle(a, b, (whole_lanes){__VA_ARGS__})
#endif

/* Transpose a square of LANES vectors: each round moves one bit of an element's vector index into its lane index. */
INLINE void transpose(lanes *vectors)
{
#pragma GCC unroll 4
    for (int round = 1; round < LANES; round *= 2) {
        lanes next[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = CHOSEN_FROM(vectors[i], vectors[i + LANES / 2], FIRST_HALF);
            next[2 * i + 1] = CHOSEN_FROM(vectors[i], vectors[i + LANES / 2], SECOND_HALF);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            vectors[i] = next[i];
    }
}

/* Adding this rounds a number to an integer, which is then in the low bits of the sum. */
#define TO_WHOLE 12582912.0f

/* 2 to the power of x, for x <= 0; `polynomial` takes the distance from the nearest integer. 0 if the result is too small for
 * float32, and for minus infinity. */
INLINE lanes power_by(lanes polynomial(lanes), lanes x)
{
    const lanes whole = x + TO_WHOLE;
    const lanes power = polynomial(x - (whole - TO_WHOLE));
    /* The addition may wrap around if x is too small: then the result is masked. */
    const unsigned_lanes scaled = (unsigned_lanes)power + ((unsigned_lanes)whole << 23);
    return (lanes)(scaled & (unsigned_lanes)(x > -126.0f));
}

INLINE lanes exact_polynomial(lanes rest)
{
    lanes power = rest * 1.5403530e-4f + 1.3333558e-3f; /* powers of ln 2 over factorials */
    power = power * rest + 9.6181291e-3f;
    power = power * rest + 5.5504109e-2f;
    power = power * rest + 2.4022651e-1f;
    power = power * rest + 6.9314718e-1f;
    return power * rest + 1.0f;
}

/* Relative error at most 1 in 13,000. */
INLINE lanes rough_polynomial(lanes rest)
{
    const lanes power = rest * 5.5171662e-2f + 2.4261116e-1f;
    return (power * rest + 6.9326099e-1f) * rest + 9.9992807e-1f;
}

/* Error at most 2 units in the last place. */
INLINE lanes power_of_2(lanes x)
{
    return power_by(exact_polynomial, x);
}

/* For results that are rounded to bfloat16. */
INLINE lanes rough_power_of_2(lanes x)
{
    return power_by(rough_polynomial, x);
}

/* The initial highest score: not minus infinity, whose difference from itself is NaN. */
#define LOWEST_SCORE (-FLT_MAX)

/* Update the highest scores so far with scores [count, vectors]; scale down the earlier sums, which were relative to the former
 * ones. */
INLINE void raise_highest(
    lanes *highest, const lanes *scores, long count, lanes *total, lanes *out, long dim, const int vectors)
{
    lanes top[MOST_VECTORS];
    for (int v = 0; v < vectors; v++)
        top[v] = highest[v];
    for (long key = 0; key < count; key++)
        for (int v = 0; v < vectors; v++)
            top[v] = larger(scores[key * vectors + v], top[v]);
    for (int v = 0; v < vectors; v++) {
        const lanes kept = power_of_2(highest[v] - top[v]);
        highest[v] = top[v];
        total[v] *= kept;
        for (long d = 0; d < dim; d++)
            out[d * vectors + v] *= kept;
    }
}

#endif
