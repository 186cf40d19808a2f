/* Activations, applied vector by vector to a product's results while they are in cache. */

#ifndef KEEPSIGHT_CPU_ACTIVATIONS_H
#define KEEPSIGHT_CPU_ACTIVATIONS_H

#include "cpu_vectors.h"

typedef enum {
    NO_ACTIVATION,
    GELU_TANH, /* the tanh approximation */
    GELU,
    SILU,
} activation;

/* x / (1 + 2^-power), for a power of either sign. */
INLINE lanes share_by_power(lanes x, lanes power)
{
    const whole_lanes is_negative = power < 0.0f;
    const lanes small = power_of_2(choose(is_negative, power, -power));
    return x * choose(is_negative, small, (lanes){} + 1.0f) / (1.0f + small);
}

/* x / (1 + exp(-x)) */
INLINE lanes silu(lanes x)
{
    return share_by_power(x, x * 1.4426950f); /* 1 / ln 2 */
}

/* Approximately x times the normal CDF of x: x / (1 + exp(-2 * sqrt(2 / pi) * (x + 0.044715 * x^3))). */
INLINE lanes gelu_tanh(lanes x)
{
    return share_by_power(x, (x + 0.044715f * x * x * x) * 2.3022082f); /* 2 * sqrt(2 / pi) / ln 2 */
}

/* The same with the CDF within 1 in 13 million: Abramowitz and Stegun, 26.2.17. */
INLINE lanes gelu(lanes x)
{
    const whole_lanes is_negative = x < 0.0f;
    const lanes t = 1.0f / (1.0f + 0.23164189f * choose(is_negative, -x, x));
    lanes beyond = t * 0.53070271f - 0.72657601f;
    beyond = beyond * t + 0.71070687f;
    beyond = beyond * t - 0.14224837f;
    beyond = beyond * t + 0.12741480f;
    beyond *= t * power_of_2(x * x * -0.72134752f); /* 1 / (2 * ln 2) */
    return x * choose(is_negative, beyond, 1.0f - beyond);
}

INLINE void activate_by(lanes function(lanes), float *numbers, long count)
{
    for (long i = 0; i < count; i += LANES) {
        const lanes number = function(vector_at(numbers + i));
        memcpy(numbers + i, &number, sizeof number);
    }
}

/* Apply an activation to `count` numbers, a multiple of LANES. */
__attribute__((unused)) static void activate(activation which, float *numbers, long count)
{
    if (which == GELU_TANH)
        activate_by(gelu_tanh, numbers, count);
    if (which == GELU)
        activate_by(gelu, numbers, count);
    if (which == SILU)
        activate_by(silu, numbers, count);
}

#endif
