/* The work between matrix products of a step, in float32 on a CPU: norms, rotation, heads. Each is one pass over its
 * inputs, where torch has a call and a copy for each operation of the formula.
 *
 * C with the vector extensions of gcc and clang; compiled for several kinds of processors, among which the caller chooses.
 */

#include <math.h>
#include "cpu_bfloat16.h"
#include "cpu_kernels.h"

#ifdef KEEPSIGHT_SOURCES  /* the identity of these files, which cpu_sources.py looks for in the library */
const char keepsight_sources[] = KEEPSIGHT_SOURCES;
#endif

atomic_long keepsight_refusals;

/* Norms --------------------------------------------------------------------------------------------------------- */

INLINE float inverse_rms(const float *x, long size, float eps)
{
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < size; i++)
        squares += x[i] * x[i];
    return 1.0f / sqrtf(squares / size + eps);
}

static void norm_part(const void *shared, long part, long parts)
{
    const norm_work *w = shared;
    for (long row = w->rows * part / parts; row < w->rows * (part + 1) / parts; row++) {
        const float *x = w->hidden + row * w->size;
        const float inverse = inverse_rms(x, w->size, w->eps);
        float *out = w->out + row * w->size;
        if (w->residual)
            for (long i = 0; i < w->size; i++)
                out[i] = w->residual[row * w->size + i] + x[i] * inverse * w->scale[i];
        else
            for (long i = 0; i < w->size; i++)
                out[i] = x[i] * inverse * w->scale[i];
    }
}

/* Compute hidden / rms(hidden) * scale, plus the residual if there is one. */
void keepsight_norm(const norm_work *w)
{
    share(norm_part, w, parts_for(w->rows * w->size));
}

/* Rotation ------------------------------------------------------------------------------------------------------- */

typedef struct {
    float *cos, *sin;          /* [bases, tokens, 2 * half]: two equal halves, but the first half of the sines is negated */
    const int64_t *positions;  /* [tokens] */
    const float *frequencies;  /* [bases, half] */
    long bases, tokens, half;
} angles_work;

static void angles_part(const void *shared, long part, long parts)
{
    const angles_work *w = shared;
    const long rows = w->bases * w->tokens;
    for (long row = rows * part / parts; row < rows * (part + 1) / parts; row++) {
        const float *frequencies = w->frequencies + row / w->tokens * w->half;
        const float position = w->positions[row % w->tokens];
        float *cos = w->cos + row * 2 * w->half, *sin = w->sin + row * 2 * w->half;
        for (long i = 0; i < w->half; i++) {
            const float angle = position * frequencies[i];
            cos[i] = cos[w->half + i] = cosf(angle);
            sin[w->half + i] = sinf(angle);
            sin[i] = -sin[w->half + i];
        }
    }
}

/* Compute the angles of every base and position. */
void keepsight_angles(const angles_work *w)
{
    share(angles_part, w, parts_for(16 * w->bases * w->tokens * w->half)); /* each costs as much as 16 numbers elsewhere */
}

/* Queries, keys and values ---------------------------------------------------------------------------------------- */

INLINE void norm_and_rotate(
    float *out, const float *x, const float *scale, const float *cos, const float *sin, long dim, float eps)
{
    const float inverse = inverse_rms(x, dim, eps);
    const long half = dim / 2;
#pragma omp simd
    for (long i = 0; i < half; i++) {
        const float a = x[i] * inverse * scale[i], b = x[half + i] * inverse * scale[half + i];
        out[i] = a * cos[i] + b * sin[i];
        out[half + i] = b * cos[half + i] + a * sin[half + i];
    }
}

INLINE void rotate(float *out, const float *x, const float *cos, const float *sin, long dim)
{
    const long half = dim / 2;
#pragma omp simd
    for (long i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] + x[half + i] * sin[i];
        out[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i];
    }
}

/* Store some numbers of a token's keys, or values, in its slot. */
INLINE void keep(void *kept, const heads_work *w, long token, long first, const float *numbers, long count)
{
    const long at = w->slots[token] * w->kv_heads * w->dim + first;
    if (!w->is_rounded)
        memcpy((float *)kept + at, numbers, count * sizeof *numbers);
    else
        for (long i = 0; i < count; i++)
            ((uint16_t *)kept)[at + i] = rounded(numbers[i]);
}

static void heads_part(const void *shared, long part, long parts)
{
    const heads_work *w = shared;
    const long dim = w->dim, num_turned = w->heads + w->kv_heads;
    float key[dim];
    for (long token = w->tokens * part / parts; token < w->tokens * (part + 1) / parts; token++) {
        const float *projected = w->projected + token * (num_turned + w->kv_heads) * dim;
        const float *cos = w->cos + token * dim, *sin = w->sin + token * dim;
        for (long head = 0; head < num_turned; head++) {
            float *out = head < w->heads ? w->query + (token * w->heads + head) * dim : key;
            if (w->scale)
                norm_and_rotate(out, projected + head * dim, w->scale + head * dim, cos, sin, dim, w->eps);
            else
                rotate(out, projected + head * dim, cos, sin, dim);
            if (out == key)
                keep(w->keys, w, token, (head - w->heads) * dim, key, dim);
        }
        keep(w->values, w, token, 0, projected + num_turned * dim, w->kv_heads * dim);
    }
}

/* Norm and rotate queries and keys; store keys and values in their slots. */
void keepsight_place_heads(const heads_work *w)
{
    share(heads_part, w, parts_for(w->tokens * w->heads * w->dim));
}
