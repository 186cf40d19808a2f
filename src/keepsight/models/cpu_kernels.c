/* What a step does between its matrix products, in float32 on a CPU: norms, heads, attention.  Each is one pass over what
 * it reads, where torch has a call and a copy for each sign of the formula.
 *
 * Plain C for any compiler; compiled for several kinds of processors, of which the caller chooses.  Threads are torch's
 * own team: two teams on the same cores would wait for each other.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Of libgomp, which is there once torch is. */
extern void GOMP_parallel(void (*run)(void *), void *job, unsigned num_threads, unsigned flags);
extern int omp_get_max_threads(void);
extern int omp_get_num_threads(void);
extern int omp_get_thread_num(void);

/* Fewer numbers than these are done before a second thread has begun. */
#define NUMBERS_WORTH_A_TEAM 32768

typedef struct {
    void (*run)(const void *work, long part, long parts);
    const void *work;
} job;

/* The team may be smaller than was asked for. */
static void run_part(void *shared)
{
    const job *all = shared;
    all->run(all->work, omp_get_thread_num(), omp_get_num_threads());
}

static void share(void (*run)(const void *, long, long), const void *work, long most_parts)
{
    const long most_threads = omp_get_max_threads(), threads = most_parts < most_threads ? most_parts : most_threads;
    job all = {run, work};
    if (threads <= 1)
        run(work, 0, 1);
    else
        GOMP_parallel(run_part, &all, threads, 0);
}

static long parts_for(long numbers)
{
    return numbers < NUMBERS_WORTH_A_TEAM ? 1 : INT32_MAX;
}

/* Norms --------------------------------------------------------------------------------------------------------- */

INLINE float inverse_rms(const float *x, long size, float eps)
{
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < size; i++)
        squares += x[i] * x[i];
    return 1.0f / sqrtf(squares / size + eps);
}

typedef struct {
    float *out;            /* [rows, size] */
    const float *hidden;   /* likewise */
    const float *scale;    /* [size] */
    const float *residual; /* [rows, size], or null */
    long rows, size;
    float eps;
} norm_work;

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

/* hidden / rms(hidden) * scale, and the residual on top. */
void keepsight_norm(const norm_work *w)
{
    share(norm_part, w, parts_for(w->rows * w->size));
}

/* Rotation ------------------------------------------------------------------------------------------------------- */

typedef struct {
    float *cos, *sin;          /* [bases, tokens, 2 * half]: each twice in a row, sines negative at first */
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

/* Of every base and position. */
void keepsight_angles(const angles_work *w)
{
    share(angles_part, w, parts_for(16 * w->bases * w->tokens * w->half)); /* each takes as long as so many of others */
}

/* Queries, keys and values ---------------------------------------------------------------------------------------- */

typedef struct {
    float *query;           /* [tokens, heads, dim] */
    float *keys, *values;   /* [slots, kv_heads, dim] */
    const float *projected; /* [tokens, heads + 2 * kv_heads, dim] */
    const float *scale;     /* [heads + kv_heads, dim] */
    const float *cos, *sin; /* [tokens, dim], sines negative in their first half */
    const int64_t *slots;   /* [tokens] */
    long tokens, heads, kv_heads, dim;
    float eps;
} heads_work;

INLINE void norm_and_rotate(float *out, const float *x, const float *scale, const float *cos, const float *sin, long dim, float eps)
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

static void heads_part(const void *shared, long part, long parts)
{
    const heads_work *w = shared;
    const long dim = w->dim, num_normed = w->heads + w->kv_heads;
    for (long token = w->tokens * part / parts; token < w->tokens * (part + 1) / parts; token++) {
        const float *projected = w->projected + token * (num_normed + w->kv_heads) * dim;
        float *query = w->query + token * w->heads * dim;
        float *key = w->keys + w->slots[token] * w->kv_heads * dim;
        for (long head = 0; head < num_normed; head++) {
            float *out = head < w->heads ? query + head * dim : key + (head - w->heads) * dim;
            norm_and_rotate(out, projected + head * dim, w->scale + head * dim, w->cos + token * dim, w->sin + token * dim, dim, w->eps);
        }
        memcpy(w->values + w->slots[token] * w->kv_heads * dim, projected + num_normed * dim, w->kv_heads * dim * sizeof(float));
    }
}

/* Norm and rotation of queries and keys; keys and values go to their slots. */
void keepsight_place_heads(const heads_work *w)
{
    share(heads_part, w, parts_for(w->tokens * w->heads * w->dim));
}

/* Attention --------------------------------------------------------------------------------------------------------
 *
 * A lane of a vector is a query: a row and one of the heads that share a key head.  So scores, their maximum and their
 * sum need nothing from a neighbour, and every number of keys and values is read once for all lanes of a tile.  Keys
 * come in chunks, and what was summed before is scaled down when a chunk has a higher score.
 */

/* Of a vector, as the processor has it: out of others compilers make code of a tenth of the speed. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
/* Of a tile: that many queries and, at once, numbers of keys or values keep all registers busy. */
#define MOST_VECTORS 2
#define AT_ONCE 8
#define CHUNK 64

/* For the caller, who must not have more heads share a key head, nor heads of other than multiples of so many numbers. */
const long keepsight_queries_per_tile = MOST_VECTORS * LANES, keepsight_numbers_at_once = AT_ONCE;

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t whole_lanes __attribute__((vector_size(4 * LANES)));

typedef struct {
    float *out;                   /* [rows, heads, dim] */
    const float *query;           /* [rows, heads, dim] */
    const float *keys, *values;   /* [slots, kv_heads, dim] */
    const int64_t *first_rows;    /* [sequences + 1]: of each sequence and, last, the number of rows */
    const int64_t *const *slots;  /* of each sequence, of each of its positions */
    const int64_t *begins, *ends; /* [rows]: which positions of its sequence a row sees */
    long sequences, heads, kv_heads, dim;
    long out_stride, query_stride, key_stride; /* from one row, or slot, to the next */
    float scale;
} attention_work;

INLINE lanes choose(whole_lanes which, lanes yes, lanes no)
{
    return (lanes)(((whole_lanes)yes & which) | ((whole_lanes)no & ~which));
}

/* Of what is not above 0, within 2 units of the last place; 0 of what float32 cannot hold, and of minus infinity. */
INLINE lanes power_of_2(lanes x)
{
    const whole_lanes is_held = x > -126.0f;
    x = choose(is_held, x, (lanes){});
    const whole_lanes whole = __builtin_convertvector(x - 0.5f, whole_lanes);
    const lanes rest = x - __builtin_convertvector(whole, lanes);
    lanes power = rest * 1.5403530e-4f + 1.3333558e-3f; /* powers of ln 2 over factorials */
    power = power * rest + 9.6181291e-3f;
    power = power * rest + 5.5504109e-2f;
    power = power * rest + 2.4022651e-1f;
    power = power * rest + 6.9314718e-1f;
    power = power * rest + 1.0f;
    return (lanes)(((whole_lanes)power + (whole << 23)) & is_held);
}

/* [AT_ONCE, vectors]: of as many keys with all queries of a tile. */
INLINE void score(lanes *scores, const float *const *keys, const lanes *query, long dim, const int vectors)
{
    lanes sums[AT_ONCE][MOST_VECTORS] = {};
    for (long d = 0; d < dim; d++)
#pragma GCC unroll 8
        for (int key = 0; key < AT_ONCE; key++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sums[key][v] += keys[key][d] * query[d * vectors + v];
    for (int key = 0; key < AT_ONCE; key++)
        for (int v = 0; v < vectors; v++)
            scores[key * vectors + v] = sums[key][v];
}

/* To [AT_ONCE, vectors] of the outputs: numbers `d` and following of all values of a chunk, weighted. */
INLINE void add_values(lanes *out, const float *const *values, long d, const lanes *weights, long count, const int vectors)
{
    lanes sums[AT_ONCE][MOST_VECTORS];
    for (int i = 0; i < AT_ONCE; i++)
        for (int v = 0; v < vectors; v++)
            sums[i][v] = out[i * vectors + v];
    for (long key = 0; key < count; key++) {
        const float *value = values[key] + d;
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sums[i][v] += value[i] * weights[key * vectors + v];
    }
    for (int i = 0; i < AT_ONCE; i++)
        for (int v = 0; v < vectors; v++)
            out[i * vectors + v] = sums[i][v];
}

/* `count` rows of one sequence with the heads that share key head `kv_head`. */
INLINE void attend_tile(const attention_work *w, const int64_t *slots, long first, long count, long kv_head, const int vectors)
{
    const long group = w->heads / w->kv_heads, dim = w->dim, first_head = kv_head * group;
    lanes query[dim * vectors], out[dim * vectors], scores[CHUNK * vectors];
    lanes highest[MOST_VECTORS], total[MOST_VECTORS] = {};
    whole_lanes begins[MOST_VECTORS] = {}, ends[MOST_VECTORS] = {};
    const float *keys[CHUNK], *values[CHUNK];
    long begin = INT64_MAX, last_begin = 0, first_end = INT64_MAX, end = 0;

    memset(query, 0, sizeof query);
    memset(out, 0, sizeof out);
    for (long lane = 0; lane < count * group; lane++) {
        const long row = first + lane / group, from = w->begins[row], to = w->ends[row];
        const float *numbers = w->query + row * w->query_stride + (first_head + lane % group) * dim;
        for (long d = 0; d < dim; d++)
            ((float *)query)[d * vectors * LANES + lane] = numbers[d] * w->scale;
        begins[lane / LANES][lane % LANES] = from;
        ends[lane / LANES][lane % LANES] = to;
        begin = from < begin ? from : begin;
        last_begin = from > last_begin ? from : last_begin;
        first_end = to < first_end ? to : first_end;
        end = to > end ? to : end;
    }
    for (int v = 0; v < vectors; v++)
        highest[v] = (lanes){} - 1e30f; /* not infinity, whose difference from itself is no number */

    for (long at = begin; at < end; at += CHUNK) {
        const long num_keys = end - at < CHUNK ? end - at : CHUNK;
        for (long key = 0; key < CHUNK; key++) {
            const long start = slots[at + (key < num_keys ? key : num_keys - 1)] * w->key_stride + kv_head * dim;
            keys[key] = w->keys + start;
            values[key] = w->values + start;
        }
        for (long key = 0; key < num_keys; key += AT_ONCE)
            score(scores + key * vectors, keys + key, query, dim, vectors);
        if (at < last_begin || at + num_keys > first_end)
            for (long key = 0; key < num_keys; key++)
                for (int v = 0; v < vectors; v++) {
                    lanes *one = scores + key * vectors + v;
                    *one = choose((begins[v] <= (int32_t)(at + key)) & (ends[v] > (int32_t)(at + key)), *one, (lanes){} - INFINITY);
                }
        for (int v = 0; v < vectors; v++) {
            lanes top = highest[v];
            for (long key = 0; key < num_keys; key++)
                top = choose(scores[key * vectors + v] > top, scores[key * vectors + v], top);
            const lanes kept = power_of_2(highest[v] - top);
            highest[v] = top;
            total[v] *= kept;
            for (long d = 0; d < dim; d++)
                out[d * vectors + v] *= kept;
            for (long key = 0; key < num_keys; key++)
                total[v] += scores[key * vectors + v] = power_of_2(scores[key * vectors + v] - top);
        }
        for (long d = 0; d < dim; d += AT_ONCE)
            add_values(out + d * vectors, values, d, scores, num_keys, vectors);
    }

    for (long lane = 0; lane < count * group; lane++) {
        float *numbers = w->out + (first + lane / group) * w->out_stride + (first_head + lane % group) * dim;
        const float inverse = 1.0f / total[lane / LANES][lane % LANES];
        for (long d = 0; d < dim; d++)
            numbers[d] = ((const float *)out)[d * vectors * LANES + lane] * inverse;
    }
}

static long rows_per_tile(const attention_work *w)
{
    return MOST_VECTORS * LANES / (w->heads / w->kv_heads);
}

/* One tile of as many as there are parts, all over the batch: later ones see more keys. */
static void attention_part(const void *shared, long part, long parts)
{
    const attention_work *w = shared;
    const long group = w->heads / w->kv_heads, most_rows = rows_per_tile(w);
    long tile = 0;
    for (long sequence = 0; sequence < w->sequences; sequence++) {
        const long end = w->first_rows[sequence + 1];
        for (long row = w->first_rows[sequence]; row < end; row += most_rows)
            for (long kv_head = 0; kv_head < w->kv_heads; kv_head++) {
                if (tile++ % parts != part)
                    continue;
                const long rows = end - row < most_rows ? end - row : most_rows;
                if (rows * group <= LANES)
                    attend_tile(w, w->slots[sequence], row, rows, kv_head, 1);
                else
                    attend_tile(w, w->slots[sequence], row, rows, kv_head, 2);
            }
    }
}

/* Rows and keys of each sequence for themselves. */
void keepsight_attend(const attention_work *w)
{
    const long rows = w->first_rows[w->sequences];
    share(attention_part, w, w->kv_heads * (w->sequences + rows / rows_per_tile(w)));
}
