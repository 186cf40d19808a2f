/* Arguments of the kernels for norms, and for a layer's queries, keys and values. */

#ifndef KEEPSIGHT_CPU_KERNELS_H
#define KEEPSIGHT_CPU_KERNELS_H

#include <stdint.h>

typedef struct {
    float *out;            /* [rows, size] */
    const float *hidden;   /* [rows, size] */
    const float *scale;    /* [size] */
    const float *residual; /* [rows, size], or null */
    long rows, size;
    float eps;
} norm_work;

typedef struct {
    float *query;           /* [tokens, heads, dim] */
    void *keys, *values;    /* [slots, kv_heads, dim] */
    const float *projected; /* [tokens, heads + 2 * kv_heads, dim] */
    const float *scale;     /* [heads + kv_heads, dim]; null: no norm */
    const float *cos, *sin; /* [tokens, dim]; the first half of the sines is negated */
    const int64_t *slots;   /* [tokens] */
    long tokens, heads, kv_heads, dim;
    long is_rounded; /* keys and values are kept in bfloat16 */
    float eps;
} heads_work;

void keepsight_norm(const norm_work *w);
void keepsight_place_heads(const heads_work *w);

#endif
