/* Numbers of bfloat16, single and in pairs, and of int8 in fours: the first of a pair or four is in the lowest bits. */

#ifndef KEEPSIGHT_CPU_BFLOAT16_H
#define KEEPSIGHT_CPU_BFLOAT16_H

#include <string.h>

#include "cpu_vectors.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

/* Round to nearest, ties to even. */
INLINE uint16_t rounded(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    const uint32_t nearest = bits + 0x7fff + (bits >> 16 & 1);
    return (number == number ? nearest : bits | 0x400000) >> 16;
}

/* The same for a vector; results are in the upper halves of lanes. */
INLINE unsigned_lanes nearest(lanes numbers)
{
    const unsigned_lanes bits = (unsigned_lanes)numbers;
    const whole_lanes is_number = numbers == numbers;
    return (unsigned_lanes)choose(is_number, (lanes)(bits + 0x7fff + (bits >> 16 & 1)), (lanes)(bits | 0x400000));
}

INLINE float widened(uint16_t number)
{
    const uint32_t bits = (uint32_t)number << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* A pair is stored in the place of a float32 number. */
INLINE void set_pair(float *place, int32_t pair)
{
    memcpy(place, &pair, sizeof pair);
}

INLINE int32_t pair_at(const float *place)
{
    int32_t pair;
    memcpy(&pair, place, sizeof pair);
    return pair;
}

/* Add products of pairs of bfloat16 to a float32 sum; requires `keepsight_multiplies_bfloat16`. */
INLINE lanes add_pairs(lanes sum, whole_lanes a, whole_lanes b)
{
#if defined(__AVX512BF16__)
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    (void)a, (void)b;
    return sum;
#endif
}

/* Add products of a number, or a pair of bfloat16 (see above), to a float32 sum. */
INLINE lanes multiply_add(lanes sum, const float *word, lanes others, const int is_paired)
{
    if (is_paired)
        return add_pairs(sum, (whole_lanes){} + pair_at(word), (whole_lanes)others);
    return sum + *word * others;
}

/* Round to pairs of bfloat16, for numbers >= 0 that are finite; ties round up. */
INLINE whole_lanes pairs_of(lanes first, lanes second)
{
    const unsigned_lanes half = (unsigned_lanes){} + 0x8000;
    return (whole_lanes)(((unsigned_lanes)first + half) >> 16 | (((unsigned_lanes)second + half) & 0xffff0000u));
}

/* The same for neighboring lanes: half as many pairs, in order. */
INLINE halves halves_of(lanes numbers)
{
    return __builtin_convertvector(((unsigned_lanes)numbers + 0x8000u) >> 16, halves);
}

/* Interleave LANES numbers of each into pairs. */
INLINE whole_lanes pairs_from(const uint16_t *first, const uint16_t *second)
{
    halves one, other;
    memcpy(&one, first, sizeof one);
    memcpy(&other, second, sizeof other);
    return __builtin_convertvector(one, whole_lanes) | __builtin_convertvector(other, whole_lanes) << 16;
}

/* Round two float32 numbers to a pair. */
INLINE int32_t pair_of(float first, float second)
{
    return (int32_t)(rounded(first) | (uint32_t)rounded(second) << 16);
}

/* The first and the second of pairs of bfloat16, as float32. */
INLINE lanes first_of(whole_lanes pairs)
{
    return (lanes)(pairs << 16);
}

INLINE lanes second_of(whole_lanes pairs)
{
    return (lanes)(pairs & (int32_t)0xffff0000);
}

/* Widen one number of each four of int8 to float32, or two to a pair of bfloat16. */
INLINE lanes one_of_four(whole_lanes fours, const int which)
{
    return __builtin_convertvector((fours << (24 - 8 * which)) >> 24, lanes);
}

INLINE whole_lanes two_of_four(whole_lanes fours, const int first)
{
    const unsigned_lanes low = (unsigned_lanes)one_of_four(fours, first) >> 16;
    return (whole_lanes)(low | (unsigned_lanes)one_of_four(fours, first + 1));
}

#endif
