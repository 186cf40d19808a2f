/* Numbers of bfloat16, one and in pairs, and of int8 in fours: a vector of those has the first of each in its lowest bits. */

#ifndef KEEPSIGHT_CPU_BFLOAT16_H
#define KEEPSIGHT_CPU_BFLOAT16_H

#include <string.h>

#include "cpu_vectors.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

/* To the nearest, of two as near the even one. */
INLINE uint16_t rounded(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    const uint32_t nearest = bits + 0x7fff + (bits >> 16 & 1);
    return (number == number ? nearest : bits | 0x400000) >> 16;
}

/* The same in the upper halves of as many as a vector has lanes. */
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

/* Products of pairs of bfloat16 on top of a sum of float32; only where `keepsight_multiplies_bfloat16` says so. */
INLINE lanes add_pairs(lanes sum, whole_lanes a, whole_lanes b)
{
#if defined(__AVX512BF16__)
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    (void)a, (void)b;
    return sum;
#endif
}

/* Of numbers that are not below 0, and are not as large as infinity; in the middle of two the larger. */
INLINE whole_lanes pairs_of(lanes first, lanes second)
{
    const unsigned_lanes half = (unsigned_lanes){} + 0x8000;
    return (whole_lanes)(((unsigned_lanes)first + half) >> 16 | (((unsigned_lanes)second + half) & 0xffff0000u));
}

/* The same of neighbours: half as many pairs, in their order. */
INLINE halves halves_of(lanes numbers)
{
    return __builtin_convertvector(((unsigned_lanes)numbers + 0x8000u) >> 16, halves);
}

/* A pair takes the place of a number of float32. */
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

/* Of as many numbers as a vector has lanes each. */
INLINE whole_lanes pairs_from(const uint16_t *first, const uint16_t *second)
{
    halves one, other;
    memcpy(&one, first, sizeof one);
    memcpy(&other, second, sizeof other);
    return __builtin_convertvector(one, whole_lanes) | __builtin_convertvector(other, whole_lanes) << 16;
}

/* Of two numbers of float32. */
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

/* One of fours of int8 as float32, and two as pairs of bfloat16. */
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
